"""Recipe: how the codes and scales of a weight follow from its values, tile by tile; and how those of MXFP4 of bfloat16 and of FP8 do. The
other microscaled forms are in microscaled.py.

Everything is computed in the element type of the values, as llm-compressor 0.14 (model_free_ptq) does: each quotient is rounded to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Protocol

import numpy as np

from reshard.engine.casts import Block, cast, numpy_type
from reshard.engine.origins.decoded import spread
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, F8, F16, F32, DType
from reshard.geometry.value import value

# The most columns of a tile, because short runs take many calls, and about how many elements it has. Fewer would stay in a processor's
# cache, but Python's threads would wait for each other more often, before each operation of numpy.
_WIDEST, _ELEMENTS = 4096, 1 << 19
# The rows and columns of a tile where the files hold columns.
_IN_COLUMNS = (2048, 256)
_QUIET_NAN = 0x7FC0


class NotRepresentable(Exception):
    """Why values cannot be written in the form of a recipe, as the end of a sentence."""


class Quantize(Protocol):
    """How codes and scales follow from values."""

    def __call__(self, words: Block, dtype: DType = ..., shared: np.float32 | None = ...) -> tuple[Block, Block]:
        """The stored words of the codes and of the scales of whole blocks, [out, in].

        words: the values, elements of `dtype`. shared: the global scale; None for recipes without one.

        Raises: NotRepresentable for values that the form does not hold.
        """


@value
class Recipe:
    """How codes and scales follow from values."""

    block: tuple[int, int | None]
    """The elements along each axis that share a scale. None: all."""
    quantize: Quantize
    """What computes them."""
    saturates: Callable[[Block, Block, DType], bool] = lambda words, scales, dtype: False
    """Whether values of these words were too large for the form, so that its largest value stands for them. scales: those made of them."""
    shared: Callable[[Block, DType], np.float32] | None = None
    """The global scale by the largest magnitude, one word, of all weights that share it; None: the form has none."""

    def tiles(self, shape: tuple[int, ...], ranges: Sequence[range], *, in_columns: bool = False) -> Iterator[Box]:
        """The boxes of whole blocks of a weight [out, in] or [experts, out, in], each read at once, that hold the elements of `ranges`.

        ranges: one for each axis. in_columns: whether the elements of a column lie side by side, not those of a row.
        """
        width = self.block[1] or shape[-1]
        if in_columns:
            rows, columns = _IN_COLUMNS
        else:
            columns = min(shape[-1], _WIDEST)
            rows = -(-_ELEMENTS // max(1, columns, self.block[1] is None and width))
        steps = (*(1,) * (len(shape) - 2), _up(rows, self.block[0]), _up(columns, width))
        axes = (range(span.start // step * step, min(span.stop, size), step) for span, step, size in zip(ranges, steps, shape, strict=True))
        for offsets in product(*axes):
            yield Box(offsets, tuple(min(step, size - start) for step, start, size in zip(steps, offsets, shape, strict=True)))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def largest_of_blocks(magnitudes: Block, block: tuple[int, int | None]) -> Block:
    """The largest element of each block."""
    by_rows = magnitudes
    if block[1] is None:
        largest: Block = magnitudes.max(axis=1, keepdims=True)
        return largest
    if block[0] > 1:  # reduceat along the first axis takes 50 times as long
        by_rows = np.stack([magnitudes[row : row + block[0]].max(axis=0) for row in range(0, len(magnitudes), block[0])])
    return np.maximum.reduceat(by_rows, np.arange(0, magnitudes.shape[1], block[1]), axis=1)


def largest_of_groups(magnitudes: Block, group: int) -> Block:
    """The largest element of each group of columns, 16 or 32 of them. Words of magnitudes are in the order of the magnitudes."""
    if magnitudes.shape[1] % group:
        return largest_of_blocks(magnitudes, (1, group))
    largest, is_narrow = magnitudes, magnitudes.itemsize == 2
    if is_narrow:  # two words at a time, the second one in the high bits
        pairs = magnitudes.view(np.int32)
        largest = pairs << np.int32(16)
        np.maximum(largest, pairs, out=largest)
    # Two columns at a time: numpy works on long rows, and reduceat takes five times as long.
    while largest.shape[1] > magnitudes.shape[1] // group:
        largest = np.maximum(largest[:, ::2], largest[:, 1::2])
    return (largest >> np.int32(16)).astype(np.uint16) if is_narrow else largest


def bfloat16_of(values: Block) -> Block:
    """float32 values rounded to bfloat16, as words. For the few scales of a tile a call less counts more than for its values (`cast`)."""
    words: Block = values.astype(numpy_type(BF16)).view(BF16.word)
    words[np.isnan(values)] = _QUIET_NAN
    return words


def words_of(values: Block, dtype: DType) -> Block:
    """float32 values rounded to an element type, as words. The array may be `values` itself."""
    if dtype == BF16:
        return bfloat16_of(values)
    words: Block = values.astype(numpy_type(dtype), copy=False).view(dtype.word)
    return words


def float32_of(words: Block, dtype: DType = BF16) -> Block:
    """Words of an element type as float32 values, in a new array."""
    values: Block = words.view(numpy_type(dtype)).astype(np.float32)
    return values


def magnitudes_of(words: Block) -> Block:
    """The words of a floating-point type without their signs. They are in the order of the magnitudes."""
    magnitudes: Block = words & words.dtype.type((1 << 8 * words.itemsize - 1) - 1)
    return magnitudes


# ---- MXFP4 in groups of 32 ----

_GROUP = 32
_MAGNITUDE = np.uint16(0x7FFF)
# (bound, whether the bound itself counts): a code is the number of bounds below a magnitude. Half-way values go to the code whose last bit
# is zero.
_BOUNDS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
# The largest magnitudes that are below each bound, in float32 and as words of bfloat16.
_BELOW = tuple(np.nextafter(np.float32(bound), np.float32(0)) if is_closed else np.float32(bound) for bound, is_closed in _BOUNDS)
_BELOW_AS_WORDS = tuple(np.int16(int(below.view(np.uint32)) >> 16) for below in _BELOW)
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
    largest = largest_of_groups(magnitudes, _GROUP)
    exponents = _exponents(largest)
    scales = exponents.astype(np.uint8)
    exponents[largest == 0] = _PLAIN[0]  # every scale gives the same codes
    is_plain = int(exponents.min()) >= _PLAIN[0] and int(exponents.max()) <= _PLAIN[1]
    codes = _codes_by_words(words, magnitudes, exponents) if is_plain else _codes_by_values(words, exponents)
    return fp4_packed(codes), scales


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
    return _codes_of(quotients, _BELOW_AS_WORDS, words > np.uint16(0x8000))


def _codes_by_values(words: Block, exponents: Block) -> Block:
    values = float32_of(words)
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)
    with np.errstate(all="ignore"):
        quotients = values / spread(scales, (1, _GROUP), (1, _GROUP), Box.whole(values.shape))
        return fp4_codes(float32_of(bfloat16_of(quotients)))


def fp4_codes(values: Block) -> Block:
    """The nearest 4-bit codes of float32 values; larger ones have that of 6. The sign of a zero is lost, and that of other values is kept,
    as in cast_to_fp4 of compressed-tensors."""
    return _codes_of(np.abs(values), _BELOW, values < 0)


def _codes_of(magnitudes: Block, bounds: Sequence[np.generic], is_negative: Block) -> Block:
    """The 4-bit codes of magnitudes. is_negative: their signs; it is overwritten."""
    codes = is_negative.view(np.uint8)
    codes *= np.uint8(8)  # numpy shifts bytes twelve times as slowly
    is_above = np.empty(magnitudes.shape, np.bool_)
    for bound in bounds:
        np.greater(magnitudes, bound, out=is_above)
        codes += is_above.view(np.uint8)
    return codes


def fp4_packed(codes: Block) -> Block:
    """4-bit codes, two in each byte, the first one in the low bits."""
    pairs = np.ascontiguousarray(codes).view(np.uint16)
    pairs = pairs | pairs >> np.uint16(4)  # the second code of a pair is in the high byte
    return pairs.astype(np.uint8)


# ---- FP8 in blocks of 128 x 128, and by row ----

_BLOCK = (128, 128)
_LARGEST_FP8 = np.float32(448)
# torch.finfo(dtype).eps, which stands in for a scale of zero.
_EPSILON = {BF16: 2.0**-7, F16: 2.0**-10, F32: 2.0**-23}
_NAN = np.uint8(0x7F)
# (the bias of bfloat16's exponents, less that of FP8) in the place of bfloat16's exponents; and 464, the largest magnitude that is rounded
# to 448, without it.
_BIAS = 120 << 7
_LAST_MOVED = 0x43E8 - _BIAS


def fp8_block(words: Block, dtype: DType = BF16, shared: np.float32 | None = None) -> tuple[Block, Block]:
    """The codes and scales of blocks of 128 x 128.

    A scale is the largest magnitude of a block over 448, rounded to the type of the values. A code is the quotient, rounded to that type
    and then to FP8. Both are computed as torch computes them.

    An example with bfloat16: the largest magnitude of a block is 3.5, so its scale is 3.5 / 448 = 0.0078125 (2^-7). The weight 0.30078125
    has the quotient 38.5, and the nearest FP8 values are 36 and 40: the code is that of 40, 0x62, which is read as 40 * 2^-7 = 0.3125.
    """
    return _fp8(words, dtype, _BLOCK)


def fp8_channel(words: Block, dtype: DType = BF16, shared: np.float32 | None = None) -> tuple[Block, Block]:
    """The codes of whole rows, and a scale for each row, as those of `fp8_block`. Raises NotRepresentable for values that are not
    finite."""
    return _fp8(words, dtype, (1, None), is_finite=True)


def check_finite(magnitudes: Block, dtype: DType) -> None:
    """Raises NotRepresentable if a magnitude is infinite or NaN."""
    if magnitudes.size and magnitudes.max() >= np.array(np.inf, numpy_type(dtype)).view(dtype.word):
        raise NotRepresentable("are not all finite")


def _fp8(words: Block, dtype: DType, block: tuple[int, int | None], *, is_finite: bool = False) -> tuple[Block, Block]:
    """is_finite: whether other values are refused."""
    magnitudes = largest_of_blocks(magnitudes_of(words), block)
    if is_finite:
        check_finite(magnitudes, dtype)
    with np.errstate(all="ignore"):
        scales = words_of(float32_of(magnitudes, dtype) / _LARGEST_FP8, dtype)
        scales[scales == 0] = words_of(np.array([_EPSILON[dtype]], np.float32), dtype)
        values, divisors = float32_of(words, dtype), float32_of(scales, dtype)
        if block[1]:
            divisors = np.repeat(divisors, block[1], axis=1)[:, : words.shape[1]]
        if block[0] == 1:
            values /= divisors
        for row, by_column in enumerate(divisors if block[0] > 1 else ()):
            of_block = values[row * block[0] : (row + 1) * block[0]]
            of_block /= by_column
        return _fp8_of_quotients(values, dtype), scales


def _fp8_of_quotients(values: Block, dtype: DType) -> Block:
    """The codes of the quotients of two numbers of an element type, rounded to that type and then to FP8. The array is overwritten."""
    quotients = values.view(F32.word)
    if dtype == F16:
        quotients = words_of(values, F16)
    if dtype != BF16:
        return cast(quotients, dtype, F8)
    # No quotient of two numbers of 8 bits lies half-way between two others, nor does its float32.
    quotients += np.uint32(0x8000)
    quotients >>= np.uint32(16)
    rounded = quotients.astype(np.uint16)
    moved = magnitudes_of(rounded).view(np.int16)
    moved -= np.int16(_BIAS)
    return fp8_of_moved(moved, rounded) if moved.max(initial=0) <= _LAST_MOVED else cast(rounded, BF16, F8)


def fp8_of_moved(moved: Block, words: Block) -> Block:
    """The nearest FP8 codes of magnitudes that are words of bfloat16 with the bias of FP8's exponents, as int16; they are overwritten.
    Half-way values go to the even code. words: with their signs, also those of zeros.

    An example: 38.5 is 0x421a, less the bias 0x3c00: 0x061a. Its last four bits are rounded away: 0x62, the code of 40.
    """
    small = np.flatnonzero(moved < np.int16(1 << 7))
    of_small = _fp8_without_exponent(moved.reshape(-1)[small].astype(np.int32))
    is_odd = moved >> np.int16(4)
    is_odd &= np.int16(1)
    moved += is_odd
    moved += np.int16(7)
    moved >>= np.int16(4)
    moved.reshape(-1)[small] = of_small
    codes = words >> np.uint16(8)
    codes &= np.uint16(0x80)
    codes |= moved.view(np.uint16)
    return codes.astype(np.uint8)


def _fp8_without_exponent(moved: Block) -> Block:
    """The codes of magnitudes below the smallest normal number of FP8: their mantissas, moved to its exponent."""
    mantissas, places = (moved & 0x7F) | 0x80, np.minimum(5 - (moved >> 7), 15)
    codes: Block = (mantissas + (1 << places - 1) - 1 + (mantissas >> places & 1)) >> places
    return codes


def exact_fp8_block(words: Block, dtype: DType = BF16, shared: np.float32 | None = None) -> tuple[Block, Block]:
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

    An example: 0.3125 over the scale 2^-7 (exponent -7). Its word is 0x3ea0, of which the last four bits are 0. Moved by
    (-7 << 7) + (120 << 7) = 0x3880 it is 0x0620, and 0x0620 >> 4 = 0x62, the FP8 word of 40.
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
    signs = words >> np.uint16(8)
    signs &= np.uint16(0x80)
    signs |= codes.view(np.uint16)
    return signs.astype(np.uint8)


def _exact(values: Block, scales: Block) -> tuple[Block, Block]:
    with np.errstate(all="ignore"):
        # Powers of two: exact, unless a quotient becomes 0.
        quotients = values * spread(1 / scales, _BLOCK, _BLOCK, Box.whole(values.shape))
    halves = quotients.view(np.uint16)
    codes: Block = np.take(_exact_fp8_of_bfloat16(), halves[:, 1::2])
    if halves[:, ::2].any() or (codes == _NAN).any() or np.count_nonzero(quotients) != np.count_nonzero(values):
        raise NotRepresentable("have more bits, or span more powers of two, than FP8 holds with a power of two as the scale of a block")
    return codes, bfloat16_of(scales)


@cache
def _exact_fp8_of_bfloat16() -> Block:
    """The FP8 word of every bfloat16 word with the same value, and _NAN for others."""
    words = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    codes = cast(words, BF16, F8)
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
