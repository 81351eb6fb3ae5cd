"""MXFP4 in groups of 32."""

from __future__ import annotations

import numpy as np

from reshard.engine.casts import Block
from reshard.engine.recipes.recipe import bfloat16_of, float32_of, largest_of_blocks, spread

_GROUP = 32
_MAGNITUDE = np.uint16(0x7FFF)
# (bound, whether the bound itself counts): a code is the number of bounds below a magnitude. Half-way values go to the code whose last bit
# is zero.
_BOUNDS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
# The largest words of bfloat16 that are below each bound.
_BELOW = tuple(np.int16((int(np.float32(bound).view(np.uint32)) >> 16) - is_closed) for bound, is_closed in _BOUNDS)
# The exponents for which `_codes_by_words` holds.
_PLAIN = (3, 127)
# The exponent of the scale 2^125, which holds up to 6 x 2^125. That of 2^126 holds no larger finite value, since 4 x 2^126 is infinite; for
# magnitudes from _BEYOND to below _INFINITY llm-compressor 0.14 takes it, and writes zeros.
_LAST = 252
_BEYOND, _INFINITY = np.uint16(0x7F60), np.uint16(0x7F80)


def mxfp4(words: Block) -> tuple[Block, Block]:
    """The codes, two in each byte, and scales of bfloat16 words.

    A scale is a power of two: that of the largest magnitude of a group, rounded up from 1.75 on, over four. A code is the quotient, rounded
    to the nearest code.
    """
    magnitudes = words & _MAGNITUDE
    largest = _largest(magnitudes)
    exponents = _exponents(largest)
    scales = exponents.astype(np.uint8)
    exponents[largest == 0] = _PLAIN[0]  # every scale gives the same codes
    is_plain = int(exponents.min()) >= _PLAIN[0] and int(exponents.max()) <= _PLAIN[1]
    codes = _codes_by_words(words, magnitudes, exponents) if is_plain else _codes_by_values(words, exponents)
    pairs = codes.view(np.uint16)
    pairs |= pairs >> np.uint16(4)  # the second code of a pair is in the high byte
    return pairs.astype(np.uint8), scales


def _largest(magnitudes: Block) -> Block:
    """The largest magnitude of each group, as a bfloat16 word. The words of magnitudes are in the order of the magnitudes."""
    if magnitudes.shape[1] % _GROUP:
        return largest_of_blocks(magnitudes, (1, _GROUP))
    # Two words at a time, the second one in the high bits; then two columns at a time: numpy works on long rows.
    pairs = magnitudes.view(np.int32)
    largest = pairs << np.int32(16)
    np.maximum(largest, pairs, out=largest)
    width = _GROUP // 2
    while width > 1:
        width //= 2
        largest = np.maximum(largest[:, ::2], largest[:, 1::2])
    return (largest >> np.int32(16)).astype(np.uint16)


def _exponents(largest: Block) -> Block:
    """The exponents of the scales. A NaN counts as infinity."""
    exponents: Block = np.minimum(largest, np.uint16(0x7FC0)).astype(np.int16)
    exponents = ((exponents + np.int16(32)) >> np.int16(7)) - np.int16(2)
    np.maximum(exponents, np.int16(0), out=exponents)
    exponents[_is_beyond(largest)] = _LAST
    return exponents


def saturates(words: Block, scales: Block) -> bool:
    """Whether `mxfp4` has written a smaller magnitude than the nearest code would be, which is infinite."""
    return bool(scales.size) and int(scales.max()) >= _LAST and bool(_is_beyond(words & _MAGNITUDE).any())


def _is_beyond(magnitudes: Block) -> Block:
    return (magnitudes >= _BEYOND) & (magnitudes < _INFINITY)


def _codes_by_words(words: Block, magnitudes: Block, exponents: Block) -> Block:
    """The codes for scales from 2^-124 to 1: the word of a quotient is that of the value, with the exponent moved. Values without an
    exponent of their own are far below the first bound. magnitudes: of the words; they are overwritten."""
    quotients = magnitudes.view(np.int16)
    quotients -= np.repeat((exponents - np.int16(127)) << np.int16(7), _GROUP, axis=1)[:, : words.shape[1]]
    codes = (words > np.uint16(0x8000)).view(np.uint8)
    codes <<= np.uint8(3)
    is_above = np.empty(words.shape, np.bool_)
    above = is_above.view(np.uint8)
    for word in _BELOW:
        np.greater(quotients, word, out=is_above)
        codes += above
    return codes


def _codes_by_values(words: Block, exponents: Block) -> Block:
    values = float32_of(words)
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)
    with np.errstate(all="ignore"):
        quotients = np.clip(float32_of(bfloat16_of(values / spread(scales, values.shape, (1, _GROUP)))), -6, 6)
    magnitudes, codes = np.abs(quotients), np.zeros(values.shape, np.uint8)
    for bound, is_closed in _BOUNDS:
        codes += (magnitudes >= bound) if is_closed else (magnitudes > bound)
    return codes | (quotients < 0).astype(np.uint8) << 3
