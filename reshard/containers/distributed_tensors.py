"""DTensor and ShardedTensor as torch pickles them: which box of which global tensor a rank's file holds.

A DTensor knows its mesh, a placement per mesh dimension and its rank's coordinates; the box follows from them (meshes.py) and
must have the size of the local tensor. A ShardedTensor lists its own boxes, and those of all other ranks.

Two forms of the mesh: until torch 2.9 a tensor of ranks, from 2.10 on a layout over a list of ranks. Coordinates are always there.
Measured on torch 2.13 and on the files in fixtures/torch_versions; class names compared without their modules, which moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from reshard.containers.inert_pickle import Inert, shown
from reshard.containers.torch_zip import AnyTensor, is_stored, memory_of
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.meshes import Distribution, Mesh, Placement, Replicated, Sharded, StridedSharded, distribution


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A rank's part of a global tensor: the boxes that its file holds, each with its bytes.

    rank: the global rank that the file says it is from; None if it does not.
    """

    dtype: DType
    shape: tuple[int, ...]
    shards: tuple[tuple[Box, AnyTensor], ...]
    distribution: Distribution | None = None
    rank: int | None = None

    @property
    def memory(self) -> tuple[object, ...] | None:
        """What two tied parameters have in common: the place of their bytes. None if the file holds nothing of it."""
        return memory_of(self.shards[0][1]) if self.shards else None


def class_of(value: Any) -> str:
    """The class of a stand-in without its module: "DTensor", "ShardedTensor"; "" for anything else."""
    return value.class_name.rpartition(".")[2] if isinstance(value, Inert) else ""


