"""What the optimizer keeps: ZeRO's masters and states in flat groups; without ZeRO, a state dict that numbers the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.adapter.state_dicts import group_numbers, optimizer_part
from reshard.adapter.state_dicts import states as states_of
from reshard.canonical.optimizer_state import names_for, plain_groups, state_kind
from reshard.containers import torch_zip
from reshard.containers.torch_zip import AnyTensor, is_stored, memory_of
from reshard.errors import CheckpointError
from reshard.index.index import ParamGroup

from ..layout.partitions import Row, Slice, on_every_rank, part_of_stage_3, ranks_of, slices_of_stage_2, slices_of_stage_3
from ..layout.states import ModelStates, OptimizerStates, Parameters, Shape
from ..layout.tag import check_ranks
from . import experts
from .join import Part, Reading, Topology, role_of


def read_zero(
    reading: Reading, models: Mapping[int, ModelStates], own: Mapping[int, OptimizerStates], topology: Topology, place: tuple[int, int]
) -> None:
    """Masters and states of one mp rank's groups; models, own: by data-parallel rank."""
    first, model = own[0], models[min(models)]
    groups = model.groups if model.groups is not None else experts.groups_without_shapes(reading, model, own)
    if len(groups) != len(first.masters):
        raise CheckpointError(
            f"it has {len(first.masters)} flat groups, param_shapes in {model.path} lists {len(groups)}",
            where=first.path,
            why="The files are from different saves",
            do="Keep the files of one save only",
        )
    _check_not_swapped(reading, first, groups)
    names: dict[int, list[str]] = {}
    for g, parameters in enumerate(groups):
        for family in experts.families(models, own, g, parameters, topology):
            for name in _read_group(reading, g, family, {dp: own[dp] for dp in family.members}, place):
                names.setdefault(g, []).append(name)
    reading.groups[place] = list(_param_groups(own, names))


def _read_group(
    reading: Reading, g: int, family: experts.Family, members: Mapping[int, OptimizerStates], place: tuple[int, int]
) -> Iterator[str]:
    """One flat group, of the ranks that share it; yields the names of its parameters."""
    cuts, needed = _slices(g, family.parameters, members)
    paths = {dp: states.path for dp, states in members.items()}
    rows = {_MASTER: _row(reading, paths, {dp: states.masters[g] for dp, states in members.items()})}
    copies: dict[str, dict[int, AnyTensor]] = {}
    for kind in dict.fromkeys(kind for states in members.values() for kind in states.states[g]):
        held = {dp: value for dp in members if is_stored(value := members[dp].states[g].get(kind))}
        if missing := [paths[dp] for dp in members if dp not in held and held]:
            raise CheckpointError(f"it holds no {kind} of group {g}, other ranks do", where=missing[0], do="Copy the file again")
        if held and next(iter(held.values())).shape == ():
            copies[kind] = held
        elif held and all(len(value.shape) == 1 for value in held.values()):
            rows[kind] = _row(reading, paths, held)
    for kind, row in rows.items():
        row.check(needed, f"{kind} of group {g}")
    for cut in cuts:
        yield cut.name
        for kind, row in rows.items():
            role, name = role_of(cut.name, kind, master=_MASTER)
            shape, shards = cut.shape, row.shards(cut)
            if cut.name in family.placed:
                shape, shards = family.placed[cut.name].apply(shards, shape)
            reading.add(role, name, Part(*place, row.dtype, shape, shards))
    for kind, held in copies.items():
        shards = on_every_rank(held, paths, reading.locations)
        for cut in cuts:
            reading.add(*state_kind(cut.name, cut.name, kind), Part(*place, held[min(held)].dtype, (), shards))


