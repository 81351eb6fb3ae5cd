"""Exact sums: the mean of 2, 4, 8 ... bfloat16 numbers in float32, which takes half of the time of float64 and gives the same bits.

An average is defined in float64 (mixed.py). If each of n weights is 2^-k, only the sums can be inexact. Let 2^e be the power of two
below the smallest number of an element, and 2^E that below the largest: all numbers are multiples of 2^(e - 7), and no sum of them reaches
n * 2^(E + 1). Such numbers have at most 24 bits if E - e <= 16 - log2(n). Then float32 and float64 hold every sum exactly, and both are
rounded to bfloat16 from the same number. The few elements whose exponents lie further apart are left to float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reshard.engine.casts import Block, cast, numpy_type
from reshard.geometry.dtypes import BF16, F32

_MOST_INPUTS = 1 << 12
_EXPONENT, _STEP = np.uint16(0x7F80), 1 << 7
# The largest exponent at which the sum of _MOST_INPUTS numbers is finite in float32.
_LARGEST = np.uint16((254 - 13) * _STEP)


def is_exact(weights: Sequence[float]) -> bool:
    """Whether `exact_sums` can be used: all weights are one power of two, from 2^-12 to 1."""
    fraction, exponent = math.frexp(weights[0])
    return {*weights} == {weights[0]} and fraction == 0.5 and -12 < exponent <= 1 and len(weights) <= _MOST_INPUTS


def exact_sums(weight: float, inputs: Block, result: Block) -> npt.NDArray[np.intp]:
    """Fill `result` with the words of the sums of weight * input in bfloat16. Returns the positions of elements that may be wrong.

    inputs: the words of bfloat16 elements, [n, elements].
    """
    values = np.empty(inputs.shape, np.float32)
    np.copyto(values, inputs.view(numpy_type(BF16)))
    sums = values[0]
    for of_input in values[1:]:
        np.add(sums, of_input, out=sums)
    np.multiply(sums, np.float32(weight), out=sums)

    exponents = np.bitwise_and(inputs, _EXPONENT)
    largest = np.maximum.reduce(exponents)
    is_doubtful = np.greater(largest, _LARGEST)
    np.subtract(largest, np.minimum.reduce(exponents), out=largest)
    furthest = np.uint16((16 - math.ceil(math.log2(len(inputs)))) * _STEP)
    doubtful = np.flatnonzero(np.logical_or(is_doubtful, np.greater(largest, furthest), out=is_doubtful))
    sums[doubtful] = 0  # so that none is counted twice as too large
    cast(sums.view(F32.word), F32, BF16, result)
    return doubtful
