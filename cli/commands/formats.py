"""reshard formats: what this installation reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..json_output import show_json
from ..tables import show, show_table

if TYPE_CHECKING:
    from reshard.adapter.format import Format


@options.command("formats", "reshard formats", "reshard formats vllm")
@click.argument("name", required=False, shell_complete=options.format_names)
@options.as_json
def command(name: str | None, as_json: bool) -> None:
    """List the formats that this installation reads and writes, or show what is known of the format NAME."""
    from reshard.adapter import registry

    if name is not None:
        found = registry.named(name)
        show_json({"formats": [_document(found)]}) if as_json else _show(found)
        return
    every = registry.formats().values()
    if as_json:
        show_json({"formats": [_document(each) for each in every]})
    else:
        show_table([(each.name, _does(each), each.summary) for each in every], ("format", "is", "what it is"))


def _document(found: Format) -> dict[str, Any]:
    return {"name": found.name, "reads": True, "writes": found.can_write, "summary": found.summary}


def _does(found: Format) -> str:
    return "read, written" if found.can_write else "read"


def _show(found: Format) -> None:
    """One format: its files, its other names and its options."""
    show(f"{found.name}: {found.summary}; {_does(found)}")
    if found.other_names:
        show(f"  called    {', '.join(found.other_names)}")
    if found.owns:
        show(f"  files     {', '.join(found.owns)}")
    if found.options:
        show()
        show_table([("--" + each.name.replace("_", "-"), each.help) for each in found.options], ("option", "what it does"))
