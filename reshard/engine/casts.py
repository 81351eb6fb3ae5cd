"""Values in another element type, exactly as torch converts them.

The commonest cast, masters to bfloat16, is done here in words: importing torch costs a second and 200 MB, more than converting a small
model does. All others are torch's, and so are blocks with a NaN in them, as the bits of a NaN in bfloat16 depend on the processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.geometry.dtypes import DType

Block = npt.NDArray[Any]

# So many elements at a time stay in a processor's cache from the first step to the last.
_STRIP = 1 << 15


def cast(block: Block, source: DType, target: DType) -> Block:
    """The block's values in another element type (round to nearest even)."""
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
    """Quantised elements as values: multiplied in 32 bits, and cast once (what DeepSeek's fp8_cast_bf16.py and transformers do)."""
    import torch

    values = torch.frombuffer(block.reshape(-1).view(np.uint8).data, dtype=getattr(torch, source.torch)).reshape(block.shape).float()
    values *= torch.from_numpy(np.ascontiguousarray(factors))
    result: Block = values.to(getattr(torch, target.torch)).view(torch.uint8).numpy().view(target.word).reshape(block.shape)
    return result


def _to_bfloat16(block: Block) -> Block | None:
    """The upper halves of the words, rounded by the lower ones; None if there is a NaN."""
    words = block.reshape(-1)
    result = np.empty(len(words), np.uint16)
    scratch = np.empty(min(_STRIP, len(words)), np.uint32)
    for start in range(0, len(words), _STRIP):
        strip = words[start : start + _STRIP]
        work = scratch[: len(strip)]
        np.bitwise_and(strip, 0x7FFFFFFF, out=work)
        if work.max() > 0x7F800000:
            return None
        # Half a unit, less one where the last bit that stays is 0: so a tie goes to the even neighbour.
        np.right_shift(strip, 16, out=work)
        np.bitwise_and(work, 1, out=work)
        np.add(work, 0x7FFF, out=work)
        np.add(work, strip, out=work)
        np.right_shift(work, 16, out=work)
        result[start : start + len(strip)] = work
    return result.reshape(block.shape)
