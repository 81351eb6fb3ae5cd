"""What a tensor holds in the end: boxes of checkpoint tensors, constants, values of its own, or nothing that anybody set."""

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
    found = [PlacedPiece(piece, _placed(piece, shape, shapes)) for piece in pieces]
    firm: list[PlacedPiece] = []
    volume = 0
    for each, meets in zip(found, _overlaps(found), strict=True):
        if volume == whole:
            break
        for part in _outside(each, [found[i] for i in meets]):
            firm.append(part)
            volume += part.placed.volume
    assert volume == whole, f"{volume} of {whole} elements"
    return firm


def _placed(piece: HeldPiece, shape: Shape, shapes: dict[str, Shape]) -> Placed:
    if piece.kind == "weight":
        return placed(piece.copy, shape, shapes[piece.name] or (1,))
    itself = merged(
        StridedCopy(piece.copy.target, piece.copy.target, tuple(each._replace(source_step=each.target_step) for each in piece.copy.loops))
    )
    return placed(itself, shape, shape)


# Pieces whose bounds are compared with all others at a time.
_ROWS = 1024


def _overlaps(found: list[PlacedPiece]) -> Iterator[list[int]]:
    """For each piece, the numbers of those before it whose bounds meet its own."""
    if len(found) == 1:
        yield []
        return
    corners = [piece.bounds() for piece in found]
    first, behind = np.array([first for first, _ in corners]).T, np.array([behind for _, behind in corners]).T
    for start in range(0, len(found), _ROWS):
        rows, meets = slice(start, start + _ROWS), np.bool_(True)
        for low, high in zip(first, behind, strict=True):
            meets = meets & (low[: start + _ROWS] < high[rows, None]) & (low[rows, None] < high[: start + _ROWS])
        for row in np.tril(meets, start - 1):
            yield np.flatnonzero(row).tolist() if row.any() else []


def _outside(piece: PlacedPiece, others: list[PlacedPiece]) -> list[PlacedPiece]:
    """The parts of a piece that lie outside of the others."""
    parts = [piece]
    for other in others:
        parts = [part for each in parts for part in _minus(each, other)]
    return parts


def _minus(piece: PlacedPiece, other: PlacedPiece) -> Iterator[PlacedPiece]:
    """The parts of a piece outside of another piece.

    Raises: NotABox if the other one is no box, and the two are not plainly apart.
    """
    first, behind = other.bounds()
    own_first, own_behind = piece.bounds()
    if any(a >= d or c >= b for a, b, c, d in zip(own_first, own_behind, first, behind, strict=True)) or _interleaved(piece, other):
        yield piece
        return
    is_box = math.prod(b - a for a, b in zip(first, behind, strict=True)) == other.placed.volume
    steps = [1] * len(first) if is_box else _steps(other)
    for number, loop in enumerate(piece.placed.axes):
        if steps[loop.target_axis] > 1 and loop.target_step == 1:
            for row in range(min(steps[loop.target_axis], loop.size)):
                yield from _minus(_every(piece, number, row, steps[loop.target_axis]), other)
            return
    if math.prod((b - a - 1) // step + 1 for a, b, step in zip(first, behind, steps, strict=True)) != other.placed.volume:
        raise NotABox("two writes that overlap in a pattern of steps")
    for axis, (low, high) in enumerate(zip(first, behind, strict=True)):
        own_first, own_behind = piece.bounds()
        if own_first[axis] < low:
            yield _clipped(piece, axis, own_first[axis], low)
        if own_behind[axis] > high:
            yield _clipped(piece, axis, high, own_behind[axis])
        if own_first[axis] < low or own_behind[axis] > high:
            piece = _clipped(piece, axis, max(own_first[axis], low), min(own_behind[axis], high))


def _steps(piece: PlacedPiece) -> list[int]:
    """The step of a piece along each axis of the tensor. Raises NotABox if it runs twice along one axis."""
    steps = [1] * len(piece.placed.at)
    axes = [each.target_axis for each in piece.placed.axes]
    if len(axes) > len(set(axes)):
        raise NotABox("two writes that overlap where rows are permuted")
    for each in piece.placed.axes:
        steps[each.target_axis] = each.target_step
    return steps


def _every(piece: PlacedPiece, number: int, first: int, step: int) -> PlacedPiece:
    """The part of a piece that takes every `step`-th turn of one of its loops, from turn `first` on."""
    size, axis, target_step, source_axis, source_step = piece.placed.axes[number]
    at, start = list(piece.placed.at), list(piece.placed.start)
    at[axis] += first * target_step
    start[source_axis] += first * source_step
    loop = Axis((size - first + step - 1) // step, axis, target_step * step, source_axis, source_step * step)
    loops = (*piece.placed.axes[:number], loop, *piece.placed.axes[number + 1 :])
    return PlacedPiece(piece.piece, Placed(tuple(at), tuple(start), tuple(each for each in loops if each.size != 1)))


def _interleaved(piece: PlacedPiece, other: PlacedPiece) -> bool:
    """Whether two pieces take different rows in turn along some axis."""
    for axis in range(len(piece.placed.at)):
        steps = [each.target_step for placed in (piece.placed, other.placed) for each in placed.axes if each.target_axis == axis]
        if len(steps) >= 2 and (piece.placed.at[axis] - other.placed.at[axis]) % math.gcd(*steps):
            return True
    return False


def _clipped(piece: PlacedPiece, axis: int, low: int, high: int) -> PlacedPiece:
    """The part of a piece between two positions of an axis of the tensor."""
    at, start, axes = list(piece.placed.at), list(piece.placed.start), list(piece.placed.axes)
    loops = [number for number, each in enumerate(axes) if each.target_axis == axis]
    if len(loops) > 1:
        raise NotABox("two writes that overlap where rows are permuted")
    if loops:
        size, _, step, source_axis, source_step = axes[loops[0]]
        skipped = -((at[axis] - low) // step) if low > at[axis] else 0
        at[axis] += skipped * step
        start[source_axis] += skipped * source_step
        axes[loops[0]] = Axis(min(size - skipped, -((at[axis] - high) // step)), axis, step, source_axis, source_step)
    return PlacedPiece(piece.piece, Placed(tuple(at), tuple(start), tuple(each for each in axes if each.size != 1)))


def one_cast(dtypes: tuple[str, ...], dtype: str) -> bool:
    """Whether elements that pass through these types into `dtype` are rounded only once, from the first to the last."""
    return all(each in (dtypes[0], dtype) or dtypes[0] in _WIDER.get(each, ()) for each in dtypes[1:])


def whole_section(shape: Shape, offset: int, strides: Shape) -> StridedCopy:
    """The StridedCopy that reads a tensor with that offset and these strides as a row-major array."""
    return copy_of((0, shape, row_major(shape)), (offset, shape, strides))
