"""IndexBuilder: from what a checkpoint's files hold to its Index. Every reader fills one, file by file, and builds the Index at the end.

A thousand ranks hold a million boxes. Here a box is a few numbers in arrays, and no object stays alive for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from reshard.containers.distributed_tensors import LocalTensor
from reshard.containers.torch_zip import Locations, UnlocatedTensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Extent
from reshard.geometry.meshes import Distribution, Mesh
from reshard.index.index import Index, Kind, ParamGroup, RunFacts, StoredFile, Tensor
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


class IndexBuilder:
    """What has been read of a checkpoint so far."""

    def __init__(self, format_name: str, files: Files) -> None:
        self.format_name = format_name
        self.files = files
        self.boxes = Collector()
        """Boxes of tensors that several files hold."""
        self.whole_tensors: list[Tensor] = []
        """Tensors that are complete as they were added."""
        self.param_groups: tuple[ParamGroup, ...] = ()
        """The optimizer's groups of parameters."""
        self.mesh: Mesh | None = None
        """The run's device mesh; of several that files name, the one with most dimensions."""
        self._objects: dict[str, None] = {}
        self._notes: dict[str, None] = {}
        self._paths: dict[str, None] = {}

    def add(self, kind: Kind, name: str, local: LocalTensor, path: str, rank: int = 0) -> None:
        """The boxes of a tensor that the file `path` of `rank` holds.

        Raises: CheckpointError if an earlier file says another element type, shape or distribution.
        """
        self.boxes.add(kind, name, local, path, rank)

    def add_tensor(self, tensor: Tensor) -> None:
        """A tensor that is complete."""
        self.whole_tensors.append(tensor)

    def add_objects(self, names: Iterable[str]) -> None:
        """Names of what is stored but is not a tensor."""
        self._objects.update(dict.fromkeys(names))

    def add_notes(self, sentences: Iterable[str]) -> None:
        """Sentences for a reader of the index; each is said once."""
        self._notes.update(dict.fromkeys(sentences))

    def add_mesh(self, mesh: Mesh | None) -> None:
        """A mesh that a file names."""
        if mesh and (self.mesh is None or len(mesh.sizes) > len(self.mesh.sizes)):
            self.mesh = mesh

    def add_files(self, paths: Iterable[str]) -> None:
        """Files that the checkpoint consists of."""
        self._paths.update(dict.fromkeys(paths))

    @property
    def objects(self) -> tuple[str, ...]:
        return tuple(self._objects)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def join(self, other: IndexBuilder) -> None:
        """Take over what another builder holds, such as one that a process of its own has filled. Raises CheckpointError as `add` does."""
        self.boxes.join(other.boxes)
        self.whole_tensors.extend(other.whole_tensors)
        self.add_objects(other.objects)
        self.add_notes(other.notes)
        self.add_mesh(other.mesh)
        self.add_files(other._paths)
        self.param_groups = (*self.param_groups, *other.param_groups)

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors so far, in the order in which they were first seen."""
        return (*self.boxes.tensors(self.files), *self.whole_tensors)

    def build(self, facts: RunFacts, *, param_groups: Callable[[], tuple[ParamGroup, ...]] | None = None) -> Index:
        """The index. `facts` are the run's; the builder adds its notes and its mesh.

        param_groups: reads the optimizer's groups when asked for, in place of those that were collected.
        """
        groups = self.param_groups
        return Index(
            self.format_name,
            self.tensors(),
            tuple(StoredFile(path, self.files.size(path) or 0) for path in self._paths),
            replace(facts, notes=(*self._notes, *facts.notes), mesh=facts.mesh or self.mesh),
            objects=self.objects,
            param_groups=param_groups or (lambda: groups),
        )
