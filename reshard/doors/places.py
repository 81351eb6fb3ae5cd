"""TargetPlaces: which pieces of a target lie where in its files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.geometry.boxes import Box
from reshard.geometry.extents import is_row_major, span_elements
from reshard.geometry.sections import Columns
from reshard.geometry.value import value
from reshard.index.index import Tensor
from reshard.index.shards import Located, PieceTable, Shards
from reshard.plans.plan import Plan

Words = npt.NDArray[Any]


@value(eq=False)
class FilePieces:
    """The pieces that lie in one file, as columns in the order of their starts."""

    path: str
    """The file."""
    starts: Columns
    """[n]: where the first element of each piece starts."""
    stops: Columns
    """[n]: where its last element ends."""
    reached: Columns
    """[n]: where the last of this and all earlier pieces ends, since pieces may lie between elements of others."""
    routes: Columns
    """[n]: the number of its route in the plan."""
    rows: Columns
    """[n]: its row among the pieces of its tensor."""

    def meeting(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The pieces whose span shares bytes with [start, stop): the number of the route and the row of each."""
        first, last = int(np.searchsorted(self.reached, start, "right")), int(np.searchsorted(self.starts, stop, "left"))
        rows = np.flatnonzero(self.stops[first:last] > start) + first
        return list(zip(self.routes[rows].tolist(), self.rows[rows].tolist(), strict=True))


class TargetPlaces:
    """The pieces of a plan's target by file. Those of a file are looked up when it is first asked for."""

    def __init__(self, plan: Plan) -> None:
        tables: dict[int, tuple[PieceTable, list[int], list[int]]] = {}
        for number, route in enumerate(plan.routes):
            shards = route.target.shards
            if len(shards):
                _, starts, numbers = tables.setdefault(id(shards.table), (shards.table, [], []))
                starts.append(shards.start)
                numbers.append(number)
        self._tables = [(table, Shards(table).located(), *_sorted(starts, numbers)) for table, starts, numbers in tables.values()]
        self._itemsizes = np.array([route.target.dtype.itemsize for route in plan.routes], np.int64)
        self._of: dict[str, FilePieces] = {}

    def of(self, path: str) -> FilePieces:
        """The pieces in a file."""
        return self._of.get(path) or self._of.setdefault(path, self._looked_up(path))

    def _looked_up(self, path: str) -> FilePieces:
        parts = [self._in_table(path, *table) for table in self._tables]
        starts, stops, routes, rows = (
            (np.concatenate(columns) for columns in zip(*parts, strict=True)) if parts else (np.zeros(0, np.int64),) * 4
        )
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], stops[order]
        return FilePieces(path, starts, stops, np.maximum.accumulate(stops), routes[order], rows[order])

    def _in_table(self, path: str, table: PieceTable, located: Located, firsts: Columns, numbers: Columns) -> tuple[Columns, ...]:
        file = located.paths.index(path) if path in located.paths else -1
        rows = np.flatnonzero((located.files == file) & (table.sizes > 0).all(axis=1))
        window = np.searchsorted(firsts, rows, "right") - 1
        routes, starts = numbers[window], located.byte_offsets[rows]
        spans = 1 + ((table.sizes[rows] - 1) * located.strides[rows]).sum(axis=1)
        return starts, starts + spans * self._itemsizes[routes], routes, rows - firsts[window]


def _sorted(starts: list[int], numbers: list[int]) -> tuple[Columns, Columns]:
    order = np.argsort(starts, kind="stable")
    return np.array(starts, np.int64)[order], np.array(numbers, np.int64)[order]


@value(eq=False)
class TargetPiece:
    """A piece of a target: the elements of a box, and where they lie in a file."""

    row: int
    """Its row among the pieces of its tensor."""
    box: Box
    """The box, in the coordinates of the tensor."""
    byte_offset: int
    """Where its first element starts in the file."""
    strides: tuple[int, ...]
    """The distance between neighbours along each axis, in elements."""
    word: npt.DTypeLike
    """The numpy type of the words of the elements."""
    itemsize: int
    """The bytes of an element."""

    @staticmethod
    def of(tensor: Tensor, row: int) -> TargetPiece:
        """A piece of a tensor."""
        piece, dtype = tensor.shards.piece(row), tensor.dtype
        return TargetPiece(row, piece.box, piece.extent.byte_offset, piece.extent.strides, dtype.word, dtype.itemsize)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the box."""
        return self.box.sizes

    @property
    def span(self) -> int:
        """The elements from the first to the last one, with those of other pieces between them."""
        return span_elements(self.sizes, self.strides)

    @property
    def is_row_major(self) -> bool:
        """Whether it lies in the file as one row-major array without gaps."""
        return is_row_major(self.sizes, self.strides)

    def elements(self, start: int, stop: int) -> tuple[int, int]:
        """The elements of which bytes [start, stop) of the file hold a part, counted from the first one: [first, last)."""
        first, last = (start - self.byte_offset) // self.itemsize, -((self.byte_offset - stop) // self.itemsize)
        return max(first, 0), min(last, self.span)

    def view(self, buffer: bytearray, base: int, box: Box) -> Words:
        """The elements of a box, counted from the start of this piece's, in a buffer that starts at byte `base` of the file."""
        return self.lines(buffer, base, box, 0, box.sizes)

    def lines(self, buffer: bytearray, base: int, box: Box, axis: int, sizes: tuple[int, ...]) -> Words:
        """The elements of a box as an array of these sizes: without the axes before `axis`, of which it has one index each."""
        at = sum(offset * stride for offset, stride in zip(box.offsets, self.strides, strict=True))
        strides = self.strides[axis:] if len(sizes) == len(self.strides) - axis else (1,)
        in_bytes = tuple(stride * self.itemsize for stride in strides)
        return np.ndarray(sizes, self.word, buffer, self.byte_offset + at * self.itemsize - base, in_bytes)


def boxes_between(sizes: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes of a strided array whose elements lie at positions start..stop, counted from its first element.

    An array [2, 3] of strides (1, 2), which holds columns, has its elements at positions 0 2 4 / 1 3 5. Positions 1..4 are the boxes
    [1:2, 0:1], of position 1, [0:2, 1:2], of positions 2 and 3.
    """
    outermost_first = sorted(range(len(sizes)), key=lambda axis: -strides[axis])
    yield from _between(Box.whole(sizes), outermost_first, strides, start, stop)


def _between(box: Box, axes: list[int], strides: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes of a box's elements at positions start..stop from its first element. axes: those along which it has several indices."""
    if start >= stop or math.prod(box.sizes) == 0:
        return
    if start <= 0 and stop > sum((box.sizes[axis] - 1) * strides[axis] for axis in axes):
        yield box
        return
    if not axes:
        return
    axis, *inner = axes
    stride, size = strides[axis], box.sizes[axis]
    if size == 1 or not stride:
        yield from _between(box, inner, strides, start, stop)
        return
    last = sum((box.sizes[other] - 1) * strides[other] for other in inner)
    first, end = max(0, -((last - start) // stride)), min(size, -(-stop // stride))
    whole, whole_end = max(first, -(-start // stride)), min(end, (stop - 1 - last) // stride + 1)
    if whole >= whole_end:
        whole = whole_end = end
    parts = [(i, i + 1) for i in range(first, whole)] + [(whole, whole_end)] + [(i, i + 1) for i in range(whole_end, end)]
    for begin, finish in parts:
        if begin < finish:
            yield from _between(
                box.narrow(axis, begin, finish),
                inner if finish == begin + 1 else [axis, *inner],
                strides,
                start - begin * stride,
                stop - begin * stride,
            )
