"""Whether a checkpoint has been saved to its end.

Frameworks write a file last, once all ranks have written theirs:

    latest_checkpointed_iteration.txt    beside the step's folder; holds the newest step (Megatron, verl, slime)
    latest                               beside the step's folder; holds the newest step's name (DeepSpeed)
    .metadata                            in the checkpoint (torch.distributed.checkpoint)
    reshard.json                         in the checkpoint (reshard)

Without such a file, a checkpoint counts as complete when nothing has changed in it for a while.
"""

from __future__ import annotations

from reshard.adapter.save_folders import step_of
from reshard.errors import ReshardError
from reshard.geometry.value import value
from reshard.plans.manifest import MANIFEST
from reshard.storage.files import Files, read_whole
from reshard.storage.own_files import WORK_FOLDER

_TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
_MARKERS = (".metadata", MANIFEST)
# Files that are never complete without a marker.
_NEED = {".distcp": ".metadata"}
# A tracker holds a name or a number.
_MOST_BYTES = 4096


@value
class Completeness:
    """Whether a checkpoint is complete."""

    complete: bool
    """Whether it was saved to its end."""
    reason: str
    """What tells so, in words."""


def completeness(files: Files, parent: Files, name: str, number: int, age: float | None, quiet: float) -> Completeness:
    """Whether the checkpoint of a step is complete.

    files: those of the checkpoint. parent: those beside the step's folder. name, number: the step's folder and number. age: seconds since
    the last change. quiet: after how many of them a checkpoint without a marker counts as complete.
    """
    if f"{WORK_FOLDER}/" in files.list():
        return Completeness(False, "reshard is writing it, or was interrupted")
    for tracker in _TRACKERS:
        if (text := _text(parent, tracker)) is not None and (newest := _tracked(text, name, number)) is not None:
            return Completeness(number <= newest, f"{tracker} names {text[:40]}")
    for path in files.list():
        marker = _NEED.get(path[path.rfind(".") :] if "." in path else "")
        if marker and not files.size(marker):
            return Completeness(False, f"{marker} is not there yet")
    for marker in _MARKERS:
        if files.size(marker):
            return Completeness(True, f"{marker} is there")
    if age is None:
        return Completeness(False, "nothing tells whether it is complete")
    return Completeness(age >= quiet, f"unchanged for {age:.0f} s")


def _text(files: Files, path: str) -> str | None:
    """The text in a small file; None if there is none."""
    try:
        return read_whole(files, path, limit=_MOST_BYTES).decode("utf-8", "replace").strip() if files.size(path) else None
    except ReshardError:
        return None


def _tracked(text: str, name: str, number: int) -> int | None:
    """The newest complete step that a tracker's text names; None if it names none."""
    if text == name:
        return number
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 18 else step_of(text)
