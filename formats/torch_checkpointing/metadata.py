"""What metadata.pkl says: the number of ranks, and for every item the file and the boxes of each rank. Versions 1.0 and 2.0."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any, NoReturn

from reshard.adapter.dcp_keys import KeyPath
from reshard.containers import inert_pickle
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.meshes import Distribution, Mesh, Placement, Replicated, Sharded, StridedSharded, distribution
from reshard.geometry.value import value
from reshard.storage.files import Files, inside, read_whole
from reshard.storage.json_input import parsed

from .files import METADATA, ItemFile, ItemFiles, default_file

_LIMIT = 4 << 30
_MOST_RANKS = 1 << 20

# What both versions say about an item: for each tensor the groups of ranks that hold it, and for each rank its layout.
_Tensors = list[tuple[KeyPath, list[Any]]]
_Layouts = Mapping[int, Any]


@value
class RankBoxes:
    """What one rank holds of a tensor, according to the metadata."""

    dtype: DType
    """The element type."""
    shape: tuple[int, ...]
    """The global shape."""
    distribution: Distribution | None
    """How the tensor lies on the run's mesh; None if the metadata lists boxes."""
    boxes: tuple[tuple[Box, Box], ...]
    """Each box, and the same box in the local tensor."""


@value
class DescribedItem:
    """An item, according to the metadata."""

    files: ItemFiles
    """Its file on every rank."""
    tensors: Mapping[int, Mapping[KeyPath, RankBoxes]]
    """Rank -> path of a tensor in the item -> what the rank holds of it."""


def read_metadata(files: Files) -> tuple[str | None, int, dict[str, DescribedItem]] | None:
    """The version of metadata.pkl if it says so, the number of ranks, and the items by name; None if there is no such file.

    Raises: CheckpointError if its version is unknown, or it does not have the expected form.
    """
    if files.size(METADATA) is None:
        return None
    root = inert_pickle.load(read_whole(files, METADATA, limit=_LIMIT), where=METADATA)
    ranks: Any = root.get("world_size") if isinstance(root, dict) and isinstance(root.get("metadata"), dict) else None
    if type(ranks) is not int or ranks < 0:
        _refuse("it is not metadata of torch_checkpointing: version, world_size and metadata are expected")
    version = root.get("version", "1.0")
    if version not in ("1.0", "2.0"):
        raise CheckpointError(
            f"its version is {inert_pickle.shown(version)}; 1.0 and 2.0 are known",
            where=METADATA,
            why="A later version may mean something else by the same words",
            do="Tell us about it, and save with an earlier torch_checkpointing until then",
        )
    if ranks > _MOST_RANKS:
        _refuse(f"the world_size is {ranks:,}")
    listed = _items_of_version_2(root["metadata"]) if version == "2.0" else _items_of_version_1(root)
    items = {name: _described_item(name, tensors, layouts, ranks) for name, tensors, layouts in listed}
    return root.get("version"), ranks, items


def _items_of_version_2(metadata: Mapping[Any, Any]) -> Iterator[tuple[str, _Tensors, _Layouts]]:
    """{item: {"nested_path_to_metadata": {path: groups}, "rank_to_layout_info": {rank: layout}}}"""
    for name, item in metadata.items():
        if not isinstance(item, dict):
            _refuse(f"the item {inert_pickle.shown(name)} is described by {inert_pickle.shown(item)}")
        tensors = [(_key_path(key), _groups(groups)) for key, groups in _mapping(item.get("nested_path_to_metadata", {})).items()]
        yield str(name), tensors, _layouts(item.get("rank_to_layout_info", {}))


def _items_of_version_1(root: Mapping[Any, Any]) -> Iterator[tuple[str, _Tensors, _Layouts]]:
    """ "metadata": {path that starts with the item: groups}, "rank_to_layout_info_mappings": {rank: {item: layout}}"""
    layouts = _layouts(root.get("rank_to_layout_info_mappings", {}))
    by_item: dict[str, _Tensors] = {}
    for key, groups in root["metadata"].items():
        name, *path = _key_path(key)
        by_item.setdefault(str(name), []).append((tuple(path), _groups(groups)))
    for name, tensors in by_item.items():
        yield name, tensors, {rank: _mapping(layout).get(name) for rank, layout in layouts.items()}


def _described_item(name: str, tensors: _Tensors, layouts: _Layouts, ranks: int) -> DescribedItem:
    by_rank: dict[int, dict[KeyPath, RankBoxes]] = {}
    for path, groups in tensors:
        for group in groups:
            if not isinstance(group, dict) or not isinstance(group.get("ranks"), tuple | list):
                _refuse(f"{name} {path} is described by {inert_pickle.shown(group)}")
            for rank, rank_boxes in _boxes_by_rank(group, f"{name}: {'.'.join(map(str, path))}"):
                by_rank.setdefault(rank, {})[path] = rank_boxes
    return DescribedItem({rank: _item_file(name, rank, layouts.get(rank)) for rank in range(ranks)}, by_rank)


