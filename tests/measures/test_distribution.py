"""The distribution of a block: the same numbers as plain numpy on the whole array, for every element type."""

import math

import numpy as np
import pytest

from reshard.engine.casts import cast
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import from_torch
from reshard.measures.distribution import ValueDistribution, measure_distribution

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def dtype(name):
    return from_torch(name, where="test")


def words(values, name):
    return cast(np.asarray(values, np.float64).view(np.uint64), dtype("float64"), dtype(name))


def measured(block, name):
    return measure_distribution([(Box.whole(block.shape), block)], dtype(name), block.shape)


@pytest.mark.parametrize("name", FLOATS)
def test_the_numbers_are_those_of_plain_numpy(name):
    values = np.random.default_rng(1).standard_normal((50, 64))
    values[3] = 0
    values[7] = 0.5
    block = words(values, name).reshape(values.shape)
    exact = cast(block, dtype(name), dtype("float64")).view(np.float64)
    found = measured(block, name)
    assert (found.elements, found.nan, found.inf, found.rows, found.constant_rows) == (3200, 0, 0, 50, 2)
    assert found.zeros == (exact == 0).sum()
    assert (found.smallest, found.largest) == (exact.min(), exact.max())
    assert found.mean == pytest.approx(exact.mean(), abs=1e-6) and found.deviation == pytest.approx(exact.std(), rel=1e-5)
    expected, _ = np.histogram(exact, bins=8)
    histogram = found.histogram(dtype(name), 8)
    assert sum(histogram) == 3200 and np.abs(np.array(histogram) - expected).max() <= (0 if dtype(name).itemsize <= 2 else 30)


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
def test_numbers_that_are_not_finite_are_counted_apart(name):
    found = measured(words([1, math.nan, math.inf, -math.inf, -3, 0], name), name)
    assert (found.nan, found.inf, found.zeros, found.finite) == (1, 2, 1, 3)
    assert (found.smallest, found.largest, found.total, found.squares) == (-3, 1, -2, 10)
    nothing = measured(words([math.nan], name), name)
    assert nothing.mean is None and nothing.deviation is None and nothing.histogram(dtype(name), 4) == []


def test_parts_add_up_to_the_whole():
    block = words(np.random.default_rng(2).standard_normal(3000), "bfloat16")
    whole = measured(block, "bfloat16")
    sums = ValueDistribution()
    for part in (block[:100], block[100:2000], block[2000:2400], block[2400:]):
        sums.add(measured(part, "bfloat16"))
    assert sums.histogram(dtype("bfloat16"), 16) == whole.histogram(dtype("bfloat16"), 16)
    assert sums.total == pytest.approx(whole.total) and sums.elements == 3000


def test_integers_have_extremes_and_no_histogram():
    found = measured(np.array([[0, 5], [250, 250]], np.uint8), "uint8")
    assert (found.smallest, found.largest, found.zeros, found.constant_rows) == (0, 250, 1, 1)
    assert found.histogram(dtype("uint8"), 4) == []
    assert measured(np.array([-3, 4], np.int64).view(np.uint64), "int64").smallest == -3
