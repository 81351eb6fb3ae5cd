"""Conversion: one run of a plan into a destination, by one process or by several that share the work.

    alone    take the destination -> begin, or resume -> copy all blocks -> check the source -> commit
    a part   begin, or join the others -> copy its tasks -> if no task is missing: take the destination, resume, commit

Processes that share a conversion do not talk to each other: the last one finds that no task is missing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from reshard.engine.blocks import (
    Done,
    block_jobs,
    check_same_source,
    check_source_is_unchanged,
    digests_by_tensor,
    fingerprint_of_blocks,
)
from reshard.engine.casts import Overflow, about_beyond
from reshard.engine.checks.reading import Reading
from reshard.engine.destinations.destination import Destination, FinishedBlocks, Replaces
from reshard.engine.destinations.journal import RunHeader
from reshard.engine.events import event
from reshard.engine.origins.reader import Tiles
from reshard.engine.pool import NO_LIMITS, Effort
from reshard.engine.record import Provenance, Read, edited_readme, lacking, records
from reshard.engine.recorded import InputDigests, notes_on_source, with_late_comparison
from reshard.errors import CheckpointError, LostObject, RequestError, TargetError, TargetInUse, ValuesOverflow
from reshard.geometry.quantities import plural
from reshard.plans.digests import Fingerprint
from reshard.plans.layout import Sidecar, TargetFile
from reshard.plans.manifest import README
from reshard.plans.plan import Plan
from reshard.plans.tasks import BlockKey, Task
from reshard.storage.claims import FileDigests, SourceChecks
from reshard.storage.system_calls import is_url

Executor = Callable[[Sequence[Task]], Iterator[tuple[Task, SourceChecks]]]
"""Copies tasks in other processes, and yields each that is done and what of the source was checked. Without one, the threads of this
process copy them."""
_NO_PROVENANCE = Provenance()


class Conversion:
    """One run of a plan, or of some of its tasks. Iterate `run()` to its end.

    tasks: those that this process converts, unless another process has, while other processes convert others; None: all, and alone.
    executor: copies the tasks instead of this process. resume: finish an interrupted run. provenance: what the caller wants to be recorded
    beside the result. source_checksums: compare what is read with the checksums of the source.
    """

    def __init__(
        self,
        plan: Plan,
        destination: Destination,
        *,
        tasks: Sequence[Task] | None = None,
        executor: Executor | None = None,
        resume: bool = False,
        provenance: Provenance = _NO_PROVENANCE,
        source_checksums: bool = True,
    ) -> None:
        self.plan, self.destination = with_late_comparison(plan), destination
        self._everything = Task(0, range(len(plan.routes)), 0, tuple(file.path for file in plan.layout.files))
        self.tasks: tuple[Task, ...] = (self._everything,) if tasks is None else tuple(tasks)
        """What the process converts."""
        self.fingerprint: Fingerprint | None = None
        """The fingerprint of the result, if it is complete when `run` has ended."""
        self.resumed_bytes = 0
        """The bytes of the tasks that were there already."""
        self.overflow: dict[str, int] = {}
        """How many finite values of each tensor became infinite, which `allow_overflow` allows; complete when `run` has ended."""
        self.notes: tuple[str, ...] = ()
        """Sentences about the run for the user; complete when `run` has ended."""
        self._reading, self._checks_elsewhere = Reading(checks=source_checksums), SourceChecks()
        self.source_digests = FileDigests()
        """How many files of the source were compared with recorded digests before the run."""
        self._is_alone, self._executor, self._resume, self._provenance = tasks is None, executor, resume, provenance
        self._identity, self._began = plan.identity(), time.monotonic()
        self._workers = destination.workers(self.plan, self.tasks)
        self._digests: dict[BlockKey, bytes] = {}
        self._inputs = InputDigests(plan)

    def __repr__(self) -> str:
        return f"Conversion({self.plan!r}, {self.destination.place!r})"

    @property
    def total(self) -> int:
        """The bytes that `run` reports in all."""
        return self._nbytes({i for task in self.tasks for i in task.routes})

    @property
    def source_checks(self) -> SourceChecks:
        """What of the source was compared with its checksums, in this process and by its executor."""
        return self._reading.checks + self._checks_elsewhere

    def _nbytes(self, routes: Collection[int]) -> int:
        return sum(self.plan.routes[i].target.nbytes for i in routes)

    def run(self) -> Iterator[Done]:
        """Run the plan or its tasks, and yield each finished block; then complete the destination if nothing is missing.

        Whatever stops the run, no incomplete file has its final name, and what is finished is kept.

        Raises: CheckpointError if a source file is incomplete or has changed, or replicas differ; then a run alone leaves nothing behind.
        TargetError if another run is writing there, something else lies there, or there is no interrupted run to resume. SystemRefusal if
        the system or the store cannot read or write, for example because the disk is full.
        """
        self.destination.refresh()
        if (self._resume or not self._is_alone) and self._take_result():
            self.resumed_bytes = self.total
        elif self._is_alone:
            yield from self._run_alone()
        else:
            yield from self._run_shared()

    def _run_alone(self) -> Iterator[Done]:
        with self.destination.alone(self._identity):
            if self._resume and self._take_result():
                self.resumed_bytes = self.total
                return
            yield from self._write(reads_back=True)

    def _run_shared(self) -> Iterator[Done]:
        try:
            with self.destination.shared(self._header(), self.plan, begins=True) as is_open:
                if is_open and self._executor:
                    yield from self._executed(self._executor)
                elif is_open:
                    yield from self._copied(self.tasks, self._finished(self.tasks))
            self._complete()
        except (TargetError, LostObject) as refusal:
            # Another process may have completed the target meanwhile, and removed a record that was just written.
            self.destination.refresh()
            if not self._take_result():
                raise
            event("left", f"another process has completed the target: {refusal.what}")

    def _complete(self) -> None:
        """Complete the destination, unless tasks are missing or another process completes it."""
        self.destination.refresh()
        if self._take_result() or self.destination.missing(self.plan, self._identity):
            return
        resumed_bytes, self._resume = self.resumed_bytes, True
        try:
            with self.destination.alone(self._identity):
                if not self._take_result():
                    # What was just written is not read back, which one process could not do as fast as all of them wrote it.
                    for _ in self._write(reads_back=False):
                        pass
        except TargetInUse as refusal:
            event("left", f"another process completes the target: {refusal.what}")
        self.resumed_bytes = resumed_bytes

    def _write(self, *, reads_back: bool) -> Iterator[Done]:
        """Begin or resume, copy what is not finished, and commit. The destination is taken. reads_back: as for `_copied`."""
        if self._provenance.card and self.destination.existing([README]):
            self._provenance = replace(self._provenance, edited=edited_readme(self.destination.files))
        self.destination.begin(self._header(), self.plan, resume=self._resume)
        everything = (self._everything,)
        try:
            yield from self._copied(everything, self._finished(everything), is_all=True, reads_back=reads_back)
            digests = digests_by_tensor(self.plan, self._digests)
            self.notes += (*notes_on_source(self.plan, digests), *self._inputs.notes())
            if self.overflow:
                types = {route.name: route.target.dtype for route in self.plan.routes}
                self.notes += (about_beyond(Overflow({(name, types[name]): count for name, count in self.overflow.items()})),)
        except (CheckpointError, ValuesOverflow):
            # The input is wrong, or does not fit, so this run can never be resumed.
            self.destination.abandon()
            raise
        self._commit(fingerprint_of_blocks(self.plan, digests))

    def copy(self) -> Iterator[Done]:
        """Copy the tasks for a process that has begun the conversion and completes it. What is there already is copied again.

        Raises: TargetError if that process has gone.
        """
        with self.destination.shared(self._header(), self.plan, begins=False):
            yield from self._copied(self.tasks, FinishedBlocks())

    def _header(self) -> RunHeader:
        nbytes = self._nbytes(self._everything.routes)
        return RunHeader(self._identity, (), self.plan.layout.format, nbytes, self._provenance.arguments)

    def _take_result(self) -> bool:
        """Take the result of an earlier run of the plan, if it came to its end. Returns whether there is one."""
        manifest = self.destination.result_of(self._identity)
        if manifest is None:
            return False
        if missing := lacking(self._provenance, self.destination.files):
            option, what = missing
            raise RequestError(
                f"the conversion is finished, and was made without {what}",
                where=self.destination.place,
                do=f"Leave out `{option}=True`, or convert again with `overwrite=True` `{option}=True`",
            )
        self.fingerprint, self.overflow = Fingerprint(manifest.fingerprint, {}), manifest.overflow
        return True

    def _finished(self, tasks: Sequence[Task]) -> FinishedBlocks:
        """What earlier runs have finished of some tasks. Raises TargetError if the source has changed since."""
        finished = self.destination.finished(self.plan, tasks)
        check_same_source(self.plan, finished.of_other_sources, self._workers, self.destination.place)
        return finished

    def _copied(self, tasks: Sequence[Task], finished: FinishedBlocks, *, is_all: bool = False, reads_back: bool = False) -> Iterator[Done]:
        """Report what is finished of these tasks, and copy the rest.

        is_all: the digests of all blocks are needed. reads_back: read what is finished first, as its bytes may have changed.
        """
        plan, began, tiles, lost = self.plan, time.monotonic(), Tiles(), 0
        wanted = {key for key in finished.keys if key in finished.digests or not is_all}
        routes = {i for task in tasks for i in task.routes}.intersection(i for i, _ in wanted)
        jobs = (job for job in block_jobs(plan, sorted(routes)) if job.key in wanted)
        done: dict[BlockKey, bytes] = {}
        for job, is_there in self.destination.read_back(plan, jobs, finished.digests) if reads_back else ((job, True) for job in jobs):
            if is_there:
                done[job.key] = finished.digests.get(job.key, b"")
                self.resumed_bytes += job.nbytes
                yield Done(job.route.name, job.nbytes)
            else:
                lost += job.nbytes
        copied: dict[BlockKey, bytes] = {}
        of_earlier = (job for job in block_jobs(plan, sorted(routes) if done else ()) if job.key in done)
        self._reading.see_again(plan, (part for job in of_earlier for part in job.source.ranges(job.box, 0)))
        beyond = {key: count for key, count in finished.beyond.items() if key in done}
        for job, digest in self.destination.copy(plan, tasks, done, tiles, self._reading):
            is_new = job.key not in copied
            copied[job.key] = digest
            beyond[job.key] = job.beyond
            self._inputs.add(job.route.name, job.key[1], job.of_inputs)
            if is_new:
                yield Done(job.route.name, job.nbytes)
        self.notes += tiles.notes()
        overflow = Counter[str]()
        for (i, _), count in sorted(beyond.items()):
            overflow[plan.routes[i].name] += count
        self.overflow = dict(+overflow)
        if lost:
            self.notes += (f"{lost:,} bytes had changed since the interrupted run wrote them, and were copied again",)
        seconds, what = time.monotonic() - began, "all blocks" if is_all else plural(len(tasks), "task")
        event("copied", f"copied {what} in {seconds:.2f} s", seconds=round(seconds, 3))
        self._digests = {**done, **copied}
        check_source_is_unchanged(plan, self._digests if is_all else copied, self._workers)

    def _executed(self, executor: Executor) -> Iterator[Done]:
        """Let other processes copy the tasks that are missing, and report each task that is done, named after its first tensor."""
        reported: set[int] = set()

        def done(task: Task) -> Done:
            new = [i for i in task.routes if i not in reported]
            reported.update(new)
            return Done(self.plan.routes[task.routes[0]].name if task.routes else "", self._nbytes(new))

        missing = self.destination.missing(self.plan, self._identity)
        for task in self.tasks:
            if task not in missing:
                finished = done(task)
                self.resumed_bytes += finished.nbytes
                yield finished
        for task, checks in executor([task for task in self.tasks if task in missing]):
            self._checks_elsewhere += checks
            yield done(task)

    def _commit(self, fingerprint: Fingerprint) -> None:
        began, plan, place = time.monotonic(), self.plan, self.destination.place
        provenance = replace(self._provenance, overflow=self.overflow)

        def made(files: Iterable[TargetFile], read: Read) -> Iterator[Sidecar]:
            of_inputs = self._inputs.fingerprints()
            return records(self.plan, files, self._identity, fingerprint, read, provenance, self._workers, of_inputs)

        if provenance.card:  # README.md is one of the records
            sidecars = tuple(sidecar for sidecar in plan.layout.sidecars if sidecar.path != README)
            plan = replace(plan, layout=replace(plan.layout, sidecars=sidecars))
        self.destination.commit(plan, made)
        self.fingerprint = fingerprint
        files, now = plan.layout.files, time.monotonic()
        event(
            "converted",
            f"completed {place} in {now - self._began:.2f} s, of which {now - began:.2f} s to complete its files; "
            f"fingerprint {fingerprint.root}",
            target=place,
            format=plan.layout.format,
            files=len(files),
            bytes=sum(file.nbytes for file in files),
            fingerprint=fingerprint.root,
            notes=list(self.notes),
            seconds=round(now - self._began, 3),
        )


def destination_at(place: str, effort: Effort = NO_LIMITS, *, replaces: Replaces = tuple) -> Destination:
    """The directory or the folder of a store at a path or URL.

    replaces: returns the files of an older checkpoint that a conversion removes, or raises TargetError if it may not write there.
    """
    if not is_url(place):
        from reshard.engine.destinations.folder import LocalFolder

        return LocalFolder(Path(place), effort, replaces=replaces)
    from reshard.engine.destinations.store import StoreFolder
    from reshard.storage.stores.urls import open_store

    return StoreFolder(open_store(place), effort, replaces=replaces)


def check_nothing_is_missing(plan: Plan, destination: Destination) -> None:
    """Raises TargetError, naming what is missing, unless all tasks of the plan are finished or the destination is complete."""
    identity = plan.identity()
    if destination.result_of(identity):
        return
    begun, is_running = destination.begun(), destination.is_running
    if begun is None or begun.header.identity != identity:
        raise TargetError(
            "no conversion with these options has begun here" if begun is None else "another conversion has begun here",
            where=destination.place,
            do="Repeat the options of the parts, and run them first",
            id="target-in-use",
        )
    missing = destination.missing(plan, identity)
    if missing:
        states = {True: "Parts are still running", False: "No part is running", None: "Their parts are still running or were interrupted"}
        raise TargetError(
            _sentence(plan, missing, len(destination.tasks(plan))),
            where=destination.place,
            why=states[is_running],
            do="Wait for the parts"
            if is_running
            else "Run the missing parts again, or run `resume=True`, which converts what is missing with one process",
            id="target-in-use",
        )


def _sentence(plan: Plan, missing: Mapping[Task, int], of: int) -> str:
    """What is missing, in words."""
    tasks, nbytes = list(missing), sum(missing.values())
    paths = [path for task in tasks for path in task.paths]
    names = paths or [plan.routes[i].name for i in (tasks[0].routes[0], tasks[-1].routes[-1])]
    size = f"{plural(len(paths), 'file')}, {nbytes:,} bytes" if paths else f"{nbytes:,} bytes"
    span = names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"
    return f"{len(tasks)} of {plural(of, 'task')} are missing ({size}): {span}"
