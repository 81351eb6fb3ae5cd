"""What interrupted conversions have left in a store: uploads that are pending, and targets that are not complete."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any, Literal

from reshard.engine.events import event
from reshard.engine.journal import JournalHeader
from reshard.engine.stores.store_target import StoreTarget
from reshard.geometry.light_dataclass import dataclass
from reshard.plans.manifest import MANIFEST
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.stores.pending_uploads import PendingUpload, PendingUploads
from reshard.storage.stores.urls import current_options, open_store

Kind = Literal["upload", "target"]
_RECORD = re.compile(rf"(?:(?<=/)|^){re.escape(WORK_FOLDER)}/")


@dataclass(frozen=True, slots=True)
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


def store_leftovers(url: str) -> Iterator[StoreLeftover]:
    """What lies below a URL. Raises SystemRefusal if the store does not answer."""
    scheme = url.partition("://")[0]
    if scheme.startswith("s3"):
        for upload in PendingUploads(url, current_options()).list():
            place, age = f"{scheme}://{upload.bucket}/{upload.key}", max(0.0, time.time() - upload.begun)
            yield StoreLeftover("upload", place, upload.nbytes, age, "an upload that is not complete", None, upload)
    store = open_store(url)
    paths = [entry.path for entry in store.list()]
    for folder in dict.fromkeys(path[: match.start()] for path in paths if (match := _RECORD.search(path))):
        target = StoreTarget(open_store(store.place(folder.rstrip("/"))))
        nbytes = sum(target.entries[path].nbytes for path in target.unfinished_files())
        begun = None if MANIFEST in target.entries else target.begun() or JournalHeader()
        run = f"conversion to {begun.to}, running or interrupted" if begun else "records beside a complete checkpoint, which stays"
        yield StoreLeftover("target", target.store.url, nbytes, None, run, begun.command() if begun else None, None)


def remove_from_store(leftover: StoreLeftover) -> None:
    """Abort an upload, or remove what a conversion has left in a folder: its records, and its files if the checkpoint is not complete."""
    if leftover.upload:
        PendingUploads(f"s3://{leftover.upload.bucket}", current_options()).abort(leftover.upload)
    else:
        StoreTarget(open_store(leftover.url)).clean()
    event("removed", f"removed {leftover.url}", path=leftover.url, bytes=leftover.nbytes)
