"""What interrupted conversions have left in a store: uploads that are pending, and targets that are not complete."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from reshard.engine.events import event
from reshard.engine.stores.store_target import BEGUN, StoreTarget
from reshard.storage.stores.pending_uploads import PendingUpload, PendingUploads
from reshard.storage.stores.urls import current_options, open_store

Kind = Literal["upload", "target"]


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
    for entry in store.list():
        if entry.path == BEGUN or entry.path.endswith(f"/{BEGUN}"):
            folder = entry.path.removesuffix(BEGUN).rstrip("/")
            target = StoreTarget(open_store(store.place(folder)))
            begun = target.begun()
            if begun:
                nbytes = sum(file.entry.nbytes for file in target.finished(begun.identity).values())
                yield StoreLeftover(
                    "target", target.store.url, nbytes, None, f"conversion to {begun.to}, running or interrupted", begun.command(), None
                )


def remove_from_store(leftover: StoreLeftover) -> None:
    """Abort an upload, or remove what a conversion has completed in a folder, and its records."""
    if leftover.upload:
        PendingUploads(f"s3://{leftover.upload.bucket}", current_options()).abort(leftover.upload)
    else:
        target = StoreTarget(open_store(leftover.url))
        begun = target.begun()
        finished = target.finished(begun.identity) if begun else {}
        target.store.remove(finished)
        target.end(finished)
    event("removed", f"removed {leftover.url}", path=leftover.url, bytes=leftover.nbytes)
