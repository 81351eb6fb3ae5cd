"""StoreTarget: a folder in a store that a conversion writes, and the records by which an interrupted one is resumed.

    .reshard/begun.json             which plan is written here; created exclusively when a run begins, removed when it has ended
    .reshard/files/<path>.json      one for each file that is complete: {"plan", "bytes", "stamp", "blocks": [[route, block, digest], ...]}

A file's record is written after the file. It counts only if plan, length and stamp (ETag) are those of the file that is there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.engine.journal import BlockKey, JournalHeader
from reshard.errors import CheckpointError
from reshard.plans.manifest import MANIFEST
from reshard.storage.files import Files, read_whole
from reshard.storage.staging import WORK_FOLDER
from reshard.storage.stores.store import Entry, Store

BEGUN = f"{WORK_FOLDER}/begun.json"
_FILES = f"{WORK_FOLDER}/files/"


def check_ended(files: Files) -> None:
    """Raises CheckpointError, with the command that finishes it, if a conversion into this folder has begun and has not ended."""
    if files.size(BEGUN) is None or files.size(MANIFEST) is not None:
        return
    header = JournalHeader.of(json.loads(read_whole(files, BEGUN, limit=1 << 24)))
    raise CheckpointError(
        f"a conversion to {header.to} has begun here and has not ended",
        where=files.root,
        why="The checkpoint is not complete",
        do=f"Wait until it has ended. If it was interrupted: {header.command()}",
        id="source-incomplete",
    )


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A file that an earlier run has completed."""

    entry: Entry
    """The file in the store."""
    blocks: Mapping[BlockKey, bytes]
    """The digests of the blocks that it holds parts of."""


class StoreTarget:
    """The folder of a store that one conversion writes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.entries = {entry.path: entry for entry in store.list()}
        """What lay there at first."""

    def begun(self) -> JournalHeader | None:
        """The conversion that has begun here and has not ended; None if there is none."""
        record = self._json(BEGUN)
        return JournalHeader.of(record) if record is not None else None

    def begin(self, header: JournalHeader) -> None:
        """Record that a conversion begins. Raises TargetError if another one was first."""
        # The identity of the run makes the content unique, so that a second run of the same plan is refused.
        self.store.create(BEGUN, json.dumps({**header.record(), "run": uuid.uuid4().hex}).encode())

    def finished(self, identity: str) -> dict[str, FinishedFile]:
        """The files that an earlier run of the same plan has completed, by path."""
        found = {}
        for path in [path for path in self.entries if path.startswith(_FILES)]:
            record, name = self._json(path) or {}, path.removeprefix(_FILES).removesuffix(".json")
            entry = self.entries.get(name)
            if entry and (record.get("plan"), record.get("bytes"), record.get("stamp")) == (identity, entry.nbytes, entry.stamp):
                found[name] = FinishedFile(entry, {(int(i), int(j)): bytes.fromhex(digest) for i, j, digest in record["blocks"]})
        return found

    def record(self, identity: str, entry: Entry, blocks: Iterable[tuple[BlockKey, bytes]]) -> None:
        """Record that a file is complete."""
        content = {
            "plan": identity,
            "bytes": entry.nbytes,
            "stamp": entry.stamp,
            "blocks": [[*key, digest.hex()] for key, digest in blocks],
        }
        self.store.put(f"{_FILES}{entry.path}.json", json.dumps(content).encode())

    def end(self, files: Iterable[str]) -> None:
        """Remove the records of these files, and last that the conversion has begun."""
        self.store.remove(f"{_FILES}{path}.json" for path in files)
        self.store.remove([BEGUN])

    def _json(self, path: str) -> dict[str, Any] | None:
        entry = self.entries.get(path)
        if entry is None:
            return None
        try:
            value = json.loads(bytes(self.store.read(entry, 0, entry.nbytes)))
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise CheckpointError("the record was not written by reshard", where=self.store.place(path), do="Start again with --overwrite")
        return value
