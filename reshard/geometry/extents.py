"""Extent: where the bytes of a box lie. Piece: a box and its extent. Spans and runs: strided bytes as few contiguous file ranges."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.value import value


@value
class Extent:
    """Where a box lies: its element (i, j, ...) starts at byte_offset + itemsize * (i * strides[0] + j * strides[1] + ...)."""

    path: str
    """The file, relative to the checkpoint."""
    byte_offset: int
    """Where the first element starts in the file."""
    strides: tuple[int, ...]
    """The distance between neighbours along each axis, in elements."""
    dtype: DType
    """The stored element type."""

    def __post_init__(self) -> None:
        if self.byte_offset < 0:
            raise CheckpointError(f"byte offset {self.byte_offset} lies before the start of the file", where=self.path)
        if any(stride < 0 for stride in self.strides):
            raise CheckpointError(f"negative strides {self.strides}", where=self.path, why="no framework writes them")


@value
class Piece:
    """A box of a canonical tensor and where its bytes lie."""

    box: Box
    extent: Extent

    def byte_offset_of(self, box: Box) -> int:
        """The byte offset in the file of the first element of `box`. The box must lie inside this piece."""
        steps = zip(box.offsets, self.box.offsets, self.extent.strides, strict=True)
        return self.extent.byte_offset + self.extent.dtype.itemsize * sum((a - b) * stride for a, b, stride in steps)


@value
class Span:
    """One contiguous range of a file that holds a box, possibly with other elements between those of the box."""

    box: Box
    """The box, in the coordinates of the canonical tensor."""
    byte_offset: int
    """Where the range starts in the file."""
    nbytes: int
    """The length of the range."""
    strides: tuple[int, ...]
    """The distance between neighbours of the box along each axis, in elements."""


def span_elements(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The number of elements from the first to the last element of a strided box, including those between that are not in the box."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def run_elements(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The number of elements in each contiguous run of a strided box."""
    elements = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride != elements:
            break
        elements *= size
    return elements


def spans(piece: Piece, box: Box, limit: int, step: int) -> Iterator[Span]:
    """The file ranges that hold `box` of a piece, each at most `limit` bytes long.

    step: runs that start at most `step` bytes apart, on average, are read in one range, with the bytes between them.
    """
    itemsize, strides = piece.extent.dtype.itemsize, piece.extent.strides
    nbytes, runs = span_elements(box.sizes, strides) * itemsize, box.volume // run_elements(box.sizes, strides)
    if nbytes <= limit and (runs == 1 or nbytes <= runs * step):
        yield Span(box, piece.byte_offset_of(box), nbytes, strides)
        return
    axis = max((a for a in range(len(box.sizes)) if box.sizes[a] > 1), key=lambda a: (strides[a], box.sizes[a]))
    half = box.sizes[axis] // 2
    yield from spans(piece, box.narrow(axis, 0, half), limit, step)
    yield from spans(piece, box.narrow(axis, half, box.sizes[axis]), limit, step)


def covering_spans(sizes: tuple[int, ...], strides: tuple[int, ...], gap: int) -> list[tuple[int, int]]:
    """The ranges of a file that hold a strided box, as (offset from its first element, length), both in elements and in file order.

    Elements outside of the box are inside of a range if at most `gap` of them lie between two elements of the box.
    """
    ranges, length = [(0, 1)], 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size == 0:
            return []
        if len(ranges) == 1 and stride - length <= gap:
            length += (size - 1) * stride
            ranges = [(0, length)]
        elif size > 1:
            ranges = [(step * stride + offset, run) for step in range(size) for offset, run in ranges]
    return ranges


def is_row_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a box with those strides lies in the file as one row-major array without gaps."""
    expected = row_major(sizes)
    return all(size <= 1 or a == b for size, a, b in zip(sizes, strides, expected, strict=True))
