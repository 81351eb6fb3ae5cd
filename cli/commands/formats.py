"""reshard formats: what this installation reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from reshard.pages.sections import Facts, Rows, Section

from .. import options
from ..replies import Reply

if TYPE_CHECKING:
    from reshard.adapter.format import Format


@options.command("formats", "reshard formats", "reshard formats vllm")
@click.argument("name", required=False, shell_complete=options.format_names)
def command(name: str | None) -> Reply:
    """List the formats that this installation reads and writes, or show what is known of the format NAME."""
    from reshard.adapter import registry

    formats = [registry.named(name)] if name is not None else [*registry.formats().values()]
    made = [{"name": format.name, "reads": True, "writes": format.can_write, "summary": format.summary} for format in formats]
    table = Rows(("format", "is", "what it is"), [(format.name, _does(format), format.summary) for format in formats])
    return Reply({"formats": made}, _sections(formats[0]) if name is not None else [table])


def _does(format: Format) -> str:
    return "read, written" if format.can_write else "read"


def _sections(format: Format) -> Iterator[Section]:
    """One format: its files, its other names and its options."""
    yield f"{format.name}: {format.summary}; {_does(format)}"
    yield Facts([("called", ", ".join(format.other_names)), ("files", ", ".join(format.owns))])
    if format.options:
        rows = [("--" + option.name.replace("_", "-"), option.help) for option in format.options]
        yield from ("", Rows(("option", "what it does"), rows))
