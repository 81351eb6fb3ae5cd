"""What a few elements tell that no name does: whether the optimizer's masters are those of the weights that they were taken for."""

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

_TENSORS, _ELEMENTS = 2000, 16


def check_masters(files: Files, index: Index) -> Index:
    """The index. Raises CheckpointError if a master is not what its weight was rounded from."""
    if (strange := _strange_master(files, index)) is not None:
        raise CheckpointError(
            strange.what,
            where=strange.where,
            why="Either the optimizer's file is of another save, or its parameters lie in another order than this version's",
            do="Copy the files of one save again; or take the weights alone, by moving the optimizer's file away",
        )
    return index


def without_strange_masters(files: Files, index: Index) -> Index:
    """The index; if its masters are not those of the weights without what the optimizer keeps, and with a note that says so.

    Megatron-Core 0.16 itself writes shifted values into a fully reshardable checkpoint if a buffer had several buckets (its issue 504).
    """
    if (strange := _strange_master(files, index)) is None:
        return index
    found = f"{strange.where}: {strange.what}"
    note = f"the optimizer's state is left out: {found} (Megatron-Core 0.16 shifts it if there were several buckets)"
    kept = tuple(tensor for tensor in index.tensors if tensor.kind == "weight")
    return replace(index, tensors=kept, facts=replace(index.facts, notes=(*index.facts.notes, note)), param_groups=tuple)


@dataclass(frozen=True, slots=True)
class _Strange:
    """A master that is not its weight's, and where the two lie."""

    what: str
    where: str


def _strange_master(files: Files, index: Index) -> _Strange | None:
    """The first master that its weight was not rounded from, by some elements of at most so many tensors.

    One step between two neighbouring values is let pass: optimizers that keep masters as remainders cut where others round.
    """
    weights, masters = index.by_kind("weight"), index.by_kind("master")
    names = [name for name in masters if name in weights]
    widest = max((tensor.dtype.itemsize for tensor in (*weights.values(), *masters.values())), default=1)
    ours, theirs = Worker(files, widest), Worker(files, widest)
    for name in names[:: max(1, len(names) // _TENSORS)]:
        weight, master = weights[name], masters[name]
        for box in _samples(weight.shape):
            rounded = cast(ours.gather(Pieces(master), box), master.dtype, weight.dtype)
            distance = _ordered(rounded, weight.dtype) - _ordered(theirs.gather(Pieces(weight), box), weight.dtype)
            if (np.abs(distance) > 1).any():
                what = f"its master in {master.shards.path(0)} is not what the weight was rounded from"
                return _Strange(what, f"{name} in {weight.shards.path(0)}")
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
    """Floating-point bits as numbers that neighbouring values follow each other in."""
    bits = words.astype(np.int64)
    sign = 1 << (8 * dtype.itemsize - 1)
    return np.where(bits & sign, sign - bits, bits)
