"""Running a plan: blocks are written into a work folder, and when all are written, the files get their final names."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Protocol, TypeVar

from reshard.engine.compare import wrong_constants
from reshard.engine.events import event
from reshard.engine.journal import BlockKey, Journal, JournalHeader, Unfinished, progress, read_journal
from reshard.engine.pool import workers_within
from reshard.engine.recipes.quantizer import Bands
from reshard.engine.record import Provenance, records
from reshard.engine.recorded import SourceCheck, read_back
from reshard.engine.stores.read_ahead import run_reading
from reshard.engine.transfer import Pieces, Worker, bytes_of, strips
from reshard.engine.values import Values
from reshard.errors import CheckpointError, RequestError, TargetError
from reshard.geometry.boxes import Box, blocks
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.plans.digests import CURRENT, Fingerprint
from reshard.plans.manifest import CHECKSUMS, MANIFEST, listed_files, usable_manifest
from reshard.plans.plan import Plan, Route
from reshard.storage.files import Change, Files, LocalFiles, read_range
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.staging import Staging
from reshard.storage.system_calls import system_errors

_NO_PROVENANCE = Provenance()
# What a recipe holds beside the buffers of a worker: the values of a band, and its intermediate results.
_BUFFERS_OF_RECIPES = 6


@value
class Done:
    """A block that has been written."""

    name: str
    """Its canonical tensor."""
    nbytes: int
    """Its size in bytes, in the target's element type and without replicas."""


@value
class Job:
    """One block to convert."""

    key: BlockKey
    """Its key in the journal."""
    route: Route
    """The route of its tensor."""
    source: Values
    """The values that are read."""
    target: Pieces
    """The pieces that are written."""
    box: Box
    """The block, in the coordinates of the canonical tensor."""

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.route.target.dtype.itemsize


