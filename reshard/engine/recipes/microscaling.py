"""MXFP4 in groups of 32."""

from __future__ import annotations

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.engine.recipes.recipe import largest_of_blocks, rounded_to_bfloat16, spread
from reshard.geometry.dtypes import BF16, F32

_GROUP = 32
_MAGNITUDE = np.uint16(0x7FFF)
# (bound, whether the bound itself counts): a code is the number of bounds below a magnitude. Half-way values go to the code whose last bit
# is zero.
_BOUNDS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
# The exponents for which `_codes_by_words` holds.
_PLAIN = (3, 127)


def mxfp4_scales(words: Block) -> Block:
    """The scale is a power of two: that of the largest magnitude of a group, rounded up from 1.75 on, over four."""
    return _exponents(_largest(words)).astype(np.uint8)


def mxfp4_codes(words: Block) -> Block:
    """The quotients, rounded to the nearest code; two codes in each byte."""
    largest = _largest(words)
    exponents = _exponents(largest)
    exponents[largest == 0] = _PLAIN[0]  # every scale gives the same codes
    is_plain = int(exponents.min()) >= _PLAIN[0] and int(exponents.max()) <= _PLAIN[1]
    codes = (_codes_by_words if is_plain else _codes_by_values)(words, exponents)
    packed: Block = codes[:, 1::2] << np.uint8(4)
    packed |= codes[:, ::2]
    return packed


def _largest(words: Block) -> Block:
    """The largest magnitude of each group, as a bfloat16 word. The words of magnitudes are in the order of the magnitudes."""
    magnitudes = words & _MAGNITUDE
    if words.shape[1] % _GROUP:
        return largest_of_blocks(magnitudes, (1, _GROUP))
    # Two columns at a time: the result is that of all columns, and numpy works on long rows.
    width = _GROUP
    while width > 1:
        width //= 2
        magnitudes = np.maximum(magnitudes[:, ::2], magnitudes[:, 1::2])
    return magnitudes


def _exponents(largest: Block) -> Block:
    """The exponents of the scales. A NaN counts as infinity."""
    exponents: Block = np.minimum(largest, np.uint16(0x7FC0)).astype(np.int16)
    exponents = ((exponents + np.int16(32)) >> np.int16(7)) - np.int16(2)
    np.maximum(exponents, np.int16(0), out=exponents)
    return exponents


def _codes_by_words(words: Block, exponents: Block) -> Block:
    """The codes for scales from 2^-124 to 1: the word of a quotient is that of the value, with the exponent moved. Values without an
    exponent of their own are far below the first bound."""
    magnitudes = (words & _MAGNITUDE).view(np.int16)
    is_negative = words > np.uint16(0x8000)
    moves = (exponents - np.int16(127)) << np.int16(7)
    quotients = magnitudes - np.repeat(moves, _GROUP, axis=1)[:, : words.shape[1]]
    codes = is_negative.view(np.uint8) << np.uint8(3)
    for bound, is_closed in _BOUNDS:
        word = np.int16(np.float32(bound).view(np.uint32) >> 16)
        codes += (quotients > word - is_closed).view(np.uint8)
    return codes


def _codes_by_values(words: Block, exponents: Block) -> Block:
    values = cast(words, BF16, F32).view(np.float32)
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)
    with np.errstate(all="ignore"):
        quotients = np.clip(rounded_to_bfloat16(values / spread(scales, values.shape, (1, _GROUP))), -6, 6)
    magnitudes, codes = np.abs(quotients), np.zeros(values.shape, np.uint8)
    for bound, is_closed in _BOUNDS:
        codes += (magnitudes >= bound) if is_closed else (magnitudes > bound)
    return codes | (quotients < 0).astype(np.uint8) << 3
