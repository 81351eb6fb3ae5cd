"""The masters and states of a ZeRO optimizer, from the flat groups of one model-parallel rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from reshard.canonical.optimizer_state import STEP, is_count
from reshard.containers.torch_zip import AnyTensor, Locations, is_plain_tensor
from reshard.errors import CheckpointError, IncompleteError, MixedSaves
from reshard.index.index import ParamGroup

from ..layout.degrees import ModelRank
from ..layout.experts import ProcessGroup, group_ranks, process_groups
from ..layout.partitions import FlatSlice, zero2_slices, zero3_part_size, zero3_slices
from ..layout.states import ModelStates, OptimizerStates, Parameters, Shape
from .flat_buffers import FlatBuffer, pieces_of_copies
from .parts import MASTER, Contents, ParameterPart, kind_and_name
from .run_states import RunStates

# A flat group is padded to a multiple of 2 elements per rank; with BF16_Optimizer, of its nccl_start_alignment_factor per rank.
_MOST_PADDING_PER_RANK = 256


def zero_optimizer(states: RunStates, rank: ModelRank, shapes: Mapping[str, Shape], locations: Locations) -> Contents:
    """The masters, states and param groups of one model-parallel rank. shapes: whole shapes by name, from the model's config.

    Raises: CheckpointError if the model's files and the optimizer's do not fit.
    """
    models, optimizers = states.models_of(rank.number), states.optimizers_of(rank.number)
    model = models[min(models)]
    known_shapes = {**shapes, **_module_shapes(model), **states.expert_shapes()}
    groups = model.groups if model.groups is not None else groups_without_shapes(model, optimizers, known_shapes)
    shapeless = [name for group in groups for name, _ in group if name not in known_shapes] if model.groups is None else []
    _check_groups(states, model, optimizers[0], groups)
    sharing = [list(process_groups(models, optimizers, number, parameters)) for number, parameters in enumerate(groups)]
    names = [[name for process_group in of_group for name, _ in process_group.parameters] for of_group in sharing]
    return Contents(
        parts=tuple(
            part
            for number, of_group in enumerate(sharing)
            for process_group in of_group
            for part in _group_parts(number, process_group, optimizers, rank, locations)
        ),
        shapeless=tuple(shapeless),
        notes=tuple(_notes(shapeless)),
        param_groups=tuple(_param_groups(optimizers, names)),
    )


def _notes(shapeless: Sequence[str]) -> Iterator[str]:
    if shapeless:
        yield (
            f"{len(shapeless)} parameters and their shapes are in no model file; each of their masters is read as one row: "
            f"{', '.join(shapeless[:3])}"
        )


def groups_without_shapes(
    model: ModelStates, optimizers: Mapping[int, OptimizerStates], shapes: Mapping[str, Shape]
) -> tuple[Parameters, ...]:
    """The parameters of each flat group for a model file without param_shapes. DeepSpeed before 0.19 leaves them out if there are experts.

    Names and their order are those of the ranks' param_slice_mappings. These versions also drop parameters with "expert" in their names
    from the model file: a parameter without a known shape counts as one row of its elements.
    Raises: CheckpointError if the names are missing, too.
    """
    groups = []
    for number in range(len(optimizers[0].masters)):
        elements: dict[str, int] = {}
        for dp in group_ranks(model, optimizers, number)[0]:
            of_rank = optimizers[dp].local_elements
            for name, count in of_rank[number] if number < len(of_rank) else ():
                elements[name] = elements.get(name, 0) + count
        if not elements:
            raise CheckpointError(
                "it holds no param_shapes, and the optimizer's files do not hold the names of the parameters in their flat groups",
                where=model.path,
                why="Nothing tells which elements belong to which parameter",
                do="Save the checkpoint with the model's states",
            )
        groups.append(tuple((name, shapes.get(name, (count,))) for name, count in elements.items()))
    return tuple(groups)


def _module_shapes(model: ModelStates) -> dict[str, Shape]:
    return {name: value.shape for name, value in (model.module or {}).items() if is_plain_tensor(value)}


def _check_groups(states: RunStates, model: ModelStates, first: OptimizerStates, groups: Sequence[Parameters]) -> None:
    """Raises CheckpointError if the optimizer has other groups than the model lists, or all its groups are empty."""
    if len(groups) != len(first.masters):
        raise CheckpointError(
            f"it has {len(first.masters)} flat groups, param_shapes in {model.path} lists {len(groups)}",
            where=first.path,
            why="The files are from different saves",
            do="Keep the files of one save only",
        )
    elements = sum(math.prod(shape) for group in groups for _, shape in group)
    if elements and all(0 in row.shape for row in first.masters):
        raise IncompleteError(
            "its full-precision groups are empty"
            + (", and offloaded_tensors/ lacks their swap files" if states.tag.has_swap_files else "")
            + ": they were swapped to NVMe",
            where=first.path,
            why="The masters are in swap files of the training machine, which DeepSpeed copies to offloaded_tensors/ beside the states",
            do="Copy that folder from where the checkpoint was written, or save once without NVMe offload",
        )


def _group_parts(
    number: int, group: ProcessGroup, optimizers: Mapping[int, OptimizerStates], rank: ModelRank, locations: Locations
) -> Iterator[ParameterPart]:
    """The masters and states of one flat group, from the ranks that share it."""
    sharing = {dp: optimizers[dp] for dp in group.ranks}
    slices, needed = _slices(number, group.parameters, sharing)
    buffers, counts = _buffers(number, sharing, locations)
    for state, buffer in buffers.items():
        buffer.check_size(needed, f"{state} of group {number}")
    for parameter in slices:
        for state, buffer in buffers.items():
            shape, shards = parameter.shape, buffer.shards(parameter)
            if expert_slice := group.expert_slices.get(parameter.name):
                shape, shards = expert_slice.fused_shape, expert_slice.in_fused_tensor(shards, shape)
            yield ParameterPart(*kind_and_name(parameter.name, state), rank.stage, rank.tp_rank, buffer.dtype, shape, shards)
    for state, copies in counts.items():
        shards = pieces_of_copies(copies, locations)
        for parameter in slices:
            dtype = copies[min(copies)].dtype
            yield ParameterPart(*kind_and_name(parameter.name, state), rank.stage, rank.tp_rank, dtype, (), shards)


def _buffers(
    number: int, sharing: Mapping[int, OptimizerStates], locations: Locations
) -> tuple[dict[str, FlatBuffer], dict[str, dict[int, AnyTensor]]]:
    """The flat buffers of a group by state, the masters first; and the step counts by state, one copy per data-parallel rank."""
    buffers = {MASTER: FlatBuffer.of({dp: states.masters[number] for dp, states in sharing.items()}, locations)}
    counts: dict[str, dict[int, AnyTensor]] = {}
    for state in dict.fromkeys(state for states in sharing.values() for state in states.states[number]):
        tensors = {dp: tensor for dp, states in sharing.items() if is_plain_tensor(tensor := states.states[number].get(state))}
        if not tensors:
            continue
        if missing := [states.path for dp, states in sharing.items() if dp not in tensors]:
            raise CheckpointError(f"it holds no {state} of group {number}, other ranks do", where=missing[0], do="Copy the file again")
        if next(iter(tensors.values())).shape == ():
            counts[state] = tensors
        elif all(len(tensor.shape) == 1 for tensor in tensors.values()):
            buffers[state] = FlatBuffer.of(tensors, locations)
    return buffers, counts


def _slices(number: int, parameters: Parameters, sharing: Mapping[int, OptimizerStates]) -> tuple[list[FlatSlice], list[int]]:
    """Where the parameters of a group lie; and how many elements of each rank's row they take."""
    ranks, first = len(sharing), next(iter(sharing.values()))
    if first.zero_stage == 3:
        return list(zero3_slices(parameters, ranks)), [sum(zero3_part_size(shape, ranks) for _, shape in parameters)] * ranks
    partition = _partition_size(number, sharing)
    alignments = first.alignments[number] if number < len(first.alignments) else ()
    slices = list(zero2_slices(parameters, alignments, partition, ranks, where=first.path))
    end = max((s.first_rank * partition + s.first_offset + math.prod(s.shape) for s in slices), default=0)
    if partition * ranks - end > _MOST_PADDING_PER_RANK * ranks:
        raise CheckpointError(
            f"the parameters of param_shapes end at element {end:,} of a row of {partition * ranks:,}",
            where=first.path,
            why="The rest is more than padding: the files are from different saves, or this version aligns parameters in an unknown way",
            do="Keep the files of one save only",
        )
    return slices, [max(0, min(partition, end - i * partition)) for i in range(ranks)]


