"""Whether the masters of a checkpoint belong to the weights beside them: rounds a few elements of each and compares them.

The two lie in different files, and the position of a parameter in an optimizer's buffer often follows from settings and order alone. So no
name shows that a file of another rank, step or run lies among them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.engine.casts import cast
from reshard.engine.transfer import Pieces, Worker
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.value import value
from reshard.index.index import Index, Tensor
from reshard.index.shards import Shards
from reshard.storage.files import Files, side_by_side

# The elements of a sample, at most.
_ELEMENTS = 2048
# The bits of infinity in the element types that masters are rounded to. Those of a NaN are larger.
_INFINITIES = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}


@value
class WrongMaster:
    """A master that does not round to its weight."""

    name: str
    """The weight."""
    weight_path: str
    """The file that holds an element of the weight."""
    master_path: str
    """The file that holds the same element of the master."""


def wrong_master(files: Files, index: Index, *, per_file: int, tolerance: int = 0) -> WrongMaster | None:
    """The first master found that does not round to its weight, or None.

    per_file: how many tensors are sampled of each file that holds weights or masters. Replicas are not compared.
    tolerance: how many representable values a weight may lie from its rounded master.
    """
    weights, masters = index.by_kind("weight"), index.by_kind("master")
    # Along axis 0 one of the two may have vocabulary padding.
    pairs = {name: (weights[name], tensor) for name, tensor in masters.items() if name in weights and _same_rows(weights[name], tensor)}
    itemsize = max((tensor.dtype.itemsize for pair in pairs.values() for tensor in pair), default=1)
    workers = _Workers(files, itemsize)

    def of_name(sampled: tuple[str, set[str]]) -> WrongMaster | None:
        name, paths = sampled
        return _wrong_sample(workers, name, pairs[name], paths, tolerance)

    checked = side_by_side(files, of_name, sampled_files(pairs, per_file).items())
    return next((wrong for wrong in checked if wrong is not None), None)


class _Workers(threading.local):
    """The two workers of each thread: one for weights, one for masters."""

    def __init__(self, files: Files, itemsize: int) -> None:
        self.weights, self.masters = Worker(files, itemsize), Worker(files, itemsize)


def _wrong_sample(workers: _Workers, name: str, pair: tuple[Tensor, Tensor], paths: Collection[str], tolerance: int) -> WrongMaster | None:
    """Whether the master of a weight does not round to it, at the first elements of their pieces in these files."""
    weight, master = (tensor.without_replicas() for tensor in pair)
    pieces = Pieces(weight), Pieces(master)
    both = Box.whole(tuple(map(min, weight.shape, master.shape)))
    for box in dict.fromkeys(box for tensor in (weight, master) for box in _first_elements(tensor.shards, paths) if both.contains(box)):
        stored = workers.weights.gather(pieces[0], box)
        rounded = cast(workers.masters.gather(pieces[1], box), master.dtype, weight.dtype)
        if np.array_equal(rounded, stored):
            continue
        wrong = np.argwhere(_distances(rounded, stored, weight.dtype) > tolerance)
        if len(wrong):
            element = Box(tuple((wrong[0] + box.offsets).tolist()), (1,) * len(box.sizes))
            return WrongMaster(name, _path_of(pieces[0], element), _path_of(pieces[1], element))
    return None


def _same_rows(weight: Tensor, master: Tensor) -> bool:
    return 0 < len(weight.shape) == len(master.shape) and weight.shape[1:] == master.shape[1:]


def sampled_files(pairs: Mapping[str, tuple[Tensor, Tensor]], per_file: int) -> dict[str, set[str]]:
    """The files in which each weight or its master is sampled: `per_file` tensors of each file, or all that it holds.

    If a file holds more, its larger tensors are taken, and not the largest: in 16 bits, norms and the rows of rare tokens often stay equal
    for many steps.
    pairs: weight and master by name.
    """
    names_by_file: dict[str, list[tuple[int, str]]] = {}
    for name, pair in pairs.items():
        elements = pair[0].elements
        for shards in (tensor.shards for tensor in pair):
            for file in {*shards.files.tolist()}:
                names_by_file.setdefault(shards.paths[file], []).append((elements, name))
    paths: dict[str, set[str]] = {}
    for path, names in names_by_file.items():
        if len(names) > per_file:
            larger = sorted(names, key=lambda of_name: -of_name[0])[: max(per_file, len(names) // 2)]
            step = -(-len(larger) // per_file)
            names = larger[step // 2 :: step]
        for _, name in names:
            paths.setdefault(name, set()).add(path)
    return paths


def _first_elements(shards: Shards, paths: Collection[str]) -> Iterator[Box]:
    """The first elements of the largest piece in each of these files that holds a piece."""
    volumes = shards.sizes.prod(axis=1)
    for file in {*shards.files.tolist()}:
        if shards.paths[file] in paths:
            row = int((volumes * (shards.files == file)).argmax())
            if volumes[row]:
                *outer, inner = shards.sizes[row].tolist()
                yield Box(tuple(shards.offsets[row].tolist()), (*(1 for _ in outer), min(inner, _ELEMENTS)))


def _path_of(pieces: Pieces, element: Box) -> str:
    return next(piece.extent.path for piece, _, _ in pieces.meeting(element))


def _distances(rounded: npt.NDArray[Any], stored: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.int64]:
    """How many representable values lie between each two words. Two NaNs are equal, whatever their bits."""
    sign = 1 << (8 * dtype.itemsize - 1)
    magnitudes = [(words & (sign - 1)).astype(np.int64) for words in (rounded, stored)]
    # Floating-point bits as whole numbers in the order of the values: neighbouring values differ by one.
    first, second = (np.where(words & sign, -size, size) for words, size in zip((rounded, stored), magnitudes, strict=True))
    both_nan = np.logical_and(*(size > _INFINITIES.get(dtype.name, sign) for size in magnitudes))
    return np.where(both_nan, 0, np.abs(first - second))
