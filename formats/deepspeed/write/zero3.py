"""ZeRO-3 shards for any data-parallel size, as DeepSpeed loads them: each rank's row of every sub-group.

    latest                                                            the tag's name
    global_step<N>/zero_pp_rank_D_mp_rank_00_model_states.pt          buffers, this rank's part of frozen weights, the run's counters
    global_step<N>/[bf16_]zero_pp_rank_D_mp_rank_00_optim_states.pt   this rank's rows of masters and states

Read by DeepSpeed 0.19.8 (tests/training).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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

from ..layout.partitions import FlatSlice, zero3_part_size, zero3_slice
from ..layout.tag import LATEST
from .training_state import F32, TrainingState, stored_dtype, training_state, zero_stage

# The default of zero_optimization.sub_group_size.
_SUB_GROUP_SIZE = 1_000_000_000


@value
class SubGroup:
    """The parameters that share one flat group."""

    param_group: int
    """The number of their param group."""
    slices: tuple[FlatSlice, ...]
    """Where each parameter lies in the ranks' rows, in the optimizer's order."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return tuple(parameter.name for parameter in self.slices)


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of every data-parallel rank, and `latest`.

    Raises: RequestError if the source lacks optimizer state, or the settings of its param groups.
    """
    target.parallel.allow("dp", what="ZeRO-3 shards, where the data-parallel ranks share every tensor (`dp=`)")
    training = training_state(content, target, "a DeepSpeed checkpoint")
    if any(not group.settings for group in training.groups):
        raise RequestError(
            "a DeepSpeed checkpoint needs the settings of its param groups, and the source has none",
            why="torch's optimizers take learning rates, weight decay and the like from the checkpoint alone",
            do="Write `to=universal`, where the run's own settings stay",
        )
    run = _Run(training, target.parallel.dp, tuple(_sub_groups(training, target.parallel.dp)))
    tag, is_bf16 = f"global_step{training.step}", _is_bf16(training)
    files = []
    for rank in range(run.ranks):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        files.append(run.model_file(f"{tag}/{name}_model_states.pt", rank))
        files.append(run.optimizer_file(f"{tag}/{'bf16_' if is_bf16 else ''}{name}_optim_states.pt", rank))
    described = f"{'with bf16 enabled' if is_bf16 else 'without bf16'}: DeepSpeed chooses the names by that setting"
    note = "" if content.facts.state.get("ds_config") else f"the optimizer's files are named for a run {described}"
    tracker = Sidecar(LATEST, tag.encode())
    return training.layout(files, target, companions, tracker, note, {**training.aliases, **run.shared_counts()})


def _sub_groups(training: TrainingState, ranks: int) -> Iterator[SubGroup]:
    """The param groups, cut into sub-groups. A sub-group is full when one rank's row has sub_group_size elements.

    Source: deepspeed/runtime/zero/stage3.py, _create_fp16_sub_groups (0.19.8).
    """
    zero_config = (training.content.facts.state.get("ds_config") or {}).get("zero_optimization") or {}
    limit = zero_config.get("sub_group_size")
    limit = limit if type(limit) is int and limit > 0 else _SUB_GROUP_SIZE
    for number, group in enumerate(training.groups):
        slices, elements = list[FlatSlice](), 0
        for name in group.names:
            slices.append(zero3_slice(name, training.shape(name), ranks, elements))
            elements += zero3_part_size(training.shape(name), ranks)
            if elements >= limit:
                yield SubGroup(number, tuple(slices))
                slices, elements = [], 0
        if slices:
            yield SubGroup(number, tuple(slices))


def _is_bf16(training: TrainingState) -> bool:
    """Whether the names of optimizer files start with bf16_. DeepSpeed looks for that prefix in runs with bf16 enabled."""
    facts = training.content.facts
    if ds_config := facts.state.get("ds_config"):
        return bool((ds_config.get("bf16") or ds_config.get("bfloat16") or {}).get("enabled"))
    config = facts.config or {}
    return str(config.get("dtype", config.get("torch_dtype", "bfloat16"))) == "bfloat16"


@value(eq=False)
class _Run:
    """The run that is written."""

    training: TrainingState
    """What it resumes from."""
    ranks: int
    """The number of data-parallel ranks."""
    sub_groups: tuple[SubGroup, ...]
    """The flat groups."""

    def shared_counts(self) -> dict[str, str]:
        """The step counts of the parameters of a sub-group that are stored once, by the key of the stored one."""
        aliases: dict[str, str] = {}
        for sub_group in self.sub_groups:
            stored: dict[str, str] = {}
            for name in sub_group.names:
                for kind in self.training.states[name].keys() - set(self.training.elementwise_states(name)):
                    key = self.training.states[name][kind]
                    if stored.setdefault(kind, key) != key:
                        aliases[key] = stored[kind]
        return aliases

    def model_file(self, path: str, rank: int) -> TargetFile:
        """A rank's model states: empty tensors in place of the partitioned parameters, whole buffers, its part of frozen weights."""
        file, training, frozen = TorchFile(path, {"dp": rank}), self.training, _frozen_names(self.training)
        module, fragments = {}, {}
        for name in dict.fromkeys((*training.content.weights, *training.aliases)):
            is_buffer = name in training.untrained and name not in frozen
            empty = StoredTensor("", F32, (0,))
            module[name] = file.whole(name, training.content.tensors[name]) if is_buffer else file.tensor(empty)
        for name in frozen:
            parameter = zero3_slice(name, training.shape(name), self.ranks)
            fragments[name] = file.tensor(self._row(f"frozen.{name}", training.untrained[name].dtype, {name: parameter}, rank))
        buffers = [name for name in training.untrained if name not in frozen]
        states = training.model_states(module, buffers, [sub_group.names for sub_group in self.sub_groups], self.ranks, fragments)
        return file.close(states if rank == 0 else {**states, "shared_params": {}})

    def optimizer_file(self, path: str, rank: int) -> TargetFile:
        """A rank's optimizer states: for each sub-group, one row of masters and one row of each kind of state."""
        file, masters, states, training = TorchFile(path, {"dp": rank}), [], {}, self.training
        for number, sub_group in enumerate(self.sub_groups):
            states[number] = self._states(file, number, rank)
            rows = {parameter.name: parameter for parameter in sub_group.slices}
            masters.append(file.tensor(self._state_row(f"fp32_flat_groups.{number}", rows, rank)))
        groups = [
            training.settings(group, [i for i, sub_group in enumerate(self.sub_groups) if sub_group.param_group == number])
            for number, group in enumerate(training.groups)
        ]
        optimizer = {
            "zero_stage": zero_stage(3),
            **training.loss_scaler_keys(),
            "partition_count": self.ranks,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "fp32_flat_groups": masters,
        }
        return file.close({"optimizer_state_dict": optimizer, "ds_config": training.ds_config, "ds_version": training.version})

    def _states(self, file: TorchFile, number: int, rank: int) -> dict[str, Any]:
        """The optimizer's state of a sub-group. One step count serves all parameters."""
        training, slices = self.training, self.sub_groups[number].slices
        first = slices[0].name
        elementwise = training.elementwise_states(first)
        shared = {kind: key for kind, key in training.states[first].items() if kind not in elementwise}
        entries: dict[str, Any] = {kind: file.whole(key, training.content.tensors[key]) for kind, key in shared.items()}
        if first in training.content.step_counts:
            entries[STEP] = training.content.step_counts[first]
        for kind in elementwise:
            entries[kind] = file.tensor(self._state_row(f"{kind}.{number}", {training.states[s.name][kind]: s for s in slices}, rank))
        return entries

    def _state_row(self, name: str, parameters: Mapping[str, FlatSlice], rank: int) -> StoredTensor:
        """A rank's row of masters or states, which have full precision."""
        return self._row(name, stored_dtype(self.training.content.tensors[next(iter(parameters))]), parameters, rank)

    def _row(self, name: str, dtype: DType, parameters: Mapping[str, FlatSlice], rank: int) -> StoredTensor:
        """A rank's row: its run of elements of each parameter; zeros pad each part. parameters: by the key of the canonical tensor."""
        sections, end = [], 0
        for key, parameter in parameters.items():
            start, strides = parameter.first_offset, row_major(parameter.shape)
            for box in flat_boxes(parameter.shape, parameter.bounds[rank], parameter.bounds[rank + 1]):
                sections.append(Section(key, box, start, strides))
                start += box.volume
            if math.prod(parameter.shape) == 0 and rank == 0:
                sections.append(Section(key, Box.whole(parameter.shape), start, strides))
            end = parameter.first_offset + zero3_part_size(parameter.shape, self.ranks)
        return StoredTensor(name, dtype, (end,), Sections.of(sections))


def _frozen_names(training: TrainingState) -> list[str]:
    """The untrained tensors that are weights, by the source's list of buffers or by the model. All others are stored as buffers."""
    buffers, model = training.content.facts.buffers, training.content.model
    if buffers is not None:
        return [name for name in training.untrained if name not in buffers]
    return [name for name in training.untrained if model is not None and name in model.weights]
