"""Casts: values in another element type, with the bits that torch 2.13 produces for every value that is not a NaN.

Each cast is a few numpy operations on words, or a look-up in a table of all values of 16 bits. Their intermediate results stay in the
processor's cache. A NaN becomes the quiet NaN of the target type, with a positive sign. (torch's NaNs depend on the processor: its code for
AVX2 and its scalar code give bfloat16 NaNs with different bits.)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.errors import CheckpointError, UnsupportedError, ValuesOverflow, some
from reshard.geometry.dtypes import BF16, F32, F64, DType, are_same_bytes
from reshard.geometry.functions import values_of, weights_of
from reshard.geometry.quantities import plural

Block = npt.NDArray[Any]
Overflow = Counter[tuple[str, DType]]
"""How many finite values of tensors a cast makes infinite, by the name and the type to which they are cast."""

_NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U64": "u8", "U32": "u4", "U16": "u2",
          "U8": "u1", "BOOL": "?", "C64": "c8", "C128": "c16"}  # fmt: skip
# The number of elements whose intermediate results stay in a processor's cache.
_STRIP = 1 << 17
# The largest values of types to which torch 2.13 casts with saturation.
_SATURATING = {"F8_E4M3": 448.0}
_QUIET_BF16, _INFINITY_F32 = 0x7FC0, 0x7F800000


def cast(block: Block, source: DType, target: DType, out: Block | None = None) -> Block:
    """The values of a block in another element type, rounded to nearest, ties to even. Returns `block` itself if the types are equal,
    or name the same bytes (dtypes.are_same_bytes).

    block: words of `source`. out: a row-major array of words of `target` for the result, which is a new array without it. Values that are
    too large become 448 in F8_E4M3, infinite in a type that has infinity, and otherwise NaN; `values_beyond` counts them. If the target's
    elements are the values of a
    function, it is computed in float32. The source's must not be, unless the function is invertible (dtypes.can_cast).

    Raises: CheckpointError for an integer that the target cannot hold, UnsupportedError for a cast between integers and floating point.
    """
    if are_same_bytes(source, target):
        return block
    if not (source.floating and target.floating):
        return _integers(block, source, target, out)
    if source.function == target.function != "":
        return cast(block, source.of(""), target.of(""), out)
    if source.function or target.function:
        wide = cast(block, source.of(""), F32).reshape(-1).view("<f4")
        values = weights_of(source.function, wide) if source.function else wide
        values = values_of(target.function, values) if target.function else values
        values[np.isnan(values)] = np.nan
        return cast(values.view(F32.word).reshape(block.shape), F32, target.of(""), out)
    words = block.reshape(-1)
    result = np.empty(len(words), target.word) if out is None else out.reshape(-1)
    with np.errstate(all="ignore"):
        convert, first = _CASTS.get((source.name, target.name)) or _other_cast(source, target), _first_beyond(source, target)
        for start in range(0, len(words), _STRIP):
            strip, out = words[start : start + _STRIP], result[start : start + _STRIP]
            convert(strip, out)
            _count_beyond(strip, out, source, first)
    return result.reshape(block.shape)


def values_beyond() -> int:
    """The number of finite values that were too large for their target in the casts of this thread since it was last asked."""
    count, _TEMPORARY.beyond = _TEMPORARY.beyond, 0
    return count


def overflow(counts: Overflow, do: str) -> ValuesOverflow:
    """The error for values that a cast makes infinite."""
    return ValuesOverflow(about_beyond(counts), why="The model would compute with them, and nothing was committed", do=do)


def about_beyond(counts: Overflow) -> str:
    """A sentence on values that a cast makes infinite."""
    total, types = sum(counts.values()), dict.fromkeys(dtype for _, dtype in sorted(counts))
    huge = np.array([np.finfo(np.float64).max]).view(F64.word)
    become = dict.fromkeys(f"{float(cast(huge, F64, dtype.of('')).view(numpy_type(dtype))[0]):g}" for dtype in types)
    values_beyond()
    verbs = ("is", "becomes") if total == 1 else ("are", "become")
    return (
        f"{plural(total, 'element')} of {plural(len(counts), 'tensor')} {verbs[0]} beyond {', '.join(dtype.torch for dtype in types)} and "
        f"{verbs[1]} {' or '.join(become)}: {some([f'{name} ({counts[name, dtype]:,})' for name, dtype in sorted(counts)])}"
    )


def _count_beyond(words: Block, cast_words: Block, source: DType, first: int) -> None:
    """Count the finite values from the word `first` on, of both signs. cast_words: what the cast has made of them."""
    sign, infinite = 1 << 8 * source.itemsize - 1, _first_beyond(source, source)
    if first == infinite or not _may_be_infinite(cast_words):
        return
    sizes = np.bitwise_and(words, words.dtype.type(sign - 1))
    _TEMPORARY.beyond += int(np.count_nonzero((sizes >= first) & (sizes < infinite)))


def _may_be_infinite(words: Block) -> bool:
    """Whether words that lie in the cache may hold an infinity or NaN. It is asked of each strip, so it is two reductions."""
    infinite = {2: 0x7C00, 4: 0x7F800000}.get(words.itemsize, 0)  # as bfloat16, a large number may be one
    if not infinite or not len(words):
        return True
    signed = words.view(f"<i{words.itemsize}")
    return bool(np.maximum.reduce(signed) >= infinite or np.maximum.reduce(words) >= infinite + (1 << 8 * words.itemsize - 1))


@cache
def _first_beyond(source: DType, target: DType) -> int:
    """The smallest word of a positive value that is too large for another type; that of infinity if it holds all finite values."""
    first, stop = 0, int(np.array([np.inf]).astype(numpy_type(source)).view(source.word)[0])
    while first < stop and source != target:
        middle = (first + stop) // 2
        values = np.array([middle], source.word).view(numpy_type(source))
        with np.errstate(all="ignore"):
            narrow = (values.astype(np.float32) if target.itemsize < 4 else values).astype(numpy_type(target))
        first, stop = (middle + 1, stop) if np.isfinite(narrow[0]) else (first, middle)
    return stop


def cast_once(values: npt.NDArray[np.float64], target: DType) -> Block:
    """The words of float64 values in another floating-point type: one rounding, to nearest, ties to even. (`cast` rounds float64 twice on
    the way to a type of at most 16 bits, as torch does.) Values that are too large become what `cast` makes of them.

    If the target's elements are the values of a function, the values are rounded to float32, and the function is computed of that.
    """
    words = np.ascontiguousarray(values).view(F64.word)
    if target.function:
        return cast(cast(words, F64, F32), F32, target)
    if target.itemsize >= 4:
        return cast(words, F64, target)
    result, flat = np.empty(values.shape, target.word), values.reshape(-1)
    narrow = result.reshape(-1)
    # The value of the first float32 beyond the type: from there on, a float64 is rounded up.
    first = int(np.array([_first_beyond(F32, target)], F32.word).view("<f4").astype("<f8").view(F64.word)[0])
    with np.errstate(all="ignore"):
        convert = _CASTS.get((F32.name, target.name)) or _other_cast(F32, target)
        for start in range(0, flat.size, _STRIP):
            strip, out = flat[start : start + _STRIP], narrow[start : start + _STRIP]
            convert(_float32_for_cast(strip, target), out)
            _count_beyond(strip.view(F64.word), out, F64, first)
    return result


def _float32_for_cast(values: npt.NDArray[np.float64], target: DType) -> Block:
    """The words of float32 values whose cast to a type of at most 16 bits is that of the float64 values. The next call overwrites them.

    Rounding to nearest keeps the order of values: a float32 on one side of a tie of the narrow type comes from a value on that side. Only
    a float32 that is a tie can come from a value beside the tie; then the next float32 on the side of the value is taken. An example with
    bfloat16, whose numbers from 1 to 2 are 2^-7 apart: 1 + 2^-8 + 2^-60 becomes the tie 1 + 2^-8 in float32, which would be rounded to 1.
    From 1 + 2^-8 + 2^-23 instead, it becomes 1 + 2^-7.
    """
    words, last_bits = _TEMPORARY.rounded[: len(values)], _TEMPORARY.words[: len(values)]
    narrowed = words.view("<f4")
    np.copyto(narrowed, values, casting="unsafe")
    # The last bits of every tie of bfloat16; and of ties of float16, which have at most 11 bits after the first one, and of 8-bit types.
    mask, tie = (0xFFFF, 0x8000) if target == BF16 else (0xFFF, 0)
    is_tie = np.equal(np.bitwise_and(words, np.uint32(mask), out=last_bits), np.uint32(tie))
    if is_tie.any():
        at = np.flatnonzero(np.logical_and(is_tie, np.not_equal(values, narrowed)))
        if len(at):
            is_larger = np.abs(values[at]) > np.abs(narrowed[at])
            words[at] += np.where(is_larger, np.uint32(1), np.uint32(0xFFFFFFFF))
    return words


def _integers(block: Block, source: DType, target: DType, out: Block | None) -> Block:
    """The same integers in another integer type."""
    kinds = {"I": "i", "U": "u"}
    if source.floating or target.floating or source.name[0] not in kinds or target.name[0] not in kinds:
        raise UnsupportedError(
            f"a cast from {source} to {target} is needed",
            why="Values are cast between floating-point types, and between integer types",
            do="Save the tensor in the element type that the target has",
        )
    values = block.view(f"<{kinds[source.name[0]]}{source.itemsize}")
    limits = np.iinfo(f"{kinds[target.name[0]]}{target.itemsize}")
    if values.size and not (limits.min <= int(values.min()) and int(values.max()) <= limits.max):
        raise CheckpointError(
            f"its values reach from {values.min()} to {values.max()}, and {target} holds {limits.min} to {limits.max}",
            why="The target stores this tensor as such integers, and others would be changed without a message",
        )
    result = np.empty(block.shape, target.word) if out is None else out.reshape(block.shape)
    result[...] = values.astype(limits.dtype).view(target.word)
    return result


def decoded(codes: Block, zeros: Block | None, factors: Block, target: DType) -> Block:
    """The values of quantized elements, (code - zero point) * factor: computed in float32 and cast once. All are float32 arrays; numpy
    broadcasts the others to the codes. The differences of codes of at most 8 bits are exact.

    Source: DeepSeek's fp8_cast_bf16.py, transformers, compressed-tensors, GPTQModel and AutoAWQ give the same bits.
    """
    with np.errstate(all="ignore"):
        if zeros is None:
            values = np.ascontiguousarray(codes * factors)
        else:
            values = np.ascontiguousarray(codes - zeros)
            values *= factors
    if target == F32:
        values[np.isnan(values)] = np.nan
    return cast(values.view(F32.word), F32, target)


def decoded_affine(codes: Block, factors: Block, biases: Block, rounded: DType, target: DType) -> Block:
    """The values of quantized elements, code * factor + bias. The product and the sum are both rounded to the element type `rounded`, that
    of the stored factors and biases. All are float32 arrays; numpy broadcasts the others to the codes.

    Source: MLX 0.32.4, mlx.core.dequantize on the CPU gives the same bits for 2 to 8 bits in bfloat16, float16 and float32.
    """

    def as_rounded(values: Block) -> Block:
        words = cast(np.ascontiguousarray(values).view(F32.word), F32, rounded)
        return words if rounded == target else cast(words, rounded, F32).view(np.float32)

    with np.errstate(all="ignore"):
        product = cast(cast(np.ascontiguousarray(codes * factors).view(F32.word), F32, rounded), rounded, F32).view(np.float32)
        sums = as_rounded(product + biases)
    return sums if rounded == target else cast(np.ascontiguousarray(sums).view(F32.word), F32, target)


class _Temporary(threading.local):
    """Intermediate results of one thread, which stay in its processor's cache."""

    def __init__(self) -> None:
        self.words, self.exponents, self.rounded = (np.empty(_STRIP, np.uint32) for _ in range(3))
        self.beyond = 0


