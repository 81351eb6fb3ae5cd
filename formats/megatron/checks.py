"""What a few elements tell that no name does: whether the optimizer's masters are those of the weights that they were taken for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.boxes import Box
from reshard.dtypes import DType
from reshard.engine.casts import cast
from reshard.engine.transfer import Pieces, Worker
from reshard.errors import CheckpointError
from reshard.files import Files
from reshard.index import Index, Tensor

_TENSORS, _ELEMENTS = 2000, 16


def check_masters(files: Files, index: Index) -> Index:
    """The index. Raises CheckpointError if a master is not what its weight was rounded from.

    One step between two neighbouring values is let pass: optimizers that keep masters as remainders cut where others round.
    """
    weights, masters = index.by_role("weight"), index.by_role("master")
    names = [name for name in masters if name in weights]
    for name in names[:: max(1, len(names) // _TENSORS)]:
        weight, master = weights[name], masters[name]
        for box in _samples(weight.shape):
            ours, theirs = cast(_read(files, master, box), master.dtype, weight.dtype), _read(files, weight, box)
            if (np.abs(_ordered(ours, weight.dtype) - _ordered(theirs, weight.dtype)) > 1).any():
                raise CheckpointError(
                    f"its master in {master.shards.path(0)} is not what the weight was rounded from",
                    where=f"{name} in {weight.shards.path(0)}",
                    why="Either the optimizer's file is of another save, or its parameters lie in another order than this version's",
                    do="Copy the files of one save again; or take the weights alone, by moving the optimizer's file away",
                )
    return index


def without_strange_masters(files: Files, index: Index) -> Index:
    """The index; if its masters are not those of the weights without what the optimizer keeps, and with a note that says so.

    Megatron-Core 0.16 itself writes shifted values into a fully reshardable checkpoint if a buffer had several buckets (its issue 504).
    """
    try:
        return check_masters(files, index)
    except CheckpointError as error:
        note = (
            f"the optimizer's state is left out: {error.where}: {error.what} (Megatron-Core 0.16 shifts it if there were several buckets)"
        )
        kept = tuple(tensor for tensor in index.tensors if tensor.role == "weight")
        return replace(index, tensors=kept, facts=replace(index.facts, notes=(*index.facts.notes, note)), param_groups=tuple)


def _samples(shape: tuple[int, ...]) -> list[Box]:
    """The first and the last few elements of a tensor."""
    if not shape or 0 in shape:
        return []
    width = min(shape[-1], _ELEMENTS)
    outer = (1,) * (len(shape) - 1)
    last = tuple(size - 1 for size in shape[:-1])
    return [Box((0,) * len(shape), (*outer, width)), Box((*last, shape[-1] - width), (*outer, width))]


def _read(files: Files, tensor: Tensor, box: Box) -> npt.NDArray[Any]:
    return Worker(files, tensor.dtype.itemsize).gather(Pieces(tensor), box).reshape(-1)


def _ordered(words: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.int64]:
    """Floating-point bits as numbers that neighbouring values follow each other in."""
    bits = words.astype(np.int64)
    sign = 1 << (8 * dtype.itemsize - 1)
    return np.where(bits & sign, sign - bits, bits)
