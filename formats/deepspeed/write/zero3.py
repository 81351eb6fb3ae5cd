"""ZeRO-3 shards of any data-parallel size, as DeepSpeed loads them: every rank's row of every sub-group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from reshard.adapter.model_files import ModelFiles
from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content
from reshard.errors import RequestError
from reshard.geometry.boxes import Box, flat_boxes, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.stored import Section, StoredTensor
from reshard.plans.layout import Layout, Sidecar, TargetFile
from reshard.plans.target import Target

from ..layout.partitions import Slice, part_of_stage_3, slices_of_stage_3
from .training_state import F32, Training, size, stage, stored_dtype, training_of

# zero_optimization.sub_group_size: a sub-group is full when its parts of one rank have so many elements.
_SUB_GROUP = 1_000_000_000


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of every data-parallel rank, and `latest`."""
    target.parallel.allow("dp", what="ZeRO-3 shards, where the data-parallel ranks share every tensor (--dp)")
    training = training_of(content, target, "a DeepSpeed checkpoint")
    if any(not group.settings for group in training.groups):
        raise RequestError(
            "a DeepSpeed checkpoint needs the settings of its param groups, and the source has none",
            why="torch's optimizers take learning rates, weight decay and the like from the checkpoint alone",
            do="Write --to universal, where the run's own settings stay",
        )
    ranks, tag = target.parallel.dp, f"global_step{training.step}"
    subgroups = list(_subgroups(training, ranks))
    files = []
    for rank in range(ranks):
        files.append(_model_file(training, f"{tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt", subgroups, ranks, rank))
        prefix = "bf16_" if _is_bf16(training) else ""
        files.append(_optimizer_file(training, f"{tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", subgroups, ranks, rank))
    dtypes = {tensor.dtype for tensor in content.weights.values()}
    sidecars = (*companions.sidecars(dtypes), Sidecar("latest", tag.encode()))
    return Layout("deepspeed", tuple(files), sidecars, target.parallel, _notes(training), _copies(training, subgroups))


def _subgroups(training: Training, ranks: int) -> Iterator[tuple[int, list[str]]]:
    """(number of the param group, its parameters) of each sub-group, as stage3.py, _create_fp16_sub_groups, cuts groups."""
    limit = ((training.content.facts.state.get("ds_config") or {}).get("zero_optimization") or {}).get("sub_group_size")
    limit = limit if type(limit) is int and limit > 0 else _SUB_GROUP
    for number, group in enumerate(training.groups):
        names: list[str] = []
        held = 0
        for name in group.names:
            names.append(name)
            held += part_of_stage_3(training.shape(name), ranks)
            if held >= limit:
                yield number, names
                names, held = [], 0
        if names:
            yield number, names


def _is_bf16(training: Training) -> bool:
    """Whether the files of the optimizer are looked for under bf16_: DeepSpeed does so in runs with bf16 enabled."""
    facts = training.content.facts
    if config := facts.state.get("ds_config"):
        return bool((config.get("bf16") or config.get("bfloat16") or {}).get("enabled"))
    kept = facts.config or {}
    return str(kept.get("dtype", kept.get("torch_dtype", "bfloat16"))) == "bfloat16"


def _notes(training: Training) -> tuple[str, ...]:
    if training.content.facts.state.get("ds_config"):
        return training.notes()
    kind = "with bf16 enabled" if _is_bf16(training) else "without bf16"
    return (*training.notes(), f"the files of the optimizer are named for a run {kind}; DeepSpeed looks for them by that")


def _copies(training: Training, subgroups: Sequence[tuple[int, list[str]]]) -> dict[str, str]:
    """What has no place of its own: the step counts of a sub-group are one, a tied weight is under one name."""
    copies = dict(training.aliases)
    for _, names in subgroups:
        kept: dict[str, str] = {}
        for name in names:
            for kind in training.states[name].keys() - set(training.kinds(name)):
                key = training.states[name][kind]
                if kept.setdefault(kind, key) != key:
                    copies[key] = kept[kind]
    return {copy: kept for copy, kept in copies.items() if copy in training.content.tensors}


