"""How a block changed: the same numbers as plain numpy on the whole array, for every element type."""

import math

import numpy as np
import pytest

from reshard.engine.casts import cast
from reshard.geometry.dtypes import BF16, F32, from_torch
from reshard.measures import changes
from reshard.measures.changes import Change, change_of, sum_of, ulp_range

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def dtype(name):
    return from_torch(name, where="test")


def words(values, name):
    return cast(np.asarray(values, np.float64).view(np.uint64), dtype("float64"), dtype(name))


def numbers(block, name):
    return cast(block, dtype(name), dtype("float64")).view(np.float64)


def measured(left, right, left_name, right_name=None):
    return change_of(left, right, dtype(left_name), dtype(right_name or left_name))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("noise", [0, 1e-3, 1.0])
def test_the_sums_are_those_of_plain_numpy(name, noise, monkeypatch):
    monkeypatch.setattr(changes, "_STRIP", 301)  # with an odd number of elements
    random = np.random.default_rng(1)
    a = random.standard_normal(1000)
    left, right = words(a, name), words(a + noise * random.standard_normal(1000), name)
    x, y = numbers(left, name), numbers(right, name)
    change = measured(left, right, name)
    assert change.elements == 1000 and change.changed == (left != right).sum() and change.nonfinite == 0
    assert change.largest == pytest.approx(np.abs(y - x).max(), rel=1e-5)
    assert change.mean == pytest.approx(np.abs(y - x).mean(), rel=1e-5)
    assert change.relative == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-5)
    assert change.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-6)
    assert sum(change.ulps) == 1000 and (noise > 0 or change.ulps == [1000])


def neighbours(name):
    """All finite numbers of a type of at most 16 bits, in order, each once."""
    d = dtype(name)
    every = np.arange(1 << 8 * d.itemsize, dtype=np.uint64).astype(d.word)
    values = numbers(every, name)
    kept = np.isfinite(values)
    order = np.argsort(values[kept], kind="stable")
    sorted_words, sorted_values = every[kept][order], values[kept][order]
    first = np.append(True, np.diff(sorted_values) > 0)
    return sorted_words[first]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("distance", [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 100])
def test_ulps_count_the_numbers_between_both_whatever_their_signs(name, distance):
    row = neighbours(name)
    left, right = row[: len(row) - distance], row[distance:]
    bin_of = next(i for i in range(40) if ulp_range(i)[0] <= distance <= ulp_range(i)[1])
    for a, b in ((left, right), (right, left)):
        assert [i for i, count in enumerate(measured(a, b, name).ulps) if count] == [bin_of]


def test_ulps_of_wide_types():
    a = np.array([1.0, -1.0, 0.0, 1e-45, -1e-45], np.float32)
    b = np.nextafter(a, np.float32(2))
    assert measured(a.view("<u4"), b.view("<u4"), "float32").ulps == [0, 5]
    assert measured(np.array([0.0], "<f4").view("<u4"), np.array([-0.0], "<f4").view("<u4"), "float32").ulps == [1]
    far = measured(np.array([-3e38], "<f4").view("<u4"), np.array([3e38], "<f4").view("<u4"), "float32")
    assert ulp_range(len(far.ulps) - 1)[1] == 2**32


def test_numbers_that_are_not_finite_are_counted_and_left_out_of_the_sums():
    left = words([1, 2, math.nan, math.inf, 5], "bfloat16")
    right = words([1, math.nan, math.nan, math.inf, 7], "bfloat16")
    change = measured(left, right, "bfloat16")
    assert (change.changed, change.nonfinite, change.largest, change.left_squares) == (2, 3, 2.0, 26.0)
    assert (change.nan, change.infinite) == ([1, 2], [1, 1])
    change.add(measured(right, left, "bfloat16"))
    assert (change.nan, change.infinite) == ([3, 3], [2, 2])
    same = measured(left, left, "bfloat16")
    assert (same.changed, same.nonfinite, same.relative, same.cosine) == (0, 2, 0.0, 1.0)


def test_two_element_types_are_compared_as_values():
    left = np.array([1.0, 1.001, -3.0], np.float32).view("<u4")
    right = cast(left, F32, BF16)
    change = measured(left, right, "float32", "bfloat16")
    assert change.changed == 1 and 0 < change.largest < 0.004 and change.ulps == [3]


def test_integers_have_differences_and_no_ulps():
    change = measured(np.array([1, 2, 250], np.uint8), np.array([1, 5, 0], np.uint8), "uint8")
    assert (change.changed, change.largest, change.ulps) == (2, 250.0, [])


def test_a_tiny_change_of_direction_is_seen():
    a = np.random.default_rng(2).standard_normal(100_000).astype(np.float32)
    b = a.copy()
    b[0] += 1e-3
    change = measured(a.view("<u4"), b.view("<u4"), "float32")
    exact = 1e-6 / 2 / float(np.sum(np.square(a, dtype=np.float64)))
    assert 1 - change.cosine == pytest.approx(exact, rel=0.05)


def test_a_tensor_that_was_zero_has_an_infinite_relative_change():
    zero, one = words([0, 0], "float32"), words([0, 1], "float32")
    assert measured(zero, one, "float32").relative == math.inf and measured(zero, one, "float32").cosine is None
    assert measured(zero, zero, "float32").relative == 0


def test_the_sum_of_several_changes_is_the_change_of_all_elements():
    random = np.random.default_rng(3)
    blocks = [(words(random.standard_normal(n), "bfloat16"), words(random.standard_normal(n), "bfloat16")) for n in (10, 1, 77)]
    parts = [measured(a, b, "bfloat16") for a, b in blocks]
    total = measured(*(np.concatenate(side) for side in zip(*blocks, strict=True)), "bfloat16")
    found = sum_of("", parts)
    assert found.ulps == total.ulps and found.tensors == 3
    assert found.relative == pytest.approx(total.relative) and found.mean == pytest.approx(total.mean)
    assert Change().relative == 0


def test_the_longest_distances_of_a_narrow_type_have_their_bin():
    """From the largest negative number to the largest positive one: 2 x 0x7F7F numbers of bfloat16."""
    left, right = np.full(10, 0xFF7F, np.uint16), np.full(10, 0x7F7F, np.uint16)
    left[0], right[0] = 0, 0x8000  # both zeros are one number
    right[1] = 0x8000 | 0x7F7F
    counts = change_of(left, right, BF16, BF16).ulps
    assert counts == [2, *[0] * 16, 8] and sum(counts) == 10