_TEMPORARY = _Temporary()
_HALF_ONES, _ONES = np.uint32(0xFFFF), np.uint32(0x7FFFFFFF)


def _float32_to_bfloat16(strip: Block, out: Block) -> None:
    np.copyto(out.view(numpy_type(BF16)), strip.view("<f4"), casting="unsafe")
    # ml_dtypes keeps the sign of a NaN: these are the largest words.
    if np.maximum.reduce(out) > 0xFF80:
        out[out > 0xFF80] = _QUIET_BF16


def _float32_to_float16(strip: Block, out: Block) -> None:
    """Add to each value the power of two that leaves only the bits of the result in the sum, so that the processor rounds it."""
    words, exponents = _TEMPORARY.words[: len(strip)], _TEMPORARY.exponents[: len(strip)]
    np.bitwise_and(strip, _ONES, out=words)
    has_nan = np.maximum.reduce(words) > _INFINITY_F32
    np.clip(words, np.uint32(0), np.uint32(0x47800000), out=words)  # 65536, which becomes infinity; `minimum` takes twice as long
    np.bitwise_and(words, np.uint32(_INFINITY_F32), out=exponents)
    # Below 2**-14, the smallest normal number, all numbers have the distance of the numbers there.
    np.clip(exponents, np.uint32(113 << 23), np.uint32(_INFINITY_F32), out=exponents)
    np.add(exponents, np.uint32(13 << 23), out=exponents)  # the last bit of 2**(e + 13) in float32 is that of 2**e in float16
    np.add(words.view("<f4"), exponents.view("<f4"), out=words.view("<f4"))
    np.subtract(words, exponents, out=words)  # the bits of the mantissa; 1024 is the implicit one
    np.right_shift(exponents, np.uint32(13), out=exponents)
    np.add(words, exponents, out=words)
    np.right_shift(strip, np.uint32(16), out=exponents)
    np.bitwise_and(exponents, np.uint32(0x8000), out=exponents)
    np.add(words, exponents, out=words)
    np.subtract(words, np.uint32((113 + 13) << 10), out=words)
    out[...] = words
    if has_nan:
        out[np.bitwise_and(strip, _ONES) > _INFINITY_F32] = 0x7E00


