"""FP8 in blocks of 128 x 128.

Codes are computed as 16-bit integers, because numpy handles 32 of them at once. The few values for which this does not work, such as those
below the smallest normal number of FP8, are looked up in a table.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from reshard.engine.casts import Block, cast, numpy_type
from reshard.engine.recipes.recipe import NotRepresentable, bfloat16_of, float32_of, largest_of_blocks, spread
from reshard.geometry.dtypes import BF16, F8, F32

_BLOCK = (128, 128)
_LARGEST_FP8 = np.float32(448)
# torch.finfo(torch.bfloat16).eps, 2^-7, which stands in for a scale of zero.
_EPSILON = np.uint16(0x3C00)
_MAGNITUDE = np.uint16(0x7FFF)
_NAN = np.uint8(0x7F)
# Words of bfloat16: the smallest normal number of FP8, 2^-6, and the largest number that is not above 448 when it is rounded.
_NORMAL, _FITS = np.uint16(0x3C80), np.uint16(0x43E7)
# (the bias of bfloat16's exponents, less that of FP8) in the place of bfloat16's exponents.
_BIAS = 120 << 7


def fp8_block(words: Block) -> tuple[Block, Block]:
    """The codes and scales of bfloat16 words.

    A scale is the largest magnitude of a block over 448, rounded to bfloat16. A code is the quotient, rounded to bfloat16 and then to FP8.
    Both are computed as torch computes them.
    """
    quotients = np.empty(words.shape, np.uint16)
    with np.errstate(all="ignore"):
        scales = bfloat16_of(float32_of(largest_of_blocks(words & _MAGNITUDE, _BLOCK)) / _LARGEST_FP8)
        scales[scales == 0] = _EPSILON
        values, divisors = float32_of(words), float32_of(np.repeat(scales, _BLOCK[1], axis=1)[:, : words.shape[1]])
        for row, by_column in enumerate(divisors):
            of_block = values[row * _BLOCK[0] : (row + 1) * _BLOCK[0]]
            of_block /= by_column
        np.copyto(quotients.view(numpy_type(BF16)), values, casting="unsafe")
    del values
    return _rounded(quotients), scales


def _rounded(words: Block) -> Block:
    """bfloat16 words rounded to FP8, ties to even."""
    magnitudes = words & _MAGNITUDE
    if magnitudes.max(initial=0) > _FITS:
        return np.take(_fp8_of_bfloat16(), words)
    small = np.flatnonzero(magnitudes < _NORMAL)
    if len(small) > words.size // 8:
        return np.take(_fp8_of_bfloat16(), words)
    odd = magnitudes >> np.uint16(4)
    odd &= np.uint16(1)
    magnitudes += odd
    magnitudes -= np.uint16(_BIAS - 7)
    magnitudes >>= np.uint16(4)
    codes = _with_signs(magnitudes, words)
    codes.reshape(-1)[small] = np.take(_fp8_of_bfloat16(), words.reshape(-1)[small])
    return codes


def _with_signs(magnitudes: Block, words: Block) -> Block:
    """FP8 words of these magnitudes, which are overwritten, with the signs of bfloat16 words."""
    signs = words >> np.uint16(8)
    signs &= np.uint16(0x80)
    magnitudes |= signs
    return magnitudes.astype(np.uint8)


@cache
def _fp8_of_bfloat16() -> Block:
    """The FP8 word of every bfloat16 word, clipped to the largest values."""
    values = cast(np.arange(1 << 16, dtype=np.uint32).astype(np.uint16), BF16, F32).view(np.float32)
    return cast(np.clip(values, -_LARGEST_FP8, _LARGEST_FP8).view(F32.word), F32, F8)


def exact_fp8_block(words: Block) -> tuple[Block, Block]:
    """Codes and scales that give the same values as the words, which are bfloat16 or float32. Raises NotRepresentable.

    A scale is the smallest power of two at which the largest magnitude of a block fits.
    """
    if words.itemsize == F32.itemsize:
        values = words.view(np.float32)
        return _exact(values, _exact_scales(largest_of_blocks(np.abs(values), _BLOCK)))
    magnitudes = words & _MAGNITUDE
    scales = _exact_scales(float32_of(largest_of_blocks(magnitudes, _BLOCK)))
    codes = _moved(words, magnitudes, np.frexp(scales)[1] - 1)
    return _exact(float32_of(words), scales) if codes is None else (codes, bfloat16_of(scales))


def _moved(words: Block, magnitudes: Block, exponents: Block) -> Block | None:
    """The codes of bfloat16 words over 2^exponents, if all that are not zero are normal numbers, also in FP8, whose bits hold them.

    The word of a quotient is then that of the value, with the exponent moved. Only from 2^-120 on, the test for small codes also finds the
    values that are not normal numbers of bfloat16.
    """
    if np.bitwise_or.reduce(words, axis=None) & 0xF or exponents.min() < -120:
        return None
    is_nonzero = magnitudes != 0
    moves = ((exponents << 7) + _BIAS).astype(np.int16)  # exponents are from -126 to 119
    codes = magnitudes.view(np.int16)
    for row, by_column in enumerate(np.repeat(moves, _BLOCK[1], axis=1)[:, : words.shape[1]]):
        of_block = codes[row * _BLOCK[0] : (row + 1) * _BLOCK[0]]
        of_block -= by_column
    is_small = codes < (1 << 7)
    is_small &= is_nonzero
    if is_small.any():
        return None
    codes >>= np.int16(4)
    codes *= is_nonzero
    return _with_signs(codes.view(np.uint16), words)


def _exact(values: Block, scales: Block) -> tuple[Block, Block]:
    with np.errstate(all="ignore"):
        quotients = values * spread(1 / scales, values.shape, _BLOCK)  # powers of two: exact, unless a quotient becomes 0
    halves = quotients.view(np.uint16)
    codes: Block = np.take(_exact_fp8_of_bfloat16(), halves[:, 1::2])
    if halves[:, ::2].any() or (codes == _NAN).any() or np.count_nonzero(quotients) != np.count_nonzero(values):
        raise NotRepresentable("have more bits, or span more powers of two, than FP8 holds with a power of two as the scale of a block")
    return codes, bfloat16_of(scales)


@cache
def _exact_fp8_of_bfloat16() -> Block:
    """The FP8 word of every bfloat16 word with the same value, and _NAN for others."""
    words = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    codes = _fp8_of_bfloat16()
    return np.where(cast(cast(codes, F8, F32), F32, BF16) == words, codes, _NAN)


def _exact_scales(largest: Block) -> Block:
    """The scales of blocks with these largest magnitudes, in float32."""
    if not np.isfinite(largest).all():
        raise NotRepresentable("are not all finite")
    exact = largest.astype(np.float64)
    _, exponents = np.frexp(exact / 448)
    exponents -= exact == np.ldexp(448.0, exponents - 1)  # 448 itself fits
    exponents[exact == 0] = 0
    scales: Block = np.ldexp(np.float32(1), np.maximum(exponents, -126)).astype(np.float32)
    return scales
