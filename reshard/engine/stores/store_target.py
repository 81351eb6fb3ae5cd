"""StoreTarget: a folder in a store that a conversion writes, and the records by which an interrupted one is resumed.

    .reshard/begun.json             which plan is written here, and its files; created exclusively when a run begins, removed when it ends
    .reshard/files/<path>.json      one for each file that is complete: {"plan", "bytes", "stamp", "blocks": [[route, block, digest], ...]}

A file's record is written after the file. It counts only if plan, length and stamp (ETag) are those of the file that is there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from reshard.engine.journal import BlockKey, JournalHeader
from reshard.errors import CheckpointError, TargetError
from reshard.geometry.light_dataclass import dataclass
from reshard.plans.layout import Layout
from reshard.plans.manifest import CHECKSUMS, DIGESTS, MANIFEST, Manifest, listed_files, usable_manifest
from reshard.storage.files import Files, read_whole
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.stores.remote_files import RemoteFiles
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
        entry = self.entries.get(BEGUN)
        return self._header(entry) if entry else None

    def result_of(self, identity: str) -> Manifest | None:
        """The manifest, if the folder holds the complete result of the plan with that identity."""
        if MANIFEST not in self.entries:
            return None
        files = RemoteFiles(self.store.url)
        manifest = usable_manifest(files)
        if manifest is None or manifest.plan != identity:
            return None
        sizes = {path: entry.nbytes for path, entry in self.entries.items()}
        return manifest if all(sizes.get(path) == size for path, size in listed_files(files, manifest).items()) else None

    def begin(self, header: JournalHeader, layout: Layout) -> None:
        """Record that a conversion begins. Raises TargetError if another one was first."""
        paths = [*(file.path for file in layout.files), *(sidecar.path for sidecar in layout.sidecars), CHECKSUMS, DIGESTS]
        # The identity of the run makes the content unique, so that a second run of the same plan is refused.
        self.store.create(BEGUN, json.dumps({**header.record(), "files": paths, "run": uuid.uuid4().hex}).encode())
        if MANIFEST not in self.entries and self.store.look(MANIFEST):
            self.store.remove([BEGUN])
            raise TargetError(
                "another run has begun and ended meanwhile", where=self.store.url, do="Choose another folder", id="target-exists"
            )

    def check_begun(self, identity: str) -> None:
        """Raises TargetError unless a conversion with that identity has begun here and has not ended."""
        entry = self.store.look(BEGUN)
        begun = self._header(entry) if entry else None
        if begun is None or begun.identity != identity:
            raise TargetError(
                "the conversion that this process belongs to has ended" if begun is None else "another conversion has begun here meanwhile",
                where=self.store.url,
                why="Its files would become a part of another checkpoint",
                do="Look who else writes here",
                id="target-in-use",
            )

    def finished(self, identity: str, paths: Iterable[str] | None = None) -> dict[str, FinishedFile]:
        """The files that earlier runs of the same plan have completed, by path. paths: of these files alone; None: of all."""
        names = [path.removeprefix(_FILES).removesuffix(".json") for path in self.entries if path.startswith(_FILES)]
        among = set(names if paths is None else paths)
        asked = {name: self.store.later(partial(self._record, name, identity)) for name in names if name in among and name in self.entries}
        return {name: file for name, future in asked.items() if (file := future.result())}

    def _record(self, name: str, identity: str) -> FinishedFile | None:
        """A file, if its record is of this plan and of the file that is there."""
        record, entry = self._json(f"{_FILES}{name}.json") or {}, self.entries[name]
        if (record.get("plan"), record.get("bytes"), record.get("stamp")) != (identity, entry.nbytes, entry.stamp):
            return None
        return FinishedFile(entry, {(int(i), int(j)): bytes.fromhex(digest) for i, j, digest in record["blocks"]})

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

    def unfinished_files(self) -> list[str]:
        """The files that a conversion has written here which has not ended; none if the checkpoint is complete."""
        if MANIFEST in self.entries:
            return []
        begun = (self._json(BEGUN) or {}).get("files", ())
        recorded = (path.removeprefix(_FILES).removesuffix(".json") for path in self.entries if path.startswith(_FILES))
        return [path for path in dict.fromkeys((*map(str, begun), *recorded)) if path in self.entries]

    def clean(self) -> None:
        """Remove these files, the records, and last that the conversion has begun."""
        self.store.remove(self.unfinished_files())
        self.store.remove(path for path in self.entries if path.startswith(_FILES))
        self.store.remove([BEGUN])

    def _header(self, entry: Entry) -> JournalHeader | None:
        record = self._content(entry)
        return JournalHeader.of(record) if record is not None else None

    def _json(self, path: str) -> dict[str, Any] | None:
        """A record that lay there at first; None if it does not exist, or another process has removed it since."""
        entry = self.entries.get(path)
        return self._content(entry) if entry else None

    def _content(self, entry: Entry) -> dict[str, Any] | None:
        place = self.store.place(entry.path)
        try:
            value = json.loads(bytes(self.store.read(entry, 0, entry.nbytes)))
        except ValueError:
            value = None
        except CheckpointError:
            # The process that completes the target removes the records, and a part that runs twice writes its own again.
            found = self.store.look(entry.path)
            return self._content(found) if found and found != entry else None
        if not isinstance(value, dict):
            raise CheckpointError("the record was not written by reshard", where=place, do="Start again with --overwrite")
        return value