def _float32_by_table(table: Block, strip: Block, out: Block) -> None:
    """Look up the upper halves of the words. If a lower half is not zero, the upper one becomes odd, so that it lies on the same side of
    every tie of the target type, which has at most 5 bits of mantissa. table: by the words of bfloat16."""
    words = _TEMPORARY.words[: len(strip)]
    np.bitwise_and(strip, _HALF_ONES, out=words)
    np.add(words, _HALF_ONES, out=words)
    np.bitwise_or(words, strip, out=words)
    np.right_shift(words, np.uint32(16), out=words)
    _by_table(table, words, out)


def _by_table(table: Block, words: Block, out: Block) -> None:
    np.take(table, words, out=out, mode="clip")  # every word is in the table; "clip" saves the check


def _bfloat16_to_float32(strip: Block, out: Block) -> None:
    np.copyto(out.view("<f4"), strip.view(numpy_type(BF16)))
    if np.bitwise_and(strip, 0x7FFF).max() > 0x7F80:
        out[np.bitwise_and(strip, 0x7FFF) > 0x7F80] = _QUIET_BF16 << 16


# The casts of most conversions, in a few operations on words.
_CASTS: dict[tuple[str, str], Callable[[Block, Block], None]] = {
    ("F32", "BF16"): _float32_to_bfloat16,
    ("F32", "F16"): _float32_to_float16,
    ("BF16", "F32"): _bfloat16_to_float32,
}


