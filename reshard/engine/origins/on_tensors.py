"""Casts, functions and recipes on torch tensors of any device, with the bits of casts.py, functions.py and recipe.py.

A live update computes where the weights lie: on a GPU nothing comes back to the host but the rare values of a function whose rounding
needs more digits. A NaN becomes the quiet NaN of the target type, with a positive sign.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from reshard.engine.casts import cast
from reshard.errors import UnsupportedError
from reshard.geometry.dtypes import BF16, F8, F32, DType, can_cast
from reshard.geometry.functions import UNSURE, values_of

if TYPE_CHECKING:
    import torch

_LARGEST_FP8 = 448.0
# 2^-7, which stands in for a scale of zero (recipe.py).
_EPSILON = 2.0**-7
_BLOCK = 128


def torch_type(dtype: DType) -> torch.dtype:
    """The element type in torch."""
    import torch

    torch_dtype: torch.dtype = getattr(torch, dtype.torch)
    return torch_dtype


def cast_tensor(tensor: torch.Tensor, source: DType, target: DType) -> torch.Tensor:
    """The elements in another element type, as `casts.cast` gives them. Returns `tensor` itself if the types are equal.

    Raises: UnsupportedError for types that are not both floating point, or for values from which the weights do not follow.
    """
    import torch

    if source == target:
        return tensor
    if not can_cast(source, target) or not source.floating:
        raise UnsupportedError(f"a cast from {source} to {target} is needed, which a live update does not compute")
    is_nan = tensor.float().isnan() if source.itemsize == 1 else tensor.isnan()
    if source.function != target.function:
        tensor = cast_tensor(tensor, source.of(""), F32)
        tensor = tensor + 1 if source.function else tensor  # x-1 alone is invertible
        tensor = _of_function(target.function, tensor) if target.function else tensor
    if target.itemsize < 4:  # by way of float32, as in torch and casts.py
        tensor = tensor.to(torch.float32)
    if target.name == F8.name:  # torch 2.13 does it itself, older versions give NaN
        tensor = tensor.clamp(-_LARGEST_FP8, _LARGEST_FP8)
    result = tensor.to(torch_type(target))
    word, words = _nan_of(target), result.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[target.itemsize])
    words.masked_fill_(is_nan, word)
    return result


def _of_function(function: str, x: torch.Tensor) -> torch.Tensor:
    """The values of a function in float32."""
    import torch

    if function == "x-1":
        return x - 1
    wide = torch.exp(x.double())
    result = wide.float()
    unsure = ((wide * (1 - UNSURE)).float() != (wide * (1 + UNSURE)).float()) & x.isfinite() & (x != 0)
    if unsure.any():
        result[unsure] = -torch.from_numpy(values_of(function, x[unsure].cpu().numpy())).to(x.device)
    return -result


@cache
def _nan_of(dtype: DType) -> int:
    """The word of the quiet NaN, as a signed integer where torch has no unsigned one."""
    word = cast(np.array([0x7FC00000], F32.word), F32, dtype.of("")) if dtype.name != "F32" else np.array([0x7FC00000], F32.word)
    return int(word.view(f"<i{dtype.itemsize}")[0]) if dtype.itemsize > 1 else int(word[0])


def _fp8_scales(words: torch.Tensor) -> torch.Tensor:
    """The scales of blocks of 128 x 128, in bfloat16."""
    import torch

    rows, columns = words.shape
    padded = torch.nn.functional.pad(words.abs(), (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    of_blocks = padded.view(padded.shape[0] // _BLOCK, _BLOCK, padded.shape[1] // _BLOCK, _BLOCK)
    largest = of_blocks.amax((1, 3))  # a NaN is the largest value
    scales = cast_tensor(largest.float() / _LARGEST_FP8, F32, BF16)
    return torch.where(scales == 0, torch.full_like(scales, _EPSILON), scales)


def _fp8_codes(words: torch.Tensor) -> torch.Tensor:
    rows, columns = words.shape
    scales = _fp8_scales(words).float().repeat_interleave(_BLOCK, 1)[:, :columns].repeat_interleave(_BLOCK, 0)[:rows]
    return cast_tensor(cast_tensor(words.float() / scales, F32, BF16), BF16, F8)


TENSOR_RECIPES: Mapping[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "fp8-block": (_fp8_codes, _fp8_scales),
}
"""The recipes that are computed on tensors: functions of values [out, in] in the recipe's element type, for the codes and the scales."""