def _partition_size(number: int, sharing: Mapping[int, OptimizerStates]) -> int:
    """How many elements each rank has of a group's row, padding included (ZeRO-1, 2)."""
    sizes = {states.path: states.masters[number].shape[0] + states.paddings[number] for states in sharing.values()}
    partition = max(sizes.values())
    for path, size in sizes.items():
        if size != partition:
            raise CheckpointError(
                f"with its padding its partition of group {number} has {size:,} elements, others have {partition:,}",
                where=path,
                why="All partitions have the same size, so this file is from another save",
                do="Copy that file from where the checkpoint was written",
            )
    return partition


def _param_groups(optimizers: Mapping[int, OptimizerStates], names: Sequence[Sequence[str]]) -> Iterator[ParamGroup]:
    """The param groups, with the step counts that some optimizers keep as plain numbers. names: the parameters of each flat group."""
    first = optimizers[0]
    # Elastic checkpoints hold no settings; there, each flat group is a param group.
    for number, settings in enumerate(first.group_settings or [{}] * len(first.masters)):
        listed = settings.get("params") if first.zero_stage == 3 else [number]
        flat_groups = [group for group in listed if type(group) is int] if isinstance(listed, list) else [number]
        steps = {
            step
            for states in optimizers.values()
            for group in flat_groups
            if group < len(states.states) and is_count(step := states.states[group].get(STEP))
        }
        if len(steps) > 1:
            raise MixedSaves(
                f"the ranks' optimizers have counted {' and '.join(map(str, sorted(steps)))} steps",
                where=first.path,
                why="Files of different steps of the run lie under the same tag, so the weights are not of one moment",
                do="Keep the files of one save only",
            )
        plain = {key: value for key, value in settings.items() if key != "params"}
        yield ParamGroup(
            tuple(name for group in flat_groups if 0 <= group < len(names) for name in names[group]),
            plain | ({STEP: steps.pop()} if steps else {}),
        )
