"""Distributed checkpoints (--ckpt-format torch_dist): every tensor whole, cut into chunks that any rank may have written.

    metadata.json      {"sharded_backend": "torch_dist", ...}; written last
    common.pt          args, iteration and what else all ranks agree on; since 2026 an entry called common_state
    .metadata, *.distcp   a folder of torch.distributed.checkpoint

Layers are stacked along a first axis, experts along a second one, unless layers differ from each other; then the names hold the layers'
numbers. Source: megatron/core/transformer/*.py (sharded_state_dict) and dist_checkpointing of 0.16.1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from reshard.adapter.dcp_reader import DcpFolder
from reshard.adapter.format import Hints
from reshard.canonical.optimizer_state import is_plain, state_kind
from reshard.containers import torch_zip
from reshard.containers.dcp_metadata import TensorItem
from reshard.containers.inert_pickle import shown
from reshard.containers.torch_zip import StoredTensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.extents import Extent, Piece
from reshard.geometry.mosaics import Mosaic, Tile
from reshard.geometry.stored import Section
from reshard.index.index import Index, ParamGroup, RunFacts, StoredFile, Tensor
from reshard.index.shards import Shards, subviews, subviews_of_flat
from reshard.storage.files import Files, read_whole

from ..layout.arguments import NotUnderstoodError, plain_args, size
from ..layout.names import IGNORED, place_of, without_wrappers
from ..layout.save_folders import COMMON, METADATA
from ..layout.tensors import MASTERS, TABLE, UNTRAINED, MegatronModel, MegatronTensor, is_decayed, respelled
from . import bucket_checkpoint, plain_dcp
from .nemo import nemo_args
from .run_model import asked_for, begin, check_complete, check_model
from .tensor_boxes import flat_sections, misfit
from .zarr import Stored, ZarrFolder

_COMMON_ENTRY = "common_state/shard_0_1"
_OPTIMIZER = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>[a-z0-9_]+)\.(?P<key>(?:(?:module|model)\.)*(?:embedding|decoder|output_layer|mtp)\..*)"
)
_STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)(.*)")
_NUMBERED = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.*)")
_EXPERTS = re.compile(r"mlp\.experts\.(?:(?:local_)?experts\.)?(?:(?P<expert>\d+)\.)?(?P<name>linear_fc[12]\.(?:weight|bias))")
# Of the run that wrote it; the files do not depend on them, but for the padding of the vocabulary.
_DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}
# Where a gate and its other half are stored apart.
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_(w|v)")


def read(files: Files, folder: str, hints: Hints) -> Index:
    """The index of a distributed checkpoint."""
    backend = _backend(files, folder)
    if backend not in ("torch_dist", "zarr", _PLAIN):
        raise CheckpointError(
            f"its tensors are stored by the backend {backend!r}",
            where=folder + METADATA,
            why="torch_dist and zarr are read",
            do="Convert it to torch_dist with the Megatron-Core that wrote it",
        )
    stored: Stored = ZarrFolder(files, folder) if backend == "zarr" else DcpFolder(files, folder)
    common = plain_dcp.common(stored) if backend == _PLAIN else _common(files, stored)
    args = plain_args(common.get("args")) or nemo_args(files, folder)
    table = next((item for key, item in stored.metadata.tensors.items() if without_wrappers(key) == TABLE), None)
    try:
        building = begin(args, hints, table.shape[0] if table and table.shape else None, folder + COMMON)
    except NotUnderstoodError as error:
        return _as_stored(stored, backend, error)
    check_model(building.model.model, args, folder + COMMON)
    tensors: list[Tensor] = []
    for key, item in stored.metadata.tensors.items():
        tensors.extend(_tensors(building.model, stored, key, item, building.shapes))
    numbered = plain_dcp.Numbered(stored, building.model, args) if backend == _PLAIN else None
    for kind, array, item in numbered.arrays() if numbered else ():
        if item.shape == array.shape:
            tensors.extend(_found(stored, item, _in_chunks(array, item), building.shapes, kind))
    tensors.extend(numbered.steps() if numbered else ())
    tensors.extend(bucket_checkpoint.read(stored, building.model, args, building.shapes))
    check_complete(building.model.model, tensors, files.root, with_optimizer=False)
    optimizer = common.get("optimizer")
    if not isinstance(optimizer, list | Mapping) or ("param_state_sharding_type" in optimizer and "optimizer" not in optimizer):
        optimizer = _optimizers_of_ranks(stored)
    steps, groups = _common_optimizer(optimizer, building.model, {tensor.name for tensor in tensors if tensor.kind == "weight"})
    tensors.extend(steps)
    groups = numbered.param_groups() if numbered else groups
    common_file = files.size(folder + COMMON)
    own = (StoredFile(folder + COMMON, common_file),) if common_file is not None else ()
    iteration = common.get("iteration", common.get("global_step"))
    plain = {key: value for key, value in common.items() if is_plain(value)}
    plain["args"] = {key: value for key, value in args.items() if is_plain(value)}
    facts = RunFacts(
        producer="Megatron-Core",
        version=backend,
        notes=tuple(numbered.notes) if numbered else (),
        step=iteration if type(iteration) is int else None,
        config=building.config,
        state=plain,
        parallel={name: size(args, key) for name, key in _DEGREES.items() if size(args, key) > 1},
        unanswered=building.asks,
    )
    objects = tuple(stored.metadata.objects)
    return Index("megatron-dist", tuple(tensors), (*stored.files, *own), facts, objects=objects, param_groups=lambda: groups)


def _as_stored(stored: Stored, backend: str, error: NotUnderstoodError) -> Index:
    """Every tensor under its key."""
    items = stored.metadata.tensors.items()
    found = [Tensor(key, item.dtype, item.shape, "state" if key.startswith(_RUN) else "weight", stored.shards(item)) for key, item in items]
    facts = RunFacts(producer="Megatron-Core", version=backend, unanswered=asked_for(error))
    return Index("megatron-dist", tuple(found), stored.files, facts, objects=tuple(stored.metadata.objects))


# Written as torch_dcp or fsdp_dtensor: a plain folder of torch.distributed.checkpoint.
_PLAIN = "torch_dcp"


def _backend(files: Files, folder: str) -> str:
    if files.size(folder + METADATA) is None:
        if files.size(folder + COMMON) is not None:
            raise CheckpointError(
                f"there is a {COMMON} and no {METADATA}",
                where=f"{files.root}/{folder}",
                why=f"Megatron-Core writes {METADATA} last, so this save was not finished (or the file was lost)",
                do="Copy it from where the checkpoint was written, or take an earlier checkpoint",
            )
        return _PLAIN
    try:
        said = json.loads(read_whole(files, folder + METADATA, limit=1 << 16))
        return str(said["sharded_backend"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"it does not name the backend of a distributed checkpoint: {error}", where=folder + METADATA, do="Copy the file again"
        ) from None


def _common(files: Files, stored: Stored) -> Mapping[str, Any]:
    """What all ranks agree on: a file of its own, or since 2026 an entry."""
    path = stored.prefix + COMMON
    if files.size(path) is not None:
        found = torch_zip.read(files, path)
    elif (entry := stored.metadata.objects.get(_COMMON_ENTRY)) is not None:
        found = stored.value(entry)
        found = found[0] if isinstance(found, list) and found else found
    else:
        raise CheckpointError(
            f"there is neither {COMMON} nor an entry {_COMMON_ENTRY}",
            where=files.root,
            why="It holds the run's settings, without which fused weights cannot be told apart",
            do="Copy it from where the checkpoint was written",
        )
    if not isinstance(found, Mapping):
        raise CheckpointError(f"it holds {shown(found)}, a dict was expected", where=path)
    return found


def _optimizers_of_ranks(stored: Stored) -> dict[int, Any]:
    """The settings of each of the chained optimizers where every rank's were saved: all ranks' are the same."""
    found: dict[int, Any] = {}
    for key, item in stored.metadata.objects.items():
        if (match := _OF_RANKS.fullmatch(key)) and (link := int(match[1] or 0)) not in found:
            value = stored.value(item)
            found[link] = value[0] if isinstance(value, list) and value else value
    return found


def _common_optimizer(optimizer: Any, model: MegatronModel, stored: set[str]) -> tuple[list[Tensor], tuple[ParamGroup, ...]]:
    """The one count of steps, as every parameter's; and the param groups, whose members follow from their settings."""
    by_key = dict(enumerate(optimizer)) if isinstance(optimizer, list) else optimizer
    by_key = by_key if isinstance(by_key, Mapping) and 0 in by_key else {0: by_key}
    links = [value for _, value in sorted(by_key.items(), key=lambda item: str(item[0])) if isinstance(value, Mapping)]
    tensors: list[Tensor] = []
    groups: list[ParamGroup] = []
    for number, link in enumerate(links):
        inner = link.get("optimizer", link)
        listed = [group for group in inner.get("param_groups", ()) if isinstance(group, Mapping)]
        own = [part for part in model.model.parts if len(links) == 1 or (part.expert is not None) is bool(number)]
        for group in listed:
            names = dict.fromkeys(
                part.tensor for part in own if is_decayed(part.parameter, part.array.shape) is (group.get("wd_mult", 1.0) != 0)
            )
            settings = {str(key): value for key, value in group.items() if key != "params" and is_plain(value)}
            groups.append(ParamGroup(tuple(names), settings))
        state = inner.get("state")
        step = state.get("common_step") if isinstance(state, Mapping) else None
        if isinstance(step, StoredTensor):
            piece = Piece(Box.whole(step.shape), Extent(step.path, step.byte_offset, step.strides, step.dtype))
            shards = Shards.of([piece])
            names = dict.fromkeys(part.tensor for part in own if part.role not in UNTRAINED and part.tensor in stored)
            tensors.extend(Tensor(name, step.dtype, step.shape, "step", shards) for name in names)
    return tensors, tuple(groups)


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What a key stands for. layers, experts: whether its first axes count them; layer, expert: the one it is of otherwise."""

    name: str
    layers: bool = False
    experts: bool = False
    layer: int | None = None
    extra: int | None = None
    expert: int | None = None
    half: int | None = None


def _meaning(key: str) -> _Meaning:
    key, half = without_wrappers(key), None
    if match := _HALF.fullmatch(key):
        key, half = match[1], "wv".index(match[2])
    stacked, numbered = _STACKED.fullmatch(key), _NUMBERED.fullmatch(key)
    if not stacked and not numbered:
        return _Meaning(place_of(key).name, half=half)
    rest = stacked[1] if stacked else numbered[3]  # type: ignore[index]
    layer = int(numbered[2]) if numbered and numbered[1] == "decoder" else None
    extra = int(numbered[2]) if numbered and numbered[1] == "mtp" else None
    if match := _EXPERTS.fullmatch(rest):
        expert = int(match["expert"]) if match["expert"] else None
        return _Meaning(match["name"], bool(stacked), expert is None, layer, extra, expert, half)
    return _Meaning(respelled(rest), bool(stacked), False, layer, extra, None, half)


def _tensors(model: MegatronModel, stored: Stored, key: str, item: TensorItem, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """The canonical tensors that lie in a stored one.

    Raises: CheckpointError if the model has no such tensor, or of another shape.
    """
    state = _OPTIMIZER.fullmatch(key)
    if IGNORED.fullmatch(key) or (state is None and key.startswith(_RUN)):
        return
    kind = MASTERS.get(state["kind"], state["kind"]) if state else None
    weight = stored.metadata.tensors.get(state["key"]) if state else None
    if weight is not None and kind and len(item.shape) == len(weight.shape) + 1:
        yield from _flattened(model, stored, _meaning(weight.fqn), weight, item, shapes, kind)
        return
    rows = _rows(model, _meaning(state["key"] if state else key), item, f"{key} in {stored.prefix}.metadata")
    yield from _found(stored, item, rows, shapes, kind)


def _flattened(
    model: MegatronModel,
    stored: Stored,
    meaning: _Meaning,
    weight: TensorItem,
    item: TensorItem,
    shapes: Mapping[str, tuple[int, ...]],
    kind: str,
) -> Iterator[Tensor]:
    """What the optimizer kept in fully_sharded_model_space, the default until 2025: (layer, .., block of rows, block of columns, element of
    the block). The blocks are those in which tensor-parallel ranks saved the weight; data-parallel ranks cut them between elements."""
    lead = meaning.layers + meaning.experts
    shards, found = stored.shards(item), dict[str, list[tuple[int, Section]]]()
    blocks, whole = item.shape[lead:-1], weight.shape[lead:]
    if (
        0 in blocks
        or any(size % count for size, count in zip(whole, blocks, strict=True))
        or math.prod(blocks) * item.shape[-1] != math.prod(whole)
    ):
        raise CheckpointError(
            f"its blocks are {list(blocks)} of {item.shape[-1]} elements each, the weight's shape is {list(whole)}",
            where=f"{item.fqn} in {stored.prefix}.metadata",
            why="In this form the two come to the same",
            do="Copy the files of one save again",
        )
    inner = tuple(size // count for size, count in zip(whole, blocks, strict=True))
    for i in range(len(shards)):
        offsets = shards.offsets[i].tolist()
        array = _array(model, meaning, tuple(offsets[:lead]), f"{item.fqn} in {stored.prefix}.metadata")
        for axis, (number, width) in enumerate(zip(offsets[lead:-1], inner, strict=True)):
            array = array.cut(axis, number * width, (number + 1) * width)
        for section in flat_sections(array, offsets[-1], offsets[-1] + int(shards.sizes[i, -1]), 0):
            found.setdefault(section.name, []).append((i, section))
    for name, rows in found.items():
        role, known = state_kind(name, name, kind)
        yield Tensor(known, item.dtype, shapes[name], role, subviews_of_flat(shards, rows))


_Rows = dict[str, list[tuple[int, Tile]]]


def _found(stored: Stored, item: TensorItem, rows: _Rows, shapes: Mapping[str, tuple[int, ...]], kind: str | None) -> Iterator[Tensor]:
    """The canonical tensors of which a stored one holds these pieces: weights, or what the optimizer keeps of them."""
    shards = stored.shards(item)
    for name, found in rows.items():
        role, known = state_kind(name, name, kind) if kind else ("weight", name)
        yield Tensor(known, item.dtype, shapes[name], role, subviews(shards, found))


def _in_chunks(array: Mosaic, item: TensorItem) -> _Rows:
    """By canonical tensor the chunks of a stored array that hold something of it, and what."""
    found: _Rows = {}
    for i in range(len(item.chunks)):
        part = array
        for axis, (offset, count) in enumerate(zip(item.chunks.offsets[i].tolist(), item.chunks.sizes[i].tolist(), strict=True)):
            part = part.cut(axis, offset, offset + count)
        for tile in part.tiles:
            found.setdefault(tile.name, []).append((i, tile))
    return found


_OF_RANKS = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_0\.optimizer/shard_0_1")
# Keys of the run beside the model.
_RUN = ("optimizer.", "chained_", "rng_state", "rerun_state_machine", "opt_param_scheduler")


def _rows(model: MegatronModel, meaning: _Meaning, item: TensorItem, where: str) -> _Rows:
    """By canonical tensor the chunks that hold something of it, and what."""
    lead = meaning.layers + meaning.experts
    expected = ((model.layers,) if meaning.layers else ()) + ((model.experts,) if meaning.experts else ())
    if item.shape[:lead] != expected:
        raise CheckpointError(
            f"its first axes are {list(item.shape[:lead])}, the model has {list(expected)} layers or experts",
            where=where,
            why="The settings, or the config given with --model, are of another model",
            do="Give the config that this model was trained with by --model DIR",
        )
    arrays: dict[tuple[int, ...], Mosaic] = {}
    found: dict[str, list[tuple[int, Tile]]] = {}
    chunks = item.chunks
    for i in range(len(chunks)):
        offsets, sizes = chunks.offsets[i].tolist(), chunks.sizes[i].tolist()
        for step in product(*(range(count) for count in sizes[:lead])):
            index = tuple(offset + each for offset, each in zip(offsets, step, strict=False))
            array = arrays.get(index)
            if array is None:
                array = arrays[index] = _array(model, meaning, index, where)
                if array.shape != item.shape[lead:]:
                    raise misfit(item.shape[lead:], array, where)
            for axis, (offset, count) in enumerate(zip(offsets[lead:], sizes[lead:], strict=True)):
                if count != array.shape[axis]:
                    array = array.cut(axis, offset, offset + count)
            for tile in array.tiles:
                placed = tile.renumbered(lambda axis: axis + lead, (*step, *tile.at))
                found.setdefault(tile.name, []).append((i, placed))
    return found


def _array(model: MegatronModel, meaning: _Meaning, index: tuple[int, ...], where: str) -> Mosaic:
    """The array of one layer and expert. Raises CheckpointError if the model has none of that name."""
    numbers = list(index)
    layer = numbers.pop(0) if meaning.layers else meaning.layer
    known: Mapping[str, MegatronTensor]
    if meaning.extra is not None:
        layer = model.layers + meaning.extra
    if meaning.experts or meaning.expert is not None:
        known = model.expert(layer or 0, numbers.pop(0) if meaning.experts else meaning.expert or 0)
    elif layer is None:
        known = model.ends
    else:
        known = {**model.layer(layer), **(model.extra(meaning.extra) if meaning.extra is not None else {})}
    if meaning.name not in known:
        raise CheckpointError(
            "the model that the run's settings describe has no such tensor",
            where=where,
            why=f"There it has {', '.join(list(known)[:6]) or 'nothing'} and the like; what is not known would be lost",
            do="Give the config of the model with --model DIR",
        )
    tensor = known[meaning.name]
    return tensor.whole if meaning.half is None else tensor.blocks[meaning.half]