class Decoder:
    """Reads the tensors of one file; meshes and specs that many of them share are understood once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._meshes: dict[int, _MeshFacts] = {}
        self._distributions: dict[Any, Distribution] = {}

    def decode(self, name: str, value: Any) -> LocalTensor | None:
        """The part of a tensor that `value` holds; None if it is no tensor.

        Raises: CheckpointError for tensors that contradict themselves, or are of a class that is not known.
        """
        if is_stored(value):
            return LocalTensor(value.dtype, value.shape, ((Box.whole(value.shape), value),))
        kind = class_of(value)
        if kind == "DTensor":
            return self._dtensor(name, value)
        if kind == "ShardedTensor":
            return self._sharded(name, value)
        if isinstance(value, Inert) and len(value.args) == 1 and is_stored(value.args[0]):
            raise CheckpointError(
                f"it is a tensor of class {value.class_name}",
                where=f"{name} in {self._where}",
                why="What its bytes mean is known to that class only",
                do="Save plain tensors or DTensors",
            )
        return None

    def _dtensor(self, name: str, value: Inert) -> LocalTensor:
        where = f"{name} in {self._where}"
        shape, local, spec = value.args[2] if len(value.args) > 2 else None, value.get("_local_tensor"), value.get("_spec")
        if not _are_counts(shape) or not is_stored(local) or not isinstance(spec, Inert):
            raise CheckpointError(
                f"the DTensor has the size {shown(shape)}, the local tensor {shown(local)}, the spec {shown(spec)}", where=where
            )
        mesh = self._mesh(_attribute(spec, "mesh", "device_mesh"), where)
        found = self._distribution(spec, mesh, where)
        if any(axis >= len(shape) for placement in found.placements if (axis := getattr(placement, "axis", -1)) >= 0):
            raise CheckpointError(f"it has {len(shape)} axes, and lies on the mesh as {found}", where=where)
        box = found.box(shape, mesh.coordinates)
        if box.sizes != local.shape:
            raise CheckpointError(
                f"rank {mesh.rank} holds {list(local.shape)} of {list(shape)}; "
                f"at {_named(mesh)} of {found} it should hold {list(box.sizes)}",
                where=where,
                why="The tensor was cut by other rules than torch's, or the file was put together by hand",
                do="Save it again with torch.distributed.checkpoint, which writes every box",
            )
        return LocalTensor(local.dtype, shape, ((box, local),), found, mesh.rank)

    def _distribution(self, spec: Inert, mesh: _MeshFacts, where: str) -> Distribution:
        stored, order = spec.get("placements"), spec.get("shard_order")
        if not isinstance(stored, tuple | list):
            raise CheckpointError(f"its placements are {shown(stored)}", where=where)
        # Few kinds of specs occur, in many objects: what they say is compared before it is understood.
        key = (id(mesh), tuple(map(_said, stored)), tuple(map(_said, order)) if isinstance(order, tuple) else None)
        found = self._distributions.get(key)
        if found is None:
            placements = tuple(_placement(each, where) for each in stored)
            found = self._distributions[key] = distribution(mesh.mesh, placements, _shard_order(order), where=where)
        return found

    def _mesh(self, value: Any, where: str) -> _MeshFacts:
        found = self._meshes.get(id(value))
        if found is None:
            found = self._meshes[id(value)] = _mesh_facts(value, where)
        return found

    def _sharded(self, name: str, value: Inert) -> LocalTensor:
        """State: (local shards, metadata of all shards, process group, sharding spec, remote references)."""
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
            if not is_stored(local) or not _are_counts(offsets) or not _are_counts(sizes):
                raise CheckpointError(f"a shard of it is {shown(local)} at {shown(offsets)}, {shown(sizes)}", where=where)
            if local.shape != tuple(sizes) or local.dtype != dtype or len(offsets) != len(sizes) or len(sizes) != len(shape):
                raise CheckpointError(
                    f"a shard at {list(offsets)} should be {dtype} {list(sizes)} of {list(shape)}, it is {local.dtype} {list(local.shape)}",
                    where=where,
                    do="Copy the file again",
                )
            shards.append((Box(tuple(offsets), tuple(sizes)), local))
        return LocalTensor(dtype, tuple(shape), tuple(shards), None, _rank(_attribute(state[2], "global_rank")))


@dataclass(frozen=True, slots=True)
class _MeshFacts:
    mesh: Mesh
    coordinates: tuple[int, ...]
    rank: int | None


def _mesh_facts(value: Any, where: str) -> _MeshFacts:
    if class_of(value) != "DeviceMesh":
        raise CheckpointError(f"its mesh is {shown(value)}, a DeviceMesh was expected", where=where)
    coordinates = _attribute(value, "_coordinate_on_dim")
    layout, grid = _attribute(value, "_layout"), _attribute(value, "mesh", "_mesh")
    sizes = _layout_sizes(layout) if layout is not None else grid.shape if is_stored(grid) else None
    if not _are_counts(sizes) or not _are_counts(coordinates) or len(coordinates) != len(sizes):
        raise CheckpointError(
            f"its mesh has the sizes {shown(sizes)}, the rank's coordinates are {shown(coordinates)}",
            where=where,
            why="Which part of the tensor this is follows from both",
            do="Save the checkpoint from ranks that are on the mesh",
        )
    if any(at >= size for at, size in zip(coordinates, sizes, strict=True)):
        raise CheckpointError(f"the rank's coordinates {tuple(coordinates)} are not on a mesh of {tuple(sizes)}", where=where)
    names = _attribute(value, "_mesh_dim_names", "mesh_dim_names")
    if not isinstance(names, tuple | list) or len(names) != len(sizes) or not all(isinstance(name, str) for name in names):
        names = tuple(f"dim{i}" for i in range(len(sizes)))
    return _MeshFacts(Mesh(tuple(names), tuple(sizes)), tuple(coordinates), _rank(_attribute(value, "_rank")))


def _layout_sizes(layout: Any) -> tuple[int, ...] | None:
    """The sizes of a _MeshLayout: one _FlatLayout per dimension, whose shape multiplies; or plain sizes (torch 2.10)."""
    axes = _attribute(layout, "axes")
    if isinstance(axes, tuple | list):
        shapes = [_attribute(axis, "shape") for axis in axes]
        if all(_are_counts(shape) for shape in shapes):
            return tuple(_product(shape) for shape in shapes)
        return None
    shape = _attribute(layout, "shape")
    if isinstance(shape, tuple | list) and all(_is_count(each) or _are_counts(each) for each in shape):
        return tuple(_product(each) if isinstance(each, tuple | list) else each for each in shape)
    return (shape,) if _is_count(shape) else None


def _product(values: Any) -> int:
    total = 1
    for value in values:
        total *= value
    return total


def _said(value: Any) -> tuple[Any, ...]:
    """All that a stand-in of a placement or of an entry of the shard order says, as something to compare by."""
    if isinstance(value, Inert) and len(value.args) <= 4 and all(map(_is_short, value.args)):
        state = value.state
        if state is None or (isinstance(state, dict) and len(state) <= 4 and all(map(_is_short, state.values()))):
            return value.class_name, value.args, tuple(state.items()) if state else ()
    return ("", id(value))


def _is_short(value: Any) -> bool:
    """Whether a value is a number or text, or a few numbers: what can be compared and hashed without a second thought."""
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
            "it is a Partial tensor: every rank holds a summand",
            where=where,
            why="A healthy checkpoint holds values, not terms of a sum that nobody has added up",
            do="Save it after redistributing to Replicate or Shard",
        )
    raise CheckpointError(
        f"the placement {shown(value)} is not one that reshard knows", where=where, do="Save it with Shard and Replicate placements"
    )


def _shard_order(value: Any) -> tuple[int, ...] | None:
    """The mesh dimensions in the order in which they cut, from entries (tensor_dim, mesh_dims); None if the file does not say."""
    if not isinstance(value, tuple | list):
        return None
    order: list[int] = []
    for entry in value:
        dims = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else _second(entry)
        if not _are_counts(dims):
            return None
        order.extend(dims)
    return tuple(order)


def _second(entry: Any) -> Any:
    """mesh_dims of a ShardOrderEntry, a named tuple."""
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
    """The first of those attributes that a stand-in has, by name or as the argument of a plain constructor."""
    if not isinstance(value, Inert):
        return None
    return next((found for name in names if (found := value.get(name)) is not None), None)


def _named(mesh: _MeshFacts) -> str:
    return ", ".join(f"{name} {at}" for name, at in zip(mesh.mesh.names, mesh.coordinates, strict=True))


def _rank(value: Any) -> int | None:
    return value if _is_count(value) else None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


def _are_counts(values: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(values, tuple | list) and all(map(_is_count, values))
