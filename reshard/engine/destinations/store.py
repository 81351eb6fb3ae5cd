"""StoreFolder: a folder in a store that a conversion writes. Files appear when they are complete, and are never renamed.

    .reshard/begun.json             which plan is written here, and its files; created exclusively when a run begins, removed when it ends
    .reshard/files/<path>.json      one for each file that is complete:
                                    {"plan", "bytes", "stamp", "source", "blocks": [[route, block, digest], ...],
                                     "checksums": [CRC-32, ...]}

A file's record is written after the file. It counts only if plan, length and stamp (ETag) are those of the file that is there. So an
interrupted conversion is resumed by file.

Stores have no locks, and parts need none. A file that is written twice gets the same bytes, and becomes visible as a whole. Index, config
and manifest come after the files of weights, and are created exclusively. Of two processes that complete the target, one creates the
manifest, and the other finds it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from reshard.engine.blocks import Job, source_trace, workers_of
from reshard.engine.checks.reading import Reading
from reshard.engine.destinations.destination import Begun, FinishedBlocks, Records, Replaces, check_empty, check_same, complete_result
from reshard.engine.destinations.front_to_back import Budget, filled
from reshard.engine.destinations.journal import RunHeader, beyond_of, blocks_of, natural
from reshard.engine.destinations.visit_order import passes
from reshard.engine.events import event
from reshard.engine.origins.reader import Tiles
from reshard.engine.pool import NO_LIMITS, Effort
from reshard.engine.transfer import Pieces
from reshard.errors import CheckpointError, TargetError, TargetInUse, WrongChecksum
from reshard.geometry.boxes import blocks
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.plans.layout import Layout, TargetFile
from reshard.plans.manifest import CHECKSUMS, DIGESTS, MANIFEST, README, Manifest, listed_files, sample_ranges, usable_manifest
from reshard.plans.plan import Plan
from reshard.plans.tasks import BlockKey, Task, by_files
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
# A thread waits while the parts of its file are under way, and others go on meanwhile.
_WORKERS = 8


def check_ended(files: Files) -> None:
    """Raises CheckpointError, with the command that finishes it, if a conversion into this folder has begun and has not ended."""
    if files.size(BEGUN) is None or files.size(MANIFEST) is not None:
        return
    header, _ = _begun_record(read_whole(files, BEGUN, limit=_MOST_BYTES), f"{files.root}/{BEGUN}")
    raise CheckpointError(
        f"a conversion to {header.to} has begun here and has not ended",
        where=files.root,
        why="The checkpoint is not complete",
        do=f"Wait until it has ended. If it was interrupted: {header.command()}",
        id="source-incomplete",
    )


def _begun_record(content: bytes, place: str) -> tuple[RunHeader, Mapping[str, int | None]]:
    """Which conversion has begun, and the lengths of the files that it writes; None for the two whose length is known when they are
    written. Raises CheckpointError, naming its place, if reshard did not write the record."""
    record = json_object(content)
    try:
        header, files = RunHeader.of(record), record.get("files", {})
        lengths = dict(files) if isinstance(files, dict) else dict.fromkeys(files)
        if not is_digest(header.identity) or not all(nbytes is None or type(nbytes) is int for nbytes in lengths.values()):
            raise ValueError("the identity is no digest, or a length is no number")
    except (ValueError, TypeError, CheckpointError):
        raise _foreign(place) from None
    return header, lengths


@value
class FinishedFile:
    """A file that an earlier run has completed."""

    entry: Entry
    """The file in the store."""
    blocks: Mapping[BlockKey, bytes]
    """The digests of the blocks that it holds parts of."""
    source: str
    """The trace of the source that they were copied from (`source_trace`)."""
    checksums: Sequence[int | None]
    """The values of the checksums in its framing."""
    beyond: Mapping[BlockKey, int]
    """The blocks in which values became infinite, and how many."""


class StoreRecords:
    """The records in a folder of a store. They are looked at once, and again after `refresh`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._listed: dict[str, Entry] | None = None
        self._finished: dict[str, FinishedFile | None] = {}

    @property
    def listed(self) -> Mapping[str, Entry]:
        """What lay there when it was looked at first, or since `refresh`."""
        if self._listed is None:
            self._listed = {entry.path: entry for entry in self.store.list()}
        return self._listed

    def refresh(self) -> None:
        """Look again."""
        self._listed = None
        self._finished.clear()

    def begin(self, header: RunHeader, layout: Layout) -> None:
        """Record that a conversion begins. Raises TargetError if another one was first."""
        files = {
            **{file.path: file.nbytes for file in layout.files},
            **{sidecar.path: len(sidecar.content) for sidecar in layout.sidecars},
            **dict.fromkeys(_MADE_LAST),
        }
        # The identity of the run makes the content unique, so that a second run of the same plan is refused.
        self.store.create(BEGUN, json.dumps({**header.record(), "files": files, "run": uuid.uuid4().hex}).encode())
        if MANIFEST not in self.listed and self.store.look(MANIFEST):
            self.store.remove([BEGUN])
            raise TargetError(
                "another run has begun and ended meanwhile", where=self.store.url, do="Choose another folder", id="target-exists"
            )

    def check_begun(self, identity: str) -> None:
        """Raises TargetError unless the conversion of that identity has begun here and has not ended."""
        begun = self._begun(self.store.look(BEGUN))
        if begun is None or begun[0].identity != identity:
            raise TargetError(
                "the conversion that this process belongs to has ended" if begun is None else "another conversion has begun here meanwhile",
                where=self.store.url,
                why="Its files would become a part of another checkpoint",
                do="Look who else writes here",
                id="target-in-use",
            )

    def finished_files(self, layout: Layout, identity: str, paths: Collection[str]) -> dict[str, FinishedFile]:
        """Those of these files that earlier runs of the plan have completed."""
        asked = [path for path in paths if path in self.listed and _record_of(path) in self.listed and path not in self._finished]
        futures = {path: self.store.later(partial(self._finished_file, path, identity)) for path in asked}
        self._finished.update((path, future.result()) for path, future in futures.items())
        files = ((file.path, len(file.checksums), self._finished.get(file.path)) for file in layout.files if file.path in paths)
        return {path: record for path, checksums, record in files if record and len(record.checksums) == checksums}

    def _finished_file(self, path: str, identity: str) -> FinishedFile | None:
        """A file, if its record is of this plan and of the file that is there."""
        record, entry = self._file_record(_record_of(path)), self.listed[path]
        if (record.get("plan"), record.get("bytes"), record.get("stamp")) != (identity, entry.nbytes, entry.stamp):
            return None
        try:
            checksums = tuple(natural(crc) & 0xFFFFFFFF for crc in record.get("checksums", ()))
            return FinishedFile(entry, dict(blocks_of(record)), str(record.get("source", "")), checksums, dict(beyond_of(record)))
        except (ValueError, TypeError):
            return None

    def add(
        self, identity: str, source: str, entry: Entry, digests: Iterable[tuple[BlockKey, bytes, int]], checksums: Sequence[int | None]
    ) -> None:
        """Record that a file is complete. identity: of the plan. source: the trace of the source."""
        content = {
            "plan": identity,
            "bytes": entry.nbytes,
            "stamp": entry.stamp,
            "source": source,
            "blocks": [[*key, digest.hex(), *filter(None, [beyond])] for key, digest, beyond in digests],
            "checksums": checksums,
        }
        self.store.put(_record_of(entry.path), json.dumps(content).encode())

    def unfinished_files(self) -> list[str]:
        # What the record names counts only if it can be of that conversion, which began in an empty folder: it is not older than the record
        # that it has begun, and has the length that was planned.
        entry = self.listed.get(BEGUN)
        begun = self.begun() if MANIFEST not in self.listed else None
        if entry is None or begun is None:
            return []
        return [path for path, nbytes in begun[1].items() if path in self.listed and self._is_of(path, nbytes, entry)]

    def _is_of(self, path: str, nbytes: int | None, begun: Entry) -> bool:
        """Whether a file can be of the conversion that has begun."""
        entry = self.listed[path]
        if entry.written is not None and begun.written is not None and entry.written < begun.written:
            return False
        if nbytes is None and path not in _MADE_LAST:  # Version 0.1.0 recorded no lengths.
            record = self._file_record(_record_of(path))
            return (record.get("bytes"), record.get("stamp")) == (entry.nbytes, entry.stamp)
        return nbytes in (None, entry.nbytes)

    def is_written_by(self, path: str, begun: float) -> bool:
        """Whether a conversion into this folder, which may have ended, writes a file of this name. begun: when its upload was begun."""
        if MANIFEST in self.listed:
            manifest = usable_manifest(files := RemoteFiles(self.store.url))
            return manifest is not None and path in listed_files(files, manifest)
        entry = self.listed.get(BEGUN)
        record = self.begun()
        # Stores tell the time of an upload in whole seconds.
        return record is not None and path in record[1] and (entry is None or entry.written is None or entry.written <= begun + 1)

    def of_files(self) -> list[str]:
        """The records of files: of what lies where they are kept, what reshard wrote."""
        asked = {path: self.store.later(partial(self._file_record, path)) for path in self.listed if path.startswith(_FILES)}
        return [path for path, future in asked.items() if future.result()]

    def clean(self) -> None:
        """Remove what a conversion which has not ended has written, the records, and last that the conversion has begun.

        Raises: CheckpointError if reshard did not write the record that a conversion has begun; then nothing is removed.
        """
        unfinished, records = self.unfinished_files(), self.of_files()
        begun = [BEGUN] if self.begun() else []
        for paths in (unfinished, records, begun):
            self.store.remove(paths)

    def begun(self) -> tuple[RunHeader, Mapping[str, int | None]] | None:
        """Which conversion had begun when the folder was looked at, and the lengths of its files. Raises: as `clean` does."""
        return self._begun(self.listed.get(BEGUN))

    def end(self, records: Iterable[str]) -> None:
        """Remove these records of files, and last that the conversion has begun."""
        self.store.remove(records)
        self.store.remove([BEGUN])

    def _begun(self, entry: Entry | None) -> tuple[RunHeader, Mapping[str, int | None]] | None:
        """The record that a conversion has begun. Raises CheckpointError if reshard did not write it."""
        content = self._content(entry) if entry else None
        return None if content is None else _begun_record(content, self.store.place(BEGUN))

    def _file_record(self, path: str) -> dict[str, Any]:
        """The record of a file; empty if there is none, or reshard did not write it."""
        entry = self.listed.get(path)
        if entry is None or entry.nbytes > _MOST_BYTES:
            return {}
        record = json_object(self._content(entry) or b"")
        return record if record.keys() - {"source", "checksums"} == _KEYS_OF_FILE else {}  # version 0.1.0 does not say these two

    def _content(self, entry: Entry) -> bytes | None:
        """A record that lay there at first, or what has replaced it; None if another process has removed it since."""
        if entry.nbytes > _MOST_BYTES:
            raise _foreign(self.store.place(entry.path))
        for _ in range(_LOOKS):
            try:
                return bytes(self.store.read(entry, 0, entry.nbytes))
            except CheckpointError:
                # The process that completes the target removes the records, and a part that runs twice writes its own again.
                current = self.store.look(entry.path)
                if current is None or current == entry:
                    return None
                entry = current
        raise CheckpointError(
            f"the file changes whenever it is read; {_LOOKS} times",
            where=self.store.place(entry.path),
            do="Look what writes it, and whether the store keeps an ETag for an object that nobody writes",
        )


