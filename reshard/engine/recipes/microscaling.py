"""MXFP4 in groups of 32."""

from __future__ import annotations

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.engine.recipes.recipe import largest_of_blocks, rounded_to_bfloat16, spread
from reshard.geometry.dtypes import BF16, F32


def mxfp4(words: Block) -> tuple[Block, Block]:
    """The scale is a power of two: that of the largest magnitude of a group, rounded up from 1.75 on, over four."""
    values = cast(words, BF16, F32).view(np.float32)
    largest = cast(largest_of_blocks(values, (1, 32)).view(F32.word), F32, BF16).astype(np.int32)
    exponents = np.maximum(((largest + 32) >> 7) - 2, 0)
    scales = np.ldexp(np.float32(1), exponents - 127).astype(np.float32)
    with np.errstate(all="ignore"):
        quotients = np.clip(rounded_to_bfloat16(values / spread(scales, values, (1, 32))), -6, 6)
    # Half-way values go to the code whose last bit is zero.
    magnitudes = np.abs(quotients)
    codes = np.zeros(values.shape, np.uint8)
    for bound, is_closed in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        codes += (magnitudes >= bound) if is_closed else (magnitudes > bound)
    codes |= (quotients < 0).astype(np.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4, exponents.astype(np.uint8)
