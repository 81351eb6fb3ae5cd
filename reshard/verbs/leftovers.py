"""What interrupted runs have left below a directory: their work folders, which `reshard clean` lists and removes.

Only a folder `.reshard` that holds a journal or a lock file of reshard counts, and a link is never followed. A folder is not removed while
a run uses it, nor if its run had begun to replace the files of the target: without its journal, nothing would say that they are a mixture.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from reshard.engine.events import event
from reshard.engine.journal import Unfinished, read_journal
from reshard.errors import RequestError, ReshardError
from reshard.geometry.value import value
from reshard.storage.local_path import existing_path
from reshard.storage.lock import Lock, is_locked
from reshard.storage.own_files import JOURNAL, WORK_FOLDER, is_digest, owner
from reshard.storage.staging import Staging
from reshard.storage.system_calls import system_refusal

State = Literal["running", "resumable", "half-replaced", "not-begun", "unknown"]
MEANINGS: dict[State, str] = {
    "running": "a run uses it",
    "resumable": "--resume finishes the run",
    "half-replaced": "the run was replacing the target's files; it must be finished",
    "not-begun": "the run has not written anything that could be resumed",
    "unknown": "it is not known to be of reshard",
}
REMOVABLE: tuple[State, ...] = ("resumable", "not-begun")
"""The states in which a work folder may be removed."""


@value
class Leftover:
    """A work folder."""

    path: str
    """The work folder."""
    target: str
    """The directory that its run was writing."""
    state: State
    """What has become of its run."""
    nbytes: int
    """The space that it takes on the disk, in bytes."""
    age: float
    """The seconds since something was last written in it."""
    run: str
    """Which run it belongs to, in words."""
    command: str | None
    """What finishes the run; None if nothing does."""

    def to_json(self) -> dict[str, Any]:
        """The work folder as plain values with stable keys."""
        return {
            "path": self.path,
            "target": self.target,
            "state": self.state,
            "bytes": self.nbytes,
            "age_seconds": int(self.age),
            "run": self.run,
            "command": self.command,
        }


def leftovers(directory: str | os.PathLike[str], on_error: Callable[[ReshardError], None]) -> Iterator[Leftover]:
    """The work folders in a directory and below it. on_error: gets the errors of directories that cannot be read.

    Raises: RequestError if the directory does not exist.
    """
    root = existing_path(directory)
    if not root.is_dir():
        raise RequestError(f"{root} is a file", do="Give the directory that contains the targets of conversions")

    def unreadable(error: OSError) -> None:
        on_error(system_refusal(error, "read", root))

    for folder, names, _ in os.walk(root, onerror=unreadable):
        if WORK_FOLDER in names:
            names.remove(WORK_FOLDER)
            work = Path(folder, WORK_FOLDER)
            if not work.is_symlink():
                try:
                    yield _leftover(work)
                except OSError as error:
                    unreadable(error)
        names.sort()


def remove(leftover: Leftover) -> bool:
    """Remove a work folder; returns whether it is gone. It stays if its run has gone on in the meantime, up to where it replaces files.

    Raises: RequestError if another run uses it or the system refuses.
    """
    work, lock = Path(leftover.path), Lock(Path(leftover.target), "clean", lambda: "")
    if not work.is_dir():
        return True
    lock.acquire()
    try:
        unfinished = _unfinished(work.parent)
        if unfinished and unfinished.committing:
            return False
        Staging(work.parent).clean()
    finally:
        lock.release()
        with suppress(OSError):  # Another run may have begun.
            work.rmdir()
    event("removed", f"removed {leftover.path}", path=leftover.path, bytes=leftover.nbytes)
    return True


def _leftover(work: Path) -> Leftover:
    unfinished, run_by = _unfinished(work.parent), owner(work.parent)
    state = _state(work, unfinished, run_by)
    nbytes, written = _size_and_time(work)
    run = f"conversion to {unfinished.header.to}{unfinished.progress}" if unfinished else "no journal"
    if run_by:
        run += f"; process {run_by['pid']} on {run_by['host']}, started {run_by['started']}"
    command = unfinished.header.command() if unfinished and state in ("resumable", "half-replaced") else None
    return Leftover(str(work), str(work.parent), state, nbytes, max(time.time() - written, 0.0), run, command)


def _state(work: Path, unfinished: Unfinished | None, run_by: dict[str, Any]) -> State:
    if is_locked(work.parent):
        return "running"
    if unfinished:
        return "half-replaced" if unfinished.committing else "resumable"
    # A run that was stopped before it wrote its journal leaves a lock file, and one that was stopped at its very end an empty folder.
    entries = set(os.listdir(work))
    if not entries or (run_by and JOURNAL not in entries):
        return "not-begun"
    return "unknown"


def _unfinished(target: Path) -> Unfinished | None:
    """The run that the journal describes; None if there is none, or another program wrote it."""
    try:
        found = read_journal(target)
    except ReshardError:
        return None
    return found if found and is_digest(found.header.identity) else None


def _size_and_time(work: Path) -> tuple[int, float]:
    """The bytes that the files of a folder take on the disk, and when the last of them was written. Files may be sparse."""
    nbytes, written = 0, work.lstat().st_mtime
    for folder, _, names in os.walk(work):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                nbytes += status.st_blocks * 512
                written = max(written, status.st_mtime)
    return nbytes, written
