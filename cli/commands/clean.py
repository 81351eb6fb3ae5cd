"""reshard clean: what interrupted runs have left."""

from __future__ import annotations

import click

from reshard.geometry.quantities import plural

from .. import options
from ..invocation import current
from ..json_output import show_json
from ..tables import duration_text, nbytes_text, show


@click.command("clean", cls=options.Command, examples=["reshard clean checkpoints", "reshard clean checkpoints --yes"])
@click.argument("directory")
@click.option("--yes", is_flag=True, help="Remove what can be removed. Without it, nothing is removed.")
@options.as_json
def command(directory: str, yes: bool, as_json: bool) -> None:
    """List the work folders (.reshard) that interrupted conversions have left in DIRECTORY and below it.

    With --yes they are removed, also those of conversions that --resume could finish. Never removed are: the folder of a conversion that is
    running, or that was stopped while it replaced the files of its target; what reshard did not make; what a link leads to.
    """
    from reshard.engine.events import event
    from reshard.errors import ReshardError
    from reshard.verbs.leftovers import MEANINGS, REMOVABLE, leftovers, remove

    def warn(error: ReshardError) -> None:
        event("not-read", str(error), level=30)

    found = list(leftovers(directory, warn))
    removed = set()
    for each in found:
        if yes and each.state in REMOVABLE:
            try:
                removed |= {each.path} if remove(each) else set()
            except ReshardError as error:
                warn(error)
    if as_json:
        folders = [{**each.to_json(), "removed": each.path in removed} for each in found]
        show_json({"directory": directory, "removed": sum(each.nbytes for each in found if each.path in removed), "folders": folders})
        return
    for each in found if not current().log.quiet else ():
        show(f"{each.path}  {nbytes_text(each.nbytes)}, {duration_text(each.age)} old, {each.run}")
        done = "removed" if each.path in removed else "can be removed" if each.state in REMOVABLE else "stays"
        show(f"  {done}: {MEANINGS[each.state]}")
        if each.command and each.path not in removed:
            show(f"  {each.command}")
    removable = [each for each in found if each.state in REMOVABLE]
    size = nbytes_text(sum(each.nbytes for each in removable))
    if yes:
        kept = f"; {len(found) - len(removed)} left" if len(found) > len(removed) else ""
        show(f"{directory}: {plural(len(removed), 'work folder')} removed{kept}")
    elif removable:
        show(f"{directory}: {plural(len(removable), 'work folder')}, {size}, can be removed. Nothing was removed: --yes removes")
    else:
        show(f"{directory}: no work folder can be removed")
