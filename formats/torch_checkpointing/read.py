"""torch_checkpointing, the package that shall follow torch.distributed.checkpoint (before its version 1.0).

    <item>_<rank>.pt    torch.save of an item ("model", "optimizer", ...) on a rank, or another path and format that its layout names:
                        safetensors (local tensors under dotted names), JSON, raw bytes
    metadata.pkl        written if any item can be resharded: {"version", "world_size", "metadata": {item: {
                            "nested_path_to_metadata": {path as JSON: [{"sharding_metadata": {"type", "data"}, "ranks"}]},
                            "rank_to_layout_info": {rank: None or {"file_path", "serialization_format"}}}}}

Where there is metadata it says which box of which tensor each rank holds, and the DTensors in the files have to agree; without it the
DTensors alone say so.
Source: torch_checkpointing 0.1.1 (distributed_metadata.py, dtensor_metadata.py, checkpoint_layout.py); measured on its files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any, NoReturn

from reshard.adapter.format import Format, Hints
from reshard.adapter.index_builder import Collector
from reshard.adapter.rank_files import step_of
from reshard.adapter.state_dicts import MODEL_ROOTS, group_numbers, holds_parts
from reshard.canonical.optimizer_state import ROOTS as OPTIMIZER_ROOTS
from reshard.canonical.optimizer_state import names_for, plain_groups, state_kind
from reshard.containers import inert_pickle, safetensors, torch_zip
from reshard.containers.distributed_tensors import Decoder, LocalTensor
from reshard.containers.torch_zip import AnyTensor, StoredTensor, UnlocatedTensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.meshes import Distribution, Mesh, Placement, Replicated, Sharded, StridedSharded, distribution
from reshard.index.index import Index, Kind, ParamGroup, RunFacts, StoredFile
from reshard.storage.files import Files, inside, missing, read_whole

_METADATA = "metadata.pkl"
_LIMIT = 4 << 30
_NUMBERED = re.compile(r"(?P<item>[\w-]+?)_(?P<rank>\d{1,6})\.(pt|json)")

Path = tuple[str | int, ...]
# What a rank holds of a tensor: dtype, global shape, distribution if it has one, and its boxes with where they start in the local tensor.
_Boxes = tuple[tuple[Box, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Said:
    """What metadata says of one tensor on one rank."""

    dtype: DType
    shape: tuple[int, ...]
    distribution: Distribution | None
    boxes: _Boxes


@dataclass(slots=True)
class _Item:
    """A top-level item: per rank its file and the file's format; per rank and path what metadata says of the tensor there."""

    name: str
    files: dict[int, tuple[str, str]] = field(default_factory=dict)
    said: dict[int, dict[Path, _Said]] = field(default_factory=dict)

    @property
    def is_optimizer(self) -> bool:
        return self.name in OPTIMIZER_ROOTS


class TorchCheckpointing(Format):
    name = "torch-checkpointing"
    summary = "torch_checkpointing (before 1.0): a file per item and rank, and metadata.pkl"
    owns = (_METADATA, "model_[0-9]*.pt", "optimizer_[0-9]*.pt")

    def detect(self, files: Files) -> str | None:
        if files.size(_METADATA) is not None:
            return _METADATA
        found = _numbered(files)
        first = next((item.files[0][0] for item in found.values() if item.name in MODEL_ROOTS and 0 in item.files), None)
        return first if first and holds_parts(files, first) else None

    def read(self, files: Files, hints: Hints) -> Index:
        metadata = _metadata(files)
        items = _numbered(files)
        ranks = _described(metadata, items) if metadata else 1 + max((max(item.files) for item in items.values()), default=-1)
        run = _Run(files)
        for item in sorted(items.values(), key=lambda item: item.is_optimizer):
            run.read(item, ranks)
        mesh = run.mesh
        facts = RunFacts(
            producer="torch_checkpointing",
            version=str(metadata["version"]) if metadata and "version" in metadata else None,
            step=step_of(files.root),
            parallel=dict(zip(mesh.names, mesh.sizes, strict=True)) if mesh else {"ranks": ranks},
            config=hints.config,
            notes=tuple(run.notes),
            mesh=mesh,
        )
        stored = [path for item in items.values() for path, _ in item.files.values()]
        return Index(
            self.name,
            tuple(run.collector.tensors(files)),
            tuple(StoredFile(path, files.size(path) or 0) for path in stored),
            facts,
            objects=tuple(dict.fromkeys(run.objects)),
            param_groups=lambda: run.groups,
        )


