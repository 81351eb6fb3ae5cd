"""Computing: what is not copied. A source computes what takes fewer bytes on the wire, a target what follows from values that it has
received. Both give the bits of `convert`.

    source    a narrower type, a function in it; codes and scales of blocks that it holds whole        -> on tensors of any device
    target    a wider type, a function in it; codes and scales of blocks that several sources share     -> in its staging, on the host
              weights with a LoRA adapter, from base and factors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.engine.casts import cast
from reshard.engine.origins.encoded import RECIPES
from reshard.engine.origins.on_tensors import TENSOR_RECIPES, cast_tensor
from reshard.geometry.dtypes import BF16, F32
from reshard.geometry.low_rank import add_products
from reshard.live.plan.beside import Computed, MergedBox
from reshard.live.plan.schedule import BoxForm, HeldTensor

if TYPE_CHECKING:
    import torch

# About how many elements are computed at once on the host.
_AT_ONCE = 1 << 19


def on_wire(box: torch.Tensor, form: BoxForm) -> torch.Tensor:
    """What a source sends of a box."""
    if form.derived is None:
        return cast_tensor(box, form.source, form.wire)
    return TENSOR_RECIPES[form.derived.recipe][form.derived.is_scale](cast_tensor(box, form.source, BF16))


def compute(computes: Iterable[Computed], values: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    """Compute codes and scales in the staging, from the values beside it. Memory: some megabytes."""
    for computed in computes:
        recipe, words = RECIPES[computed.recipe], _words(values[computed.values.name]).numpy()
        step = max(1, _AT_ONCE // (max(1, words.shape[1]) * recipe.block[0])) * recipe.block[0]
        for row in range(0, len(words), step):
            made = recipe.quantize(
                np.ascontiguousarray(words[row : row + step]).view(computed.values.dtype.word), computed.values.dtype, None
            )
            for part in computed.parts:
                of_part = cast(np.ascontiguousarray(made[part.is_scale]), part.dtype, part.target)
                _put(of_part, targets[part.tensor], part.start + row // part.rows * part.strides[0], part.strides)


def merge(merges: Iterable[MergedBox], values: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    """Merge updates into base weights, from what lies beside the staging into it. Memory: some megabytes."""
    for box in merges:
        base = _array(values, box.base)
        height, width = base.shape
        factors = [(_numbers(values, of.rows), _numbers(values, of.columns), np.float32(of.scale)) for of in box.factors]
        step = max(1, _AT_ONCE // max(1, width))
        for row in range(0, height, step):
            result = cast(np.ascontiguousarray(base[row : row + step]), box.base.dtype, F32).view(np.float32).copy()
            with np.errstate(all="ignore"):
                for rows, columns, scale in factors:
                    delta = np.zeros_like(result)
                    add_products(delta, rows[row : row + step], columns)
                    delta *= scale
                    result += delta
                result[np.isnan(result)] = np.nan
            _put(cast(result.view(F32.word), F32, box.target), targets[box.tensor], box.start + row * box.strides[0], box.strides)


def _array(values: Mapping[str, torch.Tensor], held: HeldTensor) -> Any:
    """The words of a tensor beside the staging."""
    return _words(values[held.name]).numpy().view(held.dtype.word)


def _numbers(values: Mapping[str, torch.Tensor], held: HeldTensor) -> Any:
    """The values of a tensor beside the staging, in float32."""
    return cast(np.ascontiguousarray(_array(values, held)), held.dtype, F32).view(np.float32)


def _put(words: Any, tensor: torch.Tensor, start: int, strides: tuple[int, ...]) -> None:
    """Write words into a tensor, from an element on."""
    import torch

    target = _words(tensor)
    signed = words.view(f"<i{words.itemsize}") if words.itemsize > 1 else words
    target.as_strided(words.shape, strides, target.storage_offset() + start).copy_(torch.from_numpy(signed))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host as integers of its elements' size."""
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
