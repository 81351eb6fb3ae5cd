"""Computing: what is not copied. A source computes what takes fewer bytes on the wire, a target what follows from values that it has
received. Both give the bits of `convert`.

    source    a narrower type, a function in it; codes and scales of blocks that it holds whole        -> on tensors of any device
    target    a wider type, a function in it; codes and scales of blocks that several sources share     -> in its staging, on the host
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from reshard.engine.casts import cast
from reshard.engine.recipes.on_tensors import TENSOR_RECIPES, cast_tensor
from reshard.engine.recipes.quantizer import RECIPES
from reshard.live.plan.beside import Computed
from reshard.live.plan.schedule import BoxForm

if TYPE_CHECKING:
    import torch

# About how many elements are computed at once on the host.
_AT_ONCE = 1 << 19


def on_wire(box: torch.Tensor, form: BoxForm) -> torch.Tensor:
    """What a source sends of a box."""
    if form.derived is None:
        return cast_tensor(box, form.source, form.wire)
    dtype = RECIPES[form.derived.recipe].dtype
    values = box if dtype is None else cast_tensor(box, form.source, dtype)
    return TENSOR_RECIPES[form.derived.recipe][form.derived.is_scale](values)


def compute(computes: Iterable[Computed], values: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    """Compute codes and scales in the staging, from the values beside it. Memory: some megabytes."""
    import torch

    for each in computes:
        recipe, words = RECIPES[each.recipe], _words(values[each.values.name]).numpy()
        step = max(1, _AT_ONCE // (max(1, words.shape[1]) * recipe.block[0])) * recipe.block[0]
        for row in range(0, len(words), step):
            made = recipe.quantize(np.ascontiguousarray(words[row : row + step]).view(each.values.dtype.word))
            for part in each.parts:
                of_part = cast(np.ascontiguousarray(made[part.is_scale]), part.dtype, part.target)
                target = _words(targets[part.tensor])
                start = target.storage_offset() + part.start + row // part.rows * part.strides[0]
                signed = of_part.view(f"<i{of_part.itemsize}") if of_part.itemsize > 1 else of_part
                target.as_strided(of_part.shape, part.strides, start).copy_(torch.from_numpy(signed))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host as integers of its elements' size."""
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
