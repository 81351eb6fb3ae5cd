"""Running a plan into a store with one process, and the commit.

Index, config and manifest come after the files of weights, and are created exclusively: the manifest is the commit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from reshard.engine.events import event
from reshard.engine.journal import JournalHeader
from reshard.engine.record import Provenance, records
from reshard.engine.run import Done, check_source_is_unchanged, fingerprint_of_blocks, notes_on_source
from reshard.engine.stores.gather import Budget, Gather, gather_workers
from reshard.engine.stores.store_target import FinishedFile, StoreTarget
from reshard.errors import CheckpointError
from reshard.plans.digests import Fingerprint
from reshard.plans.manifest import MANIFEST, sample_ranges
from reshard.plans.plan import Plan
from reshard.storage.stores.store import Entry, Store

_NO_PROVENANCE = Provenance()


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
        self._identity, self._began = plan.identity(), time.monotonic()
        self._workers, self._budget = gather_workers(plan, workers), Budget(memory, plan.layout.files)

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
        if self._replaces:
            # Index and manifest first, so that nobody takes what is left for a checkpoint.
            holds_weights = {file.path for file in self.plan.layout.files}
            for group in (False, True):
                target.store.remove(path for path in self._replaces if (path in holds_weights) is group)
            target = StoreTarget(self._store)
        if self._resume and self.take_finished(target):
            return
        earlier = target.begun() if self._resume else None
        finished = target.finished(self._identity) if earlier else {}
        if not earlier:
            target.begin(self.header(), self.plan.layout)
        gather = self._gather(target, finished)
        try:
            yield from self._copy(gather)
        except CheckpointError:
            # The input is wrong, so this run can never be resumed.
            StoreTarget(self._store).clean()
            raise
        self._commit(target, gather.completed)

    def header(self) -> JournalHeader:
        """What is recorded when the conversion begins."""
        return JournalHeader(self._identity, (), self.plan.layout.format, self.total, self._provenance.arguments)

    def take_finished(self, target: StoreTarget) -> bool:
        """Take the result of an earlier run of the plan, if it came to its end, and remove its records. Returns whether there is one."""
        manifest = target.result_of(self._identity)
        if manifest is None:
            return False
        target.end(file.path for file in self.plan.layout.files)
        self.fingerprint, self.resumed_bytes = Fingerprint(manifest.fingerprint, {}), self.total
        return True

    def complete(self, target: StoreTarget, finished: Mapping[str, FinishedFile]) -> None:
        """Complete a target of which all files of weights are finished.

        Raises: CheckpointError if a source file has changed; then nothing is removed. TargetError if another process was first.
        """
        gather = self._gather(target, finished)
        for _ in self._copy(gather):
            pass
        self._commit(target, gather.completed)

    def _gather(self, target: StoreTarget, finished: Mapping[str, FinishedFile]) -> Gather:
        return Gather(self.plan, self._identity, target, budget=self._budget, workers=self._workers, finished=finished)

    def _copy(self, gather: Gather) -> Iterator[Done]:
        """Complete the files that are not, and take the digests of all blocks."""
        yield from gather.run({file.path for file in self.plan.layout.files}, range(len(self.plan.routes)))
        check_source_is_unchanged(self.plan, gather.digests, self._workers)
        self.notes += (*gather.bands.notes(), *notes_on_source(self.plan, gather.digests))
        self.fingerprint, self.resumed_bytes = fingerprint_of_blocks(self.plan, gather.digests), gather.resumed_bytes

    def _commit(self, target: StoreTarget, completed: Mapping[str, Entry]) -> None:
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
        seconds = time.monotonic() - self._began
        event(
            "converted",
            f"completed {store.url} in {seconds:.2f} s, {store.traffic}; fingerprint {self.fingerprint.root}",
            target=store.url,
            format=self.plan.layout.format,
            files=len(completed),
            bytes=sum(entry.nbytes for entry in completed.values()),
            fingerprint=self.fingerprint.root,
            seconds=round(seconds, 3),
        )
