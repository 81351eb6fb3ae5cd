"""DTensor and ShardedTensor as torch pickles them: the boxes of global tensors that a rank's file holds.

A DTensor has a mesh, a placement per mesh dimension and the coordinates of its rank. The box follows from these (geometry/meshes.py) and
must have the size of the local tensor. A ShardedTensor lists the boxes of its own rank and those of all other ranks.

The mesh has two forms: up to torch 2.9 a tensor of ranks, from 2.10 on a layout over a list of ranks. Both have the coordinates.
Measured on torch 2.13 and on the files in fixtures/torch_versions. Class names are compared without their modules, because torch has moved
classes between modules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard

from reshard.containers.inert_pickle import Inert, shown
from reshard.containers.packed_states import PackedState
from reshard.containers.torch_zip import AnyTensor, class_of_array, is_plain_tensor, memory_of
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType, from_torch, unread
from reshard.geometry.meshes import Distribution, Mesh, Placement, Replicated, Sharded, StridedSharded, distribution
from reshard.geometry.quantities import plural
from reshard.geometry.value import value


@value
class LocalTensor:
    """The part of a global tensor that one rank's file holds; or an array-like object that is not read, which has no shards."""

    dtype: DType
    """The element type; that of `unread` if it is not read."""
    shape: tuple[int, ...]
    """The global shape."""
    shards: tuple[tuple[Box, AnyTensor], ...]
    """The boxes that the file holds, each with its bytes."""
    distribution: Distribution | None = None
    """How the tensor is distributed on the mesh; None if the file does not say."""
    rank: int | None = None
    """The global rank that wrote the file; None if the file does not say."""

    @property
    def is_whole(self) -> bool:
        """Whether the file holds all of it, in one piece, or it is an object that is not read."""
        return self.dtype.is_unread or [box.sizes for box, _ in self.shards] == [self.shape]

    @property
    def memory(self) -> tuple[object, ...] | None:
        """A key for the memory of the first shard, equal for two tied parameters of one file; None if the file holds no shard."""
        return memory_of(self.shards[0][1]) if self.shards else None

    def __repr__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        return f"LocalTensor({self.dtype}, {list(self.shape)}, {plural(len(self.shards), 'box', 'boxes')}{rank})"


def class_of(value: Any) -> str:
    """The class of an Inert without its module, such as "DTensor"; "" for any other value."""
    return value.class_name.rpartition(".")[2] if isinstance(value, Inert) else ""


