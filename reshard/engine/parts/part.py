"""One part of a conversion: the bands of one process, and what is still missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from reshard.engine.events import event
from reshard.engine.journal import BlockKey, Journal, Unfinished, journal_of_part, progress, read_header, read_journal
from reshard.engine.parts.shared import SharedConversion
from reshard.engine.record import Provenance
from reshard.engine.run import (
    Conversion,
    Done,
    Job,
    block_jobs,
    check_same_source,
    check_source_is_unchanged,
    copied_blocks,
    is_finished,
    source_trace,
    widest_element,
    workers_of,
)
from reshard.errors import TargetError, TargetInUse
from reshard.geometry.boxes import blocks
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.plans.bands import Band
from reshard.plans.plan import Plan
from reshard.storage.lock import is_locked
from reshard.storage.staging import Staging
from reshard.storage.system_calls import system_errors

_NO_PROVENANCE = Provenance()


@value
class Missing:
    """The bands of a conversion that are not finished."""

    bands: tuple[Band, ...]
    """The bands."""
    of: int
    """How many bands the plan has."""
    nbytes: int
    """The bytes of the target that they still have to write, without replicas."""

    def sentence(self, plan: Plan) -> str:
        """What is missing, in words."""
        first = plan.routes[self.bands[0].start].name
        last = plan.routes[self.bands[-1].stop - 1].name
        return f"{len(self.bands)} of {plural(self.of, 'task')} are missing ({self.nbytes:,} bytes), from {first} to {last}"


class _WholeConversion(Conversion):
    """The conversion that parts complete. What they have just written is not read back, which one process could not do as fast as they
    wrote it. `--resume` and `--finish` do."""

    def _read_back(self, jobs: Iterator[Job], digests: dict[BlockKey, bytes]) -> Iterator[tuple[Job, bool]]:
        return ((job, True) for job in jobs)


class PartConversion(SharedConversion):
    """One process of a conversion that several share. Iterate `run()` to its end.

    bands: those that it converts, unless another process has. replaces: as for a Conversion. workers: threads. memory: the most bytes of
    buffers. provenance: what the caller wants to be recorded, if this process completes the target.
    """

    def __init__(
        self,
        plan: Plan,
        root: str | Path,
        bands: Sequence[Band],
        *,
        replaces: Callable[[], tuple[str, ...]] = tuple,
        workers: int | None = None,
        memory: int | None = None,
        provenance: Provenance = _NO_PROVENANCE,
    ) -> None:
        self.plan = plan
        self.tasks: tuple[Band, ...] = tuple(bands)
        self.resumed_bytes = 0
        """The bytes of its bands that were there already."""
        self.completed: Conversion | None = None
        """The conversion, if the target is complete when `run` has ended."""
        self.root = Path(root)
        """The target."""
        self.given_workers, self.memory = workers, memory
        """What the caller allows."""
        self._identity, self._workers = plan.identity(), workers_of(plan, workers, memory)
        self._replaces, self._provenance = replaces, provenance

    @property
    def total(self) -> int:
        """The bytes that `run` reports in all."""
        return sum(self.plan.routes[i].target.nbytes for band in self.tasks for i in band.routes)

    def run(self) -> Iterator[Done]:
        """Convert the bands, and yield each finished block; then complete the target if no block is missing.

        Raises: as Conversion.run does. After any error, finished blocks are in the journal, and the other parts go on.
        """
        if not self._is_there():
            staging = Staging(self.root)
            with self._shared(staging, lambda: self._whole().begin(staging)):
                unfinished = self._unfinished()
                if unfinished and not unfinished.committing:
                    routes = {i for band in self.tasks for i in band.routes}
                    others = unfinished.of_other_sources(source_trace(self.plan))
                    own = {key: digest for key, digest in others.items() if key[0] in routes}
                    check_same_source(self.plan, own, self._workers, str(self.root))
                    yield from self._copy(staging, unfinished.blocks)
        if self._is_there() or ((found := self._unfinished()) and not missing_bands(self.plan, found.blocks).bands):
            completing = self._whole(resume=True)  # What is replaced stands in the journal.
            complete(completing)
            self.completed = completing if completing.fingerprint else None

    def copy(self) -> Iterator[Done]:
        """Convert the bands for a process that has begun the conversion and completes it. What is there already is converted again.

        Raises: TargetError if that process has gone.
        """
        staging = Staging(self.root)
        with self._shared(staging, self._refuse_to_begin):
            yield from self._copy(staging, {})

    @contextmanager
    def _shared(self, staging: Staging, begin: Callable[[], None]) -> Iterator[None]:
        with (
            staging.shared(self._identity, lambda: progress(self.root), is_begun=self._is_begun, begin=begin),
            system_errors("written", self.root),
        ):
            yield

    def _refuse_to_begin(self) -> None:
        raise TargetError("the conversion that this task belongs to has ended", where=str(self.root), id="target-in-use")

    def _whole(self, *, resume: bool = False) -> Conversion:
        """The conversion that this is a part of."""
        return _WholeConversion(
            self.plan,
            self.root,
            resume=resume,
            replaces=tuple if resume else self._replaces,
            workers=self.given_workers,
            memory=self.memory,
            provenance=self._provenance,
        )

    def _copy(self, staging: Staging, finished: Mapping[BlockKey, bytes]) -> Iterator[Done]:
        """Convert the blocks of the bands that are not finished yet."""
        routes = [i for band in self.tasks for i in band.routes]
        staging.prepare({file.path: file.nbytes for file in self.plan.layout.files}, resume=True)
        began, itemsize = time.monotonic(), widest_element(self.plan)
        for i in routes:
            for j, box in enumerate(blocks(self.plan.routes[i].target.shape)):
                if (i, j) in finished:
                    nbytes = box.volume * self.plan.routes[i].target.dtype.itemsize
                    self.resumed_bytes += nbytes
                    yield Done(self.plan.routes[i].name, nbytes)
        jobs = (job for job in block_jobs(self.plan, routes) if job.key not in finished)
        journal = Journal(staging, source_trace(self.plan), None, path=journal_of_part(staging))
        digests = {}
        try:
            for job, digest in copied_blocks(self.plan, staging, jobs, itemsize, self._workers):
                digests[job.key] = digest
                journal.add(job.key, digest, job.nbytes)
                yield Done(job.route.name, job.nbytes)
            check_source_is_unchanged(self.plan, digests, self._workers)
        except BaseException:
            journal.stop()
            raise
        journal.end()
        seconds = time.monotonic() - began
        event("copied", f"copied {plural(len(self.tasks), 'task')} in {seconds:.2f} s", seconds=round(seconds, 3))

    def _unfinished(self) -> Unfinished | None:
        """This conversion, as its journals describe it."""
        found = read_journal(self.root)
        return found if found and found.header.identity == self._identity else None

    def _is_begun(self) -> bool:
        header = read_header(self.root)
        return header.identity == self._identity if header else self._is_there()

    def _is_there(self) -> bool:
        """Whether the target holds the result of the plan already."""
        return not Staging(self.root).journal.exists() and is_finished(self.root, self._identity)


def complete(conversion: Conversion) -> None:
    """Give the files of a conversion whose blocks are all there their final names. If another process does, it has no fingerprint."""
    try:
        for _ in conversion.run():
            pass
    except TargetInUse as refusal:
        event("left", f"another process completes the target: {refusal.what}")


def missing_bands(plan: Plan, finished: Collection[BlockKey]) -> Missing:
    """The bands that have blocks which are not finished. finished: the keys of the finished blocks."""
    bands, nbytes = plan.bands(), 0
    incomplete = []
    for band in bands:
        lacking = sum(
            box.volume * plan.routes[i].target.dtype.itemsize
            for i in band.routes
            for j, box in enumerate(blocks(plan.routes[i].target.shape))
            if (i, j) not in finished
        )
        nbytes += lacking
        if lacking:
            incomplete.append(band)
    return Missing(tuple(incomplete), len(bands), nbytes)


def check_nothing_is_missing(plan: Plan, root: Path) -> None:
    """Raises TargetError, naming what is missing, unless all blocks of the plan are finished or the target is complete."""
    identity, unfinished = plan.identity(), read_journal(root)
    if not unfinished and is_finished(root, identity):
        return
    if not unfinished or unfinished.header.identity != identity:
        raise TargetError(
            "no conversion with these options has begun here" if not unfinished else "another conversion has begun here",
            where=str(root),
            do="Repeat the options of the parts, and run them first",
            id="target-in-use",
        )
    missing = missing_bands(plan, unfinished.blocks)
    if missing.bands:
        running = is_locked(root)
        raise TargetError(
            missing.sentence(plan),
            where=str(root),
            why="Parts are still running" if running else "No part is running",
            do="Wait for the parts"
            if running
            else "Run the missing parts again, or run --resume, which converts what is missing with one process",
            id="target-in-use",
        )
