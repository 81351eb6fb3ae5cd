"""Casts give torch's bits for every value that is not a NaN, and the quiet NaN for every NaN."""

from itertools import product

import numpy as np
import pytest

from reshard.engine.casts import cast, decoded
from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.dtypes import DType, from_torch

SOURCES = tuple(
    from_torch(name, where="")
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
)  # fmt: skip
TARGETS = tuple(dtype for dtype in SOURCES if dtype.name != "F8_E8M0")
F64, F32, F16, BF16, F8 = SOURCES[:5]
I64, I32 = from_torch("int64", where=""), from_torch("int32", where="")
NAN = {
    "F64": 0x7FF8 << 48, "F32": 0x7FC0 << 16, "F16": 0x7E00, "BF16": 0x7FC0, "F8_E4M3": 0x7F, "F8_E5M2": 0x7E, "F8_E4M3FNUZ": 0x80,
    "F8_E5M2FNUZ": 0x80,
}  # fmt: skip
# Zeros, subnormal numbers, infinities, the largest numbers, and ties between neighbours of bfloat16.
SPECIAL = (
    0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F7F8000, 0x00008000, 0x00018000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001,
)  # fmt: skip


def elements(dtype: DType) -> np.ndarray:
    """All words of a type of at most 16 bits; of a wider type random words, random values around the limits of narrow types, and ties."""
    if dtype.itemsize <= 2:
        return np.arange(1 << 8 * dtype.itemsize).astype(dtype.word)
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0, scale, 20_000) for scale in (1e-8, 1e-6, 1e-3, 1, 100, 400, 500, 60_000, 70_000)])
    ties = np.concatenate([np.array(SPECIAL, np.uint32), (rng.integers(0, 1 << 16, 20_000) << 16 | 0x8000).astype(np.uint32)])
    if dtype == F32:
        return np.concatenate([rng.integers(0, 1 << 32, 300_000, np.uint32), values.astype(np.float32).view(np.uint32), ties])
    with np.errstate(invalid="ignore"):
        near_ties = ties.view(np.float32).astype(np.float64) * (1 + 2.0**-30)
    return np.concatenate([rng.integers(0, 1 << 64, 300_000, np.uint64), values.view(np.uint64), near_ties.view(np.uint64)])


def by_torch(words: np.ndarray, source: DType, target: DType) -> tuple[np.ndarray, np.ndarray]:
    """(the words that torch computes, where the values are NaN)."""
    torch = pytest.importorskip("torch", reason="torch's own casts are what is expected")
    values = torch.from_numpy(words.view(np.uint8)).view(getattr(torch, source.torch))
    result = values.to(getattr(torch, target.torch)).view(torch.uint8).numpy().view(target.word)
    return result, torch.isnan(values.float()).numpy()


@pytest.mark.distinct
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(("source", "target"), [pair for pair in product(SOURCES, TARGETS) if pair[0] != pair[1]], ids=str)
def test_every_finite_value_is_cast_as_torch_casts_it(source, target):
    words = elements(source)
    result = cast(words, source, target)
    expected, is_nan = by_torch(words, source, target)
    assert np.array_equal(result[~is_nan], expected[~is_nan])
    assert set(result[is_nan].tolist()) <= {NAN[target.name]}


@pytest.mark.parametrize("target", [F64, F16, BF16, F8], ids=str)
def test_a_nan_becomes_the_quiet_nan(target):
    """It does so wherever the NaN lies in a strip, and without torch."""
    words = np.array([0x3F800000] * 140_000, np.uint32)
    words[[0, 139_999]] = 0x7F800001, 0xFFFFFFFF
    result = cast(words, F32, target)
    assert result[0] == result[-1] == NAN[target.name] and len(set(result[1:-1].tolist())) == 1


def test_shapes_are_kept():
    for target in (BF16, F16, F8):
        assert cast(np.zeros((3, 0, 2), np.uint32), F32, target).shape == (3, 0, 2)
        assert cast(np.zeros((), np.uint32), F32, target).shape == ()


def test_too_large_values_saturate_in_fp8():
    words = np.array([1e9, -1e9, 449, np.inf], np.float32).view(np.uint32)
    assert cast(words, F32, F8).tolist() == [0x7E, 0xFE, 0x7E, 0x7E]


def test_quantized_elements_are_multiplied_in_float32_and_cast_once():
    words = np.array([[0x38, 0x39], [0x7F, 0xB8]], np.uint8)  # 1, 1.125; NaN, -1 in F8_E4M3
    codes, factors = cast(words, F8, F32).view(np.float32), np.array([[3], [np.inf]], np.float32)
    assert decoded(codes, None, factors, F32).view(np.float32)[0].tolist() == [3, 3.375]
    assert decoded(codes, None, factors, F32)[1].tolist() == [NAN["F32"], 0xFF800000]
    assert decoded(codes, None, factors, BF16)[0].tolist() == [0x4040, 0x4058]


def test_integers_keep_their_values_and_are_never_wrapped():
    values = np.array([-7, 0, 8, 2**31 - 1], "<i8")
    assert cast(values.view(I64.word), I64, I32).view("<i4").tolist() == values.tolist()
    with pytest.raises(CheckpointError, match=r"reach from 0 to 2147483648, and I32 holds -2147483648 to 2147483647"):
        cast(np.array([0, 2**31], "<i8").view(I64.word), I64, I32)
    for source, target in ((F32, I32), (I32, F32)):
        with pytest.raises(UnsupportedError, match=r"[Aa] cast from .* is needed"):
            cast(np.zeros(2, source.word), source, target)


@pytest.mark.parametrize("source, target", [("int8", "uint8"), ("float8_e8m0fnu", "uint8"), ("uint8", "int8")])
def test_bytes_of_packed_codes_and_exponents_are_not_changed(source, target):
    block = np.arange(256, dtype=np.uint8)
    found = cast(block, from_torch(source, where="test"), from_torch(target, where="test"))
    assert found.tobytes() == bytes(range(256))
