"""The optimizer of a run without ZeRO: a torch state dict that numbers its parameters.

It lies in the model file, or in one file per expert-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.adapter.state_dicts import group_numbers, optimizer_part
from reshard.adapter.state_dicts import states as states_of
from reshard.canonical.optimizer_state import names_for, plain_groups, state_kind
from reshard.containers.torch_zip import AnyTensor, is_plain_tensor, memory_of
from reshard.index.index import ParamGroup

from ..layout.experts import parameters_of_experts
from ..layout.states import ModelStates, Parameters, Shape
from ..layout.tag import ModelRank, of_model_rank
from .parts import MASTER, Parts, kind_and_name
from .run_states import RunStates


def add_plain_optimizer(parts: Parts, states: RunStates, rank: ModelRank) -> None:
    """Add the masters, states and param groups of one model-parallel rank, if its files hold an optimizer."""
    model = states.models[0, rank.number]
    dense, experts = parameters_in_order(model), tuple(states.expert_shapes().items())
    optimizers = of_model_rank(states.expert_optimizers, rank.number)
    paths = of_model_rank(states.tag.expert_optimizers, rank.number)
    groups = () if optimizers else _add_optimizer(parts, rank, model.optimizer, model.path, dense, ())
    for ep_rank, optimizer in optimizers.items():
        # The ranks list the same param groups, each with its own experts. Only the last rank's groups are kept.
        groups = _add_optimizer(parts, rank, optimizer, paths[ep_rank], dense, parameters_of_experts(experts, ep_rank, len(paths)))
    parts.add_param_groups(groups)


def _add_optimizer(
    parts: Parts, rank: ModelRank, wrapper: Any, path: str, dense: Parameters, experts: Parameters
) -> tuple[ParamGroup, ...]:
    """Add what one optimizer's state dict holds, and the masters of a wrapper for 16-bit weights around it. Returns its param groups.

    dense: the model's parameters, in its order. experts: those of this rank's experts, which have param groups of their own.
    """
    inner = wrapper.get("optimizer_state_dict") if isinstance(wrapper, Mapping) else None
    optimizer = optimizer_part(inner if isinstance(inner, Mapping) else wrapper)
    if optimizer is None:
        return ()
    stored = list(states_of(optimizer))
    tensors = [(number, state, value) for number, state, value in stored if is_plain_tensor(value)]
    shapes = {number: value.shape for number, state, value in tensors if value.shape and "." not in state}
    names, notes = _names_of_numbers(optimizer, shapes, dense, experts)
    parts.builder.add_notes(notes)
    for number, state, value in stored:
        if number in names and not is_plain_tensor(value):
            parts.add_other(*kind_and_name(names[number], state), value, path)
    tensors += [(number, MASTER, master) for number, master in _masters(wrapper, group_numbers(optimizer))]
    file = path.rpartition("/")[2].partition("_model")[0].partition("_optim")[0]
    for number, state, tensor in tensors:
        kind, name = kind_and_name(names[number], state) if number in names else state_kind(None, f"{file}.{number}", state)
        parts.add_whole(rank, kind, name, tensor)
    return plain_groups(optimizer["param_groups"], names, optimizer["state"])


def _masters(wrapper: Mapping[str, Any], numbers: Sequence[Sequence[Any]]) -> list[tuple[Any, AnyTensor]]:
    """(number, full-precision copy) of each parameter; empty if the wrapper holds none. numbers: of each param group."""
    groups = wrapper.get("fp32_groups")
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        return []
    masters = [master for group in groups for master in group]
    order = [number for group in numbers for number in group]
    if len(masters) != len(order) or not all(map(is_plain_tensor, masters)):
        return []
    return list(zip(order, masters, strict=True))


def _names_of_numbers(
    optimizer: Mapping[str, Any], shapes: Mapping[Any, Shape], dense: Parameters, experts: Parameters
) -> tuple[Mapping[Any, str], list[str]]:
    """The name of each number, and notes on how it is known.

    Param groups of experts are marked `moe`, so an expert is never taken for a dense parameter of the same shape.
    """
    groups, numbers = optimizer["param_groups"], group_numbers(optimizer)
    if not experts or len(groups) != len(numbers):
        return names_for(optimizer, numbers, shapes, dense)
    names: dict[Any, str] = {}
    notes: list[str] = []
    for is_moe, parameters in ((False, dense), (True, experts)):
        pairs = [(group, listed) for group, listed in zip(groups, numbers, strict=True) if bool(group.get("moe")) == is_moe]
        names_of_kind, notes_of_kind = names_for(
            {**optimizer, "param_groups": [group for group, _ in pairs]}, [listed for _, listed in pairs], shapes, parameters
        )
        names |= names_of_kind
        notes += notes_of_kind
    return names, notes


def parameters_in_order(model: ModelStates) -> Parameters:
    """The module's parameters in its order, tied ones once. Buffers are left out by name; without recorded names, by element type."""
    parameters, memories, buffers = [], set(), set(model.facts.buffers or ())
    for name, tensor in model.tensors.items():
        if name in buffers or not tensor.dtype.floating:
            continue
        if (memory := memory_of(tensor)) not in memories or 0 in tensor.shape:
            memories.add(memory)
            parameters.append((name, tensor.shape))
    return tuple(parameters)
