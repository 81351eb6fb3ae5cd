"""Statistics of a tensor, gathered block by block from the numbers that its elements are.

Blocks are walked in strips that stay in a processor's cache. The largest and the smallest number of a strip tell whether one of its
elements is NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.engine.casts import cast, numpy_type
from reshard.engine.transfer import Block
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, F32, DType
from reshard.geometry.value import mutable
from reshard.measures.gathered import Gathered

_STRIP = 1 << 16
# Elements of each block from which the shape of the distribution is taken.
_SAMPLE = 1 << 15
# How numpy reads the words of an integer type.
INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "<u1"}
# Rows shorter than this are not judged as rows.
_SHORTEST_ROW = 8


def numbers(words: Block, dtype: DType) -> npt.NDArray[Any]:
    """The elements as numbers to compute with: float32, or float64 for wide types and integers."""
    if dtype.name in INTEGERS:
        return words.view(INTEGERS[dtype.name]).astype(np.float64)
    if dtype == BF16:
        return words.view(numpy_type(BF16)).astype(np.float32)
    return words.view(np.float64) if dtype.name == "F64" else cast(words, dtype, F32).view(np.float32)


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


def statistics_of(block: Block, dtype: DType, box: Box, shape: tuple[int, ...], *, values: bool, signs: bool) -> Statistics:
    """The statistics of the block of a tensor that lies at `box`.

    values: also sums of squares, a sample, and judgements of rows, which only weights need. signs: also count zeros and negatives.
    A type that is not floating point gets no statistics.
    """
    statistics, dtype = Statistics(elements=block.size), dtype.of("")  # as it is stored, also if that is a function of the values
    if not dtype.floating or not block.size:
        return statistics
    has_rows = values and len(shape) > 1 and box.sizes[-1] == shape[-1] >= _SHORTEST_ROW
    flat = block.reshape(-1)
    constant = True
    for start, strip in _strips(flat, shape[-1] if has_rows else None):
        exact = numbers(strip, dtype)
        with np.errstate(invalid="ignore"):
            largest = max(float(exact.max()), -float(exact.min()))
        if not math.isfinite(largest):
            _add_nonfinite(exact, statistics, box, start)
            constant = False
            continue
        statistics.largest = max(statistics.largest, largest)
        if signs:
            statistics.negatives += int((exact < 0).sum())
            statistics.zeros += exact.size - int(np.count_nonzero(exact))
        if not values:
            continue
        if block.itemsize > 1:  # elements of one byte mean nothing without their scale
            with np.errstate(over="ignore"):
                statistics.squares += float(np.dot(exact.reshape(-1), exact.reshape(-1)))
        statistics.rows += len(strip) if has_rows else 0
        is_odd = constant_rows(exact)
        constant = constant and bool(is_odd.all()) and bool((strip[:, 0] == flat[0]).all())
        if has_rows and is_odd.any():
            is_zero = is_odd & (exact[:, 0] == 0)
            statistics.zero_rows += int(is_zero.sum())
            statistics.constant_rows += int((is_odd & ~is_zero).sum())
            first = _coordinates(start + int(np.flatnonzero(is_odd)[0]) * strip.shape[1], box)
            statistics.first_odd_row = _first(statistics.first_odd_row, first)
    if values:
        statistics.values = {int(flat[0])} if constant else {int(flat[0]), -1}
        statistics.slices = _slices(block, box, dtype, statistics) if len(shape) == 3 else {}
        if not statistics.nan and not statistics.inf:
            _add_sample(numbers(flat[:_SAMPLE], dtype).astype(np.float64), statistics)
    return statistics


def _add_sample(sample: npt.NDArray[np.float64], statistics: Statistics) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        squares = sample * sample
        statistics.sample = np.array([len(sample), sample.sum(), squares.sum(), (squares * squares).sum()])
    statistics.sample_largest = float(np.abs(sample).max())


def _slices(block: Block, box: Box, dtype: DType, statistics: Statistics) -> dict[int, bool]:
    """By index of the first axis, whether the block is zero there. found: the statistics of the block."""
    first, count = box.offsets[0], box.sizes[0]
    if statistics.largest and (count == 1 or (statistics.rows and not statistics.zero_rows)):
        return dict.fromkeys(range(first, first + count), False)
    return {first + i: not np.count_nonzero(numbers(block[i], dtype)) for i in range(count)}


def _strips(flat: Block, row: int | None) -> Iterator[tuple[int, Block]]:
    """The elements in strips: the position of its first element, and an array of rows. row: the length of a row; None: one row each."""
    step = max(1, _STRIP // row) * row if row else _STRIP
    for start in range(0, len(flat), step):
        strip = flat[start : start + step]
        yield start, strip.reshape(-1, row or len(strip))


def _add_nonfinite(strip: npt.NDArray[Any], statistics: Statistics, box: Box, start: int) -> None:
    nan, inf = np.isnan(strip), np.isinf(strip)
    statistics.nan += int(nan.sum())
    statistics.inf += int(inf.sum())
    statistics.first_nan = _first(statistics.first_nan, _first_true(nan, box, start))
    statistics.first_inf = _first(statistics.first_inf, _first_true(inf, box, start))


def _first_true(faulty: npt.NDArray[np.bool_], box: Box, start: int) -> tuple[int, ...] | None:
    """The coordinates of the first faulty element of a strip that starts at element `start` of the block; None if there is none."""
    at = np.flatnonzero(faulty.reshape(-1))
    return _coordinates(start + int(at[0]), box) if len(at) else None


def constant_rows(strip: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
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
