"""Reading tensors once, block by block on threads: one tensor at a time, or the same block of two checkpoints together. What measures a
block gets it strip by strip, while the strip is still in the processor's cache."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Self, TypeVar

from reshard.engine.pool import workers_within
from reshard.engine.read_ahead import BoxOfTensor, run_reading
from reshard.engine.transfer import Block, Pieces, Worker, strips
from reshard.geometry.boxes import Box, blocks
from reshard.index.index import Tensor
from reshard.requests.request import Effort
from reshard.storage.files import Files

Result = TypeVar("Result")
Read = Iterator[tuple[Box, tuple[Block, ...]]]
"""Reads a block: each strip's box, and its elements on each side, which the next strip overwrites. Raises CheckpointError if a file cannot
be read or replicas differ."""
Measure = Callable[[int, Read], Result]
"""What is made of a block: called with the number of the group and the strips of the block."""


class Gathered:
    """What is known of a part of a tensor. A field is added to that of another part, or combined as its metadata says."""

    __slots__ = ()

    def add(self, part: Self) -> None:
        """Take in another part."""
        whole: Any = self
        for each in fields(whole):
            combine = each.metadata.get("combine", operator.add)
            setattr(self, each.name, combine(getattr(self, each.name), getattr(part, each.name)))


def walk(
    groups: Sequence[tuple[Tensor, ...]],
    files: tuple[Files, ...],
    measure: Measure[Result],
    *,
    effort: Effort,
    is_wanted: Callable[[int], bool] = lambda number: True,
) -> Iterator[tuple[int, Result]]:
    """The measure of every block of every group, in the order in which they are finished, with the number of the group.

    groups: tensors of one shape, one for each of `files`. is_wanted: whether the next block of a
    group is still to be read.

    Raises: what the measure raises; RequestError if the memory of `effort` is too small.
    """
    itemsize = max((tensor.dtype.itemsize for group in groups for tensor in group), default=1)

    def jobs() -> Iterator[tuple[int, Box, tuple[Pieces, ...]]]:
        for number, group in enumerate(groups):
            pieces = tuple(map(Pieces, group))
            yield from ((number, box, pieces) for box in blocks(group[0].shape) if is_wanted(number))

    def make_worker() -> Callable[[tuple[int, Box, tuple[Pieces, ...]]], tuple[int, Result]]:
        readers = tuple(Worker(each, itemsize) for each in files)

        def read(box: Box, pieces: tuple[Pieces, ...]) -> Read:
            for strip, sides in strips(box, *pieces):
                part = strip.box
                yield part, tuple(reader.read(side, strip).reshape(part.sizes) for reader, side in zip(readers, sides, strict=True))

        def perform(job: tuple[int, Box, tuple[Pieces, ...]]) -> tuple[int, Result]:
            number, box, pieces = job
            return number, measure(number, read(box, pieces))

        return perform

    def reads(side: int) -> tuple[Files, Callable[[tuple[int, Box, tuple[Pieces, ...]]], BoxOfTensor]]:
        return files[side], lambda job: (job[2][side], job[1])

    threads = workers_within(effort.memory, effort.workers, itemsize, buffers=2 * len(files))
    yield from run_reading(jobs(), make_worker, threads, *map(reads, range(len(files))))
