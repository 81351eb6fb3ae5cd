"""IndexBuilder: collects what the files of a checkpoint hold, and builds the Index at the end. Every reader fills one.

A thousand ranks hold a million boxes. The builder stores each box as a few numbers in arrays, so no object stays alive for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from reshard.canonical.optimizer_state import CODES, note_on_codes
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Extent
from reshard.geometry.meshes import Distribution, Mesh
from reshard.geometry.sections import Columns
from reshard.geometry.value import mutable, value
from reshard.index.index import Index, Kind, ParamGroup, RunFacts, StoredFile, Tensor
from reshard.index.shards import PieceTable, Shards
from reshard.storage.files import Files

if TYPE_CHECKING:
    from reshard.containers.distributed_tensors import LocalTensor
    from reshard.containers.recognised_files import AlikeRanks

T = TypeVar("T")


class IndexBuilder:
    """The tensors, objects, notes, param groups, mesh and files of a checkpoint, as far as they have been read.

    A builder can be pickled, so that another process can fill it. The copy has no `files`; pass it to `join`.
    """

    def __init__(self, format_name: str, files: Files) -> None:
        self.format_name = format_name
        """The name of the format that reads."""
        self.files = files
        """The tree that the checkpoint is read from."""
        self.param_groups: tuple[ParamGroup, ...] = ()
        """The optimizer's param groups."""
        self.mesh: Mesh | None = None
        """The run's device mesh. If files name several meshes, the one with the most dimensions."""
        self._columns: dict[tuple[Kind, str], _Columns] = {}
        self._path_numbers: dict[str, int] = {}
        self._whole_tensors: list[Tensor] = []
        self._objects: dict[str, None] = {}
        self._notes: dict[str, None] = {}
        self._files: dict[str, None] = {}
        # The same few boxes and strides occur in every layer: equal ones share one object.
        self._shared: dict[object, object] = {}

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "files": None}

    def add(self, kind: Kind, name: str, local: LocalTensor, path: str, rank: int = 0) -> None:
        """Add the boxes of a tensor that the file `path` of `rank` holds.

        Raises: CheckpointError if an earlier file gives the tensor another element type, shape or distribution.
        """
        from reshard.containers.torch_zip import UnlocatedTensor

        columns = self._columns_of(kind, name, local, path)
        for box, stored in local.shards:
            # The elements of a numpy array have a path of their own.
            number = self._path_numbers.setdefault(stored.path, len(self._path_numbers))
            columns.boxes.append(self._shared_value(box))
            columns.strides.append(self._shared_value(stored.strides))
            place = (stored.member, stored.skipped) if isinstance(stored, UnlocatedTensor) else (-1, stored.byte_offset)
            columns.numbers.extend((number, rank, *place))
        if local.distribution:
            self.add_mesh(local.distribution.mesh)

    def add_alike(self, alike: AlikeRanks, kind_and_name: Callable[[Any], tuple[Kind, str]]) -> None:
        """Add the boxes of all tensors of ranks whose files are alike.

        kind_and_name: what the key of an entry stands for.

        Raises: CheckpointError as `add` does.
        """
        from reshard.containers.recognised_files import boxes_of_ranks
        from reshard.containers.torch_zip import UnlocatedTensor

        count = len(alike.ranks)
        ranks, members = np.array(alike.ranks, np.int64), np.stack(alike.members, axis=1)
        files = np.array([self._path_numbers.setdefault(path, len(self._path_numbers)) for path in alike.paths], np.int64)
        # Tensors of one shape share their columns.
        boxes: dict[object, tuple[Columns, Columns]] = {}
        strides: dict[tuple[int, ...], Columns] = {}
        skipped: dict[int, Columns] = {}
        for (key, local), headers in zip(alike.entries, members, strict=True):
            kind, name = kind_and_name(key)
            columns, ndim = self._columns_of(kind, name, local, alike.paths[0]), len(local.shape)
            cut = local.distribution, local.shape
            if cut not in boxes:
                of_ranks = boxes_of_ranks(local, alike.ranks)
                boxes[cut] = (
                    np.array([box.offsets for box in of_ranks], np.int64).reshape(count, ndim),
                    np.array([box.sizes for box in of_ranks], np.int64).reshape(count, ndim),
                )
            stored = local.shards[0][1]
            assert isinstance(stored, UnlocatedTensor)
            row = np.array(stored.strides, np.int64).reshape(1, ndim)
            row_strides = strides.setdefault(stored.strides, np.broadcast_to(row, (count, ndim)))
            row_skipped = skipped.setdefault(stored.skipped, np.broadcast_to(np.int64(stored.skipped), count))
            columns.blocks.append(_Rows(*boxes[cut], row_strides, files, ranks, headers, row_skipped))
        for _, local in alike.entries:
            if local.distribution:
                self.add_mesh(local.distribution.mesh)

    def add_tensor(self, tensor: Tensor) -> None:
        """Add a tensor whose shards are all known."""
        self._whole_tensors.append(tensor)

    def add_objects(self, names: Iterable[str]) -> None:
        """Add the names of things that are stored and are not tensors."""
        self._objects.update(dict.fromkeys(names))

    def add_notes(self, sentences: Iterable[str]) -> None:
        """Add sentences for a reader of the index. A repeated sentence appears once."""
        self._notes.update(dict.fromkeys(sentences))

    def add_mesh(self, mesh: Mesh | None) -> None:
        """Add a mesh that a file names."""
        if mesh and (self.mesh is None or len(mesh.sizes) > len(self.mesh.sizes)):
            self.mesh = mesh

    def add_files(self, paths: Iterable[str]) -> None:
        """Add files that the checkpoint consists of."""
        self._files.update(dict.fromkeys(paths))

    @property
    def objects(self) -> tuple[str, ...]:
        """The names of the objects so far."""
        return tuple(self._objects)

    def parallel(self, ranks: int) -> dict[str, int]:
        """The run's sizes by mesh dimension; the number of ranks if no file names a mesh."""
        return dict(zip(self.mesh.names, self.mesh.sizes, strict=True)) if self.mesh else {"ranks": ranks}

    def join(self, other: IndexBuilder) -> None:
        """Add everything that another builder holds. Raises CheckpointError as `add` does."""
        numbers = np.array([self._path_numbers.setdefault(path, len(self._path_numbers)) for path in other._path_numbers], np.int64)
        for (kind, name), added in other._columns.items():
            columns = self._columns_of(kind, name, added, added.first_path)
            columns.boxes.extend(added.boxes)
            columns.strides.extend(added.strides)
            rows = np.array(added.numbers, np.int64).reshape(-1, 4)
            rows[:, 0] = numbers[rows[:, 0]]
            columns.numbers.frombytes(rows.tobytes())
            columns.blocks.extend(replace(block, files=numbers[block.files]) for block in added.blocks)
        self._whole_tensors.extend(other._whole_tensors)
        self.add_objects(other._objects)
        self.add_notes(other._notes)
        self.add_mesh(other.mesh)
        self.add_files(other._files)
        self.param_groups = (*self.param_groups, *other.param_groups)

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors so far, in the order in which they were added. Each call makes their arrays anew."""
        paths, shared = tuple(self._path_numbers), dict[object, Columns]()
        boxed = (
            Tensor(name, columns.dtype, columns.shape, kind, columns.shards(self.files, paths, shared), columns.distribution)
            for (kind, name), columns in self._columns.items()
        )
        return (*boxed, *self._whole_tensors)

    def build(self, facts: RunFacts, *, param_groups: Callable[[], tuple[ParamGroup, ...]] | None = None) -> Index:
        """The index. The builder adds its notes and its mesh to `facts`.

        param_groups: reads the optimizer's param groups when they are needed; replaces the groups that were collected.
        """
        groups, tensors = self.param_groups, self.tensors()
        if any(tensor.name.endswith(CODES) for tensor in tensors if tensor.kind == "state"):
            self.add_notes(note_on_codes(tensors))
        return Index(
            self.format_name,
            tensors,
            tuple(StoredFile(path, self.files.size(path) or 0) for path in self._files),
            replace(facts, notes=(*self._notes, *facts.notes), mesh=facts.mesh or self.mesh),
            objects=self.objects,
            param_groups=param_groups or (lambda: groups),
        )

    def _columns_of(self, kind: Kind, name: str, added: LocalTensor | _Columns, path: str) -> _Columns:
        """The columns of a tensor, new ones if no file has named it yet."""
        columns = self._columns.get((kind, name))
        if columns is None:
            columns = self._columns[kind, name] = _Columns(added.dtype, added.shape, added.distribution, path)
        else:
            _check_same(name, columns, added, path)
        return columns

    def _shared_value(self, value: T) -> T:
        return self._shared.setdefault(value, value)  # type: ignore[return-value]


@value(eq=False)
class _Rows:
    """Boxes of one tensor as columns. Row i of every column belongs to the same box."""

    offsets: Columns
    """[n, ndim]: where each box starts."""
    sizes: Columns
    """[n, ndim]: how long it is."""
    strides: Columns
    """[n, ndim]: distances in elements between neighbours in the file, per axis."""
    files: Columns
    """[n]: number of the file, as the builder numbers paths."""
    ranks: Columns
    """[n]: the rank whose file it is."""
    members: Columns
    """[n]: byte offset of the zip member's local header; -1 if the byte offset of the data is known."""
    skipped: Columns
    """[n]: byte offset of the first element, counted from the member's payload; from the start of the file if `members` is -1."""


