"""Functions of weights (reshard/geometry/functions.py): the nearest float32 number to the exact value, on every machine."""

import json
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES

from reshard.engine.casts import cast
from reshard.geometry import functions
from reshard.geometry.dtypes import F32, can_cast, from_safetensors

BF16, A = from_safetensors("BF16", where=""), F32.of("-exp")
EXACT = Context(prec=60, Emin=-(10**6), Emax=10**6)


def ulps(values):
    """Float32 numbers of one sign as whole numbers: neighbours differ by 1."""
    return values.view(np.int32).astype(np.int64) & 0x7FFFFFFF


def is_nearest(x, result):
    """Whether no float32 number is nearer to -exp(x) than `result`. An infinite result counts as 2^128."""
    exact = Fraction(EXACT.exp(Decimal(float(x))))
    word = int(ulps(np.array([result], np.float32))[0])
    around = [number(each) for each in (word - 1, word, word + 1) if 0 <= each <= 0x7F800000]
    return abs(number(word) - exact) == min(abs(each - exact) for each in around)


def number(word):
    return Fraction(2) ** 128 if word == 0x7F800000 else Fraction(float(np.array([word], np.uint32).view(np.float32)[0]))


def test_values_of_every_bfloat16_number_are_the_nearest_ones():
    words = np.arange(1 << 16, dtype=np.uint32)
    values = (words << 16).view(np.float32)
    values = values[(np.abs(values) > 2.0**-27) & (np.abs(values) < 110)]
    results = functions.values_of("-exp", values)
    assert (results <= 0).all()
    assert all(map(is_nearest, values, results))


def test_values_that_float64_does_not_decide_are_the_nearest_ones():
    """The neighbours of 0 lie next to the middle of two results."""
    near_zero = [
        sign * (2.0**exponent + step * 2.0 ** (exponent - 23)) for exponent in (-25, -24, -23) for step in range(4) for sign in (1, -1)
    ]
    random = np.random.default_rng(0).integers(0, 1 << 32, 3000, np.uint32).view(np.float32)
    values = np.concatenate([np.array(near_zero, np.float32), random[np.abs(random) < 110]])
    assert all(map(is_nearest, values, functions.values_of("-exp", values)))


def test_more_digits_are_computed_where_float64_is_unsure(monkeypatch):
    """With every value counted as unsure, the results are the same."""
    values = np.random.default_rng(1).uniform(-100, 88, 300).astype(np.float32)
    expected = functions.values_of("-exp", values)
    monkeypatch.setattr(functions, "UNSURE", 1e-6)
    assert np.array_equal(functions.values_of("-exp", values), expected)


@pytest.mark.parametrize(
    ("x", "expected"),
    [(0.0, 0xBF800000), (-0.0, 0xBF800000), (np.inf, 0xFF800000), (-np.inf, 0x80000000), (np.nan, 0x7FC00000), (89, 0xFF800000),
     (-104, 0x80000000), (-103.5, 0x80000001)],
)  # fmt: skip
def test_ends_of_the_range(x, expected):
    assert cast(np.array([x], "<f4").view("<u4"), F32, A).tolist() == [expected]


def test_a_cast_computes_the_function_once_and_rounds_once():
    words = np.random.default_rng(2).integers(0, 1 << 16, 64, np.uint16).reshape(8, 8) & 0xBFFF
    of_bf16, of_f32 = cast(words, BF16, A), cast(cast(words, BF16, F32), F32, A)
    assert of_bf16.shape == (8, 8)
    assert np.array_equal(of_bf16, of_f32)
    assert np.array_equal(cast(of_f32, A, A.of("-exp")), of_f32)
    assert np.array_equal(cast(of_f32, A, BF16.of("-exp")), cast(words, BF16, BF16.of("-exp")))


def test_torch_is_at_most_one_unit_in_the_last_place_away():
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(3).uniform(-100, 88, 1 << 18).astype(np.float32)
    theirs = (-torch.exp(torch.from_numpy(values))).numpy()
    assert np.abs(ulps(theirs) - ulps(functions.values_of("-exp", values))).max() <= 1


def test_the_list_of_what_torch_rounds_otherwise_is_complete_for_the_processor_that_it_was_made_on():
    """fixtures/vllm_declared is compared by this list: each entry is one unit in the last place."""
    apart = json.loads((FIXTURES / "functions/exp.json").read_text())["apart"]
    assert 0 < len(apart) < 100
    assert set(apart.values()) == {1, -1}


@pytest.mark.parametrize("units", [6, -6])
def test_the_result_does_not_depend_on_the_last_bits_of_float64(units, monkeypatch):
    """As on a machine whose exp is some units in the last place away."""
    exp = np.exp
    monkeypatch.setattr(np, "exp", lambda x: exp(x) * (1 + units * 2.0**-53))
    values = np.array([sign * step * 2.0**-27 for step in range(1, 64) for sign in (1, -1)], np.float32)
    assert all(map(is_nearest, values, functions.values_of("-exp", values)))


def test_a_norm_minus_one_is_rounded_once_in_either_direction():
    """The words of bfloat16 as they are computed by Python's exact numbers."""
    minus_one = BF16.of("x-1")
    words = np.arange(1 << 16, dtype=np.uint16)
    values = cast(words, BF16, F32).view("<f4").astype(np.float64)
    usual = (np.abs(values) < 2**20) & ((values == 0) | (np.abs(values) > 2**-20))  # there float64 has the sum exactly
    for source, target, added in ((BF16, minus_one, -1), (minus_one, BF16, 1)):
        expected = cast((values[usual] + added).astype(np.float32).view(F32.word), F32, BF16)
        assert np.array_equal(cast(words[usual], source, target), expected)
    whole = (values >= 0.5) & (values <= 256)
    assert np.array_equal(cast(cast(words[whole], BF16, minus_one), minus_one, BF16), words[whole]), "nothing is lost there"
    assert np.array_equal(cast(words, minus_one, minus_one.of("x-1")), words)
    assert can_cast(minus_one, F32)
    assert not can_cast(A, F32)
