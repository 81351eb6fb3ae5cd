"""FP8 in blocks of 128 x 128."""

from __future__ import annotations

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.engine.recipes.recipe import NotRepresentable, largest_of_blocks, rounded_to_bfloat16, spread
from reshard.geometry.dtypes import BF16, F8, F32

_LARGEST_FP8 = np.float32(448)
# torch.finfo(torch.bfloat16).eps, which stands in for a scale of zero.
_EPSILON = np.float32(2.0**-7)


def fp8_block(words: Block) -> tuple[Block, Block]:
    """The scale is the largest magnitude of a block over 448; both it and the quotients are rounded to bfloat16, as torch computes them."""
    values = cast(words, BF16, F32).view(np.float32)
    scales = rounded_to_bfloat16(largest_of_blocks(values, (128, 128)) / _LARGEST_FP8)
    scales[scales == 0] = _EPSILON
    quotients = np.clip(rounded_to_bfloat16(values / spread(scales, values, (128, 128))), -_LARGEST_FP8, _LARGEST_FP8)
    return cast(quotients.view(F32.word), F32, F8), cast(scales.view(F32.word), F32, BF16)


def exact_fp8_block(words: Block) -> tuple[Block, Block]:
    """The scale is the smallest power of two at which the largest magnitude of a block fits. Raises NotRepresentable."""
    values = words.view(np.float32)
    if not np.isfinite(values).all():
        raise NotRepresentable("are not all finite")
    largest = largest_of_blocks(values, (128, 128)).astype(np.float64)
    _, exponents = np.frexp(largest / 448)
    exponents -= largest == np.ldexp(448.0, exponents - 1)  # 448 itself fits
    exponents[largest == 0] = 0
    scales = np.ldexp(np.float32(1), np.maximum(exponents, -126)).astype(np.float32)
    by_element = spread(scales, values, (128, 128))
    with np.errstate(all="ignore"):
        codes = cast((values / by_element).view(F32.word), F32, F8)
        back = cast(codes, F8, F32).view(np.float32) * by_element
    if not np.array_equal(back.view(np.uint32), values.view(np.uint32)):
        raise NotRepresentable("span more powers of two than FP8 with one scale holds")
    return codes, cast(scales.view(F32.word), F32, BF16)
