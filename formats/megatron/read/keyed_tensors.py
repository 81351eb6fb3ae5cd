"""The tensors of a distributed save whose key names a weight: the weights, and optimizer state in the model's form.

    decoder.layers.self_attention.linear_qkv.weight                          [layers, rows, columns]
    decoder.layers.mlp.experts.experts.linear_fc1.weight                     [layers, experts, rows, columns]
    decoder.layers.3.mlp.linear_fc1.weight                                   [rows, columns], if layers differ from each other
    decoder.layers.mlp.linear_fc1.adapter.linear_in.weight                   [layers, r, columns], a factor of a LoRA adapter
    optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight  the shape of the weight

In fsdp_dtensor (Megatron-FSDP) nothing is stacked, gate and up are stored separately, and a state has the parameter's name before its kind:

    model.module.decoder.layers.3.mlp.experts.linear_fc1.weight7_w           gate of expert 7, [rows, columns]
    optimizer.state.module.module.decoder.layers.3.mlp.linear_fc2.weight.exp_avg

A box of a stored tensor is a "chunk" of torch.distributed.checkpoint; here it is called a box, as a chunk is a part of the pipeline.

Source: megatron/core/transformer/*.py (sharded_state_dict) and dist_checkpointing of 0.16.1; for fsdp_dtensor
transformer/fsdp_dtensor_checkpoint.py and optimizer/distrib_optimizer.py of 0.19.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from reshard.adapter.dcp_reader import KeyedFolder
from reshard.canonical.optimizer_state import kind_of_path, state_kind
from reshard.containers.dcp_metadata import TensorItem
from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.mosaics import Mosaic, joined
from reshard.index.index import Tensor
from reshard.index.shards import concatenated
from reshard.index.subviews import SubviewsBuilder, SubviewsByTensor

from ..layout.adapters import Factor, by_halves, by_ranks, factor_of, is_saved_by_halves
from ..layout.chunks import ChunkTensor
from ..layout.flat_buckets import BUFFER_KINDS
from ..layout.names import ParsedName, is_run_key, is_weight_name, parse_key
from ..layout.parameters import FUSED_DOWN, Parameters, model_tensor, named_tensor
from ..layout.stages import ParallelSizes
from ..layout.tensors import MegatronTensor
from .arrays import flat_sections, shared_expert, wrong_shape
from .run_model import RunModel

_OPTIMIZER = r"(?:chained_\d+\.)?optimizer\."
_STATE_KEY = re.compile(
    rf"{_OPTIMIZER}state\.(?P<kind>(?!module\.|model\.)[a-z0-9_]+)\.(?P<key>(?:(?:module|model)\.)*(?:embedding|decoder|output_layer|mtp)\..*)"
)
# State under a name of any form. A number means a parameter of torch_dcp, which is found by its number.
_NAMED_STATE = re.compile(rf"{_OPTIMIZER}(?:\d+\.)?state\.(?!\d)(.*)")


def keyed_tensors(
    stored: KeyedFolder, model: RunModel, numbered: Iterable[tuple[ChunkTensor, str, TensorItem]], cut_by: ParallelSizes | None = None
) -> Iterator[Tensor]:
    """The canonical tensors that the stored tensors hold; without optimizer state if there are LoRA adapters.

    numbered: (parameter, torch's name of the kind of state, item) of optimizer state that is stored under the parameters' numbers.
    cut_by: the sizes of a run that stores a fused tensor as its ranks hold it: the parts of one rank, then those of the next.
    Raises: CheckpointError if the model does not have the tensor that a key names, or has it with another shape.
    """
    locator, items = _Locator(stored, model, cut_by or ParallelSizes()), stored.metadata.tensors
    parameters = Parameters.of(items)
    segments: list[Tensor] = []
    for key, item in items.items():
        if not is_weight_name(key) or (is_run_key(key) and (model.adapters or not _NAMED_STATE.fullmatch(key))):
            continue
        weight_key, kind = (_parameter_and_kind(key, parameters) or ("", key)) if is_run_key(key) else (key, None)
        parsed = parse_key(weight_key).in_shape(item.shape)
        try:
            tensors = list(locator.tensors(parsed, item, items.get(weight_key, item), kind))
        except CheckpointError:
            if kind is None:
                raise
            tensors = [_without_name(stored, item, key)]  # the weights are whole without it
        if parsed.segment:
            segments.extend(tensors)
        else:
            yield from tensors
    yield from merged(segments)
    for parameter, kind, item in numbered:
        if item.shape == parameter.array.shape:
            yield from locator.tensors(parse_key(parameter.name), item, item, kind)
        else:
            yield from _of_all(parameter.array.names, stored, item, kind)


def _of_all(names: Iterable[str], stored: KeyedFolder, item: TensorItem, kind: str) -> Iterator[Tensor]:
    """State of another shape than its parameter, such as a step count: it belongs to each canonical tensor that the parameter holds."""
    for name in names:
        tensor_kind, known_as = state_kind(name, name, kind)
        yield Tensor(known_as, item.dtype, item.shape, tensor_kind, stored.shards(item))


def _parameter_and_kind(key: str, parameters: Parameters) -> tuple[str, str] | None:
    """The key of the parameter whose state has this key, and torch's name for the kind of state; None if the parameter is not known."""
    if match := _STATE_KEY.fullmatch(key):
        return match["key"], BUFFER_KINDS.get(match["kind"], match["kind"])
    match = _NAMED_STATE.fullmatch(key)
    if match is None or (parts := parameters.split(match[1])) is None:
        return None
    return parts[0], BUFFER_KINDS.get(kind := kind_of_path(parts[1]), kind)


def _without_name(stored: KeyedFolder, item: TensorItem, key: str) -> Tensor:
    """State whose parameter is not known, or of which no part belongs to one weight of the model."""
    kind, name = state_kind(None, key, "")
    return Tensor(name.rstrip("."), item.dtype, item.shape, kind, stored.shards(item))


def merged(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Each canonical tensor, of which several stored tensors hold a part each. Raises CheckpointError for parts of different types."""
    by_tensor: dict[tuple[str, str], list[Tensor]] = {}
    for part in parts:
        by_tensor.setdefault((part.kind, part.name), []).append(part)
    for first, *others in by_tensor.values():
        if other := next((part for part in others if part.dtype != first.dtype), None):
            raise CheckpointError(
                f"one part of it is stored as {first.dtype}, another as {other.dtype}",
                where=first.name,
                why="A run stores the parts of a tensor in one element type, so files of several saves are mixed",
                do="Copy the files of one save again",
            )
        yield replace(first, shards=concatenated([first.shards, *(part.shards for part in others)]))


class _Locator:
    """Finds the canonical tensors in the stored boxes of keyed tensors. What layers and experts that are alike share is found once."""

    def __init__(self, stored: KeyedFolder, model: RunModel, cut_by: ParallelSizes) -> None:
        self.stored, self.shapes, self.model, self.cut_by = stored, model.shapes, model.megatron, cut_by
        self._found: dict[tuple[object, ...], SubviewsByTensor] = {}

    def tensors(self, parsed: ParsedName, item: TensorItem, weight: TensorItem, kind: str | None) -> Iterator[Tensor]:
        """The canonical tensors in a stored tensor with this key: weights, or optimizer state if `kind`, torch's name for a kind of state,
        is given. weight: the weight that it is state of, or itself.

        Raises: CheckpointError if the model does not have the tensor, or has it with another shape.
        """
        parsed = parsed.in_model(self.model.layers)
        if kind and not parsed.stacked_axes and item is weight:
            array = self._array(parsed, item, f"{item.fqn} in {self.stored.prefix}.metadata")
            if item.shape != array.shape and (math.prod(item.shape) == 1 or len(array.names) == 1):
                yield from _of_all(array.names, self.stored, item, kind)
                return
        for name, pieces in self._subviews(parsed, item, weight).of(self.stored.shards(item)):
            tensor_kind, known_as = state_kind(name, name, kind) if kind else ("weight", name)
            yield Tensor(known_as, item.dtype, self.shapes[name], tensor_kind, pieces)

    def _subviews(self, parsed: ParsedName, item: TensorItem, weight: TensorItem) -> SubviewsByTensor:
        """The canonical tensors in each stored box of a tensor. For the keys of layers and experts that are alike and cut alike, they are
        found once, and get the names of each."""
        first = self._first_alike(parsed)
        form = (first, item.shape, item.chunks.offsets.tobytes(), item.chunks.sizes.tobytes())
        if form not in self._found:
            where = f"{item.fqn} in {self.stored.prefix}.metadata"
            is_flat = len(item.shape) == len(weight.shape) + 1
            self._found[form] = self._flat_runs(first, item, weight, where) if is_flat else self._tiles(first, item, where)
        subviews = self._found[form]
        if first == parsed:
            return subviews
        return subviews.renamed({name: self.model.name_in(name, parsed.layer, parsed.expert) for name in subviews.names})

    def _first_alike(self, parsed: ParsedName) -> ParsedName:
        """The same tensor of the first layer and expert that are like these."""
        layer, expert = parsed.layer, parsed.expert
        if layer is None:
            return parsed
        expert = None if expert is None else self.model.first_expert_alike(layer, expert)
        return replace(parsed, layer=self.model.first_alike(layer), expert=expert)

    def _tiles(self, parsed: ParsedName, item: TensorItem, where: str) -> SubviewsByTensor:
        """The tiles in each stored box. A box can span several layers and experts."""
        lead, builder = parsed.stacked_axes, SubviewsBuilder()
        stacked = ((self.model.layers,) if parsed.stacks_layers else ()) + ((self.model.experts,) if parsed.stacks_experts else ())
        if item.shape[:lead] != stacked:
            raise wrong_shape((*stacked, *item.shape[lead:]), item.shape, where)
        parts: dict[tuple[object, ...], Mosaic] = {}
        for i, offsets, sizes in _boxes(item):
            inner = *offsets[lead:], *sizes[lead:]
            for position in product(*(range(size) for size in sizes[:lead])):
                at = _at(parsed, [offset + step for offset, step in zip(offsets, position, strict=False)])
                for here in self._sharing(at):
                    first = self._first_alike(here)
                    if (first, inner) not in parts:
                        array = self._array(first, item, where)
                        if array.shape != item.shape[lead:]:
                            raise wrong_shape((*stacked, *array.shape), item.shape, where)
                        parts[first, inner] = _cut(array, offsets[lead:], sizes[lead:])
                    for tile in parts[first, inner].tiles:
                        builder.add_tile(i, self.model.name_in(tile.name, here.layer, here.expert), tile, position)
        return builder.build()

    def _sharing(self, parsed: ParsedName) -> list[ParsedName]:
        """The key for each expert, if all of a layer share the tensor; otherwise the key itself."""
        return [replace(parsed, expert=expert) for expert in range(self.model.experts)] if parsed.shares_experts else [parsed]

    def _flat_runs(self, parsed: ParsedName, item: TensorItem, weight: TensorItem, where: str) -> SubviewsByTensor:
        """The sections in each stored box of state in blocks."""
        lead, builder = parsed.stacked_axes, SubviewsBuilder()
        block_shape = _block_shape(item, weight, lead, where)
        for i, offsets, sizes in _boxes(item):
            array = self._array(_at(parsed, offsets[:lead]), item, where)
            block = _cut(array, [number * size for number, size in zip(offsets[lead:-1], block_shape, strict=True)], block_shape)
            for section in flat_sections(block, offsets[-1], offsets[-1] + sizes[-1], 0):
                builder.add_section(i, section, len(offsets))
        return builder.build()

    def _array(self, parsed: ParsedName, item: TensorItem, where: str) -> Mosaic:
        """The array of a key in one layer and expert. Raises CheckpointError if there is none."""
        tensor = model_tensor(self.model, parsed, where)
        if parsed.segment:
            segments = {name.rpartition(".")[2]: part for name, part in tensor.by_segment(parsed.name).items()}
            return named_tensor(segments, parsed.segment, where).whole
        if (factor := factor_of(parsed.name)) is not None:
            return _as_saved(factor, tensor, parsed, item, where)
        if parsed.half is not None:
            return tensor.blocks[parsed.half]
        ranks = self.cut_by.etp if parsed.is_expert else self.cut_by.tp
        if ranks == 1 or tensor.axis != 0 or len(tensor.blocks) == 1:
            return tensor.whole
        if parsed.name == FUSED_DOWN:
            raise UnsupportedError(
                f"it holds both down projections of {ranks} tensor-parallel ranks, and nothing tells whether they shared its rows",
                where=where,
                why="Transformer Engine's plain linear layer is whole on every rank, other classes share the rows of each projection",
                do="Save it with megatron-core's torch_dist, or with tensor-parallel size 1",
            )
        return joined([tensor.shard(ranks, rank) for rank in range(ranks)])


def _at(parsed: ParsedName, stacked: Sequence[int]) -> ParsedName:
    """The key of one layer and expert, from its positions along the stacked axes."""
    layer = stacked[0] if parsed.stacks_layers else parsed.layer
    return replace(parsed, layer=layer, expert=stacked[-1] if parsed.stacks_experts else parsed.expert)


def _boxes(item: TensorItem) -> Iterator[tuple[int, list[int], list[int]]]:
    """(number, offsets, sizes) of each stored box."""
    for i, (offsets, sizes) in enumerate(zip(item.chunks.offsets.tolist(), item.chunks.sizes.tolist(), strict=True)):
        yield i, offsets, sizes


def _cut(array: Mosaic, offsets: Sequence[int], sizes: Sequence[int]) -> Mosaic:
    """A box of the array."""
    for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != array.shape[axis]:
            array = array.cut(axis, offset, offset + size)
    return array


def _block_shape(item: TensorItem, weight: TensorItem, lead: int, where: str) -> list[int]:
    """The shape of a block of optimizer state in fully_sharded_model_space, the default until 2025: [layer, .., block of rows, block of
    columns, element], with `lead` stacked axes.

    The blocks are the shards in which tensor-parallel ranks saved the weight; data-parallel ranks split a block between elements.

    Raises: CheckpointError if the blocks are not equal parts of the weight.
    """
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
    return [size // count for size, count in zip(weight_shape, block_counts, strict=True)]


def _as_saved(factor: Factor, tensor: MegatronTensor, parsed: ParsedName, item: TensorItem, where: str) -> Mosaic:
    """The array of a factor of an adapter, in the order of rows that Megatron Bridge or ms-swift gives it.

    Raises: UnsupportedError if the shapes do not tell the order, or if ranks shared the adapter of an expert.
    """
    parts = len(set(item.chunks.offsets[:, parsed.stacked_axes].tolist()))
    if parsed.is_expert and parts > (2 if factor.is_output else 1):
        raise shared_expert(where)
    if factor.is_of_swift:
        return by_ranks(tensor, parts) if factor.is_output and len(tensor.blocks) > 1 else tensor.whole
    if not is_saved_by_halves(factor, tensor) or parts <= 2:
        return tensor.whole
    if not factor.projection or parts % 2:
        raise UnsupportedError(
            f"its rows were saved in {parts} parts, and nothing tells whether each rank had one of them or two",
            where=where,
            why="Megatron Bridge 0.3 saves B of an MLP without a gate in another order than later versions",
            do="Save the adapter with tensor-parallel size 1",
        )
    return by_halves(tensor.whole, parts)
