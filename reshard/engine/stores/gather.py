"""Running a plan into a store: every target file from front to back, as an upload in parts.

    visits in the order of the files -> blocks, read ahead, cast, digested -> FileFronts -> uploads

A file appears when its upload is completed; index, config and manifest come last and are created exclusively, so that they are the commit.
A run that fails leaves no object of a file that is not complete, and no upload that is pending, unless it is killed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from reshard.engine.events import event
from reshard.engine.journal import BlockKey, JournalHeader
from reshard.engine.record import Provenance, records
from reshard.engine.run import (
    Done,
    block_jobs,
    check_source_is_unchanged,
    copied_blocks,
    fingerprint_of_blocks,
    notes_on_source,
    widest_element,
    workers_of,
)
from reshard.engine.stores.gather_order import Pass, Visit, most_open, passes
from reshard.engine.stores.read_ahead import MEMORY_OF_STORES
from reshard.engine.stores.store_target import FinishedFile, StoreTarget
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.quantities import plural
from reshard.index.index import Constant
from reshard.plans.digests import Fingerprint
from reshard.plans.fixed_bytes import fixed_ranges, parts, planned_bytes
from reshard.plans.layout import TargetFile
from reshard.plans.manifest import MANIFEST, sample_ranges, usable_manifest
from reshard.plans.plan import Plan
from reshard.storage.stores.file_fronts import FileFronts, FrontFile, part_bytes
from reshard.storage.stores.remote_files import RemoteFiles

if TYPE_CHECKING:
    from concurrent.futures import Future

    from reshard.storage.stores.store import Entry, Store

_MOST_AT_ONCE, _WORKERS = 8, 8
_LEAST_READING = 32 << 20
_NO_PROVENANCE = Provenance()


class Budget:
    """How a number of bytes is divided among what a conversion into a store holds at a time.

    Each open file has one part that is being filled and at least one that is being sent. Half of the rest is for reading ahead, an eighth
    for bytes that came before their turn, and what remains for more parts under way.
    """

    def __init__(self, memory: int, files: Sequence[TargetFile]) -> None:
        self.part = max((part_bytes(file.nbytes) for file in files), default=part_bytes(0))
        self.most_open = (memory - _LEAST_READING) // (2 * self.part)
        if self.most_open < 1:
            needed = _LEAST_READING + 2 * self.part
            raise RequestError(
                f"--memory of {memory:,} bytes is too little: writing to a store needs {needed:,} here",
                do=f"Use --memory {needed >> 20}MiB or more",
            )
        is_open = min(self.most_open, max(1, most_open(files)))
        rest = memory - 2 * self.part * is_open
        self.reading, self.waiting = rest // 2, rest // 8
        self.at_once = min(_MOST_AT_ONCE, 1 + rest * 3 // 8 // (self.part * is_open))


class StoreConversion:
    """One run of a plan into a store. Iterate `run()` to its end. The counterpart of `Conversion`, whose attributes it has.

    resume: skip the files that an interrupted run has completed. replaces: the files of an older checkpoint, which are removed first.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        *,
        resume: bool = False,
        replaces: Sequence[str] = (),
        workers: int | None = None,
        memory: int | None = None,
        provenance: Provenance = _NO_PROVENANCE,
    ) -> None:
        self.plan = plan
        self.fingerprint: Fingerprint | None = None
        """The fingerprint of the result; None until `run` has ended."""
        self.resumed_bytes = 0
        """The bytes that an earlier run has written."""
        self.notes: tuple[str, ...] = ()
        """Sentences about the run for the user; complete when `run` has ended."""
        self._store, self._resume, self._replaces, self._provenance = store, resume, tuple(replaces), provenance
        self._identity = plan.identity()
        # A thread waits while the parts of its file are under way, and others go on meanwhile.
        self._workers = workers_of(plan, workers or _WORKERS, None)
        self._budget = Budget(MEMORY_OF_STORES if memory is None else memory, plan.layout.files)

    @property
    def total(self) -> int:
        """The bytes that `run` reports in all."""
        return sum(route.target.nbytes for route in self.plan.routes)

    def __repr__(self) -> str:
        return f"StoreConversion({self.plan!r}, {self._store.url!r})"

    def run(self) -> Iterator[Done]:
        """Run the plan, and yield each finished block.

        Raises: CheckpointError if a source file is incomplete or has changed, or replicas differ; then nothing is left in the target.
        TargetError if another run was first. SystemRefusal if the store does not answer; then --resume goes on from the complete files.
        """
        target = StoreTarget(self._store)
        began = time.monotonic()
        if self._replaces:
            # Index and manifest first, so that nobody takes what is left for a checkpoint.
            holds_weights = {file.path for file in self.plan.layout.files}
            for group in (False, True):
                target.store.remove(path for path in self._replaces if (path in holds_weights) is group)
            target = StoreTarget(self._store)
        if self._resume and (finished_earlier := self._finished_earlier(target)):
            self.fingerprint, self.resumed_bytes = finished_earlier, self.total
            return
        earlier = target.begun()
        finished = target.finished(self._identity) if self._resume and earlier else {}
        if not (earlier and self._resume):
            target.begin(JournalHeader(self._identity, (), self.plan.layout.format, self.total, self._provenance.arguments))
        completed = {path: file.entry for path, file in finished.items()}
        self._log_begin(finished)
        try:
            digests = {key: digest for file in finished.values() for key, digest in file.blocks.items()}
            yield from self._blocks(target, digests, completed)
            check_source_is_unchanged(self.plan)
            self.notes += notes_on_source(self.plan, digests)
            self.fingerprint = fingerprint_of_blocks(self.plan, digests)
            self._commit(target, completed)
        except CheckpointError:
            # The input is wrong, so this run can never be resumed.
            target.store.remove(completed)
            target.end(completed)
            raise
        seconds = time.monotonic() - began
        event(
            "converted",
            f"completed {self._store.url} in {seconds:.2f} s, {self._store.traffic}; fingerprint {self.fingerprint.root}",
            target=self._store.url,
            format=self.plan.layout.format,
            files=len(completed),
            bytes=sum(entry.nbytes for entry in completed.values()),
            fingerprint=self.fingerprint.root,
            seconds=round(seconds, 3),
        )

    def _finished_earlier(self, target: StoreTarget) -> Fingerprint | None:
        """The fingerprint that an earlier run of this plan has recorded, if it came to its end."""
        manifest = usable_manifest(RemoteFiles(self._store.url)) if MANIFEST in target.entries else None
        if manifest is None or manifest.plan != self._identity:
            return None
        target.end(file.path for file in self.plan.layout.files)
        return Fingerprint(manifest.fingerprint, {})

    def _log_begin(self, finished: dict[str, FinishedFile]) -> None:
        files, budget = self.plan.layout.files, self._budget
        event(
            "writing",
            f"writing {plural(len(files), 'file')} to {self._store.url} with {plural(self._workers, 'thread')}, "
            f"{plural(budget.at_once, 'part')} of {budget.part:,} bytes of each file under way, {budget.reading:,} bytes read ahead"
            + (f"; {plural(len(finished), 'file')} complete from an earlier run" if finished else ""),
            target=self._store.url,
            files=len(files),
            bytes=self.total,
            workers=self._workers,
        )

    def _blocks(self, target: StoreTarget, digests: dict[BlockKey, bytes], completed: dict[str, Entry]) -> Iterator[Done]:
        everything = list(passes(self.plan, completed, self._budget.most_open))
        reported = {visit.key for each in everything for visit in each.visits}
        for job in block_jobs(self.plan):
            if job.key not in reported:
                # Every file that holds a part of this block is complete.
                self.resumed_bytes += job.nbytes
                yield Done(job.route.name, job.nbytes)
        reported.clear()
        for each in everything:
            for visit, digest in self._pass(each, target, digests, completed):
                digests[visit.key] = digest
                if visit.key not in reported:
                    reported.add(visit.key)
                    yield Done(visit.route.name, visit.nbytes)

    def _pass(
        self, each: Pass, target: StoreTarget, digests: dict[BlockKey, bytes], completed: dict[str, Entry]
    ) -> Iterator[tuple[Visit, bytes]]:
        """Fill the files of a pass, and complete each when its last block has been written."""
        constants = _by_path(self.plan.target_index.constants)
        files = {file.path: FrontFile(file.path, file.nbytes, partial(_fixed, file, constants.get(file.path, ()))) for file in each.files}
        fronts = FileFronts(self._store, files, at_once=self._budget.at_once)
        blocks_of: dict[str, list[BlockKey]] = {path: [] for path in files}
        for visit in each.visits:
            for path in visit.paths:
                blocks_of[path].append(visit.key)
        left = Counter({path: len(keys) for path, keys in blocks_of.items()})
        ending: dict[str, Future[Entry]] = {}

        def end(path: str) -> Entry:
            entry = fronts.complete(path)
            target.record(self._identity, entry, [(key, digests[key]) for key in dict.fromkeys(blocks_of[path])])
            return entry

        try:
            ending.update((path, self._store.later(partial(end, path))) for path in files if not left[path])
            turn = _Turn(fronts, self._budget.waiting)
            copied = copied_blocks(
                self.plan, fronts, turn.taking(each.visits), widest_element(self.plan), self._workers, ahead=self._budget.reading
            )
            for visit, digest in copied:
                turn.done()
                yield visit, digest
                for path in visit.paths:
                    left[path] -= 1
                    if not left[path]:
                        ending[path] = self._store.later(partial(end, path))
            for path, future in ending.items():
                completed[path] = future.result()
        except BaseException:
            for path, future in ending.items():
                if future.exception() is None:
                    completed[path] = future.result()
            fronts.abort()
            raise

    def _commit(self, target: StoreTarget, completed: dict[str, Entry]) -> None:
        """Write the small files and the records. The manifest comes last: a folder with a manifest is complete."""
        assert self.fingerprint is not None
        store = self._store
        sampled = {
            (path, start, stop - start): store.later(partial(store.read, entry, start, stop))
            for path, entry in completed.items()
            for start, stop in sample_ranges(entry.nbytes)
        }

        def read(path: str, byte_offset: int, nbytes: int) -> bytes:
            ahead = sampled.pop((path, byte_offset, nbytes), None)
            return bytes(ahead.result() if ahead else store.read(completed[path], byte_offset, byte_offset + nbytes))

        for sidecar in self.plan.layout.sidecars:
            store.create(sidecar.path, sidecar.content)
        for made in records(self.plan, self._identity, self.fingerprint, read, self._provenance, self._workers):
            store.create(made.path, made.content)
            assert made.path != MANIFEST or not sampled
        target.end(completed)


class _Turn:
    """Lets blocks begin in their order, as long as not too many bytes wait for bytes before them. most: of these bytes."""

    def __init__(self, fronts: FileFronts, most: int) -> None:
        self._fronts, self._most, self._under_way = fronts, most, 0
        self._changed = threading.Condition()

    def taking(self, visits: Sequence[Visit]) -> Iterator[Visit]:
        for visit in visits:
            with self._changed:
                # What is under way brings the bytes that others wait for. If nothing is, this block does.
                while self._under_way and self._fronts.waiting_bytes > self._most:
                    self._changed.wait(0.05)
                self._under_way += 1
            yield visit

    def done(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()


def _fixed(file: TargetFile, constants: Sequence[Constant]) -> Iterator[tuple[int, bytes]]:
    """The bytes of a file that the plan knows: (byte offset, bytes), in order."""
    ranges = fixed_ranges(file, constants)
    return zip((start for start, _ in parts(ranges)), planned_bytes(file, constants, ranges), strict=True)


def _by_path(constants: Sequence[Constant]) -> dict[str, list[Constant]]:
    found: dict[str, list[Constant]] = {}
    for constant in constants:
        found.setdefault(constant.path, []).append(constant)
    return found
