"""FP8 in blocks of 128 x 128."""

from __future__ import annotations

from functools import cache

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.engine.recipes.recipe import NotRepresentable, largest_of_blocks, rounded_to_bfloat16, spread
from reshard.geometry.dtypes import BF16, F8, F32

_BLOCK = (128, 128)
_LARGEST_FP8 = np.float32(448)
# torch.finfo(torch.bfloat16).eps, which stands in for a scale of zero.
_EPSILON = np.float32(2.0**-7)
_MAGNITUDE = np.uint16(0x7FFF)
_NAN = np.uint8(0x7F)


def fp8_block_scales(words: Block) -> Block:
    """The scale is the largest magnitude of a block over 448, rounded to bfloat16, as torch computes it."""
    return cast(_scales(words).view(F32.word), F32, BF16)


def fp8_block_codes(words: Block) -> Block:
    """The quotients, rounded to bfloat16 and then to FP8, as torch computes them."""
    values = cast(words, BF16, F32).view(np.float32)
    with np.errstate(all="ignore"):
        values /= spread(_scales(words), values.shape, _BLOCK)
    codes: Block = np.take(_fp8_of_bfloat16(), cast(values.view(F32.word), F32, BF16))
    return codes


def _scales(words: Block) -> Block:
    """The scales of the blocks of bfloat16 words, in float32. The words of magnitudes are in the order of the magnitudes."""
    largest = cast(largest_of_blocks(words & _MAGNITUDE, _BLOCK), BF16, F32).view(np.float32)
    scales = rounded_to_bfloat16(largest / _LARGEST_FP8)
    scales[scales == 0] = _EPSILON
    return scales


@cache
def _fp8_of_bfloat16() -> Block:
    """The FP8 word of every bfloat16 word, clipped to the largest values."""
    values = cast(np.arange(1 << 16, dtype=np.uint32).astype(np.uint16), BF16, F32).view(np.float32)
    return cast(np.clip(values, -_LARGEST_FP8, _LARGEST_FP8).view(F32.word), F32, F8)


def exact_fp8_block_scales(words: Block) -> Block:
    """The scale is the smallest power of two at which the largest magnitude of a block fits."""
    return cast(_exact_scales(words.view(np.float32)).view(F32.word), F32, BF16)


def exact_fp8_block_codes(words: Block) -> Block:
    """The codes that give the same values. Raises NotRepresentable."""
    values = words.view(np.float32)
    scales = _exact_scales(values)
    with np.errstate(all="ignore"):
        quotients = values * spread(1 / scales, values.shape, _BLOCK)  # powers of two: exact, unless a quotient becomes 0
    halves = quotients.view(np.uint16)
    codes: Block = np.take(_exact_fp8_of_bfloat16(), halves[:, 1::2])
    if halves[:, ::2].any() or (codes == _NAN).any() or np.count_nonzero(quotients) != np.count_nonzero(values):
        raise NotRepresentable("span more powers of two than FP8 with one scale holds")
    return codes


@cache
def _exact_fp8_of_bfloat16() -> Block:
    """The FP8 word of every bfloat16 word with the same value, and _NAN for others."""
    words = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    codes = _fp8_of_bfloat16()
    return np.where(cast(cast(codes, F8, F32), F32, BF16) == words, codes, _NAN)


def _exact_scales(values: Block) -> Block:
    largest = largest_of_blocks(np.abs(values), _BLOCK).astype(np.float64)
    if not np.isfinite(largest).all():
        raise NotRepresentable("are not all finite")
    _, exponents = np.frexp(largest / 448)
    exponents -= largest == np.ldexp(448.0, exponents - 1)  # 448 itself fits
    exponents[largest == 0] = 0
    scales: Block = np.ldexp(np.float32(1), np.maximum(exponents, -126)).astype(np.float32)
    return scales
