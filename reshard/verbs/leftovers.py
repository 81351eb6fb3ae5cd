"""What interrupted conversions have left, which `reshard clean` lists and removes.

On a disk: work folders. Only a folder `.reshard` that holds a journal or a lock file of reshard counts, and a link is never followed. A
folder is not removed while a run uses it, nor if its run had begun to replace the files of the target: without its journal, nothing would
say that they are a mixture.

In a store: uploads that are pending, and targets that are not complete.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reshard.engine.destinations.journal import RunHeader, Unfinished, read_journal
from reshard.engine.events import event
from reshard.errors import CheckpointError, RequestError, ReshardError
from reshard.geometry.value import value
from reshard.plans.manifest import MANIFEST
from reshard.storage.lock import Lock, is_locked
from reshard.storage.own_files import JOURNAL, WORK_FOLDER, is_digest, owner
from reshard.storage.staging import Staging
from reshard.storage.system_calls import existing_path, is_url, system_refusal

if TYPE_CHECKING:
    from reshard.storage.stores.pending_uploads import PendingUpload

State = Literal["running", "resumable", "half-replaced", "not-begun", "unknown", "upload", "target"]
MEANINGS: dict[State, str] = {
    "running": "a run uses it",
    "resumable": "`resume=True` finishes the run",
    "half-replaced": "the run was replacing the target's files; it must be finished",
    "not-begun": "the run has not written anything that could be resumed",
    "unknown": "it is not known to be of reshard",
    "upload": "an upload that is not complete",
    "target": "a conversion has begun there and has not ended",
}
_KEPT: tuple[State, ...] = ("running", "half-replaced", "unknown")
_IN_STORE: tuple[State, ...] = ("upload", "target")
_OF_TARGET = re.compile(rf"(?:(?<=/)|^)(?:{re.escape(WORK_FOLDER)}/|{re.escape(MANIFEST)}$)")


@value
class Leftover:
    """A work folder, a pending upload, or a folder of a store in which a conversion has begun and has not ended."""

    place: str
    """The work folder, or the URL of the object that was being written or of the folder."""
    state: State
    """What has become of its run; in a store, which of the two it is."""
    nbytes: int
    """The space that it takes, in bytes."""
    age: float | None
    """The seconds since something was last written in it, or the upload was begun; None for a folder of a store."""
    run: str
    """Which run it belongs to, in words."""
    command: str | None
    """What finishes the run; None if nothing does."""
    upload: PendingUpload | None = None
    """The upload."""

    @property
    def is_removable(self) -> bool:
        """Whether it may be removed."""
        return self.state not in _KEPT

    def to_json(self) -> dict[str, Any]:
        """Plain values with stable keys."""
        if self.state in _IN_STORE:
            place = {"kind": self.state, "url": self.place}
        else:
            place = {"path": self.place, "target": os.path.dirname(self.place), "state": self.state}
        age = None if self.age is None else int(self.age)
        return {**place, "bytes": self.nbytes, "age_seconds": age, "run": self.run, "command": self.command}


def leftovers(place: str | os.PathLike[str], on_error: Callable[[ReshardError], None]) -> Iterator[Leftover]:
    """What conversions have left in a directory or below a URL. What other programs write in a store is not listed.

    on_error: gets the errors of folders that cannot be read, or hold a record that reshard did not write.

    Raises: RequestError if the directory does not exist, SystemRefusal if the store does not answer.
    """
    return _in_store(os.fspath(place), on_error) if is_url(place) else _on_disk(existing_path(place), on_error)


def remove(leftover: Leftover) -> bool:
    """Remove a leftover; returns whether it is gone. A work folder stays if its run has gone on meanwhile, up to where it replaces files.

    Of a target in a store, its records are removed, and its files if the checkpoint is not complete.

    Raises: RequestError if another run uses it or the system refuses.
    """
    if leftover.state in _IN_STORE:
        _remove_from_store(leftover)
    elif not os.path.isdir(leftover.place):
        return True
    elif not _remove_work_folder(Path(leftover.place)):
        return False
    event("removed", f"removed {leftover.place}", path=leftover.place, bytes=leftover.nbytes)
    return True


# ---- on a disk ----


def _on_disk(root: Path, on_error: Callable[[ReshardError], None]) -> Iterator[Leftover]:
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
                    yield _work_folder(work)
                except OSError as error:
                    unreadable(error)
        names.sort()


def _remove_work_folder(work: Path) -> bool:
    lock = Lock(work.parent, "clean", lambda: "")
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
    return True


def _work_folder(work: Path) -> Leftover:
    unfinished, run_by = _unfinished(work.parent), owner(work.parent)
    state = _state(work, unfinished, run_by)
    nbytes, written = _size_and_time(work)
    run = f"conversion to {unfinished.header.to}{unfinished.progress}" if unfinished else "no journal"
    if run_by:
        run += f"; process {run_by['pid']} on {run_by['host']}, started {run_by['started']}"
    command = unfinished.header.command() if unfinished and state in ("resumable", "half-replaced") else None
    return Leftover(str(work), state, nbytes, max(time.time() - written, 0.0), run, command)


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
        unfinished = read_journal(target)
    except ReshardError:
        return None
    return unfinished if unfinished and is_digest(unfinished.header.identity) else None


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


# ---- in a store ----


def _in_store(url: str, on_error: Callable[[ReshardError], None]) -> Iterator[Leftover]:
    from reshard.engine.destinations.store import StoreRecords
    from reshard.storage.stores.urls import open_store

    store = open_store(url)
    # Each folder of a target, and whether it has a work folder.
    folders: dict[str, bool] = {}
    for path in (entry.path for entry in store.list()):
        if match := _OF_TARGET.search(path):
            folders[path[: match.start()]] = match[0] != MANIFEST or folders.get(path[: match.start()], False)

    @cache
    def target_in(folder: str) -> StoreRecords:
        return StoreRecords(open_store(store.place(folder.rstrip("/"))))

    for upload, path in _uploads(url):
        with _reporting(on_error):
            if any(path.startswith(root) and target_in(root).is_written_by(path.removeprefix(root), upload.begun) for root in folders):
                place, age = f"{url.partition('://')[0]}://{upload.bucket}/{upload.key}", max(0.0, time.time() - upload.begun)
                yield Leftover(place, "upload", upload.nbytes, age, MEANINGS["upload"], None, upload)
    for folder in [folder for folder, has_work in folders.items() if has_work]:
        with _reporting(on_error):
            target = target_in(folder)
            begun, is_complete = target.begun(), MANIFEST in target.listed
            if not begun and not target.of_files():
                continue
            nbytes = sum(target.listed[path].nbytes for path in target.unfinished_files())
            header = None if is_complete else begun[0] if begun else RunHeader()
            run = f"conversion to {header.to}, running or interrupted" if header else "records beside a complete checkpoint, which stays"
            yield Leftover(target.store.url, "target", nbytes, None, run, header.command() if header else None)


def _uploads(url: str) -> Iterator[tuple[PendingUpload, str]]:
    """The pending uploads below a URL, whoever began them, each with the path of its object below the URL."""
    from reshard.storage.stores.pending_uploads import PendingUploads
    from reshard.storage.stores.urls import current_options

    scheme, _, place = url.partition("://")
    prefix = place.rstrip("/").partition("/")[2]
    if scheme.startswith("s3"):
        for upload in PendingUploads(url, current_options()).list():
            yield upload, upload.key.removeprefix(f"{prefix}/") if prefix else upload.key


@contextmanager
def _reporting(on_error: Callable[[ReshardError], None]) -> Iterator[None]:
    """Inside this context, a record that reshard did not write is reported, and not raised."""
    try:
        yield
    except CheckpointError as error:
        on_error(error)


def _remove_from_store(leftover: Leftover) -> None:
    from reshard.engine.destinations.store import StoreRecords
    from reshard.storage.stores.pending_uploads import PendingUploads
    from reshard.storage.stores.urls import current_options, open_store

    if leftover.upload:
        PendingUploads(f"s3://{leftover.upload.bucket}", current_options()).abort(leftover.upload)
    else:
        StoreRecords(open_store(leftover.place)).clean()
