"""The masters and states of a ZeRO optimizer, from the flat groups of one model-parallel rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from reshard.canonical.optimizer_state import STEP, is_count
from reshard.containers.torch_zip import AnyTensor, is_plain_tensor
from reshard.errors import CheckpointError, IncompleteError
from reshard.index.index import ParamGroup, Tensor

from ..layout.experts import ProcessGroup, group_ranks, process_groups
from ..layout.partitions import FlatSlice, whole_slices, zero2_slices, zero3_part_size, zero3_slices
from ..layout.states import FlatGroup, ModelStates, OptimizerStates, Parameters, Shape
from ..layout.tag import ModelRank, mixed_saves, of_model_rank
from .flat_buffers import FlatBuffer, pieces_of_copies
from .parts import MASTER, Parts, kind_and_name
from .run_states import RunStates

# A flat group is padded to a multiple of 2 elements per rank; with BF16_Optimizer, of its nccl_start_alignment_factor per rank.
_MOST_PADDING_PER_RANK = 256


def add_zero_optimizer(parts: Parts, states: RunStates, rank: ModelRank, shapes: Mapping[str, Shape]) -> None:
    """Add the masters, states and param groups of one model-parallel rank. shapes: whole shapes by name, from the model's config.

    Raises: CheckpointError if the model's files and the optimizer's do not fit.
    """
    models, optimizers = of_model_rank(states.models, rank.number), of_model_rank(states.optimizers, rank.number)
    model = models[min(models)]
    groups = model.groups
    if groups is None:
        known = {**shapes, **{name: tensor.shape for name, tensor in model.tensors.items()}, **states.expert_shapes()}
        groups = groups_without_shapes(model, optimizers, known)
        if shapeless := [name for group in groups for name, _ in group if name not in known]:
            count, named = len(shapeless), ", ".join(shapeless[:3])
            note = f"{count} parameters and their shapes are in no model file; each of their masters is read as one row: {named}"
            parts.builder.add_notes([note])
            parts.shapeless.update(shapeless)
    _check_groups(states, model, optimizers[0], groups)
    names: list[list[str]] = []
    for number, parameters in enumerate(groups):
        sharing = list(process_groups(models, optimizers, number, parameters))
        for process_group in sharing:
            _add_group(parts, rank, number, process_group, optimizers)
        names.append([name for process_group in sharing for name, _ in process_group.parameters])
    parts.add_param_groups(_param_groups(optimizers, names))


def groups_without_shapes(
    model: ModelStates, optimizers: Mapping[int, OptimizerStates], shapes: Mapping[str, Shape]
) -> tuple[Parameters, ...]:
    """The parameters of each flat group for a model file without param_shapes. DeepSpeed before 0.19 leaves them out if there are experts.

    Names and their order are those of the ranks' param_slice_mappings. These versions also drop parameters with "expert" in their names
    from the model file: a parameter without a known shape counts as one row of its elements.
    Raises: CheckpointError if the names are missing, too.
    """
    groups = []
    for number in range(len(optimizers[0].groups)):
        elements: dict[str, int] = {}
        for dp in group_ranks(model, optimizers, number)[0]:
            for name, count in optimizers[dp].groups[number].local_elements:
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


def _check_groups(states: RunStates, model: ModelStates, first: OptimizerStates, groups: Sequence[Parameters]) -> None:
    """Raises CheckpointError if the optimizer has other groups than the model lists, or all its groups are empty."""
    if len(groups) != len(first.groups):
        raise mixed_saves(f"it has {len(first.groups)} flat groups, param_shapes in {model.path} lists {len(groups)}", first.path)
    elements = sum(math.prod(shape) for group in groups for _, shape in group)
    if elements and all(0 in group.master.shape for group in first.groups):
        raise IncompleteError(
            "its full-precision groups are empty"
            + (", and offloaded_tensors/ lacks their swap files" if states.tag.has_swap_files else "")
            + ": they were swapped to NVMe",
            where=first.path,
            why="The masters are in swap files of the training machine, which DeepSpeed copies to offloaded_tensors/ beside the states",
            do="Copy that folder from where the checkpoint was written, or save once without NVMe offload",
        )


def _add_group(parts: Parts, rank: ModelRank, number: int, group: ProcessGroup, optimizers: Mapping[int, OptimizerStates]) -> None:
    """Add the masters and states of one flat group, from the ranks that share it."""
    paths, sharing = [optimizers[dp].path for dp in group.ranks], {dp: optimizers[dp].groups[number] for dp in group.ranks}
    if optimizers[group.ranks[0]].zero_stage == 3:
        slices = list(zero3_slices(group.parameters, len(sharing)))
        needed = [sum(zero3_part_size(shape, len(sharing)) for _, shape in group.parameters)] * len(sharing)
    else:
        slices, needed = _zero2_slices(number, group.parameters, [*sharing.values()], paths)
    counts: dict[str, dict[int, AnyTensor]] = {}
    buffers = {MASTER: FlatBuffer({dp: of_rank.master for dp, of_rank in sharing.items()}, parts.locations)}
    for state in dict.fromkeys(state for of_rank in sharing.values() for state in of_rank.states):
        tensors = {dp: tensor for dp, of_rank in sharing.items() if is_plain_tensor(tensor := of_rank.states.get(state))}
        if tensors and (missing := [path for dp, path in zip(sharing, paths, strict=True) if dp not in tensors]):
            raise CheckpointError(f"it holds no {state} of group {number}, other ranks do", where=missing[0], do="Copy the file again")
        if tensors and next(iter(tensors.values())).shape == ():
            counts[state] = tensors
        elif tensors and all(len(tensor.shape) == 1 for tensor in tensors.values()):
            buffers[state] = FlatBuffer(tensors, parts.locations)
        else:
            for parameter in slices:
                # A matrix of a whole flat group belongs to no parameter: it is named as an array that is not read.
                value = sharing[group.ranks[0]].states.get(state)
                parts.add_other(*kind_and_name(parameter.name, state), [value] if is_plain_tensor(value) else value, paths[0])
    partition = max(of_rank.master.shape[0] + of_rank.padding for of_rank in sharing.values())
    places = {state: _slices_of(buffer, slices, needed, partition, f"{state} of group {number}") for state, buffer in buffers.items()}
    for i, parameter in enumerate(slices):
        for state, buffer in buffers.items():
            shape, shards = parameter.shape, buffer.shards(places[state][i])
            if expert_slice := group.expert_slices.get(parameter.name):
                shape, shards = expert_slice.fused_shape, expert_slice.in_fused_tensor(shards, shape)
            kind, name = kind_and_name(parameter.name, state)
            parts.add(rank, Tensor(name, buffer.dtype, shape, kind, shards))
    for state, copies in counts.items():
        shards, dtype = pieces_of_copies(copies, parts.locations), copies[min(copies)].dtype
        for parameter in slices:
            kind, name = kind_and_name(parameter.name, state)
            parts.add(rank, Tensor(name, dtype, (), kind, shards))


def _slices_of(buffer: FlatBuffer, slices: list[FlatSlice], needed: Sequence[int], partition: int, what: str) -> list[FlatSlice]:
    """Where the parameters of a group lie in a buffer: as in the masters, or whole in the rows of all their ranks (ZeRO-1, 2).

    partition: the elements of each rank's row of masters, with padding.
    Raises: CheckpointError if they lie in neither way.
    """
    rows = [row.shape[0] for row in buffer.rows]
    if any(row not in (elements, partition) for row, elements in zip(rows, needed, strict=True)):
        whole, lengths = whole_slices(slices, len(rows))
        if rows == lengths:
            return whole
        if max(rows) > partition:
            wrong = next(i for i, (row, length) in enumerate(zip(rows, lengths, strict=True)) if row != length)
            raise mixed_saves(
                f"its {what} has {rows[wrong]:,} elements, the parameters of which its rank has a part have {lengths[wrong]:,}",
                buffer.paths[wrong],
            )
    buffer.check_size(needed, what)
    return slices


def _zero2_slices(
    number: int, parameters: Parameters, sharing: Sequence[FlatGroup], paths: Sequence[str]
) -> tuple[list[FlatSlice], list[int]]:
    """Where the parameters of a group lie; and how many elements of each rank's row they take (ZeRO-1, 2). paths: the ranks' files."""
    ranks, sizes = len(sharing), [group.master.shape[0] + group.padding for group in sharing]
    partition = max(sizes)
    if others := [(path, size) for path, size in zip(paths, sizes, strict=True) if size != partition]:
        path, size = others[0]
        raise CheckpointError(
            f"with its padding its partition of group {number} has {size:,} elements, others have {partition:,}",
            where=path,
            why="All partitions have the same size, so this file is from another save",
            do="Copy that file from where the checkpoint was written",
        )
    slices = list(zero2_slices(parameters, sharing[0].alignments, partition, ranks, where=paths[0]))
    end = max((s.first_rank * partition + s.first_offset + math.prod(s.shape) for s in slices), default=0)
    if partition * ranks - end > _MOST_PADDING_PER_RANK * ranks:
        raise mixed_saves(
            f"the parameters of param_shapes end at element {end:,} of a row of {partition * ranks:,}",
            paths[0],
            "The rest is more than padding: the files are from different saves, or this version aligns parameters in an unknown way",
        )
    return slices, [max(0, min(partition, end - i * partition)) for i in range(ranks)]


def _param_groups(optimizers: Mapping[int, OptimizerStates], names: Sequence[Sequence[str]]) -> Iterator[ParamGroup]:
    """The param groups, with the step counts that some optimizers keep as plain numbers. names: the parameters of each flat group."""
    first = optimizers[0]
    # Elastic checkpoints hold no settings; there, each flat group is a param group.
    for number, settings in enumerate(first.group_settings or [{}] * len(names)):
        listed = settings.get("params") if first.zero_stage == 3 else [number]
        listed = listed if isinstance(listed, list) else [number]
        numbers = [group for group in listed if type(group) is int and 0 <= group < len(names)]
        counts = (states.groups[group].states.get(STEP) for states in optimizers.values() for group in numbers)
        steps = sorted({count for count in counts if is_count(count)})
        if len(steps) > 1:
            raise mixed_saves(
                f"the ranks' optimizers have counted {' and '.join(map(str, steps))} steps",
                first.path,
                "Files of different steps of the run lie under the same tag, so the weights are not of one moment",
            )
        plain = {key: value for key, value in settings.items() if key != "params"}
        yield ParamGroup(tuple(name for group in numbers for name in names[group]), plain | ({STEP: steps[0]} if steps else {}))
