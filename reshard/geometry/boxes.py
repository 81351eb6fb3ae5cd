"""Box: a hyper-rectangle in a tensor's coordinates, and the operations on boxes.

Coordinates are literal: nothing clamps, wraps or rounds. The intersection of two boxes that share no element is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from types import EllipsisType

import numpy as np
import numpy.typing as npt

from reshard.geometry.value import value

Shape = tuple[int, ...]
"""The number of elements along each axis."""


@value
class Box:
    """A part of a tensor, in elements per axis.

    The box of a scalar has no axes and one element. A size may be 0: such a box is empty.
    """

    offsets: tuple[int, ...]
    """Where the part starts."""
    sizes: tuple[int, ...]
    """How long the part is."""

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"{len(self.offsets)} offsets, {len(self.sizes)} sizes")
        if any(offset < 0 for offset in self.offsets) or any(size < 0 for size in self.sizes):
            raise ValueError(f"a box lies at non-negative coordinates, not {self.offsets} + {self.sizes}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box of a whole tensor of that shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stops(self) -> tuple[int, ...]:
        """Where the box ends along each axis, exclusive."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def index(self) -> tuple[slice | EllipsisType, ...]:
        """A numpy index: `array[box.index]` is a view of this box. The trailing `...` makes it a view for a scalar too."""
        ranges = [slice(start, stop) for start, stop in zip(self.offsets, self.stops, strict=True)]
        return (*ranges, ...)

    def intersect(self, other: Box) -> Box | None:
        """The box that both share; None if they share no element."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(min(a, b) - start for a, b, start in zip(self.stops, other.stops, offsets, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is an element of this box."""
        return all(
            a <= b and b_stop <= a_stop for a, b, a_stop, b_stop in zip(self.offsets, other.offsets, self.stops, other.stops, strict=True)
        )

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """The same box, with `origin` as the new zero point."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin, strict=True)), self.sizes)

    def shifted(self, by: tuple[int, ...]) -> Box:
        """The same box, moved by `by` elements along each axis."""
        return Box(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.sizes)

    def narrow(self, axis: int, start: int, stop: int) -> Box:
        """The slice start..stop of this box along one axis, counted from the start of the box.

        Raises: ValueError if the slice leaves the box.
        """
        if not 0 <= start <= stop <= self.sizes[axis]:
            raise ValueError(f"{start}..{stop} is not within 0..{self.sizes[axis]}")
        return Box(
            (*self.offsets[:axis], self.offsets[axis] + start, *self.offsets[axis + 1 :]),
            (*self.sizes[:axis], stop - start, *self.sizes[axis + 1 :]),
        )

    def split(self, axis: int, parts: int) -> tuple[Box, ...]:
        """The box in `parts` equal slices along one axis.

        Raises: ValueError if `parts` does not divide the size of the axis.
        """
        size, rest = divmod(self.sizes[axis], parts)
        if rest:
            raise ValueError(f"axis {axis} of {self.sizes} does not divide by {parts}")
        return tuple(self.narrow(axis, i * size, (i + 1) * size) for i in range(parts))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offsets, self.stops, strict=True)) + "]"


def row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a row-major array of those sizes."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def contiguous_runs(sizes: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], int, npt.NDArray[np.int64]]:
    """The contiguous runs of a strided box: (its axes, outermost first; the elements in each run; where each run starts, in elements from
    the start of the box)."""
    order = tuple(sorted(range(len(sizes)), key=lambda axis: (-strides[axis], sizes[axis] == 1)))
    outer, elements = list(order), 1
    while outer and (sizes[outer[-1]] == 1 or strides[outer[-1]] == elements):
        elements *= sizes[outer.pop()]
    starts = np.zeros(1, np.int64)
    for axis in outer:
        starts = (starts[:, None] + np.arange(sizes[axis], dtype=np.int64) * strides[axis]).reshape(-1)
    return order, elements, starts


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes of the elements start..stop of a row-major tensor, in order: a part of a row, whole rows, a part of a row.

    The result has at most 2 * ndim - 1 boxes, and one for a scalar. They are disjoint and hold exactly stop - start elements.

    Raises: ValueError if the range leaves the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start}..{stop} of a tensor of shape {shape}")
    if start == stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last and stop - start < inner:
        yield from _in_row(shape, first, start - first * inner, stop - first * inner)
        return
    if start % inner:
        yield from _in_row(shape, first, start - first * inner, inner)
        first += 1
    whole_stop = stop // inner
    if whole_stop > first:
        yield Box((first,) + (0,) * (len(shape) - 1), (whole_stop - first, *shape[1:]))
    if stop % inner:
        yield from _in_row(shape, whole_stop, 0, stop - whole_stop * inner)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in flat_boxes(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


# A block holds at most this many elements: 4 MiB of bfloat16. The fingerprint is defined in blocks, so this number is a part of its
# definition (plans/digests.py) and must not be tuned.
BLOCK_ELEMENTS = 1 << 21


def blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    """The canonical blocks of a tensor, in row-major order: consecutive whole rows, together at most BLOCK_ELEMENTS elements.

    A row is the part of the tensor at one index of an axis. The axis is the first one whose rows fit into a block; a block lies at a single
    index of every axis before it. So a block is contiguous in the row-major tensor. Blocks depend on the shape alone, not on how a
    checkpoint is sharded. An empty tensor has no blocks.
    """
    if 0 in shape:
        return
    if not shape:
        yield Box((), ())
        return
    axis = next(a for a in range(len(shape)) if math.prod(shape[a + 1 :]) <= BLOCK_ELEMENTS)
    rows = BLOCK_ELEMENTS // math.prod(shape[axis + 1 :])
    inner_zeros, inner = (0,) * (len(shape) - axis - 1), shape[axis + 1 :]
    for outer in product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], rows):
            size = min(rows, shape[axis] - start)
            yield Box((*outer, start, *inner_zeros), ((1,) * axis) + (size, *inner))