def _key_path(key: Any) -> KeyPath:
    """The path that a key of the metadata holds as JSON: '["layers", 0, "weight"]'."""
    try:
        parts = parsed(key)
    except (TypeError, ValueError):
        parts = None
    if not isinstance(parts, list) or not all(type(part) in (str, int) for part in parts):
        _refuse(f"{inert_pickle.shown(key)} is not a path of names and numbers")
    return tuple(parts)


def _layouts(value: Any) -> _Layouts:
    """Layouts by rank. Ranks are numbers, or text of digits."""
    by_rank = _mapping(value)
    if wrong := [rank for rank in by_rank if not re.fullmatch(r"\d{1,9}", str(rank)) or not isinstance(rank, int | str)]:
        _refuse(f"{inert_pickle.shown(wrong[0])} is not the number of a rank")
    return {int(rank): layout for rank, layout in by_rank.items()}


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else _refuse(f"values by name are expected, and it holds {inert_pickle.shown(value)}")


def _groups(value: Any) -> list[Any]:
    return value if isinstance(value, list) else _refuse(f"a list of ranks' metadata is {inert_pickle.shown(value)}")


def _item_file(item: str, rank: int, layout: Any) -> ItemFile:
    """The file of an item on a rank. A layout that is None stands for the default."""
    if layout is None:
        return default_file(item, rank)
    serialization = layout.get("serialization_format") if isinstance(layout, dict) else None
    if not isinstance(serialization, dict) or not isinstance(layout.get("file_path"), str):
        _refuse(f"the layout of {item} on rank {rank} is {inert_pickle.shown(layout)}")
    return ItemFile(inside(layout["file_path"], where=METADATA), str(serialization.get("type")))


def _boxes_by_rank(group: Mapping[str, Any], where: str) -> Iterator[tuple[int, RankBoxes]]:
    """What each rank of a group holds of a tensor."""
    packed: Any = group.get("sharding_metadata")
    kind: Any = packed.get("type") if isinstance(packed, dict) else None
    read = {"DTensorShardingMetadata": _of_dtensor, "default_tensor_v1": _of_box_list}.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise CheckpointError(
            f"its sharding metadata is of the kind {inert_pickle.shown(kind)}",
            where=f"{where} in {METADATA}",
            why="DTensorShardingMetadata and default_tensor_v1 are known; other kinds do not tell what a rank holds",
            do="Save the item as DTensors",
        )
    try:
        yield from read(packed["data"], group["ranks"], where)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError) as error:
        raise CheckpointError(f"its sharding metadata cannot be understood: {error!r:.200}", where=f"{where} in {METADATA}") from None


def _of_dtensor(data: Mapping[str, Any], ranks: tuple[int, ...], where: str) -> Iterator[tuple[int, RankBoxes]]:
    spec = data["mesh_spec"]
    sizes, grid = tuple(spec["mesh_shape"]), tuple(spec["mesh_data"])
    names = spec["mesh_dim_names"] or tuple(f"dim{i}" for i in range(len(sizes)))
    placements = tuple(_placement(placement, where) for placement in data["placements"])
    layout = distribution(Mesh(tuple(names), sizes), placements, where=where)
    shape, dtype = tuple(data["global_shape"]), from_torch(data["dtype"], where=where)
    coordinates = _coordinates(sizes, grid)
    for rank in ranks:
        box = layout.box(shape, coordinates[rank])
        yield rank, RankBoxes(dtype, shape, layout, ((box, Box.whole(box.sizes)),))


def _of_box_list(data: Mapping[str, Any], ranks: tuple[int, ...], where: str) -> Iterator[tuple[int, RankBoxes]]:
    columns = (data["global_offsets"], data["local_sizes"], data["local_offsets"])
    boxes = tuple(
        (Box(tuple(offsets), tuple(sizes)), Box(tuple(start), tuple(sizes))) for offsets, sizes, start in zip(*columns, strict=True)
    )
    shape = tuple(data["global_shape"])
    if any(len(box.sizes) != len(shape) for box, _ in boxes):
        raise ValueError(f"boxes of another number of axes than the shape {shape}")
    rank_boxes = RankBoxes(from_torch(data["dtype"], where=where), shape, None, boxes)
    yield from ((rank, rank_boxes) for rank in ranks)


@lru_cache(maxsize=64)
def _coordinates(sizes: tuple[int, ...], grid: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Rank -> its coordinates on the mesh. `grid` lists the mesh's ranks in row-major order."""
    if len(grid) != math.prod(sizes):
        raise ValueError(f"{len(grid)} ranks on a mesh of {sizes}")
    return dict(zip(grid, product(*map(range, sizes)), strict=True))


def _placement(value: Mapping[str, Any], where: str) -> Placement:
    kind = value["type"]
    if kind == "Replicate":
        return Replicated()
    if kind == "Shard":
        return Sharded(value["dim"])
    if kind == "StridedShard":
        return StridedSharded(value["dim"], value["split_factor"])
    raise CheckpointError(f"the placement {inert_pickle.shown(kind)} is not known", where=where)


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(what, where=METADATA, do="Copy it again from where the checkpoint was written")
