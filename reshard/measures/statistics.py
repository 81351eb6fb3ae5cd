"""Statistics of a tensor, gathered block by block from the bits of its elements.

Most tests need no arithmetic: without its sign bit, the word of a floating-point number is larger the larger the number is, and NaN and
infinity are the largest words. A value is computed from its word by a shift and one multiplication:

    bfloat16, exponent bias 127     word << 16 is the float32
    float16, bias 15                word << 13 is the float32 times 2**-112 (112 = 127 - 15), subnormal numbers included

Blocks are walked in strips that stay in a processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.engine.transfer import Block
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.value import mutable, value
from reshard.measures.gathered import Gathered

_STRIP = 1 << 16
# Elements of each block from which the shape of the distribution is taken.
_SAMPLE = 1 << 15
# How numpy reads the words of an integer type.
INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "<u1"}
# Rows shorter than this are not judged as rows.
_SHORTEST_ROW = 8


@value
class FloatLayout:
    """How a floating-point type uses the bits of its word."""

    magnitude: int
    """The bits of the absolute value."""
    infinity: int | None
    """The word of infinity; None if the type has none."""
    first_nan: int
    """The smallest magnitude that is NaN."""
    shift: int
    """How far the magnitude is shifted to be a float32."""
    factor: float
    """What the float32 is then multiplied with."""


# FNUZ types have one NaN, the word of minus zero, so it is searched for by itself.
_NO_MAGNITUDE_IS_NAN, _FNUZ_NAN = 0x100, 0x80
LAYOUTS: dict[str, FloatLayout] = {
    "F64": FloatLayout((1 << 63) - 1, 0x7FF << 52, (0x7FF << 52) + 1, 0, 1.0),
    "F32": FloatLayout(0x7FFFFFFF, 0x7F800000, 0x7F800001, 0, 1.0),
    "BF16": FloatLayout(0x7FFF, 0x7F80, 0x7F81, 16, 1.0),
    "F16": FloatLayout(0x7FFF, 0x7C00, 0x7C01, 13, 2.0**112),
    "F8_E4M3": FloatLayout(0x7F, None, 0x7F, 20, 2.0**120),
    "F8_E5M2": FloatLayout(0x7F, 0x7C, 0x7D, 21, 2.0**112),
    "F8_E4M3FNUZ": FloatLayout(0x7F, None, _NO_MAGNITUDE_IS_NAN, 20, 2.0**119),
    "F8_E5M2FNUZ": FloatLayout(0x7F, None, _NO_MAGNITUDE_IS_NAN, 21, 2.0**111),
    "F8_E8M0": FloatLayout(0xFF, None, 0xFF, 23, 1.0),
}


def _first(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return b if a is None else a if b is None else min(a, b)


def _two_of(a: set[int], b: set[int]) -> set[int]:
    return set(sorted(a | b)[:2])


def _zero_in_both(a: dict[int, bool], b: dict[int, bool]) -> dict[int, bool]:
    return a | {index: a.get(index, True) and is_zero for index, is_zero in b.items()}


@mutable
class Statistics(Gathered):
    """What is known of a tensor, or of a part of it."""

    elements: int = 0
    """The number of elements."""
    nan: int = 0
    """The number of NaN."""
    inf: int = 0
    """The number of infinite elements."""
    first_nan: tuple[int, ...] | None = field(default=None, metadata={"combine": _first})
    """Where the first NaN is, in the tensor's coordinates."""
    first_inf: tuple[int, ...] | None = field(default=None, metadata={"combine": _first})
    """Where the first infinite element is."""
    negatives: int = 0
    """The number of elements below zero; counted only if asked for."""
    zeros: int = 0
    """The number of elements that are zero; counted only if asked for."""
    zero_rows: int = 0
    """The number of rows, along the last axis, that are all zero."""
    constant_rows: int = 0
    """The number of rows that have one value other than zero."""
    first_odd_row: tuple[int, ...] | None = field(default=None, metadata={"combine": _first})
    """Where the first zero or constant row starts."""
    rows: int = 0
    """The number of rows that were judged."""
    largest: float = field(default=0.0, metadata={"combine": max})
    """The largest finite absolute value."""
    squares: float = 0.0
    """The sum of the squares of the finite elements; 0 for types of one byte."""
    values: set[int] = field(default_factory=set, metadata={"combine": _two_of})
    """The words that occur: one for a constant tensor; two stand for more than one."""
    slices: dict[int, bool] = field(default_factory=dict, metadata={"combine": _zero_in_both})
    """By index of the first axis, whether all is zero there."""
    sample: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    """Of the first elements of each block: their number, and the sums of their values, squares and fourth powers."""
    sample_largest: float = field(default=0.0, metadata={"combine": max})
    """The largest absolute value of these."""

    @property
    def is_zero(self) -> bool:
        """Whether all elements are zero."""
        return bool(self.elements) and self.largest == 0 and not self.nan and not self.inf

    @property
    def is_constant(self) -> bool:
        """Whether all elements have one value."""
        return len(self.values) == 1

    @property
    def root_mean_square(self) -> float:
        """The root of the mean of the squares."""
        return math.sqrt(self.squares / self.elements) if self.elements else 0.0