def _numbered(files: Files) -> dict[str, _Item]:
    """The items whose files have the default names."""
    found: dict[str, _Item] = {}
    for path in files.list():
        if match := _NUMBERED.fullmatch(path):
            item = found.setdefault(match["item"], _Item(match["item"]))
            item.files[int(match["rank"])] = path, "TorchSerialization" if path.endswith(".pt") else "JsonSerialization"
    return found


# ---- metadata.pkl ----


def _metadata(files: Files) -> Mapping[str, Any] | None:
    if files.size(_METADATA) is None:
        return None
    root = inert_pickle.load(read_whole(files, _METADATA, limit=_LIMIT), where=_METADATA)
    if not isinstance(root, dict) or not isinstance(root.get("metadata"), dict) or not _is_rank(root.get("world_size")):
        _refuse("it is no metadata of torch_checkpointing: version, world_size and metadata are expected")
    version = root.get("version", "1.0")
    if version not in ("1.0", "2.0"):
        raise CheckpointError(
            f"its version is {inert_pickle.shown(version)}; 1.0 and 2.0 are known",
            where=_METADATA,
            why="A later version may mean something else by the same words",
            do="Tell us about it, and save with an earlier torch_checkpointing until then",
        )
    return root


def _described(metadata: Mapping[str, Any], items: dict[str, _Item]) -> int:
    """Fill `items` with what metadata says; returns the number of ranks."""
    ranks = metadata["world_size"]
    for name, paths, layouts in _listed(metadata):
        item = items.setdefault(name, _Item(name))
        item.files = {rank: _file(name, rank, layouts.get(rank)) for rank in range(ranks)}
        for path, groups in paths:
            for group in groups:
                if not isinstance(group, dict) or not isinstance(group.get("ranks"), tuple | list):
                    _refuse(f"{name} {path} is described by {inert_pickle.shown(group)}")
                for rank, said in _said(group, f"{name}: {'.'.join(map(str, path))}"):
                    item.said.setdefault(rank, {})[path] = said
    return int(ranks)


def _listed(metadata: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[Path, list[Any]]], Mapping[int, Any]]]:
    """Each item with its paths and their groups, and its layout per rank; of both versions."""
    if metadata.get("version", "1.0") == "2.0":
        for name, said in metadata["metadata"].items():
            if not isinstance(said, dict):
                _refuse(f"the item {inert_pickle.shown(name)} is described by {inert_pickle.shown(said)}")
            paths = [(_path(key), _list(groups)) for key, groups in said.get("nested_path_to_metadata", {}).items()]
            yield str(name), paths, {int(rank): layout for rank, layout in said.get("rank_to_layout_info", {}).items()}
        return
    layouts = metadata.get("rank_to_layout_info_mappings", {})
    by_item: dict[str, list[tuple[Path, list[Any]]]] = {}
    for key, groups in metadata["metadata"].items():
        name, *path = _path(key)
        by_item.setdefault(str(name), []).append((tuple(path), _list(groups)))
    for name, paths in by_item.items():
        yield name, paths, {int(rank): layout.get(name) for rank, layout in layouts.items()}


def _path(key: Any) -> Path:
    try:
        parts = json.loads(key)
    except (TypeError, ValueError, RecursionError):
        parts = None
    if not isinstance(parts, list) or not all(type(part) in (str, int) for part in parts):
        _refuse(f"{inert_pickle.shown(key)} is no path of names and numbers")
    return tuple(parts)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else _refuse(f"a list of ranks' metadata is {inert_pickle.shown(value)}")


def _file(item: str, rank: int, layout: Any) -> tuple[str, str]:
    """The path of an item's file, and the name of its format."""
    if layout is None:
        return f"{item}_{rank}.pt", "TorchSerialization"
    kind = layout.get("serialization_format") if isinstance(layout, dict) else None
    if not isinstance(kind, dict) or not isinstance(layout.get("file_path"), str):
        _refuse(f"the layout of {item} on rank {rank} is {inert_pickle.shown(layout)}")
    return inside(layout["file_path"], where=_METADATA), str(kind.get("type"))


