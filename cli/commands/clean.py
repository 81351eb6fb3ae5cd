"""reshard clean: what interrupted runs have left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from reshard.geometry.quantities import nbytes_text, plural
from reshard.pages.sections import Note, Section
from reshard.pages.texts import age_text

from .. import options
from ..replies import Reply

if TYPE_CHECKING:
    from reshard.errors import ReshardError
    from reshard.verbs.leftovers import Leftover


@options.command("clean", "reshard clean checkpoints", "reshard clean checkpoints --yes", "reshard clean s3://bucket/checkpoints")
@click.argument("directory")
@click.option("--yes", is_flag=True, help="Remove what can be removed. Without it, nothing is removed.")
@options.storage_option
def command(directory: str, yes: bool) -> Reply:
    """List the work folders (.reshard) that interrupted conversions have left in DIRECTORY and below it.

    DIRECTORY may be a URL: then unfinished targets and uploads that are not complete are listed, and --yes removes them all. Make sure that
    no conversion is writing there.

    With --yes they are removed, also those of conversions that --resume could finish. Never removed are: the folder of a conversion that is
    running, or that was stopped while it replaced the files of its target; what reshard did not make; what a link leads to.
    """
    from reshard.errors import ReshardError
    from reshard.storage.system_calls import is_url
    from reshard.verbs.leftovers import leftovers, remove

    all_left = list(leftovers(directory, _warn))
    if any(leftover.upload for leftover in all_left):
        _warn(f"{directory}: 0.4 does not list uploads: give the bucket the lifecycle rule AbortIncompleteMultipartUpload", "going-away")
    removed = set()
    for leftover in all_left:
        if yes and leftover.is_removable:
            try:
                removed |= {leftover.place} if remove(leftover) else set()
            except ReshardError as error:
                if is_url(directory):
                    raise
                _warn(error)
    listed = [{**leftover.to_json(), "removed": leftover.place in removed} for leftover in all_left]
    places = {"folders": [], "leftovers": listed} if is_url(directory) else {"folders": listed}
    made = {"directory": directory, "removed": sum(leftover.nbytes for leftover in all_left if leftover.place in removed), **places}
    return Reply(made, _sections(directory, all_left, removed, yes=yes, in_store=is_url(directory)), brief=True)


def _warn(error: ReshardError | str, name: str = "not-read") -> None:
    from reshard.engine.events import event

    event(name, str(error), level=30)


def _sections(directory: str, all_left: list[Leftover], removed: set[str], *, yes: bool, in_store: bool) -> Iterator[Section]:
    from reshard.verbs.leftovers import MEANINGS

    for leftover in all_left:
        age = "" if leftover.age is None else f", {age_text(leftover.age)} old"
        done = "removed" if leftover.place in removed else "can be removed" if leftover.is_removable else "stays"
        meaning = [] if in_store else [f"{done}: {MEANINGS[leftover.state]}"]
        command = leftover.command if leftover.command and leftover.place not in removed else ""
        yield Note(f"{leftover.place}  {nbytes_text(leftover.nbytes)}{age}, {leftover.run}", meaning, advice=command)
    removable = [leftover for leftover in all_left if leftover.is_removable]
    size = nbytes_text(sum(leftover.nbytes for leftover in removable))
    words = ("upload or target", "uploads and targets") if in_store else ("work folder",)
    if not removable and (in_store or not yes):
        yield f"{directory}: {'nothing is left of interrupted conversions' if in_store else 'no work folder can be removed'}"
    elif not yes:
        yield f"{directory}: {plural(len(removable), *words)}, {size}, can be removed. Nothing was removed: --yes removes"
    elif in_store:
        yield f"{directory}: {plural(len(removable), *words)}, {size}, removed"
    else:
        kept = f"; {len(all_left) - len(removed)} left" if len(all_left) > len(removed) else ""
        yield f"{directory}: {plural(len(removed), 'work folder')} removed{kept}"