class Meter:
    """Computes the statistics of blocks, with scratch memory of its own: one for each thread."""

    def __init__(self) -> None:
        self._magnitudes = np.empty(0, np.uint8)
        self._floats = np.empty(_STRIP, np.uint32)

    def measure(self, block: Block, dtype: DType, box: Box, shape: tuple[int, ...], *, values: bool, signs: bool) -> Statistics:
        """The statistics of the block of a tensor that lies at `box`.

        values: also sums of squares, a sample, and judgements of rows, which only weights need. signs: also count zeros and negatives.
        A type that is not floating point gets no statistics.
        """
        found, layout = Statistics(elements=block.size), LAYOUTS.get(dtype.name)
        if layout is None or not block.size:
            return found
        has_rows = values and len(shape) > 1 and box.sizes[-1] == shape[-1] >= _SHORTEST_ROW
        flat = block.reshape(-1)
        constant, largest = True, 0
        for start, strip in _strips(flat, shape[-1] if has_rows else None):
            magnitudes = self._scratch(strip)
            np.bitwise_and(strip, strip.dtype.type(layout.magnitude), out=magnitudes)
            row_max = magnitudes.max(axis=1)
            if not _is_finite(strip, int(row_max.max()), layout):
                _add_nonfinite(strip, magnitudes, layout, found, box, start)
                constant = False
                continue
            largest = max(largest, int(row_max.max()))
            if signs:
                found.negatives += _negatives(strip, magnitudes, layout)
                found.zeros += int((magnitudes == 0).sum()) if dtype.name != "F8_E8M0" else 0
            if not values:
                continue
            if block.itemsize > 1:  # elements of one byte mean nothing without their scale
                found.squares += self._squares(magnitudes, layout)
            found.rows += len(strip) if has_rows else 0
            is_zero = row_max == 0
            is_odd = constant_rows(strip) | is_zero
            constant = constant and bool(is_odd.all()) and bool((strip[:, 0] == flat[0]).all())
            if has_rows and is_odd.any():
                found.zero_rows += int(is_zero.sum())
                found.constant_rows += int((is_odd & ~is_zero).sum())
                first = _coordinates(start + int(np.flatnonzero(is_odd)[0]) * strip.shape[1], box)
                found.first_odd_row = _first(found.first_odd_row, first)
        found.largest = float(_sizes(np.array([largest], flat.dtype), layout)[0])
        if values:
            found.values = {int(flat[0])} if constant else {int(flat[0]), -1}
            found.slices = _slices(block, box, layout, found) if len(shape) == 3 else {}
            self._sample(flat[:_SAMPLE], layout, found)
        return found

    def _scratch(self, strip: Block) -> Block:
        if self._magnitudes.nbytes < strip.nbytes:
            self._magnitudes = np.empty(strip.nbytes, np.uint8)
        result: Block = self._magnitudes[: strip.nbytes].view(strip.dtype).reshape(strip.shape)
        return result

    def _squares(self, magnitudes: Block, layout: FloatLayout) -> float:
        if magnitudes.dtype.itemsize == 8:
            wide: Any = magnitudes.view(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                return float((wide * wide).sum())
        flat = magnitudes.reshape(-1)
        if layout.shift == 0:
            floats = flat.view(np.float32)
        else:
            if len(self._floats) < len(flat):
                self._floats = np.empty(len(flat), np.uint32)
            words = self._floats[: len(flat)]
            words[...] = flat
            np.left_shift(words, layout.shift, out=words)
            floats = words.view(np.float32)
            if layout.factor != 1.0:
                np.multiply(floats, np.float32(layout.factor), out=floats)
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.dot(floats, floats))

    def _sample(self, flat: Block, layout: FloatLayout, found: Statistics) -> None:
        if found.nan or found.inf:
            return
        sizes = _sizes(flat & flat.dtype.type(layout.magnitude), layout)
        with np.errstate(over="ignore", invalid="ignore"):
            signed = np.where(flat > layout.magnitude, -sizes, sizes)
            squares = sizes * sizes
            found.sample = np.array([len(flat), signed.sum(), squares.sum(), (squares * squares).sum()])
        found.sample_largest = float(sizes.max())