def _model_file(training: Training, path: str, subgroups: Sequence[tuple[int, list[str]]], ranks: int, rank: int) -> TargetFile:
    """The module without its parameters, which are all partitioned: whole buffers, this rank's part of what is frozen."""
    file, content = TorchFile(path, {"dp": rank}), training.content
    frozen = _frozen(training)
    nothing = StoredTensor("", F32, (0,), ())
    order = dict.fromkeys((*content.weights, *training.aliases))
    module: dict[str, Any] = {}
    for name in order:
        if name in training.rest and name not in frozen:
            # A buffer: one copy of its bytes is enough for our plan, but every rank's file has it.
            module[name] = file.whole(name, content.tensors[name])
        else:
            module[name] = file.tensor(nothing)
    shapes = {name: content.tensors[name].shape for name in frozen}
    cuts = slices_of_stage_3(tuple(shapes.items()), ranks)
    fragments = {cut.name: file.tensor(_part(training, f"frozen.{cut.name}", [(cut.name, cut)], ranks, rank)) for cut in _alone(cuts)}
    return file.close(
        {
            "module": module,
            "buffer_names": [name for name in training.rest if name not in frozen],
            "optimizer": None,
            "param_shapes": [{name: size(training.shape(name)) for name in names} for _, names in subgroups],
            "frozen_param_shapes": {name: size(shape) for name, shape in shapes.items()} or None,
            "shared_params": dict(training.aliases) if rank == 0 else {},
            "frozen_param_fragments": fragments or None,
            **training.run_states(ranks),
        }
    )


def _frozen(training: Training) -> list[str]:
    """What is not trained and no buffer, by what the source says or the model declares; the rest is kept as buffers are."""
    buffers, model = training.content.facts.buffers, training.content.model
    if buffers is not None:
        return [name for name in training.rest if name not in buffers]
    return [name for name in training.rest if model is not None and name in model.weights]


def _alone(cuts: Iterable[Slice]) -> Iterator[Slice]:
    """Each parameter as the only one of its row."""
    for cut in cuts:
        yield Slice(cut.name, cut.shape, cut.bounds, 0, 0, 0)


def _optimizer_file(training: Training, path: str, subgroups: Sequence[tuple[int, list[str]]], ranks: int, rank: int) -> TargetFile:
    file = TorchFile(path, {"dp": rank})
    state: dict[int, dict[str, Any]] = {}
    flats = []
    for i, (number, names) in enumerate(subgroups):
        cuts = list(slices_of_stage_3(tuple((name, training.shape(name)) for name in names), ranks))
        first = training.states[names[0]]
        kept: dict[str, Any] = {}
        for kind, key in first.items():
            if kind not in training.kinds(names[0]):
                kept[kind] = file.whole(key, training.content.tensors[key])
        if "step" not in first and "step" in training.groups[number].settings:
            kept["step"] = training.groups[number].settings["step"]
        for kind in training.kinds(names[0]):
            kept[kind] = file.tensor(_part(training, f"{kind}.{i}", [(training.states[cut.name][kind], cut) for cut in cuts], ranks, rank))
        state[i] = kept
        flats.append(file.tensor(_part(training, f"fp32_flat_groups.{i}", [(cut.name, cut) for cut in cuts], ranks, rank)))
    groups = [
        training.settings(group, [i for i, (number, _) in enumerate(subgroups) if number == j]) for j, group in enumerate(training.groups)
    ]
    states = {
        "zero_stage": stage(3),
        **training.scaler(),
        "partition_count": ranks,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
        "fp32_flat_groups": flats,
    }
    known = training.run_states(ranks)
    return file.close({"optimizer_state_dict": states, "ds_config": known["ds_config"], "ds_version": known["ds_version"]})


def _part(training: Training, name: str, parts: Sequence[tuple[str, Slice]], ranks: int, rank: int) -> StoredTensor:
    """A rank's row: its run of each (key of a tensor, slice), the rest of the slice's part being zeros."""
    sections, end = [], 0
    dtype: DType | None = None
    for key, cut in parts:
        tensor = training.content.tensors[key]
        dtype = dtype or (stored_dtype(tensor) if key in training.content.states or key not in training.rest else tensor.dtype)
        at = cut.start
        for box in flat_boxes(cut.shape, cut.bounds[rank], cut.bounds[rank + 1]):
            sections.append(Section(key, box, at, row_major(cut.shape)))
            at += box.volume
        end = cut.start + part_of_stage_3(cut.shape, ranks)
        if math.prod(cut.shape) == 0 and rank == 0:
            sections.append(Section(key, Box.whole(cut.shape), cut.start, row_major(cut.shape)))
    return StoredTensor(name, dtype or F32, (end,), tuple(sections))