def _said(group: Mapping[str, Any], where: str) -> Iterator[tuple[int, _Said]]:
    packed = group.get("sharding_metadata")
    kind: Any = packed.get("type") if isinstance(packed, dict) else None
    data: Any = packed.get("data") if isinstance(packed, dict) else None
    try:
        if kind == "DTensorShardingMetadata":
            yield from _dtensor(data, group["ranks"], where)
            return
        if kind == "default_tensor_v1":
            shape, dtype = tuple(data["global_shape"]), from_torch(data["dtype"], where=where)
            columns = (data["global_offsets"], data["local_sizes"], data["local_offsets"])
            boxes = tuple((Box(tuple(at), tuple(size)), tuple(local)) for at, size, local in zip(*columns, strict=True))
            yield from ((rank, _Said(dtype, shape, None, boxes)) for rank in group["ranks"])
            return
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError) as error:
        raise CheckpointError(f"its sharding metadata cannot be understood: {error!r:.200}", where=f"{where} in {_METADATA}") from None
    raise CheckpointError(
        f"its sharding metadata is of the kind {inert_pickle.shown(kind)}",
        where=f"{where} in {_METADATA}",
        why="Known are DTensorShardingMetadata and default_tensor_v1; what a rank holds cannot be known otherwise",
        do="Save the item as DTensors",
    )


def _dtensor(data: Mapping[str, Any], ranks: tuple[int, ...], where: str) -> Iterator[tuple[int, _Said]]:
    spec = data["mesh_spec"]
    sizes, grid = tuple(spec["mesh_shape"]), tuple(spec["mesh_data"])
    names = spec["mesh_dim_names"] or tuple(f"dim{i}" for i in range(len(sizes)))
    found = distribution(Mesh(tuple(names), sizes), tuple(_placement(each, where) for each in data["placements"]), where=where)
    shape, dtype = tuple(data["global_shape"]), from_torch(data["dtype"], where=where)
    at = _coordinates(sizes, grid)
    for rank in ranks:
        box = found.box(shape, at[rank])
        yield rank, _Said(dtype, shape, found, ((box, (0,) * len(shape)),))