def _sizes(magnitudes: Block, layout: FloatLayout) -> npt.NDArray[np.float64]:
    """The absolute values of magnitudes, in double precision."""
    if magnitudes.dtype.itemsize == 8:
        return magnitudes.view(np.float64)
    return (magnitudes.astype(np.uint32) << np.uint32(layout.shift)).view(np.float32).astype(np.float64) * layout.factor


def _slices(block: Block, box: Box, layout: FloatLayout, found: Statistics) -> dict[int, bool]:
    """By index of the first axis, whether the block is zero there. found: the statistics of the block."""
    first, count = box.offsets[0], box.sizes[0]
    if found.largest and (count == 1 or (found.rows and not found.zero_rows)):
        return dict.fromkeys(range(first, first + count), False)
    return {first + i: not (block[i] & block.dtype.type(layout.magnitude)).any() for i in range(count)}


def _strips(flat: Block, row: int | None) -> Iterator[tuple[int, Block]]:
    """The elements in strips: the position of its first element, and an array of rows. row: the length of a row; None: one row each."""
    step = max(1, _STRIP // row) * row if row else _STRIP
    for start in range(0, len(flat), step):
        strip = flat[start : start + step]
        yield start, strip.reshape(-1, row or len(strip))


def _is_finite(strip: Block, largest: int, layout: FloatLayout) -> bool:
    """Whether no element is NaN or infinite. largest: the largest magnitude."""
    if layout.first_nan == _NO_MAGNITUDE_IS_NAN:
        return not bool((strip == _FNUZ_NAN).any())
    return largest < (layout.first_nan if layout.infinity is None else layout.infinity)


def _add_nonfinite(strip: Block, magnitudes: Block, layout: FloatLayout, found: Statistics, box: Box, start: int) -> None:
    nan = strip == _FNUZ_NAN if layout.first_nan == _NO_MAGNITUDE_IS_NAN else magnitudes >= layout.first_nan
    inf = magnitudes == layout.infinity if layout.infinity is not None else np.zeros_like(nan)
    found.nan += int(nan.sum())
    found.inf += int(inf.sum())
    found.first_nan = _first(found.first_nan, _first_true(nan, box, start))
    found.first_inf = _first(found.first_inf, _first_true(inf, box, start))


def _first_true(faulty: npt.NDArray[np.bool_], box: Box, start: int) -> tuple[int, ...] | None:
    """The coordinates of the first faulty element of a strip that starts at element `start` of the block; None if there is none."""
    at = np.flatnonzero(faulty.reshape(-1))
    return _coordinates(start + int(at[0]), box) if len(at) else None


def _negatives(strip: Block, magnitudes: Block, layout: FloatLayout) -> int:
    """The number of elements below zero. Few strips have a sign bit at all."""
    if int(strip.max()) <= layout.magnitude:
        return 0
    return int(((strip > layout.magnitude) & (magnitudes > 0)).sum())


def constant_rows(strip: Block) -> npt.NDArray[np.bool_]:
    """For each row, whether all its elements are equal. Two or three elements of each row rule out nearly all."""
    same: npt.NDArray[np.bool_] = strip[:, 0] == strip[:, -1]
    if same.any():
        same &= strip[:, 0] == strip[:, strip.shape[1] // 2]
        candidates = np.flatnonzero(same)
        same[candidates] = (strip[candidates] == strip[candidates, :1]).all(axis=1)
    return same


def _coordinates(flat: int, box: Box) -> tuple[int, ...]:
    """The coordinates in the tensor of the element `flat` of a row-major block."""
    inside = np.unravel_index(flat, box.sizes) if box.sizes else ()
    return tuple(int(i) + start for i, start in zip(inside, box.offsets, strict=True))