@mutable
class _Columns:
    """The boxes of one tensor, as they were added: one by one, then in blocks."""

    dtype: DType
    """The tensor's element type."""
    shape: tuple[int, ...]
    """The tensor's global shape."""
    distribution: Distribution | None
    """How the tensor lies on the run's mesh; None if the files do not tell."""
    first_path: str
    """The file that named the tensor first, for messages."""
    boxes: list[Box] = field(default_factory=list)
    """[n] Each box that was added alone, in elements of the whole tensor."""
    strides: list[tuple[int, ...]] = field(default_factory=list)
    """[n] Its strides."""
    numbers: array[int] = field(default_factory=lambda: array("q"))
    """[n * 4] `files`, `ranks`, `members` and `skipped` of _Rows, box by box."""
    blocks: list[_Rows] = field(default_factory=list)
    """Boxes that were added for many ranks at once."""

    def rows(self, shared: dict[object, Columns]) -> _Rows:
        """All boxes. With blocks, they are in the order of the ranks. shared: columns that tensors share if they are equal."""
        ndim, count = len(self.shape), len(self.boxes)
        alone = _Rows(
            np.array([box.offsets for box in self.boxes], np.int64).reshape(count, ndim),
            np.array([box.sizes for box in self.boxes], np.int64).reshape(count, ndim),
            np.array(self.strides, np.int64).reshape(count, ndim),
            *np.ascontiguousarray(np.array(self.numbers, np.int64).reshape(count, 4).T),
        )
        if not self.blocks:
            return alone
        parts = [alone, *self.blocks]

        def joined(name: str) -> Columns:
            # Blocks are alive, so their columns are told apart by id; the boxes that were added alone are few.
            columns = [getattr(part, name) for part in parts]
            key = name, id(order), columns[0].tobytes(), *map(id, columns[1:])
            if key not in shared:
                shared[key] = np.concatenate(columns)[order]
            return shared[key]

        ranks_key = "order", alone.ranks.tobytes(), *(id(part.ranks) for part in self.blocks)
        if ranks_key not in shared:
            shared[ranks_key] = np.argsort(np.concatenate([part.ranks for part in parts]), kind="stable")
        order = shared[ranks_key]
        return _Rows(*map(joined, [field.name for field in fields(_Rows)]))

    def shards(self, files: Files, paths: tuple[str, ...], shared: dict[object, Columns]) -> Shards:
        """The boxes as the pieces of a tensor. shared: columns that tensors share if they are equal."""
        from reshard.containers.torch_zip import Locations

        rows = self.rows(shared)
        starts_at_member = bool((rows.skipped == 0).all() and (rows.members >= 0).all())
        positions = rows.members if starts_at_member else np.where(rows.members >= 0, rows.members, 0) + rows.skipped
        locations, dtype = Locations(files), self.dtype

        def extent(i: int) -> Extent:
            path, member = paths[rows.files[i]], int(rows.members[i])
            start = locations.start(path, member) if member >= 0 else 0
            return Extent(path, start + int(rows.skipped[i]), tuple(rows.strides[i].tolist()), dtype)

        return Shards(PieceTable(paths, rows.offsets, rows.sizes, rows.files, positions, extent, ranks=rows.ranks))


def _check_same(name: str, columns: _Columns, added: LocalTensor | _Columns, path: str) -> None:
    """Raises CheckpointError unless two files agree on a tensor's element type, shape and distribution."""
    if (columns.dtype, columns.shape, columns.distribution) == (added.dtype, added.shape, added.distribution):
        return
    if (columns.dtype, columns.shape) != (added.dtype, added.shape):
        raise CheckpointError(
            f"{columns.first_path} has it as {columns.dtype} {list(columns.shape)}, {path} as {added.dtype} {list(added.shape)}",
            where=name,
            why="The files are from different models or saves",
            do="Keep the files of one save only",
        )
    meshes = [distribution.mesh if distribution else "none" for distribution in (columns.distribution, added.distribution)]
    raise CheckpointError(
        f"{columns.first_path} has it as ({columns.distribution or 'whole'}) on the mesh ({meshes[0]}), "
        f"{path} as ({added.distribution or 'whole'}) on ({meshes[1]})",
        where=name,
        why="The files are from runs on different meshes, so their boxes do not fit together",
        do="Keep the files of one save only",
    )
