"""Casts: values in another element type, with the bits that torch produces.

The most common cast, from float32 masters to bfloat16, is computed here on words: importing torch costs a second and 200 MB, more than the
conversion of a small model. torch does all other casts, and also blocks that contain a NaN, because the bits of a NaN in bfloat16 depend on
the processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.geometry.dtypes import DType

Block = npt.NDArray[Any]

# The number of elements that stay in a processor's cache during all steps of a cast.
_STRIP = 1 << 15


def cast(block: Block, source: DType, target: DType) -> Block:
    """The values of a block in another element type, rounded to nearest, ties to even. Returns `block` itself if the types are equal."""
    if source == target:
        return block
    if (source.name, target.name) == ("F32", "BF16") and (rounded := _to_bfloat16(block)) is not None:
        return rounded
    import torch

    words = block.reshape(-1).view(np.uint8).data
    tensor = torch.frombuffer(words, dtype=getattr(torch, source.torch)).to(getattr(torch, target.torch))
    result: Block = tensor.view(torch.uint8).numpy().view(target.word).reshape(block.shape)
    return result


def scaled(block: Block, source: DType, factors: npt.NDArray[np.float32], target: DType) -> Block:
    """The values of quantized elements: multiplied by `factors` in float32 and cast once.

    factors: an array that numpy broadcasts to the block. Source: DeepSeek's fp8_cast_bf16.py and transformers do the same.
    """
    import torch

    values = torch.frombuffer(block.reshape(-1).view(np.uint8).data, dtype=getattr(torch, source.torch)).reshape(block.shape).float()
    values *= torch.from_numpy(np.ascontiguousarray(factors))
    result: Block = values.to(getattr(torch, target.torch)).view(torch.uint8).numpy().view(target.word).reshape(block.shape)
    return result


def _to_bfloat16(block: Block) -> Block | None:
    """The upper halves of float32 words, rounded by their lower halves; None if the block contains a NaN."""
    words = block.reshape(-1)
    result = np.empty(len(words), np.uint16)
    scratch = np.empty(min(_STRIP, len(words)), np.uint32)
    for start in range(0, len(words), _STRIP):
        strip = words[start : start + _STRIP]
        work = scratch[: len(strip)]
        np.bitwise_and(strip, 0x7FFFFFFF, out=work)
        if work.max() > 0x7F800000:
            return None
        # Add half a unit, or one less if the last remaining bit is 0, so that a tie goes to the even neighbour.
        np.right_shift(strip, 16, out=work)
        np.bitwise_and(work, 1, out=work)
        np.add(work, 0x7FFF, out=work)
        np.add(work, strip, out=work)
        np.right_shift(work, 16, out=work)
        result[start : start + len(strip)] = work
    return result.reshape(block.shape)