def _slices(g: int, parameters: Parameters, members: Mapping[int, OptimizerStates]) -> tuple[list[Slice], list[int]]:
    """Where a group's parameters lie, and how many elements each rank must therefore have of its row."""
    ranks, first = len(members), next(iter(members.values()))
    if first.stage == 3:
        return list(slices_of_stage_3(parameters, ranks)), [sum(part_of_stage_3(shape, ranks) for _, shape in parameters)] * ranks
    lengths = {states.path: states.masters[g].shape[0] + states.paddings[g] for states in members.values()}
    partition = max(lengths.values())
    if odd := [path for path, length in lengths.items() if length != partition]:
        raise CheckpointError(
            f"with its padding its part of group {g} has {lengths[odd[0]]:,} elements, others have {partition:,}",
            where=odd[0],
            why="All ranks' parts are equally long, so this file is from another save",
            do="Copy that file from where the checkpoint was written",
        )
    alignments = first.alignments[g] if g < len(first.alignments) else ()
    cuts = list(slices_of_stage_2(parameters, alignments, partition, ranks, where=first.path))
    end = max((cut.first * partition + cut.start + math.prod(cut.shape) for cut in cuts), default=0)
    # Rows end with 2 elements of alignment per rank, or with what BF16_Optimizer was told (nccl_start_alignment_factor).
    if partition * ranks - end > _MOST_PADDING * ranks:
        raise CheckpointError(
            f"the parameters of param_shapes end at element {end:,} of a row of {partition * ranks:,}",
            where=first.path,
            why="The rest is more than padding: the files are from different saves, or this version aligns parameters in an unknown way",
            do="Keep the files of one save only",
        )
    return cuts, [max(0, min(partition, end - i * partition)) for i in range(ranks)]


_MOST_PADDING = 256
# No kind of state is called so.
_MASTER = "(master)"


def _row(reading: Reading, paths: Mapping[int, str], held: Mapping[int, AnyTensor]) -> Row:
    # A tensor that was swapped out lies in a file of its own.
    return Row(tuple(tensor.path for tensor in held.values()), ranks_of(paths), tuple(held.values()), reading.locations)


def _check_not_swapped(reading: Reading, first: OptimizerStates, groups: Sequence[Parameters]) -> None:
    expected = sum(math.prod(shape) for group in groups for _, shape in group)
    if expected and all(0 in flat.shape for flat in first.masters):
        raise CheckpointError(
            "its full-precision groups are empty"
            + (", and offloaded_tensors/ does not hold what they name" if reading.tag.swapped else "")
            + ": they were swapped to NVMe",
            where=first.path,
            why="The masters are in swap files of the training machine, which DeepSpeed copies to offloaded_tensors/ beside the states",
            do="Copy that folder from where the checkpoint was written, or save once without NVMe offload",
        )


def _param_groups(own: Mapping[int, OptimizerStates], names: Mapping[int, Sequence[str]]) -> Iterator[ParamGroup]:
    """The settings of each param group, with the steps that some optimizers keep as plain numbers."""
    first = own[0]
    # Elastic checkpoints hold no settings; which parameters make a group they tell all the same.
    for j, settings in enumerate(first.settings or [{}] * len(first.masters)):
        numbers = settings.get("params") if first.stage == 3 else [j]
        listed = [number for number in numbers if type(number) is int] if isinstance(numbers, list) else [j]
        kept = {key: value for key, value in settings.items() if key != "params"}
        told = (states.states[g].get("step") for states in own.values() for g in listed if g < len(states.states))
        steps = {step for step in told if type(step) is int}
        if len(steps) > 1:
            raise CheckpointError(
                f"the ranks' optimizers have counted {' and '.join(map(str, sorted(steps)))} steps",
                where=first.path,
                why="Files of different steps of the run lie under the same tag, so the weights are not of one moment",
                do="Keep the files of one save only",
            )
        yield ParamGroup(tuple(name for g in listed for name in names.get(g, ())), kept | ({"step": steps.pop()} if steps else {}))


def merged_groups(groups: Mapping[tuple[int, int], Sequence[ParamGroup]]) -> tuple[ParamGroup, ...]:
    """The ranks' groups of the same number as one: a pipeline stage knows its own parameters only."""
    merged: list[ParamGroup] = []
    for own in groups.values():
        for j, group in enumerate(own):
            if j < len(merged):
                merged[j] = replace(merged[j], names=tuple(dict.fromkeys((*merged[j].names, *group.names))))
            else:
                merged.append(group)
    return tuple(merged)


