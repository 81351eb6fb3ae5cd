"""Recipes with a scale for each group of input features: MXFP4 and MXFP8 of any element type, NVFP4.

Source: compressed-tensors 0.20 (calculate_qparams, generate_mx_scales, generate_gparam, cast_to_fp4), as llm-compressor 0.14 calls it.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.engine.origins import recipe
from reshard.engine.origins.recipe import (
    NotRepresentable,
    Recipe,
    check_finite,
    float32_of,
    fp4_codes,
    fp4_packed,
    fp8_of_moved,
    largest_of_groups,
    magnitudes_of,
    words_of,
)
from reshard.geometry.dtypes import BF16, F8, F16, F32, DType

_MX_GROUP, _NV_GROUP = 32, 16
# Bits of the mantissa, the bias of the exponents, and the exponent of the largest numbers.
_FLOATS = {BF16: (7, 127, 254), F16: (10, 15, 30), F32: (23, 127, 254)}
# floor(log2) of the largest code: 6 and 448.
_OFFSETS = {4: 2, 8: 8}
_LARGEST_FP4, _LARGEST_FP8 = np.float32(6), np.float32(448)
# Words of bfloat16. From 2^-95 on: over the scale of a group with this magnitude, a value without an exponent of its own is zero in FP8.
# To below 1.75 * 2^127, which is rounded up to a power of two that bfloat16 does not hold.
_PLAIN = np.uint16(32 << 7), np.uint16(0x7F60)
# A move of exponents to below all FP8 numbers.
_BEYOND = 127 << 7
# What stands in for a scale of zero.
_SMALLEST_SCALE = np.float32(0.125)

# ---- MX: scales are powers of two ----


def mxfp4(words: Block, dtype: DType = BF16, shared: np.float32 | None = None) -> tuple[Block, Block]:
    """The codes, two in each byte, and the exponents of groups of 32. Raises NotRepresentable for values of other types than bfloat16 that
    are not finite."""
    if dtype == BF16:
        return recipe.mxfp4(words)
    exponents = _exponents(largest_of_groups(magnitudes_of(words), _MX_GROUP), dtype, 4)
    return fp4_packed(fp4_codes(_over_powers(words, dtype, exponents))), exponents.astype(np.uint8)


def mxfp8(words: Block, dtype: DType = BF16, shared: np.float32 | None = None) -> tuple[Block, Block]:
    """The codes and the exponents of groups of 32. Raises NotRepresentable for values that are not finite.

    A scale is the power of two of the largest magnitude of a group, rounded up from 1.75 on, over 2^8. An example: the largest magnitude is
    1.8, so the scale is 2 / 256 = 2^-7, exponent 120. The weight 0.3 has the quotient 38.4, whose code is that of 40.
    """
    magnitudes = magnitudes_of(words)
    largest = largest_of_groups(magnitudes, _MX_GROUP)
    exponents = _exponents(largest, dtype, 8)
    if dtype != BF16 or largest.min(initial=_PLAIN[0], where=largest > 0) < _PLAIN[0] or largest.max(initial=0) >= _PLAIN[1]:
        return cast(_over_powers(words, dtype, exponents).view(F32.word), F32, F8), exponents.astype(np.uint8)
    # The word of a quotient is that of the value, with the exponent moved. For a group of zeros, any large exponent gives zeros.
    moves = (exponents - 7 << 7).astype(np.int16)
    moves[largest == 0] = _BEYOND
    moved = magnitudes.view(np.int16)
    moved -= np.repeat(moves, _MX_GROUP, axis=1)[:, : words.shape[1]]
    return fp8_of_moved(moved, words), exponents.astype(np.uint8)


def saturates(words: Block, scales: Block, dtype: DType) -> bool:
    """Whether the magnitudes of a group would need a larger scale than the type of the values has."""
    if dtype == BF16:
        return recipe.saturates(words, scales)
    mantissa, _, last = _FLOATS[dtype]
    return bool(words.size) and (int(magnitudes_of(words).max()) + (1 << mantissa - 2)) >> mantissa > last


def _exponents(largest: Block, dtype: DType, bits: int) -> Block:
    """The exponents of the scales of groups, as those of E8M0. largest: the largest magnitude of each."""
    check_finite(largest, dtype)
    mantissa, bias, last = _FLOATS[dtype]
    powers = (largest.astype(np.int32) + (1 << mantissa - 2)) >> mantissa
    exponents: Block = np.minimum(powers, last) - bias + 127 - _OFFSETS[bits]
    np.maximum(exponents, 0, out=exponents)
    # Without a power of two, the scale is 2^-127. float16 does not hold it, and then compressed-tensors takes 1.
    exponents[powers == 0] = 127 if dtype == F16 else 0
    return exponents


def _over_powers(words: Block, dtype: DType, exponents: Block) -> Block:
    """The values over the scales of their groups, in float32."""
    values = float32_of(words, dtype)
    _divide(values, np.ldexp(np.float32(1), exponents - 127).astype(np.float32), _MX_GROUP)
    return values


# ---- NVFP4: scales of E4M3, and a global one ----


def nvfp4(words: Block, dtype: DType = BF16, shared: np.float32 | None = None) -> tuple[Block, Block]:
    """The codes, two in each byte, and the scales of groups of 16, for a global scale.

    A scale is the largest magnitude of a group over 6, times the global scale, as E4M3. A code is the weight over (scale / global scale).
    """
    assert shared is not None, "the recipe has a global scale"
    with np.errstate(all="ignore"):
        largest = float32_of(largest_of_groups(magnitudes_of(words), _NV_GROUP), dtype)
        sixths = float32_of(words_of(largest / _LARGEST_FP4, dtype), dtype)
        scales = cast(np.minimum(sixths * shared, _LARGEST_FP8).view(F32.word), F32, F8)
        numbers = cast(scales, F8, F32).view(np.float32)
        is_zero = numbers == 0
        scales[is_zero], numbers[is_zero] = cast(_SMALLEST_SCALE.reshape(1).view(F32.word), F32, F8), _SMALLEST_SCALE
        values = float32_of(words, dtype)
        _divide(values, numbers / shared, _NV_GROUP)
    return fp4_packed(fp4_codes(values)), scales


def nvfp4_shared(largest: Block, dtype: DType) -> np.float32:
    """The global scale: 448 * 6 over the largest magnitude. As in torch, which multiplies by the reciprocal, both are rounded to the type
    of the values. It is 1 if that type does not hold it."""
    check_finite(largest, dtype)
    with np.errstate(all="ignore"):
        tiny = np.float32({F16: 2.0**-14}.get(dtype, 2.0**-126))
        reciprocal = float32_of(words_of(1 / np.maximum(float32_of(largest, dtype), tiny), dtype), dtype)
        scale = float32_of(words_of(reciprocal * (_LARGEST_FP8 * _LARGEST_FP4), dtype), dtype)[0]
    return np.float32(scale if np.isfinite(scale) else 1)


# The exponents of the powers of two that E4M3 holds.
_FIRST_POWER, _LAST_POWER = -9, 8


def exact_nvfp4(words: Block, dtype: DType = BF16, shared: np.float32 | None = None) -> tuple[Block, Block]:
    """Codes and scales that give the same values as MXFP4, in groups of 32 with scales that are powers of two. Raises NotRepresentable.

    The two groups of 16 get the same scale: the power of two at which their largest magnitude has the code of 4 or of 6. So the codes are
    those of MXFP4, unless its scale was larger than necessary. An example: exponents from -10 to 3 in all weights that share the global
    scale, which is then 2^(8 - 3) = 32. A group with the exponent -10 gets the scale 2^-10 * 32 = 2^-5.
    """
    assert shared is not None and dtype == BF16, "the values of MXFP4 are those of bfloat16"
    powers = _powers(largest_of_groups(magnitudes_of(words), _MX_GROUP))
    moved = np.clip(powers + int(np.frexp(shared)[1]) - 1, _FIRST_POWER, _LAST_POWER)
    scales = np.ldexp(np.float32(1), moved).astype(np.float32)
    quotients = float32_of(words)
    _divide(quotients, scales / shared, _MX_GROUP)
    codes = fp4_codes(quotients) | (words >> np.uint16(15)).astype(np.uint8) << 3  # also the sign of a zero
    if not np.array_equal(np.take(_fp4_values(), codes), quotients):
        raise NotRepresentable("span more powers of two than the scales of NVFP4 do, 2^-9 to 2^8, or are not those of MXFP4")
    return fp4_packed(codes), np.repeat(cast(scales.view(F32.word), F32, F8), _MX_GROUP // _NV_GROUP, axis=1)[
        :, : -(-words.shape[1] // _NV_GROUP)
    ]


def exact_nvfp4_shared(largest: Block, dtype: DType) -> np.float32:
    """The global scale: with it, the largest magnitude has the scale 2^8."""
    check_finite(largest, dtype)
    power = int(_powers(largest)[0]) if largest[0] else _LAST_POWER
    return np.float32(np.ldexp(1.0, -min(max(power - _LAST_POWER, -126), 126)))


def _powers(largest: Block) -> Block:
    """The exponents of the powers of two at which bfloat16 words have the codes of 4 to 6. Those of zero are 0."""
    exponents: Block = np.frexp(float32_of(largest))[1].astype(np.int32) - 3
    exponents[largest == 0] = 0
    return exponents


# ---- what they share ----


def _divide(values: Block, scales: Block, group: int) -> None:
    """Divide values [rows, columns], in place, by the scale of each group of columns."""
    with np.errstate(all="ignore"):
        values /= np.repeat(scales, group, axis=1)[:, : values.shape[1]]


@cache
def _fp4_values() -> Block:
    """The value of every code."""
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([positive, -positive])


RECIPES = {
    "mxfp4": Recipe((1, _MX_GROUP), mxfp4, saturates),
    "mxfp8": Recipe((1, _MX_GROUP), mxfp8),
    "nvfp4": Recipe((1, _NV_GROUP), nvfp4, shared=nvfp4_shared),
    "exact-nvfp4": Recipe((1, _MX_GROUP), exact_nvfp4, shared=exact_nvfp4_shared),
}
"""The recipes, by their names."""
