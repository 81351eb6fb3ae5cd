"""StoreTarget: a folder in a store that a conversion writes, and the records by which an interrupted one is resumed.

    .reshard/begun.json             which plan is written here, and its files; created exclusively when a run begins, removed when it ends
    .reshard/files/<path>.json      one for each file that is complete:
                                    {"plan", "bytes", "stamp", "source", "blocks": [[route, block, digest], ...]}

A file's record is written after the file. It counts only if plan, length and stamp (ETag) are those of the file that is there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from reshard.engine.journal import BlockKey, JournalHeader, blocks_of
from reshard.errors import CheckpointError, TargetError
from reshard.geometry.value import value
from reshard.plans.layout import Layout
from reshard.plans.manifest import CHECKSUMS, DIGESTS, MANIFEST, Manifest, listed_files, usable_manifest
from reshard.storage.files import Files, read_whole
from reshard.storage.own_files import WORK_FOLDER, is_digest, json_object
from reshard.storage.stores.remote_files import RemoteFiles
from reshard.storage.stores.store import Entry, Store

BEGUN = f"{WORK_FOLDER}/begun.json"
_FILES = f"{WORK_FOLDER}/files/"
_KEYS_OF_FILE = frozenset({"plan", "bytes", "stamp", "blocks"})
# The record of a file of 5 TB, which is the longest in S3.
_MOST_BYTES = 64 << 20
_MADE_LAST = (CHECKSUMS, DIGESTS)
# Processes that complete a target, or write a file twice, replace records; somebody who does nothing else is not waited for.
_LOOKS = 8


def check_ended(files: Files) -> None:
    """Raises CheckpointError, with the command that finishes it, if a conversion into this folder has begun and has not ended."""
    if files.size(BEGUN) is None or files.size(MANIFEST) is not None:
        return
    begun = Begun.of(read_whole(files, BEGUN, limit=_MOST_BYTES), f"{files.root}/{BEGUN}")
    raise CheckpointError(
        f"a conversion to {begun.header.to} has begun here and has not ended",
        where=files.root,
        why="The checkpoint is not complete",
        do=f"Wait until it has ended. If it was interrupted: {begun.header.command()}",
        id="source-incomplete",
    )


@value
class Begun:
    """The record of a conversion that has begun."""

    header: JournalHeader
    """Which conversion it is."""
    files: Mapping[str, int | None]
    """The files that it writes, with their lengths in bytes; None for the two whose length is known when they are written."""

    @staticmethod
    def of(content: bytes, place: str) -> Begun:
        """The record in a file. Raises CheckpointError, naming its place, if reshard did not write it."""
        record = json_object(content)
        try:
            header, files = JournalHeader.of(record), record.get("files", {})
            lengths = dict(files) if isinstance(files, dict) else dict.fromkeys(files)
            if not is_digest(header.identity) or not all(nbytes is None or type(nbytes) is int for nbytes in lengths.values()):
                raise ValueError("the identity is no digest, or a length is no number")
        except (ValueError, TypeError, CheckpointError):
            raise _foreign(place) from None
        return Begun(header, lengths)


@value
class FinishedFile:
    """A file that an earlier run has completed."""

    entry: Entry
    """The file in the store."""
    blocks: Mapping[BlockKey, bytes]
    """The digests of the blocks that it holds parts of."""
    source: str
    """The trace of the source that they were copied from (`source_trace`)."""


class StoreTarget:
    """The folder of a store that one conversion writes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.entries = {entry.path: entry for entry in store.list()}
        """What lay there at first."""

    def begun(self) -> JournalHeader | None:
        """The conversion that has begun here and has not ended; None if there is none."""
        begun = self._begun(self.entries.get(BEGUN))
        return begun.header if begun else None

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
        files = {
            **{file.path: file.nbytes for file in layout.files},
            **{sidecar.path: len(sidecar.content) for sidecar in layout.sidecars},
            **dict.fromkeys(_MADE_LAST),
        }
        # The identity of the run makes the content unique, so that a second run of the same plan is refused.
        self.store.create(BEGUN, json.dumps({**header.record(), "files": files, "run": uuid.uuid4().hex}).encode())
        if MANIFEST not in self.entries and self.store.look(MANIFEST):
            self.store.remove([BEGUN])
            raise TargetError(
                "another run has begun and ended meanwhile", where=self.store.url, do="Choose another folder", id="target-exists"
            )

    def check_begun(self, identity: str) -> None:
        """Raises TargetError unless a conversion with that identity has begun here and has not ended."""
        begun = self._begun(self.store.look(BEGUN))
        if begun is None or begun.header.identity != identity:
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
        record, entry = self._file_record(f"{_FILES}{name}.json"), self.entries[name]
        if (record.get("plan"), record.get("bytes"), record.get("stamp")) != (identity, entry.nbytes, entry.stamp):
            return None
        try:
            return FinishedFile(entry, dict(blocks_of(record)), str(record.get("source", "")))
        except (ValueError, TypeError):
            return None

    def record(self, identity: str, source: str, entry: Entry, blocks: Iterable[tuple[BlockKey, bytes]]) -> None:
        """Record that a file is complete. source: the trace of the source."""
        content = {
            "plan": identity,
            "bytes": entry.nbytes,
            "stamp": entry.stamp,
            "source": source,
            "blocks": [[*key, digest.hex()] for key, digest in blocks],
        }
        self.store.put(f"{_FILES}{entry.path}.json", json.dumps(content).encode())

    def end(self, files: Iterable[str]) -> None:
        """Remove the records of these files, and last that the conversion has begun."""
        self.store.remove(f"{_FILES}{path}.json" for path in files)
        self.store.remove([BEGUN])

    def unfinished_files(self) -> list[str]:
        """The files that a conversion has written here which has not ended; none if the checkpoint is complete.

        What the record names counts only if it can be of that conversion, which began in an empty folder: it is not older than the record
        that it has begun, and has the length that was planned.
        """
        entry = self.entries.get(BEGUN)
        begun = self._begun(entry) if MANIFEST not in self.entries else None
        if entry is None or begun is None:
            return []
        return [path for path, nbytes in begun.files.items() if path in self.entries and self._is_of(path, nbytes, entry)]

    def _is_of(self, path: str, nbytes: int | None, begun: Entry) -> bool:
        """Whether a file can be of the conversion that has begun."""
        found = self.entries[path]
        if found.written is not None and begun.written is not None and found.written < begun.written:
            return False
        if nbytes is None and path not in _MADE_LAST:  # Version 0.1.0 recorded no lengths.
            record = self._file_record(f"{_FILES}{path}.json")
            return (record.get("bytes"), record.get("stamp")) == (found.nbytes, found.stamp)
        return nbytes in (None, found.nbytes)

    def is_written_by(self, path: str, begun: float) -> bool:
        """Whether a conversion into this folder, which may have ended, writes a file of this name. begun: when its upload was begun."""
        if MANIFEST in self.entries:
            files = RemoteFiles(self.store.url)
            manifest = usable_manifest(files)
            return manifest is not None and path in listed_files(files, manifest)
        entry = self.entries.get(BEGUN)
        found = self._begun(entry)
        # Stores tell the time of an upload in whole seconds.
        return found is not None and path in found.files and (entry is None or entry.written is None or entry.written <= begun + 1)

    def records(self) -> list[str]:
        """The records of files: of what lies where they are kept, what reshard wrote."""
        paths = [path for path in self.entries if path.startswith(_FILES)]
        asked = {path: self.store.later(partial(self._file_record, path)) for path in paths}
        return [path for path, future in asked.items() if future.result()]

    def clean(self) -> None:
        """Remove what a conversion which has not ended has written, the records, and last that the conversion has begun.

        Raises: CheckpointError if reshard did not write the record that a conversion has begun; then nothing is removed.
        """
        unfinished, records = self.unfinished_files(), self.records()
        begun = [BEGUN] if self._begun(self.entries.get(BEGUN)) else []
        for paths in (unfinished, records, begun):
            self.store.remove(paths)

    def _begun(self, entry: Entry | None) -> Begun | None:
        """The record that a conversion has begun. Raises CheckpointError if reshard did not write it."""
        content = self._content(entry) if entry else None
        return None if content is None else Begun.of(content, self.store.place(BEGUN))

    def _file_record(self, path: str) -> dict[str, Any]:
        """The record of a file; empty if there is none, or reshard did not write it."""
        entry = self.entries.get(path)
        if entry is None or entry.nbytes > _MOST_BYTES:
            return {}
        record = json_object(self._content(entry) or b"")
        return record if record.keys() - {"source"} == _KEYS_OF_FILE else {}  # version 0.1.0 does not say the source

    def _content(self, entry: Entry) -> bytes | None:
        """A record that lay there at first, or what has replaced it; None if another process has removed it since."""
        if entry.nbytes > _MOST_BYTES:
            raise _foreign(self.store.place(entry.path))
        for _ in range(_LOOKS):
            try:
                return bytes(self.store.read(entry, 0, entry.nbytes))
            except CheckpointError:
                # The process that completes the target removes the records, and a part that runs twice writes its own again.
                found = self.store.look(entry.path)
                if found is None or found == entry:
                    return None
                entry = found
        raise CheckpointError(
            f"the file changes whenever it is read; {_LOOKS} times",
            where=self.store.place(entry.path),
            do="Look what writes it, and whether the store keeps an ETag for an object that nobody writes",
        )


def _foreign(place: str) -> CheckpointError:
    return CheckpointError(
        "the record was not written by reshard",
        where=place,
        why="It should say which conversion has begun here",
        do="Remove it if it is yours to remove, or choose another folder",
    )
