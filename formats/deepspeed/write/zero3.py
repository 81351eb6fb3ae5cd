"""ZeRO-3 shards for any data-parallel size, as DeepSpeed loads them: each rank's row of every sub-group.

    latest                                                            the tag's name
    global_step<N>/zero_pp_rank_D_mp_rank_00_model_states.pt          buffers, this rank's part of frozen weights, the run's counters
    global_step<N>/[bf16_]zero_pp_rank_D_mp_rank_00_optim_states.pt   this rank's rows of masters and states

Read by DeepSpeed 0.19.8 (tests/training).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.adapter.model_files import ModelFiles
from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import STEP
from reshard.errors import RequestError
from reshard.geometry.boxes import Box, flat_boxes, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.sections import Section, Sections, StoredTensor
from reshard.geometry.value import value
from reshard.plans.layout import Layout, Sidecar, Target, TargetFile

from ..layout.partitions import FlatSlice, zero3_part_size, zero3_slice, zero3_slices
from .training_state import F32, TrainingState, stored_dtype, torch_size, training_state, zero_stage

# The default of zero_optimization.sub_group_size.
_SUB_GROUP_SIZE = 1_000_000_000


@value
class SubGroup:
    """The parameters that share one flat group."""

    param_group: int
    """The number of their param group."""
    names: tuple[str, ...]
    """The parameters, in the optimizer's order."""


@value
class DataRank:
    """One data-parallel rank."""

    number: int
    """Its number, from 0."""
    count: int
    """How many data-parallel ranks there are."""


