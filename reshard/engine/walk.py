"""Walking tensors: each is read once, block by block on threads; one tensor at a time, or the same block of two checkpoints together. What
measures a block gets it strip by strip, while the strip is still in the processor's cache. The digests of a checkpoint are made so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TypeVar

from reshard.engine.checks.reading import Reading
from reshard.engine.origins.reader import Reader, reader
from reshard.engine.pool import NO_LIMITS, Effort
from reshard.engine.read_ahead import BoxOfTensor, run_reading
from reshard.engine.recorded import BlockDigests
from reshard.engine.transfer import Block, SharedPatches, Worker, bytes_of, strips
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, blocks
from reshard.index.index import Tensor
from reshard.plans.digests import CURRENT, DigestVersion
from reshard.storage.files import Files

Result = TypeVar("Result")
BlockPlace = tuple[int, int, Box]
"""A block of a walk: (number of the group, number of the block in its tensors, the block)."""
Read = Iterator[tuple[Box, tuple[Block, ...]]]
"""Reads a block: each strip's box, and its elements on each side, which the next strip overwrites. Raises CheckpointError if a file cannot
be read or replicas differ."""
Measure = Callable[[BlockPlace, Read], Result]
"""What is made of a block: called with the block and its strips."""


def walk(
    groups: Sequence[tuple[Tensor, ...]],
    files: tuple[Files, ...],
    make_measure: Callable[[], Measure[Result]],
    *,
    effort: Effort,
    is_wanted: Callable[[int], bool] = lambda number: True,
    reading: Reading | None = None,
) -> Iterator[tuple[BlockPlace, Result]]:
    """The measure of every block of every group, in the order in which they are finished. Reports the bytes of the last file's tensors.

    groups: tensors of one shape, one for each of `files`. make_measure: called once in each thread. is_wanted: whether the next block of a
    group is still to be read. reading: compares what is read with the checksums of the files.

    Raises: WrongChecksum; what the measure raises; RequestError if the memory of `effort` is too small.
    """
    itemsize = max((tensor.dtype.itemsize for group in groups for tensor in group), default=1)

    def jobs() -> Iterator[tuple[BlockPlace, tuple[Reader, ...]]]:
        for i, group in enumerate(groups):
            pieces = tuple(reader(tensor, tensor.dtype) for tensor in group)
            yield from (((i, j, box), pieces) for j, box in enumerate(blocks(group[0].shape)) if is_wanted(i))

    def make_worker() -> Callable[[tuple[BlockPlace, tuple[Reader, ...]]], tuple[BlockPlace, Result]]:
        workers = tuple(Worker(side_files, itemsize, shared=opened) for side_files, opened in zip(seen, shared, strict=True))
        measure = make_measure()

        def read(box: Box, pieces: tuple[Reader, ...]) -> Read:
            for strip, sides in strips(box, *pieces):
                parts = zip(workers, pieces, sides, strict=True)
                yield strip.box, tuple(side.read(worker, held, strip).reshape(strip.box.sizes) for worker, side, held in parts)

        def perform(job: tuple[BlockPlace, tuple[Reader, ...]]) -> tuple[BlockPlace, Result]:
            place, pieces = job
            return place, measure(place, read(place[2], pieces))

        return perform

    def reads(side: int) -> tuple[Files, Callable[[tuple[BlockPlace, tuple[Reader, ...]]], BoxOfTensor]]:
        return files[side], lambda job: (job[1][side], job[0][2])

    threads = effort.threads(itemsize, buffers=2 * len(files))
    reading = reading or Reading(checks=False)
    seen = [reading.of(side_files, partial(map, itemgetter(side), groups)) for side, side_files in enumerate(files)]
    shared = [SharedPatches(side_files, threads) for side_files in seen]
    for place, result in run_reading(jobs(), make_worker, threads, *map(reads, range(len(files)))):
        effort.report(place[2].volume * groups[place[0]][-1].dtype.itemsize)
        yield place, result
    reading.complete()


def block_digests(
    files: Files,
    tensors: Mapping[str, Tensor],
    effort: Effort = NO_LIMITS,
    *,
    version: DigestVersion = CURRENT,
    unreadable: dict[str, CheckpointError] | None = None,
    reading: Reading | None = None,
) -> BlockDigests:
    """The digest of every block of every tensor.

    unreadable: gets the error of each tensor that has an unreadable block, or replicas that differ; None: the first error is raised.
    reading: as for `walk`.
    """
    names, digests = list(tensors), BlockDigests()

    def measure(place: BlockPlace, read: Read) -> bytes | CheckpointError:
        running = version.new()
        try:
            for _, (values,) in read:
                running.update(bytes_of(values))
        except CheckpointError as error:
            if unreadable is None:
                raise
            return error
        return running.digest()

    for (i, j, _), digest in walk([(tensor,) for tensor in tensors.values()], (files,), lambda: measure, effort=effort, reading=reading):
        if isinstance(digest, bytes):
            digests.setdefault(names[i], {})[j] = digest
        elif unreadable is not None:
            unreadable.setdefault(names[i], digest)
    return digests
