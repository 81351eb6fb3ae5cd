"""What interrupted conversions have left in a store: uploads that are pending, and targets that are not complete."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from reshard.engine.events import event
from reshard.engine.journal import JournalHeader
from reshard.engine.stores.store_target import StoreTarget
from reshard.errors import CheckpointError, ReshardError
from reshard.geometry.value import value
from reshard.plans.manifest import MANIFEST
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.stores.pending_uploads import PendingUpload, PendingUploads
from reshard.storage.stores.urls import current_options, open_store

Kind = Literal["upload", "target"]
_OF_TARGET = re.compile(rf"(?:(?<=/)|^)(?:{re.escape(WORK_FOLDER)}/|{re.escape(MANIFEST)}$)")


@value
class StoreLeftover:
    """A pending upload, or a folder in which a conversion has begun and has not ended."""

    kind: Kind
    """Which of the two."""
    url: str
    """The object that was being written, or the folder."""
    nbytes: int
    """The bytes of its parts, or of the files that are complete."""
    age: float | None
    """The seconds since the upload was begun; None for a folder."""
    run: str
    """What it belongs to, in words."""
    command: str | None
    """What finishes the run; None for an upload."""
    upload: PendingUpload | None
    """The upload."""

    def to_json(self) -> dict[str, Any]:
        """Plain values with stable keys."""
        return {
            "kind": self.kind,
            "url": self.url,
            "bytes": self.nbytes,
            "age_seconds": None if self.age is None else int(self.age),
            "run": self.run,
            "command": self.command,
        }


def store_leftovers(url: str, on_error: Callable[[ReshardError], None]) -> Iterator[StoreLeftover]:
    """What conversions have left below a URL. What other programs write there is not listed.

    on_error: gets the errors of folders with a record that reshard did not write. Raises: SystemRefusal if the store does not answer.
    """
    store = open_store(url)
    # Each folder of a target, and whether it has a work folder.
    folders: dict[str, bool] = {}
    for path in (entry.path for entry in store.list()):
        if match := _OF_TARGET.search(path):
            folders[path[: match.start()]] = match[0] != MANIFEST or folders.get(path[: match.start()], False)

    @cache
    def target_in(folder: str) -> StoreTarget:
        return StoreTarget(open_store(store.place(folder.rstrip("/"))))

    for upload, path in _uploads(url):
        with _reporting(on_error):
            if any(path.startswith(each) and target_in(each).is_written_by(path.removeprefix(each), upload.begun) for each in folders):
                place, age = f"{url.partition('://')[0]}://{upload.bucket}/{upload.key}", max(0.0, time.time() - upload.begun)
                yield StoreLeftover("upload", place, upload.nbytes, age, "an upload that is not complete", None, upload)
    for folder in [folder for folder, has_work in folders.items() if has_work]:
        with _reporting(on_error):
            target = target_in(folder)
            begun, is_complete = target.begun(), MANIFEST in target.entries
            if not begun and not target.records():
                continue
            nbytes = sum(target.entries[path].nbytes for path in target.unfinished_files())
            header = None if is_complete else begun or JournalHeader()
            run = f"conversion to {header.to}, running or interrupted" if header else "records beside a complete checkpoint, which stays"
            yield StoreLeftover("target", target.store.url, nbytes, None, run, header.command() if header else None, None)


def _uploads(url: str) -> Iterator[tuple[PendingUpload, str]]:
    """The pending uploads below a URL, whoever began them, each with the path of its object below the URL."""
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


def remove_from_store(leftover: StoreLeftover) -> None:
    """Abort an upload, or remove what a conversion has left in a folder: its records, and its files if the checkpoint is not complete."""
    if leftover.upload:
        PendingUploads(f"s3://{leftover.upload.bucket}", current_options()).abort(leftover.upload)
    else:
        StoreTarget(open_store(leftover.url)).clean()
    event("removed", f"removed {leftover.url}", path=leftover.url, bytes=leftover.nbytes)