def zero3_layout(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of every data-parallel rank, and `latest`.

    Raises: RequestError if the source lacks optimizer state, or the settings of its param groups.
    """
    target.parallel.allow("dp", what="ZeRO-3 shards, where the data-parallel ranks share every tensor (--dp)")
    training = training_state(content, target, "a DeepSpeed checkpoint")
    if any(not group.settings for group in training.groups):
        raise RequestError(
            "a DeepSpeed checkpoint needs the settings of its param groups, and the source has none",
            why="torch's optimizers take learning rates, weight decay and the like from the checkpoint alone",
            do="Write --to universal, where the run's own settings stay",
        )
    ranks, tag = target.parallel.dp, f"global_step{training.step}"
    sub_groups = list(_sub_groups(training, ranks))
    precision = "bf16_" if _is_bf16(training) else ""
    files = []
    for rank in (DataRank(number, ranks) for number in range(ranks)):
        name = f"zero_pp_rank_{rank.number}_mp_rank_00"
        files.append(_model_file(f"{tag}/{name}_model_states.pt", training, sub_groups, rank))
        files.append(_optimizer_file(f"{tag}/{precision}{name}_optim_states.pt", training, sub_groups, rank))
    dtypes = {tensor.dtype for tensor in content.weights.values()}
    sidecars = (*companions.sidecars(dtypes), Sidecar("latest", tag.encode()))
    return Layout("deepspeed", tuple(files), sidecars, target.parallel, _notes(training), _aliases(training, sub_groups))


def _sub_groups(training: TrainingState, ranks: int) -> Iterator[SubGroup]:
    """The param groups, cut into sub-groups. A sub-group is full when one rank's row has sub_group_size elements.

    Source: deepspeed/runtime/zero/stage3.py, _create_fp16_sub_groups (0.19.8).
    """
    zero_config = (training.content.facts.state.get("ds_config") or {}).get("zero_optimization") or {}
    limit = zero_config.get("sub_group_size")
    limit = limit if type(limit) is int and limit > 0 else _SUB_GROUP_SIZE
    for number, group in enumerate(training.groups):
        names: list[str] = []
        elements = 0
        for name in group.names:
            names.append(name)
            elements += zero3_part_size(training.shape(name), ranks)
            if elements >= limit:
                yield SubGroup(number, tuple(names))
                names, elements = [], 0
        if names:
            yield SubGroup(number, tuple(names))


def _is_bf16(training: TrainingState) -> bool:
    """Whether the names of optimizer files start with bf16_. DeepSpeed looks for that prefix in runs with bf16 enabled."""
    facts = training.content.facts
    if ds_config := facts.state.get("ds_config"):
        return bool((ds_config.get("bf16") or ds_config.get("bfloat16") or {}).get("enabled"))
    config = facts.config or {}
    return str(config.get("dtype", config.get("torch_dtype", "bfloat16"))) == "bfloat16"


def _notes(training: TrainingState) -> tuple[str, ...]:
    if training.content.facts.state.get("ds_config"):
        return training.notes()
    run = "with bf16 enabled" if _is_bf16(training) else "without bf16"
    return (*training.notes(), f"the optimizer's files are named for a run {run}: DeepSpeed chooses the names by that setting")


def _aliases(training: TrainingState, sub_groups: Sequence[SubGroup]) -> dict[str, str]:
    """Canonical tensors that are stored once under another name: tied parameters, and the step counts of a sub-group."""
    aliases = dict(training.aliases)
    for sub_group in sub_groups:
        stored: dict[str, str] = {}
        for name in sub_group.names:
            for kind in training.states[name].keys() - set(training.elementwise_states(name)):
                key = training.states[name][kind]
                if stored.setdefault(kind, key) != key:
                    aliases[key] = stored[kind]
    return {alias: key for alias, key in aliases.items() if alias in training.content.tensors}


def _model_file(path: str, training: TrainingState, sub_groups: Sequence[SubGroup], rank: DataRank) -> TargetFile:
    """A rank's model states: empty tensors in place of the parameters, which are partitioned; whole buffers; its part of frozen weights."""
    file, content = TorchFile(path, {"dp": rank.number}), training.content
    frozen = _frozen_names(training)
    empty = StoredTensor("", F32, (0,))
    module = {
        name: file.whole(name, content.tensors[name]) if name in training.untrained and name not in frozen else file.tensor(empty)
        for name in dict.fromkeys((*content.weights, *training.aliases))
    }
    fragments = {}
    for name in frozen:
        parameter = zero3_slice(name, training.shape(name), rank.count)
        fragments[name] = file.tensor(_row(f"frozen.{name}", {name: parameter}, training, rank))
    return file.close(
        {
            "module": module,
            "buffer_names": [name for name in training.untrained if name not in frozen],
            "optimizer": None,
            "param_shapes": [{name: torch_size(training.shape(name)) for name in sub_group.names} for sub_group in sub_groups],
            "frozen_param_shapes": {name: torch_size(training.shape(name)) for name in frozen} or None,
            "shared_params": dict(training.aliases) if rank.number == 0 else {},
            "frozen_param_fragments": fragments or None,
            **training.model_file_keys(rank.count),
        }
    )


def _frozen_names(training: TrainingState) -> list[str]:
    """The untrained tensors that are weights, by the source's list of buffers or by the model. All others are stored as buffers."""
    buffers, model = training.content.facts.buffers, training.content.model
    if buffers is not None:
        return [name for name in training.untrained if name not in buffers]
    return [name for name in training.untrained if model is not None and name in model.weights]


def _optimizer_file(path: str, training: TrainingState, sub_groups: Sequence[SubGroup], rank: DataRank) -> TargetFile:
    """A rank's optimizer states: for each sub-group, one row of masters and one row of each kind of state."""
    file, masters, states = TorchFile(path, {"dp": rank.number}), [], {}
    for number, sub_group in enumerate(sub_groups):
        slices = list(zero3_slices(tuple((name, training.shape(name)) for name in sub_group.names), rank.count))
        states[number] = _states(file, number, slices, training, rank)
        masters.append(file.tensor(_row(f"fp32_flat_groups.{number}", {s.name: s for s in slices}, training, rank)))
    groups = [
        training.settings(group, [i for i, sub_group in enumerate(sub_groups) if sub_group.param_group == number])
        for number, group in enumerate(training.groups)
    ]
    optimizer = {
        "zero_stage": zero_stage(3),
        **training.loss_scaler_keys(),
        "partition_count": rank.count,
        "optimizer_state_dict": {"state": states, "param_groups": groups},
        "fp32_flat_groups": masters,
    }
    model_keys = training.model_file_keys(rank.count)
    return file.close({"optimizer_state_dict": optimizer, "ds_config": model_keys["ds_config"], "ds_version": model_keys["ds_version"]})


def _states(file: TorchFile, number: int, slices: Sequence[FlatSlice], training: TrainingState, rank: DataRank) -> dict[str, Any]:
    """The optimizer's state of sub-group `number`. One step count serves all parameters."""
    states, elementwise = training.states[slices[0].name], training.elementwise_states(slices[0].name)
    entries: dict[str, Any] = {
        kind: file.whole(key, training.content.tensors[key]) for kind, key in states.items() if kind not in elementwise
    }
    if slices[0].name in training.content.step_counts:
        entries[STEP] = training.content.step_counts[slices[0].name]
    for kind in elementwise:
        row = _row(f"{kind}.{number}", {training.states[s.name][kind]: s for s in slices}, training, rank)
        entries[kind] = file.tensor(row)
    return entries


def _row(name: str, parameters: Mapping[str, FlatSlice], training: TrainingState, rank: DataRank) -> StoredTensor:
    """A rank's row: its run of elements of each parameter; zeros pad each part. parameters: by the key of the canonical tensor."""
    sections, end = [], 0
    dtype: DType | None = None
    for key, parameter in parameters.items():
        dtype = dtype or _row_dtype(key, training)
        start, strides = parameter.first_offset, row_major(parameter.shape)
        for box in flat_boxes(parameter.shape, parameter.bounds[rank.number], parameter.bounds[rank.number + 1]):
            sections.append(Section(key, box, start, strides))
            start += box.volume
        if math.prod(parameter.shape) == 0 and rank.number == 0:
            sections.append(Section(key, Box.whole(parameter.shape), start, strides))
        end = parameter.first_offset + zero3_part_size(parameter.shape, rank.count)
    return StoredTensor(name, dtype or F32, (end,), Sections.of(sections))


def _row_dtype(key: str, training: TrainingState) -> DType:
    """The element type of a row that starts with that tensor: frozen weights keep theirs, masters and states have full precision."""
    tensor = training.content.tensors[key]
    return tensor.dtype if key in training.untrained and key not in training.content.states else stored_dtype(tensor)
