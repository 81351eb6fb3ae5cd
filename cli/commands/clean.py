"""reshard clean: what interrupted runs have left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from reshard.geometry.quantities import plural

from .. import options
from ..invocation import current
from ..json_output import show_json
from ..tables import duration_text, nbytes_text, show

if TYPE_CHECKING:
    from reshard.errors import ReshardError
    from reshard.verbs.leftovers import Leftover


@options.command("clean", "reshard clean checkpoints", "reshard clean checkpoints --yes", "reshard clean s3://bucket/checkpoints")
@click.argument("directory")
@click.option("--yes", is_flag=True, help="Remove what can be removed. Without it, nothing is removed.")
@options.storage_option
@options.as_json
def command(directory: str, yes: bool, as_json: bool) -> None:
    """List the work folders (.reshard) that interrupted conversions have left in DIRECTORY and below it.

    DIRECTORY may be a URL: then unfinished targets and uploads that are not complete are listed, and --yes removes them all. Make sure that
    no conversion is writing there.

    With --yes they are removed, also those of conversions that --resume could finish. Never removed are: the folder of a conversion that is
    running, or that was stopped while it replaced the files of its target; what reshard did not make; what a link leads to.
    """
    from reshard.errors import ReshardError
    from reshard.storage.system_calls import is_url
    from reshard.verbs.leftovers import leftovers, remove

    found = list(leftovers(directory, _warn))
    removed = set()
    for each in found:
        if yes and each.is_removable:
            try:
                removed |= {each.place} if remove(each) else set()
            except ReshardError as error:
                if is_url(directory):
                    raise
                _warn(error)
    if as_json:
        listed = [{**each.to_json(), "removed": each.place in removed} for each in found]
        places = {"folders": [], "leftovers": listed} if is_url(directory) else {"folders": listed}
        show_json({"directory": directory, "removed": sum(each.nbytes for each in found if each.place in removed), **places})
        return
    show_found = _show_in_store if is_url(directory) else _show_folders
    show_found(directory, found, removed, yes)


def _warn(error: ReshardError) -> None:
    from reshard.engine.events import event

    event("not-read", str(error), level=30)


def _show_folders(directory: str, found: list[Leftover], removed: set[str], yes: bool) -> None:
    from reshard.verbs.leftovers import MEANINGS

    for each in found if not current().log.quiet else ():
        show(f"{each.place}  {nbytes_text(each.nbytes)}, {duration_text(each.age or 0)} old, {each.run}")
        done = "removed" if each.place in removed else "can be removed" if each.is_removable else "stays"
        show(f"  {done}: {MEANINGS[each.state]}")
        if each.command and each.place not in removed:
            show(f"  {each.command}")
    removable = [each for each in found if each.is_removable]
    size = nbytes_text(sum(each.nbytes for each in removable))
    if yes:
        kept = f"; {len(found) - len(removed)} left" if len(found) > len(removed) else ""
        show(f"{directory}: {plural(len(removed), 'work folder')} removed{kept}")
    elif removable:
        show(f"{directory}: {plural(len(removable), 'work folder')}, {size}, can be removed. Nothing was removed: --yes removes")
    else:
        show(f"{directory}: no work folder can be removed")


def _show_in_store(url: str, found: list[Leftover], removed: set[str], yes: bool) -> None:
    for each in found if not current().log.quiet else ():
        age = "" if each.age is None else f", {duration_text(each.age)} old"
        show(f"{each.place}  {nbytes_text(each.nbytes)}{age}, {each.run}")
        if each.command and each.place not in removed:
            show(f"  {each.command}")
    what = f"{plural(len(found), 'upload or target', 'uploads and targets')}, {nbytes_text(sum(each.nbytes for each in found))}"
    if not found:
        show(f"{url}: nothing is left of interrupted conversions")
    else:
        show(f"{url}: {what}, removed" if yes else f"{url}: {what}, can be removed. Nothing was removed: --yes removes")
