"""Casts: values in another element type, with the bits that torch 2.13 produces for every value that is not a NaN.

numpy and ml_dtypes compute them, strip by strip, so that a strip stays in the processor's cache. Elements of at most 16 bits are looked up
in a table of all their values. A NaN becomes the quiet NaN of the target type, with a positive sign. (torch's NaNs depend on the processor:
its code for AVX2 and its scalar code give bfloat16 NaNs with different bits.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.dtypes import F32, DType
from reshard.geometry.functions import values_of

Block = npt.NDArray[Any]

# The number of elements that stay in a processor's cache during all steps of a cast.
_STRIP = 1 << 15
# The largest values of types to which torch 2.13 casts with saturation.
_SATURATING = {"F8_E4M3": 448.0}


def cast(block: Block, source: DType, target: DType) -> Block:
    """The values of a block in another element type, rounded to nearest, ties to even. Returns `block` itself if the types are equal.

    block: words of `source`. Values that are too large become 448 in F8_E4M3, infinite in a type that has infinity, and otherwise NaN.
    If the target's elements are the values of a function, it is computed in float32. The source's must not be (dtypes.can_cast).

    Raises: CheckpointError for an integer that the target cannot hold, UnsupportedError for a cast between integers and floating point.
    """
    if source == target:
        return block
    if source.function:
        assert source.function == target.function, "weights do not follow from the values of a function of them"
        return cast(block, source.of(""), target.of(""))
    if target.function:
        values = values_of(target.function, cast(block, source, F32).reshape(-1).view("<f4"))
        values[np.isnan(values)] = np.nan
        return cast(values.view(F32.word).reshape(block.shape), F32, target.of(""))
    if not (source.floating and target.floating):
        return _integers(block, source, target)
    words = block.reshape(-1)
    result = np.empty(len(words), target.word)
    on_words = _ON_WORDS.get((source.name, target.name))
    table = _table(source, target) if source.itemsize <= 2 else None
    for start in range(0, len(words), _STRIP):
        strip, out = words[start : start + _STRIP], result[start : start + _STRIP]
        if on_words is not None and on_words(strip, out):
            continue
        if table is not None:
            np.take(table, strip, out=out, mode="clip")  # every word is in the table; "clip" saves the check
        else:
            out[...] = _converted(strip, source, target)
    return result.reshape(block.shape)


def _integers(block: Block, source: DType, target: DType) -> Block:
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
    return values.astype(limits.dtype).view(target.word)


def scaled(block: Block, source: DType, factors: npt.NDArray[np.float32], target: DType) -> Block:
    """The values of quantized elements: multiplied by `factors` in float32 and cast once.

    factors: an array that numpy broadcasts to the block. Source: DeepSeek's fp8_cast_bf16.py and transformers do the same.
    """
    with np.errstate(all="ignore"):
        values = cast(block, source, F32).view("<f4") * factors
    if target == F32:
        values[np.isnan(values)] = np.nan
    return cast(values.view(F32.word), F32, target)


def _float32_to_bfloat16(strip: Block, out: Block) -> bool:
    """Write the upper halves of the words, rounded by the lower halves. Returns False, and writes nothing, if there is a NaN."""
    work = np.bitwise_and(strip, 0x7FFFFFFF)
    if work.max() > 0x7F800000:
        return False
    # Add half a unit, or one less if the last remaining bit is 0, so that a tie goes to the even neighbour.
    np.right_shift(strip, 16, out=work)
    np.bitwise_and(work, 1, out=work)
    np.add(work, 0x7FFF, out=work)
    np.add(work, strip, out=work)
    np.right_shift(work, 16, out=work)
    out[...] = work
    return True


def _bfloat16_to_float32(strip: Block, out: Block) -> bool:
    """Write the words as the upper halves of longer ones. Returns False, and writes nothing, if there is a NaN."""
    if np.bitwise_and(strip, 0x7FFF).max() > 0x7F80:
        return False
    np.left_shift(strip, 16, out=out, dtype=out.dtype)
    return True


# The casts of most conversions, in a few operations on words.
_ON_WORDS = {("F32", "BF16"): _float32_to_bfloat16, ("BF16", "F32"): _bfloat16_to_float32}


@lru_cache(maxsize=8)
def _table(source: DType, target: DType) -> Block:
    """The cast of every element of a type of at most 16 bits, by its word."""
    return _converted(np.arange(1 << 8 * source.itemsize, dtype=np.uint64).astype(source.word), source, target)


def _converted(words: Block, source: DType, target: DType) -> Block:
    """The words of the cast values."""
    values = words.view(_numpy_type(source))
    with np.errstate(all="ignore"):
        if target.itemsize < 4:  # by way of float32, as in torch: exact for narrow types, and rounded twice for float64
            values = values.astype(np.float32)
        if target.name in _SATURATING:
            values = np.clip(values, -_SATURATING[target.name], _SATURATING[target.name])
        result = values.astype(_numpy_type(target))
        result[np.isnan(values)] = np.nan
    return result.view(target.word)


def _numpy_type(dtype: DType) -> np.dtype[Any]:
    """The numpy type of a floating-point type; ml_dtypes has those that numpy lacks."""
    if dtype.name in ("F64", "F32", "F16"):
        return np.dtype(f"<f{dtype.itemsize}")
    import ml_dtypes

    narrow: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.torch))
    return narrow