class Decoder:
    """Decodes the tensors of one file. A mesh or spec that many tensors share is decoded once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._meshes: dict[int, _MeshFacts] = {}
        self._distributions: dict[Any, Distribution] = {}

    def decode(self, name: str, value: Any) -> LocalTensor | None:
        """The part of a tensor that `value` holds, or what stands for an array-like value of another class; None if it is neither.

        Raises: CheckpointError for a tensor that contradicts itself.
        """
        if is_plain_tensor(value):
            return LocalTensor(value.dtype, value.shape, ((Box.whole(value.shape), value),))
        kind = class_of(value)
        if kind == "DTensor":
            return self._dtensor(name, value)
        if kind == "ShardedTensor":
            return self._sharded(name, value)
        sizes = (tuple(part) for part in value.args if _are_counts(part) and 0 not in part) if isinstance(value, Inert) else iter(())
        return LocalTensor(unread(class_name), next(sizes, ()), ()) if (class_name := class_of_array(value)) else None

    def decode_state(self, name: str, value: Any) -> dict[str, LocalTensor]:
        """The parts of a state's tensors that `value` holds, by what follows its name: "" for a tensor; ".codes" and others for a state
        in 8 or 4 bits, if this part of it begins with a block. Raises CheckpointError as `decode` does.
        """
        is_distributed = class_of(value) == "DTensor"
        packed = PackedState.of(value.get("_local_tensor") if is_distributed else value)
        if packed is None:
            local = self.decode(name, value)
            return {"": local} if local else {}
        whole = replace(packed.stored["codes"], shape=packed.shape, strides=row_major(packed.shape))
        local = (
            self._dtensor(name, value, whole)
            if is_distributed
            else LocalTensor(whole.dtype, packed.shape, ((Box.whole(packed.shape), whole),))
        )
        (box, _), layout = local.shards[0], packed.layout(local.shape)
        boxes = packed.boxes(box, local.shape) if layout else None
        if layout is None or boxes is None:
            return {"": LocalTensor(unread(packed.class_name), local.shape, ())}
        return {
            f".{part}": LocalTensor(*layout[part], ((boxes[part], stored),), local.distribution if boxes[part] == box else None, local.rank)
            for part, stored in packed.stored.items()
        }

    def _dtensor(self, name: str, value: Inert, packed: AnyTensor | None = None) -> LocalTensor:
        """packed: what stands for the local tensor, if that is a state in 8 or 4 bits."""
        where = f"{name} in {self._where}"
        shape, local, spec = value.args[2] if len(value.args) > 2 else None, packed or value.get("_local_tensor"), value.get("_spec")
        if _are_counts(shape) and (class_name := class_of_array(local)):
            return LocalTensor(unread(class_name), tuple(shape), ())
        if not _are_counts(shape) or not is_plain_tensor(local) or not isinstance(spec, Inert):
            raise CheckpointError(
                f"the DTensor has the size {shown(shape)}, the local tensor {shown(local)}, the spec {shown(spec)}", where=where
            )
        mesh = self._mesh(_attribute(spec, "mesh", "device_mesh"), where)
        distributed = self._distribution(spec, mesh, where)
        if any(axis >= len(shape) for placement in distributed.placements if (axis := getattr(placement, "axis", -1)) >= 0):
            raise CheckpointError(f"it has {len(shape)} axes, but its placements on the mesh are {distributed}", where=where)
        box = distributed.box(shape, mesh.coordinates)
        if box.sizes != local.shape:
            raise CheckpointError(
                f"rank {mesh.rank} holds {list(local.shape)} of {list(shape)}; "
                f"at {_named(mesh)} of {distributed} it should hold {list(box.sizes)}",
                where=where,
                why="The tensor was cut by rules that are not torch's, or the file was assembled by hand",
                do="Save it again with torch.distributed.checkpoint, which writes every box",
            )
        return LocalTensor(local.dtype, shape, ((box, local),), distributed, mesh.rank)

    def _distribution(self, spec: Inert, mesh: _MeshFacts, where: str) -> Distribution:
        stored, order = spec.get("placements"), spec.get("shard_order")
        if not isinstance(stored, tuple | list):
            raise CheckpointError(f"its placements are {shown(stored)}", where=where)
        # A file has many spec objects, but few different specs. So their content is compared before it is decoded.
        key = (id(mesh), tuple(map(_comparable, stored)), tuple(map(_comparable, order)) if isinstance(order, tuple) else None)
        decoded = self._distributions.get(key)
        if decoded is None:
            placements = tuple(_placement(placement, where) for placement in stored)
            decoded = self._distributions[key] = distribution(mesh.mesh, placements, _shard_order(order), where=where)
        return decoded

    def _mesh(self, value: Any, where: str) -> _MeshFacts:
        decoded = self._meshes.get(id(value))
        if decoded is None:
            decoded = self._meshes[id(value)] = _mesh_facts(value, where)
        return decoded

    def _sharded(self, name: str, value: Inert) -> LocalTensor:
        """The state of a ShardedTensor is (local shards, metadata of all shards, process group, sharding spec, remote references)."""
        where = f"{name} in {self._where}"
        state = value.state
        if not isinstance(state, tuple) or len(state) < 3 or not isinstance(state[0], list) or not isinstance(state[1], Inert):
            raise CheckpointError(f"the ShardedTensor's state is {shown(state)}", where=where)
        shape, dtype = state[1].get("size"), _dtype_of(state[1].get("tensor_properties"), where)
        if not _are_counts(shape):
            raise CheckpointError(f"the ShardedTensor's size is {shown(shape)}", where=where)
        shards = []
        for shard in state[0]:
            local, metadata = _attribute(shard, "tensor"), _attribute(shard, "metadata")
            offsets, sizes = _attribute(metadata, "shard_offsets"), _attribute(metadata, "shard_sizes")
            if class_name := class_of_array(local):
                return LocalTensor(unread(class_name), tuple(shape), ())
            if not is_plain_tensor(local) or not _are_counts(offsets) or not _are_counts(sizes):
                raise CheckpointError(
                    f"one of its shards is {shown(local)} with the offsets {shown(offsets)}, the sizes {shown(sizes)}", where=where
                )
            if local.shape != tuple(sizes) or local.dtype != dtype or len(offsets) != len(sizes) or len(sizes) != len(shape):
                raise CheckpointError(
                    f"a shard at {list(offsets)} should be {dtype} {list(sizes)} of {list(shape)}, it is {local.dtype} {list(local.shape)}",
                    where=where,
                    do="Copy the file again",
                )
            shards.append((Box(tuple(offsets), tuple(sizes)), local))
        return LocalTensor(dtype, tuple(shape), tuple(shards), None, _rank(_attribute(state[2], "global_rank")))


@value
class _MeshFacts:
    """A DeviceMesh as one rank's file describes it."""

    mesh: Mesh
    coordinates: tuple[int, ...]
    """The coordinates of the rank on the mesh."""
    rank: int | None
    """The global rank; None if the file does not say."""


