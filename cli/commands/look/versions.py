"""reshard versions: the releases of other software that reshard was compared with."""

from __future__ import annotations

from pathlib import Path

from reshard.pages.sections import Rows

from ... import options
from ...replies import Reply


@options.command("versions", "reshard versions", "reshard versions --json")
def command() -> Reply:
    """List the software whose checkpoints and memory reshard was compared with: which release, what was done with it, and when.

    read: what it wrote equals what its processes held. loaded: it loads what reshard writes. held: its ranks hold what reshard computes.
    followed: its source was followed, and it was not run.
    """
    import yaml

    from reshard.adapter import registry

    rows = yaml.safe_load(Path(registry.__file__).with_name("software.yaml").read_text())
    made = [{**row, "date": str(row["date"])[:7]} for row in rows]
    cells = [(row["software"], row["version"], ", ".join(row["formats"]), ", ".join(row["done"]), row["date"]) for row in made]
    return Reply({"versions": made}, [Rows(("software", "version", "formats", "compared", "date"), cells)])