def read_optimizers_of_experts(reading: Reading, model: ModelStates, mp_rank: int, place: tuple[int, int]) -> int:
    """Without ZeRO: the optimizer of each expert-parallel rank, in a file of its own. Returns how many there are; 0 if they are empty, as
    DeepSpeed before 0.19 writes them beside ZeRO's."""
    paths = {ep: path for (ep, mp), path in reading.tag.expert_optimizers.items() if mp == mp_rank}
    roots = {ep: torch_zip.read(reading.files, path, locate=False) for ep, path in paths.items()}
    kept = {ep: found for ep, root in roots.items() if isinstance(root, Mapping) and isinstance(found := root.get("optimizer"), Mapping)}
    if not kept:
        return 0
    check_ranks(paths, 1 + max(paths), "expert-parallel", why=f"{paths[max(paths)]} is the last one's")
    for ep_rank, optimizer in kept.items():
        own = experts.parameters_of(reading, ep_rank, len(paths))
        read_plain_optimizer(reading, optimizer, paths[ep_rank], parameters_in_order(model), own, place)
    return len(paths)


def read_plain_optimizer(
    reading: Reading, wrapper: Mapping[str, Any], path: str, parameters: Parameters, of_experts: Parameters, place: tuple[int, int]
) -> None:
    """Without ZeRO: the optimizer's own state dict, its parameters by number; and the masters of a wrapper for 16-bit types.

    parameters: the model's, in its order; of_experts: those of this rank's experts, which have param groups of their own.
    """
    inner = wrapper.get("optimizer_state_dict") if isinstance(wrapper.get("optimizer_state_dict"), Mapping) else wrapper
    optimizer = optimizer_part(inner)
    if optimizer is None:
        return
    numbers = group_numbers(optimizer)
    kept = [(parameter, kind, value) for parameter, kind, value in states_of(optimizer) if is_stored(value)]
    names = _names(reading, optimizer, {number: value.shape for number, kind, value in kept if kind != "step"}, parameters, of_experts)

    def add(number: Any, kind: str, value: AnyTensor) -> None:
        if (name := names.get(number)) is None:
            whose = path.rpartition("/")[2].partition("_model")[0].partition("_optim")[0]
            reading.add_unnamed(f"optim.state.{whose}.{number}.{kind}", value)
        else:
            reading.add_whole(*role_of(name, kind, master=_MASTER), value, place)

    for parameter, kind, value in kept:
        add(parameter, kind, value)
    masters = wrapper.get("fp32_groups")
    groups = masters if isinstance(masters, list) and all(isinstance(group, list) for group in masters) else []
    listed, order = [each for group in groups for each in group], [number for group in numbers for number in group]
    if len(listed) == len(order) and all(map(is_stored, listed)):
        for number, value in zip(order, listed, strict=True):
            add(number, _MASTER, value)
    reading.groups[place] = list(plain_groups(optimizer["param_groups"], names))


def _names(
    reading: Reading, optimizer: Mapping[str, Any], shapes: Mapping[Any, Shape], parameters: Parameters, of_experts: Parameters
) -> Mapping[Any, str]:
    """The name of each number. Groups of experts are marked, so that an expert is never taken for a dense parameter of the same shape."""
    groups, numbers = optimizer["param_groups"], group_numbers(optimizer)
    if not of_experts or len(groups) != len(numbers):
        names, notes = names_for(optimizer, numbers, shapes, parameters)
        reading.notes.extend(notes)
        return names
    found: dict[Any, str] = {}
    for is_expert, known in ((False, parameters), (True, of_experts)):
        own = [group for group in groups if bool(group.get("moe")) == is_expert]
        listed = [each for each, group in zip(numbers, groups, strict=True) if bool(group.get("moe")) == is_expert]
        names, notes = names_for({**optimizer, "param_groups": own}, listed, shapes, known)
        found |= names
        reading.notes.extend(notes)
    return found


def parameters_in_order(model: ModelStates) -> Parameters:
    """The module's parameters, tied ones once, in its order; buffers are told by their names or, without, by their types."""
    found, seen = [], set()
    for name, value in (model.module or {}).items():
        if not is_stored(value) or str(name) in (model.buffers or ()) or not value.dtype.floating:
            continue
        if (memory := memory_of(value)) not in seen or 0 in value.shape:
            seen.add(memory)
            found.append((str(name), value.shape))
    return tuple(found)
