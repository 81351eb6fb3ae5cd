"""Whether the masters of a checkpoint belong to the weights beside them: rounds a few elements of each and compares them.

The two lie in different files, and the position of a parameter in an optimizer's buffer often follows from settings and order alone. So no
name shows that a file of another rank, step or run lies among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.engine.casts import cast
from reshard.engine.transfer import Pieces, Worker
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.index.index import Index, Tensor
from reshard.index.shards import Shards, primary_rows
from reshard.storage.files import Files

# About how many samples are compared, and the elements of a sample. Each file has at least one sample.
_SAMPLES, _ELEMENTS = 2000, 64
# The bits of infinity in the element types that masters are rounded to. Those of a NaN are larger.
_INFINITIES = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}


@dataclass(frozen=True, slots=True)
class WrongMaster:
    """A master that does not round to its weight."""

    name: str
    """The weight."""
    weight_path: str
    """A file that holds the weight."""
    master_path: str
    """The file that holds the compared elements of the master."""


def wrong_master(files: Files, index: Index, *, tolerance: int = 0) -> WrongMaster | None:
    """The first master found that does not round to its weight, or None. Samples every partition, up to about `_SAMPLES` in all.

    tolerance: how many representable values a weight may lie from its rounded master. Replicas are not compared.
    """
    weights, masters = index.by_kind("weight"), index.by_kind("master")
    pairs = {name: (weights[name], master) for name, master in masters.items() if name in weights and weights[name].shape == master.shape}
    itemsize = max((tensor.dtype.itemsize for pair in pairs.values() for tensor in pair), default=1)
    workers = Worker(files, itemsize), Worker(files, itemsize)
    for name, boxes in _samples(pairs).items():
        weight, master = (_without_replicas(tensor) for tensor in pairs[name])
        pieces = Pieces(weight), Pieces(master)
        for box in boxes:
            stored = workers[0].gather(pieces[0], box)
            rounded = cast(workers[1].gather(pieces[1], box), master.dtype, weight.dtype)
            if not np.array_equal(rounded, stored) and _farthest(rounded, stored, weight.dtype) > tolerance:
                return WrongMaster(name, _path_of(weight, box), _path_of(master, box))
    return None


def _samples(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, list[Box]]:
    """The boxes to compare, by weight: of each file some, spread evenly over its tensors."""
    by_file: dict[str, list[tuple[str, Box]]] = {}
    for name, pair in pairs.items():
        for tensor in pair:
            for path, box in _first_elements(tensor.shards):
                by_file.setdefault(path, []).append((name, box))
    most = max(1, _SAMPLES // max(1, len(by_file)))
    boxes: dict[str, dict[Box, None]] = {}
    for samples in by_file.values():
        for name, box in samples[:: -(-len(samples) // most)]:
            boxes.setdefault(name, {})[box] = None
    return {name: list(of_name) for name, of_name in boxes.items()}


def _first_elements(shards: Shards) -> Iterator[tuple[str, Box]]:
    """For each file, the first elements of the tensor's largest primary piece in it."""
    if not shards.sizes.shape[1]:
        return
    volumes = shards.sizes.prod(axis=1) * primary_rows(shards)
    rows = [0] if len(shards) == 1 else [int(np.flatnonzero(shards.files == file)[volumes[shards.files == file].argmax()]) for file in np.unique(shards.files)]
    for row in rows:
        if volumes[row]:
            *outer, inner = shards.sizes[row].tolist()
            yield shards.path(row), Box(tuple(shards.offsets[row].tolist()), (*(1 for _ in outer), min(inner, _ELEMENTS)))


def _without_replicas(tensor: Tensor) -> Tensor:
    """The tensor with its primary pieces only."""
    shards, rows = tensor.shards, np.flatnonzero(primary_rows(tensor.shards))
    if len(rows) == len(shards):
        return tensor
    primary = replace(
        shards,
        offsets=shards.offsets[rows],
        sizes=shards.sizes[rows],
        files=shards.files[rows],
        positions=shards.positions[rows],
        extent=lambda i: shards.extent(int(rows[i])),
        primary=np.ones(len(rows), np.bool_),
        ranks=None,
    )
    return replace(tensor, shards=primary)


def _path_of(tensor: Tensor, box: Box) -> str:
    """The file that holds the first element of a box."""
    return next(piece.extent.path for piece, _, _ in Pieces(tensor).meeting(box))


def _farthest(rounded: npt.NDArray[Any], stored: npt.NDArray[Any], dtype: DType) -> int:
    """How many representable values lie between the two arrays of words, at most. Two NaNs are equal, whatever their bits."""
    # Floating-point bits as whole numbers in the order of the values: neighbouring values differ by one.
    sign = 1 << (8 * dtype.itemsize - 1)
    first, second = (np.where(words & sign, sign - words.astype(np.int64), words) for words in (rounded, stored))
    infinity = _INFINITIES.get(dtype.name, sign)
    both_nan = (np.abs(first) > infinity) & (np.abs(second) > infinity)
    return int(np.where(both_nan, 0, np.abs(first - second)).max(initial=0))
