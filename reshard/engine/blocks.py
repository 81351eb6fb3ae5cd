"""Blocks: the unit of all copying. A block is read, cast, digested and written; the digests tell what was copied and from what."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import merge
from itertools import groupby, islice
from operator import itemgetter

from reshard.engine.casts import Overflow, overflow, values_beyond
from reshard.engine.checks.reading import Reading
from reshard.engine.events import event
from reshard.engine.origins.reader import Reader, Tiles, reader
from reshard.engine.pool import NO_LIMITS, Effort, run_jobs
from reshard.engine.read_ahead import run_reading
from reshard.engine.recorded import BlockDigests, fingerprint_of
from reshard.engine.transfer import Pieces, SharedPatches, Sink, Worker, bytes_of, strips
from reshard.errors import CheckpointError, TargetError
from reshard.geometry.boxes import Box, blocks
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.index.origin import Encoded
from reshard.plans.digests import CURRENT, Fingerprint
from reshard.plans.plan import Plan
from reshard.plans.tasks import BlockKey, Route
from reshard.storage.files import Files

# What a recipe holds beside the buffers of a worker: the values of a tile, and its intermediate results.
_BUFFERS_OF_RECIPES = 6
# The most tensors whose deltas are decoded by turns. Four decode faster than a disk writes, and each frame of a chain takes a megabyte.
_MOST_SIDE_BY_SIDE = 4


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
    source: Reader
    """The values that are read."""
    target: Pieces
    """The pieces that are written."""
    box: Box
    """The block, in the coordinates of the canonical tensor."""
    paths: frozenset[str] = frozenset()
    """The files that it writes to, where files are written from front to back."""
    held: Reader | None = None
    """The values that the target holds already, if it gets only what changes."""
    of_inputs: tuple[bytes, ...] = ()
    """Once it is done: the digest of the block in each checkpoint that it was combined from; empty if it comes from one."""
    beyond: int = 0
    """Once it is done: how many finite values the cast made infinite."""

    @property
    def nbytes(self) -> int:
        """The bytes of the block in the target's element type."""
        return self.box.volume * self.route.target.dtype.itemsize


@value(eq=False)
class Held:
    """What a destination holds already."""

    plan: Plan
    """The plan by which it would be written, from another checkpoint of the same tensors."""
    sink: Sink
    """Gets its bytes: those of each strip before the new ones."""
    routes: Mapping[str, Route]
    """The routes of the plan, by name."""
    tiles: Tiles
    """Where the codes and scales of its weights meet."""

    @staticmethod
    def of(plan: Plan, sink: Sink) -> Held:
        """What a plan would have written."""
        return Held(plan, sink, {route.name: route for route in plan.routes}, Tiles())

    def values(self, route: Route) -> Reader:
        """The values in place of those of a route."""
        return reader(self.routes[route.name].source, route.target.dtype, self.tiles)


def widest_element(plan: Plan) -> int:
    """The bytes of the widest element that is read or written."""
    return max((dtype.itemsize for route in plan.routes for dtype in route.dtypes), default=1)


def workers_of(plan: Plan, effort: Effort, held: Plan | None = None) -> int:
    """The number of threads that run a plan. held: a second plan, which each of them runs beside it. Raises: as `Effort.threads` does."""
    if any(route.quantized_by for route in plan.routes):
        buffers = _BUFFERS_OF_RECIPES
    else:
        buffers = 3 if any(route.is_cast or route.source.origin.changed_by for route in plan.routes) else 2
    return effort.threads(max(widest_element(either) for either in (plan, held or plan)), buffers=buffers * (2 if held else 1))


def block_jobs(
    plan: Plan, routes: Iterable[int] | None = None, tiles: Tiles | None = None, held: Held | None = None, *, workers: int = 1
) -> Iterator[Job]:
    """The blocks of a plan. routes: the indexes of its routes; None: of all. tiles: where the codes and scales of a weight meet. held: what
    the destination holds already. workers: the number of threads that copy them.

    One thread at a time decodes the deltas of a tensor. If there are deltas, the blocks of several tensors take turns, so that threads do
    not wait for each other.
    """
    tiles = tiles or Tiles()
    groups = groupby(range(len(plan.routes)) if routes is None else routes, lambda i: _weight_of(plan.routes[i]) or i)
    # The scales of a block come right after its codes, with which they are computed.
    of_weights = (merge(*[_jobs_of(plan, i, tiles, held) for i in group], key=itemgetter(0)) for _, group in groups)
    taking_turns = deque(islice(of_weights, min(workers, _MOST_SIDE_BY_SIDE) if plan.content.deltas else 1))
    while taking_turns:
        jobs = taking_turns.popleft()
        if (next_job := next(jobs, None)) is None:
            taking_turns.extend(islice(of_weights, 1))
        else:
            taking_turns.append(jobs)
            yield next_job[1]


def _weight_of(route: Route) -> int:
    """The identity of the weight whose component a route writes; 0 if it writes none that is computed."""
    origin = route.source.origin
    return id(origin.weight) if isinstance(origin, Encoded) else 0


def _jobs_of(plan: Plan, i: int, tiles: Tiles, held: Held | None) -> Iterator[tuple[tuple[float, bool], Job]]:
    """The blocks of a route, each with the part of the tensor that ends with it."""
    route = plan.routes[i]
    source, target = reader(route.source, route.target.dtype, tiles), Pieces(route.target)
    before = held.values(route) if held else None
    origin, done = route.source.origin, 0
    is_scale = isinstance(origin, Encoded) and origin.component.is_scale
    for j, box in enumerate(blocks(route.target.shape)):
        done += box.volume
        yield (done / max(1, route.target.elements), is_scale), Job((i, j), route, source, target, box, held=before)


