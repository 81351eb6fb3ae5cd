"""Products of two small matrices, in one order of operations, so that every machine and every division into blocks gives the same bits.

A matrix library adds the terms of a product in an order that depends on the processor and on the size of the block. Here the rule is

    delta = sum over k = 0, 1, ..., r - 1 of rows[:, k] * columns[k, :]      each product and each sum rounded to float32
    value = base + scale * delta                                            in float32, then rounded once to the element type
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
# The number of elements whose products stay in a processor's second-level cache. With fewer, Python's threads wait for each other more
# often.
_IN_CACHE = 1 << 16


def add_products(delta: Float32, rows: Float32 | None, columns: Float32) -> None:
    """Add rows[:, k] * columns[k, :] to `delta` for k = 0, 1, ...; rows of None are ones.

    delta: [m, n]. rows: [m, r]. columns: [r, n].
    """
    height, width = delta.shape
    step = max(1, _IN_CACHE // max(1, width))
    products = np.empty((min(step, height), width), np.float32)
    for start in range(0, height, step):
        part = delta[start : start + step]
        for k, column in enumerate(columns):
            if rows is None:
                part += column
                continue
            product = np.multiply(rows[start : start + step, k : k + 1], column, out=products[: len(part)])
            part += product


def row_lengths(values: Float32) -> Float32:
    """The Euclidean length of each row, computed in float64 and rounded once. values: [m, n]."""
    wide = values.astype(np.float64)
    lengths: Float32 = np.sqrt(np.add.reduce(wide * wide, axis=1)).astype(np.float32)
    return lengths
