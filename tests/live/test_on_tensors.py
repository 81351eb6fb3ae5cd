"""Casts, functions and recipes on tensors give the bits of those on arrays, which `convert` uses: for every word of 16 bits, and for words
of 32 and 64 bits at random and beside each tie.
"""

import numpy as np
import pytest
import torch

from reshard.engine.casts import cast
from reshard.engine.origins.encoded import RECIPES
from reshard.engine.origins.on_tensors import TENSOR_RECIPES, cast_tensor, torch_type
from reshard.errors import UnsupportedError
from reshard.geometry.dtypes import BF16, F32, from_safetensors

TYPES = [from_safetensors(name, where="") for name in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")]


def words_of(dtype):
    random = np.random.default_rng(0)
    if dtype.itemsize <= 2:
        return np.arange(1 << 8 * dtype.itemsize, dtype=np.uint64).astype(dtype.word)
    if dtype.itemsize == 4:
        upper = np.arange(1 << 16, dtype=np.uint32) << 16
        lower = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
        return np.concatenate([*(upper | each for each in lower), random.integers(0, 1 << 32, 50_000, dtype=np.uint32)])
    values = random.standard_normal(50_000) * 10.0 ** random.integers(-45, 45, 50_000)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, 65504, 65520])
    return np.concatenate([values, special]).view(np.uint64)


def tensor_of(words, dtype):
    return torch.from_numpy(words.view(np.uint8).copy()).view(torch_type(dtype)).view(words.shape)


def words_in(tensor, dtype):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().view(dtype.word).reshape(tensor.shape)


@pytest.mark.parametrize("source", TYPES, ids=str)
@pytest.mark.parametrize("target", TYPES, ids=str)
def test_a_cast_gives_the_bits_of_convert(source, target):
    words = words_of(source)
    assert np.array_equal(words_in(cast_tensor(tensor_of(words, source), source, target), target), cast(words, source, target))


@pytest.mark.parametrize("source", [BF16, F32], ids=str)
@pytest.mark.parametrize("target", [F32, BF16], ids=str)
@pytest.mark.parametrize("function", ["-exp", "x-1"])
def test_a_function_gives_the_bits_of_convert(function, source, target):
    words, held = words_of(source), target.of(function)
    with np.errstate(all="ignore"):
        expected = cast(words, source, held)
    assert np.array_equal(words_in(cast_tensor(tensor_of(words, source), source, held), held), expected)


@pytest.mark.parametrize("source", [BF16, F32], ids=str)
def test_a_weight_follows_from_itself_minus_one_and_not_from_minus_exp(source):
    words = words_of(source)
    held = source.of("x-1")
    for target in (BF16, F32):
        with np.errstate(all="ignore"):
            expected = cast(words, held, target)
        assert np.array_equal(words_in(cast_tensor(tensor_of(words, source), held, target), target), expected)
    with pytest.raises(UnsupportedError, match="-exp"):
        cast_tensor(tensor_of(words, source), source.of("-exp"), F32)


# Values of blocks, as words of bfloat16.
KINDS = {
    "any": lambda random, shape: random.integers(0, 1 << 16, shape),
    "normal": lambda random, shape: random.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16,
    "zero": lambda random, shape: np.zeros(shape, np.int64),
    "subnormal": lambda random, shape: random.integers(0, 1 << 16, shape) & 0x807F,
    "finite": lambda random, shape: random.integers(0, 0x7F80, shape) | random.integers(0, 2, shape) << 15,
    "infinite": lambda random, shape: np.where(random.random(shape) < 0.01, 0x7F80, 0x3F80),
    "saturating": lambda random, shape: np.where(random.random(shape) < 0.01, 0x7F7F, 0xFF00),
}


@pytest.mark.parametrize("shape", [(128, 128), (256, 300), (5, 7), (130, 129), (384, 640), (1, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_blocks_of_tensors_are_those_of_arrays(kind, shape):
    words = KINDS[kind](np.random.default_rng(1), shape).astype(np.uint16)
    expected = RECIPES["fp8-block"].quantize(words.copy())
    for made, of_arrays in zip(TENSOR_RECIPES["fp8-block"], expected, strict=True):
        found = made(tensor_of(words, BF16))
        assert np.array_equal(found.contiguous().view(torch.uint8).numpy().view(of_arrays.dtype).reshape(of_arrays.shape), of_arrays)


def test_strided_values_have_the_codes_of_contiguous_ones():
    whole = torch.randn(256, 384).to(torch.bfloat16)
    for part in (whole[:, 128:256], whole.t()[128:, :128]):
        for made in TENSOR_RECIPES["fp8-block"]:
            assert torch.equal(made(part).view(torch.uint8), made(part.contiguous()).view(torch.uint8))
