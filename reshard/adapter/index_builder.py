"""Collecting an index from files of one rank each: every file adds its boxes, at the end they are the columns of tensors.

A thousand ranks hold a million boxes; here a box is a few numbers in arrays, and no object stays alive for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from reshard.containers.distributed_tensors import LocalTensor
from reshard.containers.torch_zip import Locations, UnlocatedTensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Extent
from reshard.geometry.meshes import Distribution
from reshard.index.index import Kind, Tensor
from reshard.index.shards import Shards
from reshard.storage.files import Files

T = TypeVar("T")


@dataclass(slots=True)
class _Columns:
    """What is known of one tensor so far; one row per box."""

    dtype: DType
    shape: tuple[int, ...]
    distribution: Distribution | None
    first: str
    boxes: list[Box] = field(default_factory=list)
    strides: list[tuple[int, ...]] = field(default_factory=list)
    files: array[int] = field(default_factory=lambda: array("q"))
    ranks: array[int] = field(default_factory=lambda: array("q"))
    members: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))


class Collector:
    """The tensors of a checkpoint, as far as its files have been read."""

    def __init__(self) -> None:
        self._paths: dict[str, int] = {}
        self._found: dict[tuple[Kind, str], _Columns] = {}
        # The same few boxes and strides occur in every layer: one object for all equal ones.
        self._same: dict[object, object] = {}

    def add(self, role: Kind, name: str, local: LocalTensor, path: str, rank: int) -> None:
        """The boxes of a tensor that the file `path` of `rank` holds.

        Raises: CheckpointError if an earlier file says another dtype, shape or distribution.
        """
        known = self._found.get((role, name))
        if known is None:
            known = self._found[role, name] = _Columns(local.dtype, local.shape, local.distribution, path)
        else:
            self._check(name, known, local, path)
        number = self._paths.setdefault(path, len(self._paths))
        for box, stored in local.shards:
            known.boxes.append(self._one(box))
            known.strides.append(self._one(stored.strides))
            known.files.append(number)
            known.ranks.append(rank)
            known.members.append(stored.member if isinstance(stored, UnlocatedTensor) else -1)
            known.offsets.append(stored.skipped if isinstance(stored, UnlocatedTensor) else stored.byte_offset)

    def join(self, other: Collector) -> None:
        """Take over what another one has collected. Raises CheckpointError as `add` does."""
        paths = list(other._paths)
        numbers = np.array([self._paths.setdefault(path, len(self._paths)) for path in paths], np.int64)
        for (role, name), found in other._found.items():
            known = self._found.get((role, name))
            if known is None:
                known = self._found[role, name] = _Columns(found.dtype, found.shape, found.distribution, found.first)
            else:
                self._check(name, known, found, found.first)
            known.boxes.extend(found.boxes)
            known.strides.extend(found.strides)
            known.files.frombytes(numbers[np.frombuffer(found.files, np.int64)].tobytes())
            for mine, theirs in ((known.ranks, found.ranks), (known.members, found.members), (known.offsets, found.offsets)):
                mine.extend(theirs)

    def tensors(self, files: Files) -> Iterator[Tensor]:
        """The tensors, in the order in which they were first seen."""
        paths = tuple(self._paths)
        for (role, name), known in self._found.items():
            yield Tensor(name, known.dtype, known.shape, role, self._shards(files, known, paths), known.distribution)

    def _shards(self, tree: Files, known: _Columns, paths: tuple[str, ...]) -> Shards:
        ndim, count = len(known.shape), len(known.boxes)
        members, offsets = np.array(known.members, np.int64), np.array(known.offsets, np.int64)
        files = np.array(known.files, np.int64)
        return Shards(
            paths,
            np.array([box.offsets for box in known.boxes], np.int64).reshape(count, ndim),
            np.array([box.sizes for box in known.boxes], np.int64).reshape(count, ndim),
            files,
            np.where(members >= 0, members, 0) + offsets,
            _extent(tree, paths, files, members, offsets, known.strides, known.dtype),
            ranks=np.array(known.ranks, np.int64),
        )

    def _one(self, value: T) -> T:
        return self._same.setdefault(value, value)  # type: ignore[return-value]

    def _check(self, name: str, known: _Columns, local: LocalTensor | _Columns, path: str) -> None:
        if (known.dtype, known.shape, known.distribution) == (local.dtype, local.shape, local.distribution):
            return
        if (known.dtype, known.shape) != (local.dtype, local.shape):
            raise CheckpointError(
                f"{known.first} says {known.dtype} {list(known.shape)}, {path} says {local.dtype} {list(local.shape)}",
                where=name,
                why="The files are from different models or saves",
                do="Keep the files of one save only",
            )
        raise CheckpointError(
            f"{known.first} has it as ({known.distribution or 'whole'}) on the mesh ({_mesh(known.distribution)}), "
            f"{path} as ({local.distribution or 'whole'}) on ({_mesh(local.distribution)})",
            where=name,
            why="Files of runs on different meshes lie together; their boxes do not fit",
            do="Keep the files of one save only",
        )


def _extent(
    files: Files,
    paths: tuple[str, ...],
    numbers: npt.NDArray[np.int64],
    members: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    strides: list[tuple[int, ...]],
    dtype: DType,
) -> Callable[[int], Extent]:
    """A function from a row to where its bytes lie; of a zip member the payload's start is looked up once, when it is asked for."""

    locations = Locations(files)

    def extent(i: int) -> Extent:
        path, member = paths[numbers[i]], int(members[i])
        return Extent(path, (locations.start(path, member) if member >= 0 else 0) + int(offsets[i]), strides[i], dtype)

    return extent


def _mesh(found: Distribution | None) -> str:
    return str(found.mesh) if found else "none"
