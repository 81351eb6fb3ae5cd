"""Stacked experts: tensors [experts, ...] of models that hold each expert under names of its own once they are quantized.

    experts.gate_up_proj [E, H, 2 I]   ->   experts.0.gate_proj.weight [I, H], experts.0.up_proj.weight [I, H], experts.1. ...

The experts' weights are pieces of the stacked tensor, whatever the order of its axes: no byte moves before it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, Tile, joined, stacked
from reshard.index.index import Index, Tensor
from reshard.index.shards import Shards, rows_meeting
from reshard.models.model import Model
from reshard.models.quantization import without_quantization
from reshard.models.weights import numbered

if TYPE_CHECKING:
    from reshard.index.subviews import SubviewsByTensor


def stacks(model: Model) -> Mapping[str, Mosaic]:
    """The stacked tensors that a model has only if it is not quantized, by name: each as the array of its experts' weights."""
    if model.declared is model.architecture:
        return {}
    plain = Model(model.architecture, without_quantization(model.config))
    return {weight.name: _of_experts(plain, weight.name) for weight in plain.weights.values() if weight.declared.by_expert()}


def by_expert(index: Index, weights: Mapping[str, Tensor], model: Model) -> tuple[Index, dict[str, Tensor], Model]:
    """An index, the chosen weights of it and their model, with the weights of each expert under names of their own.

    Weights whose values are computed, by dequantization or with an adapter, stay stacked.
    """
    single = Model(model.architecture.by_expert(), model.config)
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in weights.items():
        weight = model.weights.get(name)
        if weight and weight.declared.by_expert() and not tensor.is_computed:
            located = located_in(tensor.shards, _of_experts(model, name)).of(tensor.shards)
            experts[name] = [replace(tensor, name=own, shape=single.weights[own].shape, shards=shards) for own, shards in located]

    def one_by_one(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        for tensor in tensors:
            is_stacked = tensor.name in experts and tensor.kind == weights[tensor.name].kind
            yield from experts[tensor.name] if is_stacked else (tensor,)

    return replace(index, tensors=tuple(one_by_one(index.tensors))), {made.name: made for made in one_by_one(weights.values())}, single


def _of_experts(model: Model, name: str) -> Mosaic:
    """A stacked tensor of the model as the array of its experts' weights."""
    weight = model.weights[name]
    names = {expert.role: expert.name for expert in weight.declared.by_expert()}
    experts: dict[int | None, list[Mosaic]] = {}
    for part in model.parts_of([weight]):
        own = numbered(names[part.role], weight.layer, part.expert)
        experts.setdefault(part.expert, []).append(Mosaic.of(own, Box.whole(part.array.shape)))
    arrays = map(joined, experts.values())
    return stacked(array.transposed() if weight.declared.transposed else array for array in arrays)


def located_in(shards: Shards, array: Mosaic) -> SubviewsByTensor:
    """The tiles of an array in the pieces of the stored tensor that is this array."""
    from reshard.index.subviews import SubviewsBuilder

    starts, stops = shards.offsets, shards.offsets + shards.sizes
    builder = SubviewsBuilder()
    for tile in array.tiles:
        spans = [tile.span(axis) for axis in range(len(array.shape))]
        box = Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))
        for row in rows_meeting(starts, stops, box).tolist():
            part: Tile | None = tile
            for axis, (start, stop) in enumerate(zip(starts[row].tolist(), stops[row].tolist(), strict=True)):
                part = part.cut(axis, start, stop) if part else None
            assert part is not None
            builder.add_tile(row, part.name, part)
    return builder.build()