def _other_cast(source: DType, target: DType) -> Callable[[Block, Block], None]:
    """The function that casts words of `source` into an array of words of `target`."""
    if source.itemsize <= 2:
        table = _table(source, target)
        return partial(_by_table, table)
    if source == F32 and target.itemsize == 1:
        return partial(_float32_by_table, _table(BF16, target))

    def convert(strip: Block, out: Block) -> None:
        out[...] = _converted(strip, source, target)

    return convert


@lru_cache(maxsize=8)
def _table(source: DType, target: DType) -> Block:
    """The cast of every element of a type of at most 16 bits, by its word."""
    return _converted(np.arange(1 << 8 * source.itemsize, dtype=np.uint64).astype(source.word), source, target)


def _converted(words: Block, source: DType, target: DType) -> Block:
    """The words of the cast values."""
    values = words.view(numpy_type(source))
    if target.itemsize < 4:  # by way of float32, as in torch: exact for narrow types, and rounded twice for float64
        values = values.astype(np.float32)
    if target.name in _SATURATING:
        values = np.clip(values, -_SATURATING[target.name], _SATURATING[target.name])
    result = values.astype(numpy_type(target))
    result[np.isnan(values)] = np.nan
    return result.view(target.word)


@cache
def numpy_type(dtype: DType) -> np.dtype[Any]:
    """The numpy type of an element type; one of ml_dtypes where numpy has none."""
    if dtype.name in _NUMPY:
        return np.dtype("<" + _NUMPY[dtype.name])
    import ml_dtypes

    narrow: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.torch))
    return narrow