@lru_cache(maxsize=64)
def _coordinates(sizes: tuple[int, ...], grid: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Where each rank is on a mesh, whose ranks are listed row by row."""
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


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1_000_000


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(what, where=_METADATA, do="Copy it again from where the checkpoint was written")


# ---- the ranks' files ----


class _Run:
    def __init__(self, files: Files) -> None:
        self._files = files
        self.collector = Collector()
        self.objects: list[str] = []
        self.notes: list[str] = []
        self.groups: tuple[ParamGroup, ...] = ()
        self.mesh: Mesh | None = None
        self._parameters: dict[str, tuple[int, ...]] = {}

    def read(self, item: _Item, ranks: int) -> None:
        names: Mapping[Any, str] = {}
        for rank in range(ranks):
            if rank not in item.files:
                raise missing(self._files, f"{item.name}_{rank}.pt")
            path, kind = item.files[rank]
            if self._files.size(path) is None:
                raise missing(self._files, path)
            root, leaves = self._leaves(item, rank, path, kind)
            if rank == 0 and item.is_optimizer:
                names = self._names(root, leaves)
            for parts, local in leaves:
                self._note(local)
                role, name = _role(item, parts, names)
                self.collector.add(role, name, local, path, rank)
                if rank == 0 and item.name in MODEL_ROOTS and local.dtype.floating:
                    self._parameters.setdefault(".".join(map(str, parts)), local.shape)

    def _leaves(self, item: _Item, rank: int, path: str, kind: str) -> tuple[Any, list[tuple[Path, LocalTensor]]]:
        """The object in a file (None if it holds tensors alone), and its tensors by path."""
        said = item.said.get(rank, {})
        root: Any = None
        found: dict[Path, Any] = {}
        if kind == "TorchSerialization":
            root = torch_zip.read(self._files, path, locate=False)
            found = dict(_walk(root))
        elif kind == "SafetensorsSerialization":
            dotted = {".".join(map(str, parts)): parts for parts in said}
            for entry in safetensors.read_header(self._files, path).entries:
                stored = StoredTensor(path, entry.byte_offset, entry.dtype, entry.shape, row_major(entry.shape), entry.name)
                found[dotted.get(entry.name, (entry.name,))] = stored
        else:
            self.objects.append(path)
            return None, []
        if absent := [parts for parts in said if parts not in found]:
            raise CheckpointError(
                f"{_METADATA} places a part of {item.name} {'.'.join(map(str, absent[0]))} in it, which it does not hold",
                where=path,
                why="The files are from different saves",
                do="Copy all files of one save again",
            )
        decoder, leaves = Decoder(path), list[tuple[Path, LocalTensor]]()
        for parts, value in found.items():
            local = decoder.decode(".".join(map(str, parts)), value)
            if local is None:
                self.objects.append(".".join(map(str, (item.name, *parts))))
            else:
                leaves.append((parts, _agreed(local, said[parts], parts, path) if parts in said else local))
        return root, leaves

    def _names(self, root: Any, leaves: list[tuple[Path, LocalTensor]]) -> Mapping[Any, str]:
        """The names of the optimizer's parameters."""
        groups = root.get("param_groups") if isinstance(root, Mapping) else None
        listed = {"param_groups": groups if isinstance(groups, list) else []}
        shapes = {parts[1]: local.shape for parts, local in leaves if len(parts) == 3 and parts[0] == "state" and parts[2] != "step"}
        names, notes = names_for(listed, group_numbers(listed), shapes, list(self._parameters.items()))
        self.notes.extend(notes)
        self.groups = plain_groups(groups, names)
        return names

    def _note(self, local: LocalTensor) -> None:
        if local.distribution and (self.mesh is None or len(local.distribution.mesh.sizes) > len(self.mesh.sizes)):
            self.mesh = local.distribution.mesh


def _walk(value: Any, parts: Path = (), seen: set[int] | None = None) -> Iterator[tuple[Path, Any]]:
    """The leaves of nested dicts and lists; of one that is there twice, once."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else None
    seen = set() if seen is None else seen
    if pairs is None or len(parts) > 32:
        yield parts, value
    elif id(value) not in seen:
        seen.add(id(value))
        for key, inner in pairs:
            yield from _walk(inner, (*parts, key if type(key) is int else str(key)), seen)


def _role(item: _Item, parts: Path, names: Mapping[Any, str]) -> tuple[Kind, str]:
    if item.is_optimizer and parts[:1] == ("state",) and len(parts) > 2:
        name = parts[1] if isinstance(parts[1], str) else names.get(parts[1])
        return state_kind(name, parts[1], ".".join(map(str, parts[2:])))
    if item.name in MODEL_ROOTS and parts:
        return "weight", ".".join(map(str, parts))
    return "state", ".".join(map(str, (item.name, *parts)))


def _agreed(local: LocalTensor, said: _Said, parts: Path, path: str) -> LocalTensor:
    """What a file and metadata say together. Raises CheckpointError where they contradict each other."""
    stored = local.shards[0][1] if local.shards else None
    fits = local.dtype == said.dtype and stored is not None
    if local.distribution is not None:
        fits = fits and (local.shape, local.shards[0][0]) == (said.shape, said.boxes[0][0])
    elif stored is not None:
        reach = ((at + size <= n for at, size, n in zip(start, box.sizes, stored.shape, strict=True)) for box, start in said.boxes)
        fits = fits and all(map(all, reach)) and (said.distribution is None or stored.shape == said.boxes[0][0].sizes)
    if not fits or stored is None:
        raise CheckpointError(
            f"the file holds {local.dtype} {list(stored.shape) if stored else []}, {_METADATA} says {said.dtype} "
            f"{said.boxes[0][0] if said.boxes else 'nothing'} of {list(said.shape)}",
            where=f"{'.'.join(map(str, parts))} in {path}",
            why="The files are from different saves",
            do="Copy all files of one save again",
        )
    return LocalTensor(said.dtype, said.shape, tuple((box, _from(stored, start, box)) for box, start in said.boxes), said.distribution)


def _from(stored: AnyTensor, start: tuple[int, ...], box: Box) -> AnyTensor:
    """The part of a stored tensor that begins at `start` and is as large as the box."""
    skip = stored.dtype.itemsize * sum(at * stride for at, stride in zip(start, stored.strides, strict=True)) if box.volume else 0
    if isinstance(stored, UnlocatedTensor):
        return replace(stored, skipped=stored.skipped + skip, shape=box.sizes)
    return replace(stored, byte_offset=stored.byte_offset + skip, shape=box.sizes)


FORMAT = TorchCheckpointing()
