"""Which experts lie on which ranks, and the names that they have there.

DeepSpeed-MoE stores the weights of each expert in a file of its own, under the expert's global number. Its optimizer state lies in flat
groups that only the ranks with the same experts share, under the expert's local number.

    global number = expert-parallel rank * experts per rank + local number

AutoEP (0.19) fuses the experts of a layer: its optimizer has one tensor with all experts of a rank. Its files (ZeRO-1, 2) have one expert
each.

The expert-parallel rank of data-parallel rank d is d % ep, as expert parallelism lies inside data parallelism; with
use_data_before_expert_parallelism it is d // (dp / ep).

Source: deepspeed/utils/groups.py, deepspeed/moe/; measured on 0.14.5, 0.16.9 and 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.value import value
from reshard.index.shards import Shards, concatenated

from .states import ModelStates, OptimizerStates, Parameters, Shape
from .tag import mixed_saves

_EXPERT = re.compile(r"(?P<module>.*\bdeepspeed_experts)\.(?P<number>\d+)\.(?P<rest>.*)")
# AutoEP's fused tensors of a layer.
_FUSED_TENSORS = ("w1", "w2", "w3")


@value
class ExpertSlice:
    """Some experts of a layer as a part of the fused tensor of all its experts, [experts, ...]."""

    fused_shape: Shape
    """The shape of the fused tensor of all experts."""
    experts: tuple[int, ...]
    """Their global numbers, in the order in which the part holds them."""

    def in_fused_tensor(self, shards: Shards, shape: Shape) -> Shards:
        """The pieces of the part in the coordinates of the fused tensor. shards, shape: of the part, in its own coordinates."""
        other_axes = (0,) * (len(shape) - 1)
        return concatenated(
            [
                shards.moved(Box.whole(shape).narrow(0, position, position + 1), (expert, *other_axes))
                for position, expert in enumerate(self.experts)
            ]
        )


@value
class ProcessGroup:
    """The data-parallel ranks that share one flat group, and the group's parameters under their names in the whole model."""

    ranks: tuple[int, ...]
    """The data-parallel ranks, in the order of their partitions."""
    parameters: Parameters
    """The group's parameters, experts under their global numbers."""
    expert_slices: Mapping[str, ExpertSlice]
    """AutoEP's fused parameter -> the experts of it that these ranks hold."""


def process_groups(
    models: Mapping[int, ModelStates], optimizers: Mapping[int, OptimizerStates], number: int, parameters: Parameters
) -> Iterator[ProcessGroup]:
    """The process groups that share flat group `number`: one for dense parameters, one per expert-parallel rank for experts.

    models, optimizers: by data-parallel rank; without ZeRO-3 there are model states of rank 0 only.
    """
    first = models[min(models)]
    for ep_rank, ranks in enumerate(group_ranks(first, optimizers, number)):
        model = models.get(ranks[0])
        recorded = model.autoep_layers[0].get("ep_rank", ep_rank) if model and model.autoep_layers else ep_rank
        yield ProcessGroup(ranks, tuple(with_global_numbers(parameters, ep_rank)), dict(_expert_slices(first, parameters, recorded)))


def group_ranks(model: ModelStates, optimizers: Mapping[int, OptimizerStates], number: int) -> list[tuple[int, ...]]:
    """For each expert-parallel rank, the data-parallel ranks that share flat group `number`; AutoEP records them.

    Raises: CheckpointError if the ranks do not divide into process groups of one size.
    """
    ranks, path = sorted(optimizers), optimizers[min(optimizers)].path
    if recorded := dict.fromkeys(states.groups[number].ranks for states in optimizers.values() if states.groups[number].ranks):
        if sorted(rank for members in recorded for rank in members) != ranks:
            raise CheckpointError(f"group {number} is shared by the ranks {[*recorded]}, not by each rank once", where=path)
        return list(recorded)
    size = optimizers[ranks[0]].groups[number].sharing or len(ranks)
    ep, rest = divmod(len(ranks), size)
    if rest:
        raise mixed_saves(f"group {number} is shared by {size} ranks, and {len(ranks)} ranks are not a multiple of {size}", path)
    is_data_first = bool(model.config.get("use_data_before_expert_parallelism"))
    return [tuple(dp for dp in ranks if (dp // size if is_data_first else dp % ep) == ep_rank) for ep_rank in range(ep)]


def _expert_slices(model: ModelStates, parameters: Parameters, ep_rank: int) -> Iterator[tuple[str, ExpertSlice]]:
    """AutoEP's fused tensors among the parameters, and which experts an expert-parallel rank holds of each."""
    shapes = dict(parameters)
    for layer in model.autoep_layers:
        experts = _experts_of_rank(layer, ep_rank)
        total = layer.get("num_experts")
        for name in (f"{layer.get('expert_key_prefix')}.{tensor}" for tensor in _FUSED_TENSORS):
            if (shape := shapes.get(name)) is None:
                continue
            if type(total) is not int or len(experts) != shape[0] or any(expert >= total for expert in experts):
                raise CheckpointError(
                    f"its shape is {list(shape)}, and its rank holds the experts {experts} of {total}", where=f"{name} in {model.path}"
                )
            yield name, ExpertSlice((total, *shape[1:]), experts)


def _experts_of_rank(layer: Mapping[str, Any], ep_rank: int) -> tuple[int, ...]:
    """The global numbers of the experts of an AutoEP layer on an expert-parallel rank; consecutive numbers if the layer records none."""
    recorded = layer.get("expert_placement")
    ranks = recorded.get("ranks") if isinstance(recorded, Mapping) else None
    if isinstance(ranks, list | tuple):
        return next((tuple(entry["experts"]) for entry in ranks if entry["rank"] == ep_rank), ())
    experts_per_rank: Any = layer.get("num_local_experts")
    ep: Any = layer.get("ep_size")
    has_numbers = type(experts_per_rank) is int and type(ep) is int and ep_rank < ep
    return tuple(range(ep_rank * experts_per_rank, (ep_rank + 1) * experts_per_rank)) if has_numbers else ()


def with_global_numbers(parameters: Parameters, ep_rank: int) -> Iterator[tuple[str, Shape]]:
    """The parameters of an expert-parallel rank, with global numbers in place of local ones."""
    experts_per_rank = _experts_per_module(parameters)
    for name, shape in parameters:
        if match := _EXPERT.fullmatch(name):
            module, number = match["module"], int(match["number"])
            name = f"{module}.{ep_rank * experts_per_rank[module] + number}.{match['rest']}"
        yield name, shape


def parameters_of_experts(parameters: Parameters, ep_rank: int, ep: int) -> Parameters:
    """The parameters of the experts that one of `ep` expert-parallel ranks holds. parameters: those of all experts, with global numbers."""
    experts = _experts_per_module(parameters)

    def is_on_rank(name: str) -> bool:
        match = _EXPERT.fullmatch(name)
        return match is not None and int(match["number"]) // max(1, experts[match["module"]] // ep) == ep_rank

    return tuple((name, shape) for name, shape in parameters if is_on_rank(name))


def _experts_per_module(parameters: Sequence[tuple[str, Shape]]) -> dict[str, int]:
    """How many experts each module has among the parameters."""
    experts: dict[str, int] = {}
    for name, _ in parameters:
        if match := _EXPERT.fullmatch(name):
            experts[match["module"]] = max(experts.get(match["module"], 0), 1 + int(match["number"]))
    return experts
