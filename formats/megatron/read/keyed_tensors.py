"""The tensors of a distributed save whose key names a weight: the weights, and optimizer state in the model's form.

    decoder.layers.self_attention.linear_qkv.weight                          [layers, rows, columns]
    decoder.layers.mlp.experts.experts.linear_fc1.weight                     [layers, experts, rows, columns]
    decoder.layers.3.mlp.linear_fc1.weight                                   [rows, columns], if layers differ from each other
    optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight  the shape of the weight

A box of a stored tensor is a "chunk" of torch.distributed.checkpoint; here it is called a box, as a chunk is a part of the pipeline.

Source: megatron/core/transformer/*.py (sharded_state_dict) and dist_checkpointing of 0.16.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from reshard.canonical.optimizer_state import state_kind
from reshard.containers.dcp_metadata import TensorItem
from reshard.errors import CheckpointError
from reshard.geometry.mosaics import Mosaic, Tile
from reshard.geometry.sections import Section
from reshard.index.index import Tensor
from reshard.index.shards import subviews, subviews_of_flat

from ..layout.names import ParsedKey, is_weight_name, parse_key
from ..layout.tensors import MASTER_KINDS, MegatronModel
from .run_model import RunModel
from .tensor_boxes import flat_sections, named_tensor, wrong_shape
from .zarr import StoredFolder

_STATE_KEY = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>[a-z0-9_]+)\.(?P<key>(?:(?:module|model)\.)*(?:embedding|decoder|output_layer|mtp)\..*)"
)
_RUN_KEYS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine", "opt_param_scheduler")

TileRows = Mapping[str, Sequence[tuple[int, Tile]]]
"""Canonical name -> (number of a stored box, tile of the canonical tensor in that box)."""


def is_run_key(key: str) -> bool:
    """Whether a key belongs to the state of the run, and not to the model."""
    return key.startswith(_RUN_KEYS)


def keyed_tensors(stored: StoredFolder, model: RunModel) -> Iterator[Tensor]:
    """The canonical tensors that the stored tensors hold.

    Raises: CheckpointError if the model does not have the tensor that a key names, or has it with another shape.
    """
    for key, item in stored.metadata.tensors.items():
        if is_weight_name(key):
            if match := _STATE_KEY.fullmatch(key):
                yield from _state_tensors(stored, model, MASTER_KINDS.get(match["kind"], match["kind"]), match["key"], item)
            elif not is_run_key(key):
                yield from canonical_tensors(stored, item, _tile_rows(model.megatron, parse_key(key), item, _where(stored, key)), model)


def canonical_tensors(stored: StoredFolder, item: TensorItem, rows: TileRows, model: RunModel, kind: str | None = None) -> Iterator[Tensor]:
    """The canonical tensors in a stored tensor: weights, or optimizer state if `kind`, torch's name for a kind of state, is given."""
    shards = stored.shards(item)
    for name, tiles in rows.items():
        tensor_kind, known_as = state_kind(name, name, kind) if kind else ("weight", name)
        yield Tensor(known_as, item.dtype, model.shapes[name], tensor_kind, subviews(shards, tiles))


def array_rows(array: Mosaic, item: TensorItem) -> TileRows:
    """The tiles in each stored box of a tensor that holds this array."""
    rows: dict[str, list[tuple[int, Tile]]] = {}
    for i in range(len(item.chunks)):
        for tile in _cut(array, item.chunks.offsets[i].tolist(), item.chunks.sizes[i].tolist()).tiles:
            rows.setdefault(tile.name, []).append((i, tile))
    return rows


def _cut(array: Mosaic, offsets: Sequence[int], sizes: Sequence[int]) -> Mosaic:
    """A box of the array."""
    for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != array.shape[axis]:
            array = array.cut(axis, offset, offset + size)
    return array


def _where(stored: StoredFolder, key: str) -> str:
    return f"{key} in {stored.prefix}.metadata"


def _state_tensors(stored: StoredFolder, model: RunModel, kind: str, weight_key: str, item: TensorItem) -> Iterator[Tensor]:
    weight, parsed, where = stored.metadata.tensors.get(weight_key), parse_key(weight_key), _where(stored, item.fqn)
    if weight is not None and len(item.shape) == len(weight.shape) + 1:
        yield from _blocked_state(stored, model, kind, parsed, weight, item)
    else:
        yield from canonical_tensors(stored, item, _tile_rows(model.megatron, parsed, item, where), model, kind)


