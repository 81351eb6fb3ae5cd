"""reshard formats: what this installation reads and writes."""

from __future__ import annotations

from .. import options
from ..json_output import show_json
from ..tables import show, table


@options.command("formats")
@options.as_json
def command(as_json: bool) -> None:
    """List the formats that this installation reads and writes."""
    from reshard.adapter import registry

    found = [(name, "read, write" if each.can_write else "read", each.summary) for name, each in registry.formats().items()]
    if as_json:
        formats = [{"name": name, "reads": True, "writes": "write" in what, "summary": summary} for name, what, summary in found]
        show_json({"formats": formats})
    else:
        show(*table(found, ("format", "", "what it is")))