class Conversion:
    """One run of a plan into the directory `root`. Iterate `run()` to its end.

    resume: finish an interrupted run. replaces: returns the files of an older checkpoint in `root`, which are removed when the new one is
    complete; called when no other run can write there any more. workers: threads. memory: the most bytes of buffers. provenance: what the
    caller wants to be recorded beside the result.
    """

    def __init__(
        self,
        plan: Plan,
        root: str | Path,
        *,
        resume: bool = False,
        replaces: Callable[[], tuple[str, ...]] = tuple,
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
        self._provenance = provenance
        self._staging = Staging(root)
        self._resume, self._replaces = resume, replaces
        self._identity = plan.identity()
        self._itemsize = widest_element(plan)
        self._workers = workers_of(plan, workers, memory)

    @property
    def total(self) -> int:
        """The bytes that `run` reports in all."""
        return sum(route.target.nbytes for route in self.plan.routes)

    def __repr__(self) -> str:
        return f"Conversion({self.plan!r}, {str(self._staging.root)!r})"

    def run(self) -> Iterator[Done]:
        """Run the plan, and yield each finished block.

        Whatever stops the run, no file has its final name unless all files are complete, and finished blocks are in the journal.

        Raises: CheckpointError if a source file is incomplete or has changed, or replicas differ; then nothing is left in the target.
        TargetError if another run is writing there, or there is no interrupted run to resume. SystemRefusal if the system cannot read or
        write, for example because the disk is full.
        """
        staging = self._staging
        if self._resume and not staging.work.exists() and is_finished(staging.root, self._identity):
            self._take_finished()
            return
        with staging.locked(self._identity, lambda: progress(staging.root)), system_errors("written", staging.root):
            yield from self._run()

    def _run(self) -> Iterator[Done]:
        staging = self._staging
        replaces = self._replaces()
        earlier = read_journal(staging.root)
        if self._resume and self._is_finished(earlier):
            staging.clean()
            self._take_finished()
            return
        if self._resume and earlier is None:
            self._check_nothing_else_is_there()
        resumed = earlier if self._resume else None
        if resumed:
            self._check_identity(resumed)
        if earlier and earlier.committing and not resumed:
            # No complete checkpoint is left to preserve, and without the journal nothing would say so.
            staging.remove((*earlier.header.replaces, *replaces))
        self._prepare(staging, resumed)
        digests: dict[BlockKey, bytes] = {}
        header = resumed.header if resumed else self._header(replaces)
        finished = resumed.nbytes_of_journal if resumed else 0
        journal = Journal(staging, source_trace(self.plan), None if resumed else header, finished=finished)
        began = time.monotonic()
        self._log_begin(resumed, header.replaces)
        try:
            yield from self._blocks(digests, journal, resumed)
            copied = time.monotonic()
            event("copied", f"copied all blocks in {copied - began:.2f} s", seconds=round(copied - began, 3))
            check_source_is_unchanged(self.plan, digests, self._workers)
            self.notes += notes_on_source(self.plan, digests)
            self.fingerprint = fingerprint_of_blocks(self.plan, digests)
            self._finish(journal, header.replaces, again=resumed is not None and resumed.committing)
            self._log_end(time.monotonic() - began, time.monotonic() - copied)
        except CheckpointError:
            # The input is wrong, so this run can never be resumed.
            journal.stop()
            staging.abandon()
            raise
        except BaseException:
            journal.stop()
            raise

    def begin(self, staging: Staging) -> None:
        """Prepare the files, their framing and the journal, for processes that each convert a part. The caller has the lock of the target.

        Raises: TargetError if something lies there that may not be replaced.
        """
        replaces = self._replaces()
        earlier = read_journal(staging.root)
        if earlier and earlier.committing:
            staging.remove((*earlier.header.replaces, *replaces))
        self._prepare(staging, None)
        write_framing(self.plan, staging)
        staging.sync()
        Journal(staging, source_trace(self.plan), self._header(replaces)).stop()
        staging.close()

    def _log_begin(self, resumed: Unfinished | None, replaces: tuple[str, ...]) -> None:
        files, earlier = self.plan.layout.files, resumed.nbytes if resumed else 0
        event(
            "writing",
            f"writing {plural(len(files), 'file')} to {self._staging.root} with {plural(self._workers, 'thread')}"
            + (f", which replace {plural(len(replaces), 'file')}" if replaces else "")
            + (f"; {earlier:,} bytes are there from an earlier run" if resumed else ""),
            target=str(self._staging.root),
            files=len(files),
            bytes=self.total,
            resumed_bytes=earlier,
            replaces=len(replaces),
            workers=self._workers,
        )

    def _log_end(self, seconds: float, finishing: float) -> None:
        assert self.fingerprint is not None
        files = self.plan.layout.files
        nbytes = sum(file.nbytes for file in files)
        event(
            "converted",
            f"completed {self._staging.root} in {seconds:.2f} s, of which {finishing:.2f} s to sync, record and rename; "
            f"fingerprint {self.fingerprint.root}",
            target=str(self._staging.root),
            format=self.plan.layout.format,
            files=len(files),
            bytes=nbytes,
            fingerprint=self.fingerprint.root,
            notes=list(self.notes),
            seconds=round(seconds, 3),
        )

    def _is_finished(self, earlier: Unfinished | None) -> bool:
        """Whether an earlier run has finished this conversion. Until its last rename, the target holds what it is about to replace."""
        committed = earlier is None or (earlier.committing and not (self._staging.work / MANIFEST).exists())
        return committed and is_finished(self._staging.root, self._identity)

    def _take_finished(self) -> None:
        """An earlier run has finished this conversion."""
        self._check_checksums_are_there()
        self.fingerprint = recorded_fingerprint(LocalFiles(self._staging.root))
        self.resumed_bytes = self.total

    def _header(self, replaces: tuple[str, ...]) -> JournalHeader:
        return JournalHeader(self._identity, replaces, self.plan.layout.format, self.total, self._provenance.arguments)

    def _prepare(self, staging: Staging, resumed: Unfinished | None) -> None:
        """Prepare the files. A run that cannot begin leaves nothing behind; one that cannot continue keeps the work of the earlier run."""
        sizes = {file.path: file.nbytes for file in self.plan.layout.files}
        try:
            staging.prepare(sizes, resume=resumed is not None, committing=resumed is not None and resumed.committing)
        except RequestError:
            if not resumed:
                staging.abandon()
            raise

    def _check_identity(self, earlier: Unfinished) -> None:
        """Raises TargetError if the interrupted run followed another plan."""
        if earlier.header.identity != self._identity:
            raise TargetError(
                "the interrupted conversion in this directory had other options or another version of reshard, or its source has changed "
                "since",
                where=str(self._staging.root),
                why="Resuming would mix two conversions",
                do="Repeat the options of that run, or start again with --overwrite",
            )

    def _check_nothing_else_is_there(self) -> None:
        """Raises RequestError if the target holds files. Without a journal, resuming means starting, which must not touch such files."""
        root = self._staging.root
        others = [entry.name for entry in root.iterdir() if entry.name != WORK_FOLDER] if root.exists() else []
        if others:
            more = f" and {plural(len(others) - 1, 'other entry', 'other entries')}" if len(others) > 1 else ""
            raise TargetError(
                f"there is no interrupted run of this conversion here, but {others[0]}{more}",
                where=str(root),
                why="This is the result of another conversion, or of none; resuming would mix the two",
                do="Repeat the options of the interrupted run, or start again with --overwrite",
                id="target-in-use",
            )

    def _blocks(self, digests: dict[BlockKey, bytes], journal: Journal, resumed: Unfinished | None) -> Iterator[Done]:
        """Copy what the earlier run has not finished. digests: gets those of all blocks."""
        if resumed:
            yield from self._resumed(digests, resumed)
        if not (resumed and resumed.committing):
            write_framing(self.plan, self._staging, again=resumed is not None)
        finished = frozenset(digests)
        bands = Bands()
        jobs = (job for job in block_jobs(self.plan, bands=bands) if job.key not in finished)
        for job, digest in copied_blocks(self.plan, self._staging, jobs, self._itemsize, self._workers):
            digests[job.key] = digest
            journal.add(job.key, digest, job.nbytes)
            yield Done(job.route.name, job.nbytes)
        self.notes += bands.notes()

    def _resumed(self, digests: dict[BlockKey, bytes], resumed: Unfinished) -> Iterator[Done]:
        """Take over the finished blocks of the earlier run whose bytes are still those that it wrote."""
        check_same_source(self.plan, resumed.of_other_sources(source_trace(self.plan)), self._workers, str(self._staging.root))
        lost = 0
        for job, is_there in self._read_back((job for job in block_jobs(self.plan) if job.key in resumed.blocks), resumed.blocks):
            if is_there:
                digests[job.key] = resumed.blocks[job.key]
                self.resumed_bytes += job.nbytes
                yield Done(job.route.name, job.nbytes)
            else:
                lost += job.nbytes
        if resumed.committing and (lost or not has_framing(self.plan, self._staging.files())):
            raise TargetError(
                "bytes have changed since the interrupted run wrote them",
                where=str(self._staging.root),
                why="Its files were about to get their final names, or have them already",
                do="Start again with --overwrite",
            )
        if lost:
            self.notes += (f"{lost:,} bytes had changed since the interrupted run wrote them, and were copied again",)

    def _read_back(self, jobs: Iterator[Job], digests: dict[BlockKey, bytes]) -> Iterator[tuple[Job, bool]]:
        """Each of these blocks, and whether the target holds what its digest says."""
        return read_back(self._staging.files(), jobs, digests, self._itemsize, self._workers)

    def _finish(self, journal: Journal, replaces: tuple[str, ...], *, again: bool) -> None:
        """Write the sidecars and the records, and give all files their final names."""
        staging, layout = self._staging, self.plan.layout
        assert self.fingerprint is not None
        staging.sync()
        # The manifest comes last: a directory with a manifest is complete.
        made = records(self.plan, self._identity, self.fingerprint, staging.read, self._provenance, self._workers)
        sidecars = (*layout.sidecars, *made)
        for sidecar in sidecars:
            staging.add(sidecar.path, sidecar.content)
        names = [file.path for file in layout.files] + [sidecar.path for sidecar in sidecars]
        journal.begin_commit()
        staging.commit(names, replaces=replaces, again=again)

    def _check_checksums_are_there(self) -> None:
        """Raises RequestError if checksums are wanted, and the finished conversion has none."""
        if self._provenance.checksums and not (self._staging.root / CHECKSUMS).exists():
            raise RequestError(
                f"the conversion is finished, and was made without {CHECKSUMS}",
                where=str(self._staging.root),
                do="Leave out --checksums, or convert again with --overwrite --checksums",
            )


def widest_element(plan: Plan) -> int:
    """The bytes of the widest element that is read or written."""
    return max((dtype.itemsize for route in plan.routes for dtype in route.dtypes), default=1)


def workers_of(plan: Plan, workers: int | None, memory: int | None) -> int:
    """The number of threads that run a plan. Raises: as `workers_within` does."""
    if any(route.quantized_by for route in plan.routes):
        buffers = _BUFFERS_OF_RECIPES
    else:
        buffers = 3 if any(route.is_cast for route in plan.routes) else 2
    return workers_within(memory, workers, widest_element(plan), buffers=buffers)


def block_jobs(plan: Plan, routes: Iterable[int] | None = None, bands: Bands | None = None) -> Iterator[Job]:
    """The blocks of a plan. routes: the indexes of its routes; None: of all. bands: where the codes and scales of a weight meet."""
    bands = bands or Bands()
    for _, group in groupby(range(len(plan.routes)) if routes is None else routes, lambda i: _weight_of(plan.routes[i]) or i):
        # The scales of a block come right after its codes, with which they are computed.
        yield from (job for _, job in merge(*(_jobs_of(plan, i, bands) for i in group), key=itemgetter(0)))


def _weight_of(route: Route) -> int:
    """The identity of the weight whose component a route writes; 0 if it writes none that is computed."""
    return id(route.source.derivation.weight) if route.source.derivation else 0


def _jobs_of(plan: Plan, i: int, bands: Bands) -> Iterator[tuple[tuple[float, bool], Job]]:
    """The blocks of a route, each with the part of the tensor that ends with it."""
    route = plan.routes[i]
    source, target = Values(route.source, route.target.dtype, bands), Pieces(route.target)
    is_scale, done = route.source.derivation is not None and route.source.derivation.component.is_scale, 0
    for j, box in enumerate(blocks(route.target.shape)):
        done += box.volume
        yield (done / max(1, route.target.elements), is_scale), Job((i, j), route, source, target, box)


class BlockJob(Protocol):
    """A block to be copied: a Job, or a Visit of the schedule gather."""

    @property
    def source(self) -> Values: ...
    @property
    def target(self) -> Pieces: ...
    @property
    def box(self) -> Box: ...


AnyJob = TypeVar("AnyJob", bound=BlockJob)


class Sink(Protocol):
    """Where blocks are written: staged files at offsets (Staging), or uploads that are fed from front to back (FileFronts)."""

    def write(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Write bytes into a file."""

    def write_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        """Write runs of equal length, which follow each other in the buffer, at these byte offsets of a file."""


def copied_blocks(
    plan: Plan, sink: Sink, jobs: Iterable[AnyJob], itemsize: int, workers: int, *, ahead: int | None = None
) -> Iterator[tuple[AnyJob, bytes]]:
    """Copy these blocks into the files of a sink; yields each with its digest.

    itemsize: the bytes of the widest element of the plan. ahead: the most bytes that are read ahead from a store.
    """

    def make_worker() -> Callable[[AnyJob], tuple[AnyJob, bytes]]:
        worker = Worker(plan.source_files, itemsize, sink.write, sink.write_runs)

        def perform(job: AnyJob) -> tuple[AnyJob, bytes]:
            digest = CURRENT.new()
            for strip, (source, target) in strips(job.box, job.source, job.target):
                values = job.source.read(worker, source, strip)
                digest.update(bytes_of(values))
                worker.write(values, target, strip)
            return job, digest.digest()

        return perform

    return run_reading(jobs, make_worker, workers, (plan.source_files, lambda job: (job.source, job.box)), memory=ahead)


def write_framing(plan: Plan, staging: Staging, *, again: bool = False) -> None:
    """Write the bytes that the plan knows: headers, and constants that are not zero. New files are already filled with zeros.

    again: whether the files are not new, so that all constants are written.
    """
    for file in plan.layout.files:
        for offset, data in file.literals:
            staging.write(file.path, offset, memoryview(data))
    for constant in plan.target_index.constants:
        if again or constant.expected.strip(b"\0"):
            data = constant.expected * (constant.nbytes // len(constant.expected))
            staging.write(constant.path, constant.byte_offset, memoryview(data))


def has_framing(plan: Plan, files: Files) -> bool:
    """Whether written files hold the bytes that the plan knows."""
    literals = ((file.path, offset, data) for file in plan.layout.files for offset, data in file.literals)
    is_there = all(read_range(files, path, offset, len(data)) == data for path, offset, data in literals)
    return is_there and not any(wrong_constants(files, plan.target_index.constants))


def check_source_is_unchanged(plan: Plan, digests: Mapping[BlockKey, bytes], workers: int) -> None:
    """Raises CheckpointError if a source file was written after its metadata was read.

    A file that was replaced, renamed or linked, or whose mode changed, may hold the same bytes: the blocks are compared with it again.
    digests: of the blocks that were copied.
    """
    changes: dict[Change, str] = {plan.source_files.changed(file.path): file.path for file in plan.source.files}
    if "written" not in changes and "touched" in changes and not _is_source_of(plan, digests, workers):
        changes["written"] = changes["touched"]
    if "written" in changes:
        raise CheckpointError(
            "the file was written while it was converted",
            where=changes["written"],
            why="A part of the result would be from before and a part from after, so nothing was kept",
            do="Wait until the checkpoint has been saved, then convert it again",
        )


def source_trace(plan: Plan) -> str:
    """A digest of the inodes and change times of the source's files; empty if they are in a store, whose stamps tell every change."""
    traces = [plan.source_files.trace(file.path) for file in plan.source.files]
    return hashlib.sha256("\0".join(traces).encode()).hexdigest()[:32] if any(traces) else ""


def check_same_source(plan: Plan, digests: Mapping[BlockKey, bytes], workers: int, where: str) -> None:
    """Read these blocks again. Raises TargetError if the source no longer holds what an earlier run has copied.

    digests: of blocks that were copied from files of another trace. where: the target.
    """
    if not _is_source_of(plan, digests, workers):
        raise TargetError(
            "the source has changed since the interrupted run, although the lengths and times of its files are the same",
            where=where,
            why="Resuming would mix two checkpoints",
            do="Give the source of that run, or start again with --overwrite",
        )


def _is_source_of(plan: Plan, digests: Mapping[BlockKey, bytes], workers: int) -> bool:
    """Whether the source holds what these digests say. The blocks are read again."""
    if not digests:
        return True
    blocks = plural(len(digests), "block")
    event("source-touched", f"source files were replaced or touched, so {blocks} are compared with them again", blocks=len(digests))
    jobs = (job for job in block_jobs(plan) if job.key in digests)
    found = copied_blocks(plan, _Nowhere(), jobs, widest_element(plan), workers)
    return all(digests[job.key] == digest for job, digest in found)


class _Nowhere:
    """A sink of blocks that are only read."""

    def write(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        pass

    def write_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        pass


def notes_on_source(plan: Plan, digests: dict[BlockKey, bytes]) -> tuple[str, ...]:
    """Compare what was read with the digests that reshard recorded when it wrote the source. Raises CheckpointError if they differ."""
    check = SourceCheck(plan)
    for i, block_digests in _by_route(plan, digests):
        check.add(plan.routes[i], block_digests)
    return tuple(check.notes())


def fingerprint_of_blocks(plan: Plan, digests: dict[BlockKey, bytes]) -> Fingerprint:
    """The fingerprint of the result, from the digests of all blocks."""
    aliases: dict[str, list[str]] = {}
    for alias, stored in plan.layout.aliases.items():
        aliases.setdefault(stored, []).append(alias)
    by_tensor: dict[str, bytes] = {}
    for i, block_digests in _by_route(plan, digests):
        route = plan.routes[i]
        for name in (route.name, *aliases.get(route.name, ())):
            by_tensor[name] = CURRENT.tensor(name, route.target.dtype, route.target.shape, block_digests)
    return CURRENT.checkpoint(by_tensor)


def _by_route(plan: Plan, digests: dict[BlockKey, bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """The digests of each route's blocks in canonical order."""
    by_route: dict[int, list[tuple[int, bytes]]] = {}
    for (i, j), digest in digests.items():
        by_route.setdefault(i, []).append((j, digest))
    return ((i, [digest for _, digest in sorted(by_route.get(i, []))]) for i in range(len(plan.routes)))


def is_finished(root: Path, identity: str) -> bool:
    """Whether a directory holds the complete result of the plan with that identity.

    There may still be a work folder, if the run was stopped after its last rename and before it removed the folder.
    """
    files = LocalFiles(root) if root.is_dir() else None
    manifest = usable_manifest(files) if files else None
    if files is None or manifest is None or manifest.plan != identity:
        return False
    return all(files.size(path) == size for path, size in listed_files(files, manifest).items())


def recorded_fingerprint(files: Files) -> Fingerprint:
    """The fingerprint in the manifest of a finished conversion, without the digests of its tensors."""
    manifest = usable_manifest(files)
    assert manifest is not None
    return Fingerprint(manifest.fingerprint, {})
