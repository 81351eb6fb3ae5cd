"""The distribution of a tensor's elements: its sums, its extremes and how often each number occurs.

The upper 16 bits of each word are counted. For types of at most 16 bits the counts are the whole tensor, and everything follows from them
exactly. For wider types they tell the histogram, to within 1/256 of each number (F64: 1/32), and sums and extremes come from the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.engine.casts import cast
from reshard.engine.transfer import Block
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.value import mutable
from reshard.measures.gathered import Gathered
from reshard.measures.statistics import INTEGERS, constant_rows

_F64 = from_torch("float64", where="distribution")


def _added(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return b if not len(a) else a + b if len(b) else a


@mutable
class ValueDistribution(Gathered):
    """What is known of the elements of a tensor, or of a part of it."""

    elements: int = 0
    """The number of elements."""
    nan: int = 0
    """The number of NaN."""
    inf: int = 0
    """The number of infinite elements."""
    zeros: int = 0
    """The number of elements that are zero."""
    rows: int = 0
    """The number of rows, along the last axis, that were judged."""
    constant_rows: int = 0
    """The number of these that have one value."""
    smallest: float = field(default=math.inf, metadata={"combine": min})
    """The smallest finite element."""
    largest: float = field(default=-math.inf, metadata={"combine": max})
    """The largest finite element."""
    total: float = 0.0
    """The sum of the finite elements."""
    squares: float = 0.0
    """The sum of their squares."""
    words: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), metadata={"combine": _added})
    """How often each upper 16 bits of a word occur; empty for integers."""

    @property
    def finite(self) -> int:
        """The number of finite elements."""
        return self.elements - self.nan - self.inf

    @property
    def mean(self) -> float | None:
        """The mean of the finite elements; None if there are none."""
        return self.total / self.finite if self.finite else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the finite elements; None if there are none."""
        return math.sqrt(max(self.squares / self.finite - (self.total / self.finite) ** 2, 0.0)) if self.finite else None

    def histogram(self, dtype: DType, bins: int) -> list[int]:
        """The number of finite elements in each of `bins` intervals of equal width between the smallest and the largest; empty if the
        elements are no floating-point numbers, or all are equal."""
        width = self.largest - self.smallest
        if not len(self.words) or not 0 < width < math.inf:
            return []
        values, counts = _every_value(self.words, dtype)
        finite = np.isfinite(values)
        values, counts = values[finite], counts[finite]
        at = np.clip((values - self.smallest) / width * bins, 0, bins - 1).astype(np.int64)
        return [int(count) for count in np.bincount(at, weights=counts, minlength=bins)]


def measure_distribution(strips: Iterable[tuple[Box, Block]], dtype: DType, shape: tuple[int, ...]) -> ValueDistribution:
    """The distribution of a part of a tensor. A complex type has no values, only a number of elements.

    strips: the elements of the part, in pieces of any size, each with the box that it fills in the tensor.
    """
    distribution = ValueDistribution()
    for box, strip in strips:
        distribution.elements += strip.size
        if not (dtype.floating or dtype.name in INTEGERS) or not strip.size:
            continue
        if len(shape) > 1 and box.sizes[-1] == shape[-1] > 1:
            row_table = strip.reshape(-1, shape[-1])
            distribution.rows += len(row_table)
            distribution.constant_rows += int(constant_rows(row_table).sum())
        flat = strip.reshape(-1)
        if dtype.floating:
            distribution.words = _added(distribution.words, _counted(flat, dtype))
        if not (dtype.floating and dtype.itemsize <= 2):
            _add_values(distribution, flat.view(INTEGERS.get(dtype.name, f"<f{dtype.itemsize}")))
    if dtype.floating and dtype.itemsize <= 2:
        _add_exactly(distribution, *_every_value(distribution.words, dtype))
    return distribution


def _counted(flat: Block, dtype: DType) -> npt.NDArray[np.int64]:
    """How often each upper 16 bits occur."""
    shift = max(8 * dtype.itemsize - 16, 0)
    return np.bincount(flat.view(np.uint16)[shift // 16 :: dtype.itemsize // 2] if shift else flat, minlength=1 << 16)


def _every_value(words: npt.NDArray[np.int64], dtype: DType) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """The numbers that occur, whether finite or not, and how often. For wide types, numbers near to them."""
    used = np.flatnonzero(words)
    counts = words[used]
    if dtype.itemsize > 2:
        shift = 8 * dtype.itemsize - 16
        # The middle of all numbers that begin with these bits. Infinity becomes a NaN by that.
        wide = ((used.astype(np.uint64) << np.uint64(shift)) + np.uint64(1 << (shift - 1))).astype(dtype.word)
        return cast(wide, dtype, _F64).view(np.float64), counts
    return cast(used.astype(dtype.word), dtype, _F64).view(np.float64), counts


def _add_exactly(distribution: ValueDistribution, values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> None:
    """Fill in what follows from all numbers that occur."""
    finite = np.isfinite(values)
    distribution.nan = int(counts[np.isnan(values)].sum())
    distribution.inf = int(counts[np.isinf(values)].sum())
    values, counts = values[finite], counts[finite]
    distribution.zeros = int(counts[values == 0].sum())
    distribution.smallest, distribution.largest = float(values.min(initial=math.inf)), float(values.max(initial=-math.inf))
    distribution.total, distribution.squares = float(values @ counts), float((values * values) @ counts)


def _add_values(distribution: ValueDistribution, strip: npt.NDArray[Any]) -> None:
    """Fill in what the values themselves tell."""
    with np.errstate(all="ignore"):
        values = strip if strip.dtype.kind == "f" else strip.astype(np.float64)
        squares = float(np.dot(values, values))
        if not math.isfinite(squares):
            distribution.nan += int(np.isnan(values).sum())
            distribution.inf += int(np.isinf(values).sum())
            values = values[np.isfinite(values)].astype(np.float64)
            squares = float(np.dot(values, values))
        distribution.zeros += len(values) - int(np.count_nonzero(values))
        distribution.smallest = min(distribution.smallest, float(values.min(initial=math.inf)))
        distribution.largest = max(distribution.largest, float(values.max(initial=-math.inf)))
        distribution.total += float(values.sum(dtype=np.float64))
        distribution.squares += squares