def _blocked_state(
    stored: StoredFolder, model: RunModel, kind: str, parsed: ParsedKey, weight: TensorItem, item: TensorItem
) -> Iterator[Tensor]:
    """Optimizer state in fully_sharded_model_space, the default until 2025: [layer, .., block of rows, block of columns, element].

    The blocks are the shards in which tensor-parallel ranks saved the weight; data-parallel ranks split a block between elements.
    """
    where, lead = _where(stored, item.fqn), parsed.stacked_axes
    block_counts, weight_shape = item.shape[lead:-1], weight.shape[lead:]
    if (
        0 in block_counts
        or any(size % count for size, count in zip(weight_shape, block_counts, strict=True))
        or math.prod(block_counts) * item.shape[-1] != math.prod(weight_shape)
    ):
        raise CheckpointError(
            f"it has {list(block_counts)} blocks of {item.shape[-1]} elements each, the weight's shape is {list(weight_shape)}",
            where=where,
            why="In this form the blocks are equal parts of the weight",
            do="Copy the files of one save again",
        )
    block_shape = [size // count for size, count in zip(weight_shape, block_counts, strict=True)]
    shards, rows = stored.shards(item), dict[str, list[tuple[int, Section]]]()
    for i in range(len(shards)):
        offsets = shards.offsets[i].tolist()
        array = _array(model.megatron, parsed, offsets[:lead], where)
        block = _cut(array, [number * size for number, size in zip(offsets[lead:-1], block_shape, strict=True)], block_shape)
        for section in flat_sections(block, offsets[-1], offsets[-1] + int(shards.sizes[i, -1]), 0):
            rows.setdefault(section.name, []).append((i, section))
    for name, sections in rows.items():
        tensor_kind, known_as = state_kind(name, name, kind)
        yield Tensor(known_as, item.dtype, model.shapes[name], tensor_kind, subviews_of_flat(shards, sections))


def _tile_rows(model: MegatronModel, parsed: ParsedKey, item: TensorItem, where: str) -> TileRows:
    """The tiles in each stored box of a tensor with this key. A box can span several layers and experts.

    Raises: CheckpointError if the model does not have the tensor, or has it with another shape.
    """
    lead = parsed.stacked_axes
    expected = ((model.layers,) if parsed.stacks_layers else ()) + ((model.experts,) if parsed.stacks_experts else ())
    if item.shape[:lead] != expected:
        raise CheckpointError(
            f"its first axes are {list(item.shape[:lead])}, but the model has {list(expected)} layers or experts",
            where=where,
            why="The settings, or the config given with --model, belong to another model",
            do="Give the config that this model was trained with by --model DIR",
        )
    arrays: dict[tuple[int, ...], Mosaic] = {}
    rows: dict[str, list[tuple[int, Tile]]] = {}
    for i in range(len(item.chunks)):
        offsets, sizes = item.chunks.offsets[i].tolist(), item.chunks.sizes[i].tolist()
        for position in product(*(range(size) for size in sizes[:lead])):
            numbers = tuple(offset + step for offset, step in zip(offsets, position, strict=False))
            if numbers not in arrays:
                arrays[numbers] = _array(model, parsed, numbers, where)
                if arrays[numbers].shape != item.shape[lead:]:
                    raise wrong_shape(arrays[numbers], item.shape[lead:], where)
            for tile in _cut(arrays[numbers], offsets[lead:], sizes[lead:]).tiles:
                stacked = tile.renumbered(lambda axis: axis + lead, (*position, *tile.at))
                rows.setdefault(tile.name, []).append((i, stacked))
    return rows


def _array(model: MegatronModel, parsed: ParsedKey, numbers: Sequence[int], where: str) -> Mosaic:
    """The array of one layer and expert, whose numbers along the stacked axes are given. Raises CheckpointError if there is none."""
    layer = numbers[0] if parsed.stacks_layers else parsed.layer
    if parsed.mtp_layer is not None:
        layer = model.layers + parsed.mtp_layer
    if parsed.is_expert:
        expert = numbers[-1] if parsed.stacks_experts else parsed.expert
        tensors = model.expert(layer or 0, expert or 0)
    elif layer is None:
        tensors = model.outside_layers
    else:
        tensors = {**model.layer(layer), **(model.mtp_module(parsed.mtp_layer) if parsed.mtp_layer is not None else {})}
    tensor = named_tensor(tensors, parsed.name, where)
    return tensor.whole if parsed.half is None else tensor.blocks[parsed.half]
