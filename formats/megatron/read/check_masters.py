"""Checks that masters belong to their weights: rounds a few elements of each master and compares them with the weight.

The position of a parameter in an optimizer's buffer follows from settings and order alone. No name would reveal a mistake.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.engine.casts import cast
from reshard.engine.transfer import Pieces, Worker
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.index.index import Index
from reshard.storage.files import Files

# At least this many tensors are sampled, if there are as many, and this many elements at each end of a tensor.
_TENSORS, _ELEMENTS = 2000, 16


def check_masters(files: Files, index: Index) -> Index:
    """The index. Raises CheckpointError if a master does not round to its weight."""
    if (wrong := _wrong_master(files, index)) is not None:
        raise CheckpointError(
            wrong.what,
            where=wrong.where,
            why="Either the optimizer's file belongs to another save, or its parameters have another order than in this version",
            do="Copy the files of one save again; or take the weights alone: move the optimizer's file away",
        )
    return index


def without_wrong_masters(files: Files, index: Index) -> Index:
    """The index; without its optimizer state and with a note if a master does not round to its weight.

    Megatron-Core 0.16 itself writes shifted values into a fully reshardable checkpoint if a buffer had several buckets (its issue 504).
    """
    if (wrong := _wrong_master(files, index)) is None:
        return index
    note = f"the optimizer's state is left out: {wrong.where}: {wrong.what} (Megatron-Core 0.16 shifts it if there were several buckets)"
    weights = tuple(tensor for tensor in index.tensors if tensor.kind == "weight")
    return replace(index, tensors=weights, facts=replace(index.facts, notes=(*index.facts.notes, note)), param_groups=tuple)


@dataclass(frozen=True, slots=True)
class _WrongMaster:
    """A master that does not round to its weight, and where the two lie."""

    what: str
    where: str


def _wrong_master(files: Files, index: Index) -> _WrongMaster | None:
    """The first master that does not round to its weight; samples tensors at regular distances, and some elements of each.

    A difference of one step between neighbouring values is accepted: optimizers that keep masters as remainders truncate instead.
    """
    weights, masters = index.by_kind("weight"), index.by_kind("master")
    names = [name for name in masters if name in weights]
    itemsize = max((tensor.dtype.itemsize for tensor in (*weights.values(), *masters.values())), default=1)
    master_worker, weight_worker = Worker(files, itemsize), Worker(files, itemsize)
    for name in names[:: max(1, len(names) // _TENSORS)]:
        weight, master = weights[name], masters[name]
        for box in _samples(weight.shape):
            rounded = cast(master_worker.gather(Pieces(master), box), master.dtype, weight.dtype)
            stored = weight_worker.gather(Pieces(weight), box)
            if (np.abs(_ordered(rounded, weight.dtype) - _ordered(stored, weight.dtype)) > 1).any():
                what = f"its master in {master.shards.path(0)} is not what the weight was rounded from"
                return _WrongMaster(what, f"{name} in {weight.shards.path(0)}")
    return None


def _samples(shape: tuple[int, ...]) -> list[Box]:
    """The first and the last few elements of a tensor."""
    if not shape or 0 in shape:
        return []
    width = min(shape[-1], _ELEMENTS)
    outer = (1,) * (len(shape) - 1)
    last = tuple(size - 1 for size in shape[:-1])
    return [Box((0,) * len(shape), (*outer, width)), Box((*last, shape[-1] - width), (*outer, width))]


def _ordered(words: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.int64]:
    """Floating-point bits as whole numbers in the order of the values: neighbouring values differ by one."""
    bits = words.astype(np.int64)
    sign = 1 << (8 * dtype.itemsize - 1)
    return np.where(bits & sign, sign - bits, bits)
