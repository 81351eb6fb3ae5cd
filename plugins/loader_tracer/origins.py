"""Where the elements of a tensor come from: boxes of checkpoint tensors, constants, values of its own, or nothing that anybody set.

`pieces_of` follows a tensor back through the writes, the last one first. Its pieces may overlap; `settled` leaves of each what lies outside
of those before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from .recorder import Array
from .strided import Axis, NotABox, Placed, Shape, StridedCopy, composed, copy_of, merged, placed, row_major

# Element types that hold every value of the types after them.
_WIDER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16"), "float16": (), "bfloat16": ()}


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """A part of a tensor, and where its elements come from."""

    kind: str
    """weight: a checkpoint tensor. fill: one value. real: the tensor's own elements. operation: computed. unset: nobody set them."""
    copy: StridedCopy
    """The section of the tensor, and for a weight the section of the checkpoint tensor."""
    name: str = ""
    """The checkpoint tensor, or the operation."""
    value: float = 0.0
    """The value of a fill."""
    functions: tuple[str, ...] = ()
    """What is applied to each element of a weight, in order."""
    dtypes: tuple[str, ...] = ()
    """The element types on the way from the checkpoint to the tensor."""


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A HeldPiece in coordinates."""

    piece: HeldPiece
    placed: Placed

    def bounds(self) -> tuple[list[int], list[int]]:
        """The smallest box of the tensor that holds the piece: its first corner, and the corner behind its last element."""
        first, behind = list(self.placed.at), [at + 1 for at in self.placed.at]
        for axis in self.placed.axes:
            behind[axis.target_axis] += (axis.size - 1) * axis.target_step
        return first, behind

    def steps(self) -> list[int]:
        """The step of the piece along each axis of the tensor. Raises NotABox if it runs twice along one axis."""
        return [loop.target_step if (loop := self._loop_along(axis)) else 1 for axis in range(len(self.placed.at))]

    def is_apart_from(self, other: PlacedPiece) -> bool:
        """Whether the two are plainly apart: their bounds do not meet, or they take different rows in turn along some axis."""
        (first, behind), (other_first, other_behind) = self.bounds(), other.bounds()
        if any(a >= d or c >= b for a, b, c, d in zip(first, behind, other_first, other_behind, strict=True)):
            return True
        for axis in range(len(first)):
            steps = (loop.target_step for placed in (self.placed, other.placed) for loop in placed.axes if loop.target_axis == axis)
            # Of gcd(3, 6) = 3 rows one is met; without a loop in either, the gcd is 0.
            if (together := math.gcd(*steps)) and (first[axis] - other_first[axis]) % together:
                return True
        return False

    def every(self, axis: int, step: int) -> list[PlacedPiece]:
        """The piece as pieces whose rows along an axis are multiples of `step` apart.

        step 2:    rows 4 5 6 7 8    ->    rows 4 6 8  and  rows 5 7
                   rows 4 7 10 13    ->    rows 4 10   and  rows 7 13
        """
        for loop in self.placed.axes:
            turns = step // math.gcd(step, loop.target_step)
            if loop.target_axis == axis and turns > 1:
                return [self._with_turns(loop, first, -(-(loop.size - first) // turns), turns) for first in range(min(turns, loop.size))]
        return [self]

    def between(self, axis: int, low: int, high: int) -> PlacedPiece:
        """The part of the piece between two positions of an axis of the tensor."""
        loop, at = self._loop_along(axis), self.placed.at[axis]
        if loop is None:
            return self
        skipped = max(0, -((at - low) // loop.target_step))
        stop = min(loop.size, -((at - high) // loop.target_step))
        return self._with_turns(loop, skipped, stop - skipped, 1)

    def _loop_along(self, axis: int) -> Axis | None:
        loops = [loop for loop in self.placed.axes if loop.target_axis == axis]
        if len(loops) > 1:
            raise NotABox("two writes that overlap where rows are permuted")
        return loops[0] if loops else None

    def _with_turns(self, loop: Axis, first: int, size: int, every: int) -> PlacedPiece:
        """The part of the piece with `size` turns of one of its loops, from turn `first` on."""
        at, start = list(self.placed.at), list(self.placed.start)
        at[loop.target_axis] += first * loop.target_step
        start[loop.source_axis] += first * loop.source_step
        turns = loop._replace(size=size, target_step=loop.target_step * every, source_step=loop.source_step * every)
        axes = (turns if axis is loop else axis for axis in self.placed.axes)
        return PlacedPiece(self.piece, Placed(tuple(at), tuple(start), tuple(axis for axis in axes if axis.size != 1)))


def pieces_of(arrays: dict[int, Array], number: int, copy: StridedCopy, before: float = math.inf) -> Iterator[HeldPiece]:
    """The pieces of what `copy` reads from an array, as it was at the time `before`. Pieces may overlap: the first one counts.

    Raises: NotABox for a write that loops do not describe.
    """
    array = arrays[number]
    for write in reversed(array.writes):
        if write.time >= before:
            continue
        for met in composed(copy, write.copy, array.shape):
            if write.kind == "copy":
                for piece in pieces_of(arrays, write.source, met, write.time):
                    is_weight = piece.kind == "weight"
                    functions = (*piece.functions, write.operation) if write.operation else piece.functions
                    yield replace(piece, functions=functions, dtypes=(*piece.dtypes, write.dtype)) if is_weight else _after(piece, write)
            else:
                yield HeldPiece(write.kind, met, name=write.operation, value=write.value)
            if met.volume == copy.volume:
                return
    if array.root:
        yield HeldPiece("weight", copy, name=array.root)
    else:
        yield HeldPiece("real" if array.is_set else "unset", copy)


def _after(piece: HeldPiece, write: object) -> HeldPiece:
    """A piece that holds no weight, after a copy that may apply a function to it."""
    operation = getattr(write, "operation", "")
    return replace(piece, kind="operation", name=operation) if operation and piece.kind != "unset" else piece


def settled(pieces: Iterator[HeldPiece], shape: Shape, shapes: dict[str, Shape]) -> list[PlacedPiece]:
    """The pieces without overlaps: of two that overlap, the first one stays whole. Together they are the tensor.

    shapes: the shapes of the checkpoint tensors.
    """
    whole = math.prod(shape)
    placed_pieces = [PlacedPiece(piece, _placed(piece, shape, shapes)) for piece in pieces]
    firm: list[PlacedPiece] = []
    volume = 0
    for piece, meets in zip(placed_pieces, _overlaps(placed_pieces), strict=True):
        if volume == whole:
            break
        for part in _outside(piece, [placed_pieces[i] for i in meets]):
            firm.append(part)
            volume += part.placed.volume
    assert volume == whole, f"{volume} of {whole} elements"
    return firm


def _placed(piece: HeldPiece, shape: Shape, shapes: dict[str, Shape]) -> Placed:
    if piece.kind == "weight":
        return placed(piece.copy, shape, shapes[piece.name] or (1,))
    itself = merged(
        StridedCopy(piece.copy.target, piece.copy.target, tuple(loop._replace(source_step=loop.target_step) for loop in piece.copy.loops))
    )
    return placed(itself, shape, shape)


# Pieces whose bounds are compared with all others at a time.
_ROWS = 1024


def _overlaps(placed_pieces: list[PlacedPiece]) -> Iterator[list[int]]:
    """For each piece, the numbers of those before it whose bounds meet its own."""
    if len(placed_pieces) == 1:
        yield []
        return
    corners = [piece.bounds() for piece in placed_pieces]
    first, behind = np.array([first for first, _ in corners]).T, np.array([behind for _, behind in corners]).T
    for start in range(0, len(placed_pieces), _ROWS):
        rows, meets = slice(start, start + _ROWS), np.bool_(True)
        for low, high in zip(first, behind, strict=True):
            meets = meets & (low[: start + _ROWS] < high[rows, None]) & (low[rows, None] < high[: start + _ROWS])
        for row in np.tril(meets, start - 1):
            yield np.flatnonzero(row).tolist() if row.any() else []


def _outside(piece: PlacedPiece, others: list[PlacedPiece]) -> list[PlacedPiece]:
    """The parts of a piece that lie outside of the others. Raises NotABox as `_minus` does."""
    parts = [piece]
    for other in others:
        parts = [part for uncovered in parts for part in _minus(uncovered, other)]
    return parts


def _minus(piece: PlacedPiece, other: PlacedPiece) -> Iterator[PlacedPiece]:
    """The parts of a piece outside of another one, which may take every k-th row: both are brought to the same rows, where the other one is
    a box.

    Raises: NotABox if the other one is no box, and the two are not plainly apart.
    """
    (first, behind), rows = other.bounds(), [piece]
    spans = [stop - start for start, stop in zip(first, behind, strict=True)]
    if not piece.is_apart_from(other) and math.prod(spans) != other.placed.volume:
        steps = other.steps()
        for axis, step in enumerate(steps):
            rows = [part for row in rows for part in ([row] if row.is_apart_from(other) else row.every(axis, step))]
        spans = [(span - 1) // step + 1 for span, step in zip(spans, steps, strict=True)]
    for row in rows:
        if row.is_apart_from(other):
            yield row
        elif math.prod(spans) != other.placed.volume:
            raise NotABox("two writes that overlap in a pattern of steps")
        else:
            yield from _around(row, first, behind)


def _around(piece: PlacedPiece, first: list[int], behind: list[int]) -> Iterator[PlacedPiece]:
    """The parts of a piece around a box: before and behind it along the first axis, then, of the rows between, along the next one.

    +-------------------+
    |         A         |      axis 0: A before the box, B behind it
    +-----+-------+-----+
    |  C  |  box  |  D  |      axis 1: C before the box, D behind it
    +-----+-------+-----+
    |         B         |
    +-------------------+
    """
    rest = piece
    for axis, (low, high) in enumerate(zip(first, behind, strict=True)):
        start, stop = (corner[axis] for corner in rest.bounds())
        if start < low:
            yield rest.between(axis, start, low)
        if stop > high:
            yield rest.between(axis, high, stop)
        rest = rest.between(axis, max(start, low), min(stop, high))


def one_cast(dtypes: tuple[str, ...], dtype: str) -> bool:
    """Whether elements that pass through these types into `dtype` are rounded only once, from the first to the last."""
    return all(between in (dtypes[0], dtype) or dtypes[0] in _WIDER.get(between, ()) for between in dtypes[1:])


def whole_section(shape: Shape, offset: int, strides: Shape) -> StridedCopy:
    """The StridedCopy that reads a tensor with that offset and these strides as a row-major array."""
    return copy_of((0, shape, row_major(shape)), (offset, shape, strides))