def _mesh_facts(value: Any, where: str) -> _MeshFacts:
    if class_of(value) != "DeviceMesh":
        raise CheckpointError(f"its mesh is {shown(value)}, expected a DeviceMesh", where=where)
    coordinates = _attribute(value, "_coordinate_on_dim")
    layout, grid = _attribute(value, "_layout"), _attribute(value, "mesh", "_mesh")
    sizes = _layout_sizes(layout) if layout is not None else grid.shape if is_plain_tensor(grid) else None
    if not _are_counts(sizes) or not _are_counts(coordinates) or len(coordinates) != len(sizes):
        raise CheckpointError(
            f"its mesh has the sizes {shown(sizes)}, the rank's coordinates are {shown(coordinates)}",
            where=where,
            why="Both are needed to know which part of the tensor this is",
            do="Save the checkpoint from ranks that are on the mesh",
        )
    if any(at >= size for at, size in zip(coordinates, sizes, strict=True)):
        raise CheckpointError(f"the rank's coordinates {tuple(coordinates)} are outside of its mesh of {tuple(sizes)}", where=where)
    names = _attribute(value, "_mesh_dim_names", "mesh_dim_names")
    if not isinstance(names, tuple | list) or len(names) != len(sizes) or not all(isinstance(name, str) for name in names):
        names = tuple(f"dim{i}" for i in range(len(sizes)))
    return _MeshFacts(Mesh(tuple(names), tuple(sizes)), tuple(coordinates), _rank(_attribute(value, "_rank")))


def _layout_sizes(layout: Any) -> tuple[int, ...] | None:
    """The sizes of a _MeshLayout: the product of the shape of each dimension's _FlatLayout, or plain sizes (torch 2.10)."""
    axes = _attribute(layout, "axes")
    if isinstance(axes, tuple | list):
        shapes = [_attribute(axis, "shape") for axis in axes]
        if all(_are_counts(shape) for shape in shapes):
            return tuple(_product(shape) for shape in shapes)
        return None
    shape = _attribute(layout, "shape")
    if isinstance(shape, tuple | list) and all(_is_count(size) or _are_counts(size) for size in shape):
        return tuple(_product(size) if isinstance(size, tuple | list) else size for size in shape)
    return (shape,) if _is_count(shape) else None


def _product(values: Any) -> int:
    total = 1
    for value in values:
        total *= value
    return total


def _comparable(value: Any) -> tuple[Any, ...]:
    """The content of a placement or of an entry of the shard order, as a value that can be compared and hashed."""
    if isinstance(value, Inert) and len(value.args) <= 4 and all(map(_is_short, value.args)):
        state = value.state
        if state is None or (isinstance(state, dict) and len(state) <= 4 and all(map(_is_short, state.values()))):
            return value.class_name, value.args, tuple(state.items()) if state else ()
    return ("", id(value))


def _is_short(value: Any) -> bool:
    """Whether a value is None, a number, a text, or a short tuple of numbers: these are cheap to compare and hash."""
    return value is None or type(value) in (int, str) or (type(value) is tuple and len(value) <= 8 and all(map(_is_count, value)))


def _placement(value: Any, where: str) -> Placement:
    kind, axis = class_of(value), _attribute(value, "dim")
    if kind == "Replicate":
        return Replicated()
    if kind == "Shard" and _is_count(axis):
        return Sharded(axis)
    factor = _attribute(value, "split_factor")
    if kind == "_StridedShard" and _is_count(axis) and _is_count(factor):
        return StridedSharded(axis, factor)
    if kind == "Partial" or kind == "_Partial":
        raise CheckpointError(
            "it is a Partial tensor: every rank holds one term of a sum",
            where=where,
            why="The terms have not been added, so no rank holds the values",
            do="Save it after redistributing to Replicate or Shard",
        )
    raise CheckpointError(f"its placement {shown(value)} is unknown", where=where, do="Save it with Shard and Replicate placements")


def _shard_order(value: Any) -> tuple[int, ...] | None:
    """The mesh dimensions in the order in which they cut, from the entries (tensor_dim, mesh_dims); None if the file does not say."""
    if not isinstance(value, tuple | list):
        return None
    order: list[int] = []
    for entry in value:
        dims = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else _mesh_dims_of(entry)
        if not _are_counts(dims):
            return None
        order.extend(dims)
    return tuple(order)


def _mesh_dims_of(entry: Any) -> Any:
    """The mesh_dims of a ShardOrderEntry, which is a named tuple."""
    if not isinstance(entry, Inert):
        return None
    return entry.args[1] if len(entry.args) > 1 else entry.get("mesh_dims")


def _dtype_of(properties: Any, where: str) -> DType:
    state = properties.state if isinstance(properties, Inert) else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(dtype, str):
        raise CheckpointError(f"the ShardedTensor's element type is {shown(dtype)}", where=where)
    return from_torch(dtype, where=where)


def _attribute(value: Any, *names: str) -> Any:
    """The first of those attributes that an Inert has and that is not None."""
    if not isinstance(value, Inert):
        return None
    return next((attribute for name in names if (attribute := value.get(name)) is not None), None)


def _named(mesh: _MeshFacts) -> str:
    return ", ".join(f"{name} {at}" for name, at in zip(mesh.mesh.names, mesh.coordinates, strict=True))


def _rank(value: Any) -> int | None:
    return value if _is_count(value) else None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


def _are_counts(values: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(values, tuple | list) and all(map(_is_count, values))
