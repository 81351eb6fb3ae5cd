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

# Elements that are computed at once.
_AT_ONCE = 1 << 18
# The unit roundoff of float32, with what covers products of it and the rounding of `half` itself; the other operations of an element; and
# the most terms for which this holds.
_ROUNDOFF, _OTHERS, _LONGEST = 1.01 * 2.0**-24, 10, 1 << 14
# The least reach, so that the interval holds the error of numbers that are too small for the relative accuracy of float32. And numbers that
# are far from its end.
_SHORT, _LARGE = np.float32(2.0**-50), 2.0**100
# If more than one element in so many is uncertain, the rule is faster for all.
_FEW = 4


@np.errstate(all="ignore")
def merged_words(base: Float32, rows: Float32, columns: Float32, scale: float, of_columns: Float32) -> Block:
    """The bfloat16 words of base + scale * (rows x columns).

    base: [m, n]. rows: [m, r]. columns: [r, n]. of_columns: [n], the reach of each column.
    """
    result = np.empty(base.shape, BF16.word)
    step = max(1, _AT_ONCE // max(1, base.shape[1]))
    for start in range(0, len(base), step):
        part = slice(start, start + step)
        if not _fill(result[part], base[part], rows[part], columns, scale, of_columns):
            delta = np.zeros(base[part].shape, np.float32)
            add_products(delta, rows[part], columns)
            delta *= np.float32(scale)
            delta += base[part]
            cast(delta.view(F32.word), F32, BF16, result[part])
    return result


def _fill(result: Block, base: Float32, rows: Float32, columns: Float32, scale: float, of_columns: Float32) -> bool:
    """Fill `result` with the words. Returns whether it did: not for huge numbers, or many uncertain elements."""
    of_rows = reach(rows)
    largest = float(of_rows.max(initial=0)) * float(of_columns.max(initial=0)) * max(1.0, abs(scale))
    if not (largest < _LARGE and len(columns) <= _LONGEST):
        return False
    half = np.multiply(np.maximum(of_rows * np.float32(abs(scale) * _ROUNDOFF), _SHORT)[:, None], of_columns)
    upper = np.matmul(rows * np.float32(scale), columns)
    lower = upper - half
    upper += half
    lower += base
    upper += base
    if not (float(lower.min(initial=0)) > -_LARGE and float(upper.max(initial=0)) < _LARGE):
        return False
    cast(upper.view(F32.word), F32, BF16, result)
    uncertain = np.flatnonzero(result != cast(lower.view(F32.word), F32, BF16))
    if len(uncertain) > result.size // _FEW:
        return False
    values = _by_rule(base, rows, columns, scale, uncertain)
    result.reshape(-1)[uncertain] = cast(values.view(F32.word), F32, BF16)
    return True


@np.errstate(all="ignore")
def reach(vectors: Float32) -> Float32:
    """The reach of each row. vectors: [vectors, numbers in each]."""
    squares = np.cumsum(np.square(vectors, dtype=np.float64), axis=1)
    lengths: Float32 = np.sqrt(squares.sum(axis=1) + (squares.shape[1] + _OTHERS) * squares[:, -1]).astype(np.float32)
    return np.maximum(lengths, _SHORT)


def _by_rule(base: Float32, rows: Float32, columns: Float32, scale: float, places: Block) -> Float32:
    """The values of single elements."""
    in_rows, in_columns = np.divmod(places, base.shape[1])
    delta = np.zeros(len(places), np.float32)
    products = np.take(rows.T, in_rows, axis=1, mode="clip")
    products *= np.take(columns, in_columns, axis=1, mode="clip")
    for product in products:
        delta += product
    delta *= np.float32(scale)
    delta += base.reshape(-1)[places]
    return delta