def copied_blocks(
    plan: Plan,
    sink: Sink | None,
    jobs: Iterable[Job],
    itemsize: int,
    workers: int,
    *,
    ahead: int | None = None,
    held: Held | None = None,
    reading: Reading | None = None,
) -> Iterator[tuple[Job, bytes]]:
    """Copy these blocks into the files of a sink, or only read them without one; yields each with its digest.

    itemsize: the bytes of the widest element of the plan. ahead: the most bytes that are read ahead from a store. held: what the
    destination holds already, which is read beside it. reading: compares what is read with the checksums of the source.

    Raises: WrongChecksum, before the last block that uses a damaged storage, or at the end. ValuesOverflow after all blocks if casts have
    made values infinite that the plan does not allow (`is_refused`).
    """
    reading = reading or Reading(checks=False)
    files = reading.of_plan(plan)
    shared_held = SharedPatches(held.plan.source_files, workers) if held else None
    shared = SharedPatches(files, workers)

    def make_worker() -> Callable[[Job], tuple[Job, bytes]]:
        worker = Worker(files, itemsize, sink, shared)
        before = Worker(held.plan.source_files, widest_element(held.plan), held.sink, shared_held) if held else worker

        def perform(job: Job) -> tuple[Job, bytes]:
            digest, hashes, beyond = CURRENT.new(), job.source.new_hashes(), 0
            for strip, (source, target, *others) in strips(job.box, job.source, job.target, *filter(None, [job.held])):
                if job.held:
                    before.write(job.held.read(before, others[0], strip), target, strip)
                values_beyond()
                values = job.source.read(worker, source, strip, hashes=hashes)
                beyond += values_beyond()
                digest.update(bytes_of(values))
                if sink:
                    worker.write(values, target, strip)
            done = replace(job, of_inputs=tuple(running.digest() for running in hashes), beyond=beyond) if hashes or beyond else job
            return done, digest.digest()

        return perform

    refused = Overflow()
    for job, block in run_reading(jobs, make_worker, workers, (plan.source_files, lambda job: (job.source, job.box)), memory=ahead):
        if is_refused(plan, job):
            refused[job.route.name, job.route.target.dtype] += job.beyond
        yield job, block
    reading.complete()
    if refused:
        do = "Choose a wider type, such as `dtype=bf16`, leave these tensors as they are with `keep_dtype=`, or say `allow_overflow=True`"
        raise overflow(refused, do)


def is_refused(plan: Plan, job: Job) -> bool:
    """Whether a finished block holds values that the cast made infinite, and the plan does not allow it. It is not recorded as finished."""
    return job.beyond > 0 and not plan.target.allow_overflow


def read_back(
    files: Files, written: Iterable[Job], digests: Mapping[BlockKey, bytes], itemsize: int, workers: int
) -> Iterator[tuple[Job, bool]]:
    """Each of these blocks, and whether all pieces in `files` still hold the bytes of its digest. itemsize: of the widest element."""

    def make_worker() -> Callable[[Job], tuple[Job, bool]]:
        worker = Worker(files, itemsize)

        def perform(job: Job) -> tuple[Job, bool]:
            try:
                return job, worker.digest(job.target, job.box, CURRENT.new()) == digests[job.key]
            except CheckpointError:  # Its replicas differ.
                return job, False

        return perform

    return run_jobs(written, make_worker, workers)


def check_source_is_unchanged(plan: Plan, digests: Mapping[BlockKey, bytes], workers: int) -> None:
    """Raises CheckpointError if a source file was written after its metadata was read. digests: of the blocks that were copied."""
    Reading.check_unchanged(plan.source_files, plan.source, lambda: _is_source_of(plan, digests, workers), verb="converted")


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
            do="Give the source of that run, or start again with `overwrite=True`",
        )


def _is_source_of(plan: Plan, digests: Mapping[BlockKey, bytes], workers: int) -> bool:
    """Whether the source holds what these digests say. The blocks are read again."""
    if not digests:
        return True
    blocks = plural(len(digests), "block")
    event("source-touched", f"source files were replaced or touched, so {blocks} are compared with them again", blocks=len(digests))
    jobs = (job for job in block_jobs(plan) if job.key in digests)
    copied = copied_blocks(plan, None, jobs, widest_element(plan), workers)
    return all(digests[job.key] == digest for job, digest in copied)


def digests_by_tensor(plan: Plan, digests: Mapping[BlockKey, bytes]) -> BlockDigests:
    """The digests of blocks by tensor. An alias has those of the tensor that is stored."""
    by_tensor: BlockDigests = {route.name: {} for route in plan.routes}
    for (i, j), digest in digests.items():
        by_tensor[plan.routes[i].name][j] = digest
    return by_tensor | {alias: by_tensor[stored] for alias, stored in plan.layout.aliases.items()}


def fingerprint_of_result(plan: Plan, effort: Effort = NO_LIMITS) -> Fingerprint:
    """The fingerprint of what a plan writes. The source is read, and nothing is written."""
    copied = copied_blocks(plan, None, block_jobs(plan, tiles=Tiles()), widest_element(plan), workers_of(plan, effort))
    return fingerprint_of_blocks(plan, digests_by_tensor(plan, {job.key: digest for job, digest in copied}))


def fingerprint_of_blocks(plan: Plan, digests: BlockDigests) -> Fingerprint:
    """The fingerprint of the result, from the digests of its blocks."""
    targets = {route.name: route.target for route in plan.routes}
    return fingerprint_of(targets | {alias: targets[stored] for alias, stored in plan.layout.aliases.items()}, digests)