class StoreFolder:
    """A folder of a store as a `Destination`."""

    is_running = None

    def __init__(self, store: Store, effort: Effort = NO_LIMITS, *, replaces: Replaces = tuple) -> None:
        self.store, self.place = store, store.url
        self._effort, self._replaces = effort, replaces
        self._identity = ""
        self._records = StoreRecords(store)
        self._complete: dict[str, FinishedFile] = {}
        """The files that are complete."""

    @property
    def files(self) -> Files:
        return RemoteFiles(self.place)

    def refresh(self) -> None:
        self._records.refresh()
        self._complete.clear()

    def workers(self, plan: Plan, tasks: Sequence[Task]) -> int:
        self._budget(plan, tasks)
        return workers_of(plan, Effort(self._effort.workers or _WORKERS))

    def _budget(self, plan: Plan, tasks: Sequence[Task]) -> Budget:
        paths = {path for task in tasks for path in task.paths}
        return Budget(self._effort.memory, [file for file in plan.layout.files if file.path in paths])

    def tasks(self, plan: Plan) -> tuple[Task, ...]:
        return by_files(plan.layout.files, plan.routes)

    def entries(self, folders: Iterable[str] = ()) -> Sequence[str]:
        return sorted(self._records.listed)

    def existing(self, paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(path for path in paths if path in self._records.listed)

    def begun(self) -> Begun | None:
        begun = self._records.begun()
        return Begun(begun[0], f"a conversion to {begun[0].to} has begun here and has not ended") if begun else None

    def result_of(self, identity: str) -> Manifest | None:
        if MANIFEST not in self._records.listed:
            return None
        sizes = {path: entry.nbytes for path, entry in self._records.listed.items()}
        manifest = complete_result(self.files, identity, sizes.get)
        if manifest and any(path.startswith(f"{WORK_FOLDER}/") for path in self._records.listed):
            self._records.end(path for path in self._records.listed if path.startswith(_FILES))
        return manifest

    def alone(self, identity: str) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, header: RunHeader, plan: Plan, *, resume: bool) -> None:
        self._identity = header.identity
        if resume and (begun := self.begun()):
            check_same(begun.header, header.identity, self.place)
            return
        replaces = tuple(self._replaces())
        if resume:
            check_empty(self.entries(), self.place)
        if replaces:
            # Index and manifest first, so that nobody takes what is left for a checkpoint.
            holds_weights = {file.path for file in plan.layout.files}
            for group in (False, True):
                self.store.remove(path for path in replaces if (path in holds_weights) is group)
            self.refresh()
        self._records.begin(header, plan.layout)

    @contextmanager
    def shared(self, header: RunHeader, plan: Plan, *, begins: bool) -> Iterator[bool]:
        self._identity = header.identity
        if begins:
            self._join(header, plan.layout)
        else:
            self._records.check_begun(self._identity)
        yield True

    def _join(self, header: RunHeader, layout: Layout) -> None:
        """Begin the conversion, unless another part has. Raises TargetError if something else lies there."""
        begun = self.begun()
        if begun is None:
            if self._records.listed:
                raise TargetError(
                    f"the target exists and holds {plural(len(self._records.listed), 'entry', 'entries')}",
                    where=self.place,
                    why="Parts write into an empty folder of a store; nothing was written",
                    do="Choose another folder, or remove what lies there",
                    id="target-exists",
                )
            try:
                self._records.begin(header, layout)
            except TargetError:
                self.refresh()
                begun = self.begun()
                if begun is None:
                    raise
        if begun and begun.header.identity != header.identity:
            raise TargetError(
                f"another conversion to {begun.header.to} has begun here",
                where=self.place,
                why="It has other options or another version of reshard, or the source has changed since; nothing was written",
                do="Repeat the options of the other parts, or choose another folder",
                id="target-in-use",
            )

    def finished(self, plan: Plan, tasks: Sequence[Task]) -> FinishedBlocks:
        paths = {path for task in tasks for path in task.paths}
        files = self._complete = self._records.finished_files(plan.layout, self._identity, paths)
        left, trace = paths - files.keys(), source_trace(plan)
        digests = {key: digest for file in files.values() for key, digest in file.blocks.items()}
        others = {key: digest for file in files.values() if trace and file.source != trace for key, digest in file.blocks.items()}
        beyond = {key: count for file in files.values() for key, count in file.beyond.items()}
        return FinishedBlocks({key for task in tasks for i in task.routes for key in _not_in(plan, i, left)}, digests, others, beyond)

    def missing(self, plan: Plan, identity: str) -> Mapping[Task, int]:
        sizes = {file.path: file.nbytes for file in plan.layout.files}
        finished = self._records.finished_files(plan.layout, identity, sizes.keys())
        lacking = {task: [sizes[path] for path in task.paths if path not in finished] for task in self.tasks(plan)}
        return {task: sum(nbytes) for task, nbytes in lacking.items() if nbytes}

    def read_back(self, plan: Plan, jobs: Iterable[Job], digests: Mapping[BlockKey, bytes]) -> Iterator[tuple[Job, bool]]:
        return ((job, True) for job in jobs)  # the stamps of their files tell that nobody has written them since

    def copy(
        self, plan: Plan, tasks: Sequence[Task], done: Collection[BlockKey], tiles: Tiles, reading: Reading
    ) -> Iterator[tuple[Job, bytes]]:
        paths = {path for task in tasks for path in task.paths}
        budget, workers, trace = self._budget(plan, tasks), self.workers(plan, tasks), source_trace(plan)
        self._log_begin([file for file in plan.layout.files if file.path in paths], budget, workers)
        routes, ended = sorted({i for task in tasks for i in task.routes}), list[str]()

        def end(
            path: str, complete: Callable[[], tuple[Entry, Sequence[int | None]]], digests: Iterable[tuple[BlockKey, bytes, int]]
        ) -> None:
            self._records.check_begun(self._identity)
            entry, checksums = complete()
            ended.append(_record_of(path))
            self._records.add(self._identity, trace, entry, digests, checksums)
            self._complete[path] = FinishedFile(entry, {}, trace, checksums, {})

        try:
            for one_pass in list(passes(plan, paths - self._complete.keys(), routes, budget.most_open, tiles)):
                yield from filled(plan, self.store, one_pass, budget, workers, end, reading)
        except WrongChecksum:
            self.store.remove(ended)
            raise

    def _log_begin(self, files: Sequence[TargetFile], budget: Budget, workers: int) -> None:
        complete = sum(file.path in self._complete for file in files)
        event(
            "writing",
            f"writing {plural(len(files), 'file')} to {self.place} with {plural(workers, 'thread')}, "
            f"{plural(budget.at_once, 'part')} of {budget.part:,} bytes of each file under way, {budget.reading:,} bytes read ahead"
            + (f"; {plural(complete, 'file')} complete from an earlier run" if complete else ""),
            target=self.place,
            files=len(files),
            bytes=sum(file.nbytes for file in files),
            workers=workers,
        )

    def commit(self, plan: Plan, made: Records) -> None:
        # The manifest comes last: a folder with a manifest is complete.
        store = self.store
        sampled = {
            (path, start, stop - start): store.later(partial(self._read, path, start, stop - start))
            for path, file in self._complete.items()
            for start, stop in sample_ranges(file.entry.nbytes)
        }

        def read(path: str, byte_offset: int, nbytes: int) -> bytes:
            ahead = sampled.pop((path, byte_offset, nbytes), None)
            return ahead.result() if ahead else self._read(path, byte_offset, nbytes)

        for sidecar in plan.layout.sidecars:
            store.create(sidecar.path, sidecar.content)
        for record in made((file.sealed(self._finished(file.path).checksums) for file in plan.layout.files), read):
            # README.md may be there: somebody has written it, or an interrupted run.
            (store.put if record.path == README else store.create)(record.path, record.content)
            assert record.path != MANIFEST or not sampled
        self._records.end(map(_record_of, self._complete))

    def _finished(self, path: str) -> FinishedFile:
        """A file that is complete. Raises TargetInUse if its record is not there any more."""
        if path not in self._complete:
            raise TargetInUse(f"another process has removed the record of {path}", where=self.place, do="Wait until it has ended")
        return self._complete[path]

    def _read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Bytes of a file that is complete. Raises TargetInUse if another process has written it again, or has completed the target."""
        entry = self._finished(path).entry
        try:
            return bytes(self.store.read(entry, byte_offset, byte_offset + nbytes))
        except CheckpointError as error:
            if self.store.look(path) == entry:
                raise
            raise TargetInUse(f"another process has written {path} again", where=self.place, do="Wait until it has ended") from error

    def abandon(self) -> None:
        self.refresh()
        self._records.clean()

    def unfinished_files(self) -> list[str]:
        return self._records.unfinished_files()


def _not_in(plan: Plan, i: int, left: set[str]) -> Iterator[BlockKey]:
    """The blocks of a route that have no part in these files."""
    target = plan.routes[i].target
    holders = target.shards.holders
    if not holders or left.issuperset(holders):  # A scalar whose value is in the framing has no piece, and is read for its digest.
        return
    pieces = None if left.isdisjoint(holders) else Pieces(target)
    for j, box in enumerate(blocks(target.shape)):
        if pieces is None or not any(piece.extent.path in left for piece, _, _ in pieces.meeting(box)):
            yield i, j


def _record_of(path: str) -> str:
    """The path of the record of a file."""
    return f"{_FILES}{path}.json"


def _foreign(place: str) -> CheckpointError:
    return CheckpointError(
        "the record was not written by reshard",
        where=place,
        why="It should say which conversion has begun here",
        do="Remove it if it is yours to remove, or choose another folder",
    )
