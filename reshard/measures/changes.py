"""How the elements of one tensor changed into those of another: a few sums, gathered block by block.

With d = right - left, over the elements that are finite on both sides:

    largest      max |d|
    mean         sum |d| / elements
    relative     sqrt(sum d^2) / sqrt(sum left^2)
    cosine       1 - (sum d^2 - (|left| - |right|)^2) / (2 |left| |right|), which is exact where the tensors are nearly equal
    ULPs         how many numbers of the element type lie between the two; two equal numbers are 0 apart, neighbours 1

Blocks are walked in strips that stay in a processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.engine.casts import cast
from reshard.engine.transfer import Block
from reshard.geometry.dtypes import DType
from reshard.geometry.value import mutable
from reshard.measures.gathered import Gathered
from reshard.measures.statistics import INTEGERS, numbers

_STRIP = 1 << 17
_ONES = np.ones(_STRIP, np.float32)
# The distances in ULPs at which the bins of a histogram end.
_EDGES = (0, *(1 << power for power in range(16)))


def _kept(ours: Any, theirs: Any) -> Any:
    return ours


def _added(ours: list[int], theirs: list[int]) -> list[int]:
    """Counts entry by entry; one list may be longer."""
    return [a + b for a, b in zip_longest(ours, theirs, fillvalue=0)]


@mutable
class Change(Gathered):
    """How a tensor, or a group of tensors, changed."""

    JSON = "name layer role tensors elements changed nonfinite nan infinite relative largest mean cosine ulps"

    name: str = field(default="", metadata={"combine": _kept})
    """The tensor, or the group."""
    layer: int | None = field(default=None, metadata={"combine": _kept})
    """The layer; None if the tensor belongs to none."""
    role: str = field(default="", metadata={"combine": _kept})
    """What the tensor does in the model, such as attention.q; the last words of its name if the model is not known."""
    tensors: int = field(default=1, metadata={"combine": _kept})
    """The number of tensors."""
    elements: int = 0
    """The number of elements that were compared."""
    changed: int = 0
    """The number of elements that differ."""
    nonfinite: int = 0
    """The number of elements that are NaN or infinite on one side at least. They are left out of the sums."""
    nan: list[int] = field(default_factory=lambda: [0, 0], metadata={"combine": _added})
    """The number of NaN on the left and on the right."""
    infinite: list[int] = field(default_factory=lambda: [0, 0], metadata={"combine": _added})
    """The number of infinite elements on the left and on the right."""
    largest: float = field(default=0.0, metadata={"combine": max})
    """The largest absolute difference."""
    total: float = 0.0
    """The sum of the absolute differences."""
    squares: float = 0.0
    """The sum of the squared differences."""
    left_squares: float = 0.0
    """The sum of the squares of the left elements."""
    right_squares: float = 0.0
    """The sum of the squares of the right elements."""
    ulps: list[int] = field(default_factory=list, metadata={"combine": _added})
    """The number of elements by their distance in ULPs: 0, 1, 2, 3 to 4, 5 to 8, 9 to 16, ...; empty for integers."""

    @property
    def share(self) -> float:
        """The share of the elements that differ."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def mean(self) -> float:
        """The mean absolute difference."""
        return self.total / self.elements if self.elements else 0.0

    @property
    def relative(self) -> float:
        """The relative L2 difference: |right - left| / |left|. Infinite if the left is zero and the right is not."""
        if not self.squares:
            return 0.0
        return math.sqrt(self.squares / self.left_squares) if self.left_squares else math.inf

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between both; None if one of them is zero."""
        left, right = math.sqrt(self.left_squares), math.sqrt(self.right_squares)
        if not left or not right:
            return None
        return min(1.0, 1.0 - (self.squares - (left - right) ** 2) / (2 * left * right))


def sum_of(name: str, parts: Sequence[Change], *, layer: int | None = None, role: str = "") -> Change:
    """The change of several tensors together."""
    whole = Change(name, layer, role, tensors=sum(part.tensors for part in parts))
    for part in parts:
        whole.add(part)
    return whole


def columns_of(title: str, changes: Sequence[Change]) -> tuple[tuple[str, ...], list[tuple[str | int, ...]]]:
    """The headings and the rows of a table of changes; with a column of NaN and infinite elements, if there are any."""
    headings = (title, "tensors", "changed", "relative L2", "largest", "mean", "1 - cosine", "NaN, inf")
    shown = len(headings) if any(change.nonfinite for change in changes) else len(headings) - 1
    rows = []
    for change in changes:
        sizes = (f"{change.relative:.3g}", f"{change.largest:.3g}", f"{change.mean:.3g}")
        cosine = "-" if change.cosine is None else f"{1 - change.cosine:.3g}"
        row = (change.name, change.tensors, f"{100 * change.share:.3g} %", *sizes, cosine, f"{change.nonfinite:,}")
        rows.append(row[:shown])
    return headings[:shown], rows


def ulp_range(number: int) -> tuple[int, int]:
    """The first and the last distance that bin `number` of a histogram of ULPs counts."""
    return (number, number) if number < 3 else (2 ** (number - 2) + 1, 2 ** (number - 1))


def change_of(left: Block, right: Block, left_dtype: DType, right_dtype: DType) -> Change:
    """How the elements of a block changed. Where the element types differ, the elements are compared as values, and ULPs are those of the
    type with fewer bytes."""
    change = Change(elements=left.size)
    a, b = left.reshape(-1), right.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, len(a), _STRIP):
            strip = slice(start, start + _STRIP)
            if _has_values(left_dtype) and _has_values(right_dtype):
                _add(change, a[strip], b[strip], left_dtype, right_dtype)
            else:
                change.changed += int((a[strip] != b[strip]).sum()) if left_dtype == right_dtype else len(a[strip])
    return change


def _add(change: Change, a: Block, b: Block, left: DType, right: DType) -> None:
    """Take in a strip."""
    x = numbers(a, left)
    left_squares = float(np.dot(x, x))
    changed = int(np.count_nonzero(a != b)) if left == right else -1
    if not changed and math.isfinite(left_squares):  # equal bytes need the sum of the squares alone
        change.left_squares += left_squares
        change.right_squares += left_squares
        change.ulps = _added(change.ulps, [len(a)] if left.floating else [])
        return
    y = numbers(b, right)
    change.changed += changed if left == right else int(np.count_nonzero(x != y))
    difference = y - x
    right_squares, squares = float(np.dot(y, y)), float(np.dot(difference, difference))
    if not math.isfinite(left_squares + right_squares + squares):
        x, y, a, b = _finite(change, a, b, left, right)
        difference = y - x
        left_squares, right_squares, squares = (float(np.dot(vector, vector)) for vector in (x, y, difference))
    np.abs(difference, out=difference)
    change.left_squares += left_squares
    change.right_squares += right_squares
    change.squares += squares
    change.largest = max(change.largest, float(difference.max(initial=0)))
    # Single precision: a strip has few enough elements. A dot product is twice as fast as a sum.
    change.total += float(np.dot(difference, _ONES[: len(difference)]) if difference.dtype == np.float32 else difference.sum())
    if left.floating and right.floating:
        narrow = left if left.itemsize < right.itemsize else right
        change.ulps = _added(change.ulps, _ulp_counts(_distances(cast(a, left, narrow), cast(b, right, narrow), narrow)))


def _ulp_counts(distance: npt.NDArray[Any]) -> list[int]:
    """The number of elements in each bin of the histogram."""
    counts: list[int] = []
    more, farthest = len(distance), int(distance.max(initial=0))
    if farthest < 1 << 8:  # the narrower the words, the faster they are compared
        distance = distance.astype(np.uint8)
    # For distances of at most 16 bits it is faster to count what lies beyond every edge than to compute with single distances.
    for edge in _EDGES if farthest < 1 << 16 else _EDGES[:4]:
        if edge >= farthest:
            return [*counts, more]
        beyond = int(np.count_nonzero(distance > edge))
        counts.append(more - beyond)
        more = beyond
    return [*counts, more] if farthest < 1 << 16 else counts + _bins(distance)[4:]


def _distances(a: Block, b: Block, dtype: DType) -> npt.NDArray[Any]:
    """The distances in ULPs, as unsigned words. Both zeros are the same number."""
    if dtype.name == "F8_E8M0":  # no sign
        return np.where(a > b, a - b, b - a)
    magnitude, signed = (1 << 8 * dtype.itemsize - 1) - 1, np.dtype(f"i{a.itemsize}")
    # Two numbers of one sign are less than half of all words apart.
    distance: npt.NDArray[Any] = np.abs(a.view(signed) - b.view(signed)).view(a.dtype)
    signs = a ^ b
    if int(signs.max(initial=0)) > magnitude:  # the sign of some changed: few, as a rule
        rows = np.flatnonzero(signs > magnitude)
        distance[rows] = (a[rows] & a.dtype.type(magnitude)) + (b[rows] & a.dtype.type(magnitude))
    return distance


def _bins(distance: npt.NDArray[Any]) -> list[int]:
    """The histogram of distances, of which those of 0 and 1 are in no bin of their own."""
    # 4.5 to 7.5 have one exponent: so a bin ends with a power of two.
    exponents = (distance.astype(np.float64) - 0.5).view(np.int64) >> 52 & 0x7FF
    return [int(count) for count in np.bincount(exponents - 1021)]


def _finite(change: Change, a: Block, b: Block, left: DType, right: DType) -> tuple[Any, ...]:
    """The elements that are finite on both sides, as numbers in double precision and as words."""
    x, y = numbers(a, left), numbers(b, right)
    rows = np.isfinite(x) & np.isfinite(y)
    change.nonfinite += int(len(rows) - np.count_nonzero(rows))
    for side, values in enumerate((x, y)):
        change.nan[side] += int(np.count_nonzero(np.isnan(values)))
        change.infinite[side] += int(np.count_nonzero(np.isinf(values)))
    return x[rows].astype(np.float64), y[rows].astype(np.float64), a[rows], b[rows]


def _has_values(dtype: DType) -> bool:
    return dtype.floating or dtype.name in INTEGERS
