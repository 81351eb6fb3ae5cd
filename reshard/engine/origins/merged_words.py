"""Merged words: base + scale * (rows x columns) in bfloat16 by a matrix library, with the bits of the rule in geometry/low_rank.py.

The rule fixes the order of all operations, and a matrix library has its own. Both results differ from the exact one by at most `half`
below. Additions and casts keep the order of numbers: if both ends of the interval around the result of the library give the same bfloat16
word, then the rule gives that word too. The few other elements are computed by the rule.

With u = 2^-24, vectors r and c of n numbers, and |r| for a length:

    library    by any order, fused or not, each product takes part in at most n roundings: n * u * |r| * |c|
    rule       each product is rounded, then each sum of the first k products: u * |r| * |c| + the sum over k of u * |r[:k]| * |c[:k]|
    half       |scale| times both; by Cauchy's inequality at most |scale| * u * reach(r) * reach(c), where
               reach(r)^2 = the sum over k of |r[:k]|^2, plus (n + _OTHERS) * |r|^2

An example with rank 64: row and column have the lengths 0.1 and 0.2, the scale is 2, so `half` is about 100 * 2^-24 * 0.04 = 2^-21.9.
bfloat16 numbers from 0.016 to 0.031 are 2^-13 apart, so that one of 240 elements there has a border between two words in its interval.
"""

from __future__ import annotations

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.geometry.dtypes import BF16, F32
from reshard.geometry.low_rank import Float32, add_products
from reshard.geometry.value import value

# Elements that are computed at once.
_AT_ONCE = 1 << 18
# The unit roundoff of float32, with what covers products of it and the rounding of `half` itself; the other operations of an element; and
# the most terms for which this holds.
_ROUNDOFF, _OTHERS, _LONGEST = 1.01 * 2.0**-24, 10, 1 << 14
# The least reach, so that the interval holds the error of numbers that are too small for the relative accuracy of float32. And numbers that
# are far from its end.
_SHORT, _LARGE = np.float32(2.0**-50), 2.0**100
# If more than one element in four is uncertain, it is faster to compute all elements by the rule.
_FEW = 4
# How many of them are computed at once, and how many numbers of a vector are fetched together: one fetch takes as long as that of one.
_PLACES, _RUN = 1 << 13, 8


@value
class FactorColumns:
    """The factor of the columns, as it is kept for a tensor, or some columns of it."""

    values: Float32
    """[r, n]."""
    reach: Float32
    """[n], the reach of each column."""
    packed: Float32
    """[r / 8, n, 8]: eight numbers of a column lie side by side."""

    @classmethod
    def of(cls, values: Float32) -> FactorColumns:
        return cls(values, reach(values.T), _packed(values.T))

    def narrow(self, span: slice) -> FactorColumns:
        """Some of the columns."""
        return FactorColumns(self.values[:, span], self.reach[span], self.packed[:, span])


@np.errstate(all="ignore")
def merged_words(base: Float32, rows: Float32, columns: FactorColumns, scale: float) -> Block:
    """The bfloat16 words of base + scale * (rows x columns).

    base: [m, n]. rows: [m, r]. columns: n of them.
    """
    result = np.empty(base.shape, BF16.word)
    step = max(1, _AT_ONCE // max(1, base.shape[1]))
    for start in range(0, len(base), step):
        part = slice(start, start + step)
        if not _fill(result[part], base[part], rows[part], columns, scale):
            delta = np.zeros(base[part].shape, np.float32)
            add_products(delta, rows[part], columns.values)
            delta *= np.float32(scale)
            delta += base[part]
            cast(delta.view(F32.word), F32, BF16, result[part])
    return result


def _fill(result: Block, base: Float32, rows: Float32, columns: FactorColumns, scale: float) -> bool:
    """Fill `result` with the words. Returns whether it did: not for huge numbers, or many uncertain elements."""
    of_rows = reach(rows)
    largest = float(of_rows.max(initial=0)) * float(columns.reach.max(initial=0)) * max(1.0, abs(scale))
    if not (largest < _LARGE and len(columns.values) <= _LONGEST):
        return False
    half = np.multiply(np.maximum(of_rows * np.float32(abs(scale) * _ROUNDOFF), _SHORT)[:, None], columns.reach)
    upper = np.matmul(rows * np.float32(scale), columns.values)
    lower = np.subtract(upper, half)
    upper += half
    lower += base
    upper += base
    if not (float(lower.min(initial=0)) > -_LARGE and float(upper.max(initial=0)) < _LARGE):
        return False
    uncertain = _round(lower.view(F32.word), upper.view(F32.word), result)
    if len(uncertain) > result.size // _FEW:
        return False
    values = _by_rule(base, rows, columns, scale, uncertain)
    result.reshape(-1)[uncertain] = cast(values.view(F32.word), F32, BF16)
    return True


def _round(lower: Block, upper: Block, result: Block) -> Block:
    """Round float32 words to the nearest bfloat16 words. Both are overwritten. Returns the places of those that may differ from the words
    of some number between the two: where the words of the two differ, or one of the two lies half-way between two words."""
    upper += np.uint32(0x8000)
    lower += np.uint32(0x8000)
    is_uncertain = upper.astype(np.uint16) == 0
    is_uncertain |= lower.astype(np.uint16) == 0
    lower ^= upper
    is_uncertain |= lower > np.uint32(0xFFFF)
    np.right_shift(upper, np.uint32(16), out=upper)
    result[...] = upper
    return np.flatnonzero(is_uncertain)


@np.errstate(all="ignore")
def reach(vectors: Float32) -> Float32:
    """The reach of each row. vectors: [vectors, numbers in each]."""
    numbers = vectors.shape[1]
    taken = np.arange(numbers, 0, -1) + float(numbers + _OTHERS)  # how often each square is in the sum
    lengths: Float32 = np.sqrt(np.square(vectors, dtype=np.float64) @ taken).astype(np.float32)
    return np.maximum(lengths, _SHORT)


def _packed(vectors: Float32) -> Float32:
    """Vectors in runs of eight numbers, filled up with zeros: [runs, vectors, 8]. Adding a zero changes no sum that began with zero."""
    runs = np.zeros((-(-vectors.shape[1] // _RUN), len(vectors), _RUN), np.float32)
    for number, run in enumerate(runs):
        part = vectors[:, number * _RUN : (number + 1) * _RUN]
        run[:, : part.shape[1]] = part
    return runs


def _by_rule(base: Float32, rows: Float32, columns: FactorColumns, scale: float, places: Block) -> Float32:
    """The values of single elements."""
    result, of_rows = np.zeros(len(places), np.float32), _packed(rows)
    for start in range(0, len(places), _PLACES):
        in_rows, in_columns = np.divmod(places[start : start + _PLACES], base.shape[1])
        delta = result[start : start + _PLACES]
        for row_run, column_run in zip(of_rows, columns.packed, strict=True):
            products = np.take(row_run, in_rows, axis=0, mode="clip")
            products *= np.take(column_run, in_columns, axis=0, mode="clip")
            for product in np.ascontiguousarray(products.T):
                delta += product
    result *= np.float32(scale)
    result += base.reshape(-1)[places]
    return result
