"""The run's parallel sizes, and whether the files of a tag are from one save: no file is missing or left over, all are of one step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from reshard.adapter.rank_files import first_missing, listed
from reshard.engine.checks.masters import wrong_master
from reshard.errors import CheckpointError, MissingFile, MixedSaves
from reshard.geometry.meshes import Parallel
from reshard.index.index import Index
from reshard.storage.files import Files, read_range

from ..layout.experts import group_ranks
from ..layout.states import TIED_PREFIX, ModelStates, OptimizerStates
from ..layout.tag import mixed_saves, model_ranks, of_model_rank
from .parts import Parts
from .run_states import RunStates

# The model's files list the parameters in the order of the masters. So a wrong master is in a wrong file, where few or none round.
# If the steps differ, which may be right or not, many are compared.
_PER_FILE, _PER_FILE_IN_DOUBT = 2, 2000


def degrees_of_run(states: RunStates) -> Parallel:
    """The parallel sizes recorded in the files.

    Raises: CheckpointError if a rank has no file, or a file is left over from a save of other sizes.
    """
    degrees = model_parallel_degrees(states)
    model, first = states.first_model, states.first_optimizer
    if first is None and states.is_zero3:
        raise MissingFile(
            "the optimizer's files are missing, and with ZeRO-3 they hold the only copy of the weights",
            where=model.path,
            do="Copy *_optim_states.pt from where the checkpoint was written",
        )
    dp = _dp_of_optimizer(states, first) if first else model.sizes.get("dp", 1)
    if first:
        _check_optimizer_files(states, first, replace(degrees, dp=dp))
    return replace(degrees, dp=dp, ep=_expert_parallel(states))


def model_parallel_degrees(states: RunStates) -> Parallel:
    """The pipeline-parallel and tensor-parallel size recorded in the files.

    Raises: CheckpointError if a model-parallel rank has no model states, or model states are left over.
    """
    first, ranks = states.first_model, sorted({mp for _, mp in states.models})
    pp, tp = first.sizes.get("pp"), first.sizes.get("tp")
    if not (pp and tp):
        # Older files hold only the product pp * tp; tp follows from the names of layer files.
        mp = first.sizes.get("mp", len(ranks))
        tp = 1 + max(tp_rank for _, tp_rank in states.tag.layers) if states.tag.layers else mp
        pp = max(1, mp // tp)
    paths = {rank: next(iter(of_model_rank(states.models, rank).values())).path for rank in ranks}
    check_ranks(paths, pp * tp, "model-parallel", why=f"{first.path} says pipeline-parallel size {pp}, tensor-parallel size {tp}")
    return Parallel(tp, pp)


def _expert_parallel(states: RunStates) -> int:
    """The expert-parallel size: how many process groups share a flat group; without ZeRO, how many ranks have a file of their experts."""
    sizes = [1]
    for mp_rank in {mp for _, mp in (*states.optimizers, *states.expert_optimizers)}:
        models, optimizers = of_model_rank(states.models, mp_rank), of_model_rank(states.optimizers, mp_rank)
        if optimizers:
            sizes += [len(group_ranks(models[min(models)], optimizers, number)) for number in range(len(optimizers[0].groups))]
        else:
            paths = of_model_rank(states.tag.expert_optimizers, mp_rank)
            check_ranks(paths, 1 + max(paths), "expert-parallel", why=f"{paths[max(paths)]} is the file of the last rank")
            sizes.append(len(paths))
    return max(sizes)


def _dp_of_optimizer(states: RunStates, first: OptimizerStates) -> int:
    """The data-parallel size recorded in ZeRO's optimizer states."""
    model = states.first_model
    for optimizer in states.optimizers.values():
        if (optimizer.zero_stage == 3) != states.is_zero3:
            raise CheckpointError(
                f"its optimizer is {'not ' if states.is_zero3 else ''}of ZeRO-3, {model.path} is {'' if states.is_zero3 else 'not'}",
                where=optimizer.path,
                why="Two saves lie under the same tag, and nothing tells which of them is wanted",
                do="Move the files of the older save away",
            )
    recorded = model.sizes.get("dp")
    dp = max(first.shared_by, default=0) or recorded or 1 + max(dp_rank for dp_rank, _ in states.optimizers)
    if first.zero_stage == 3 or not recorded:
        return dp
    if any(0 < count < recorded for count in first.shared_by):
        return recorded  # groups of experts are shared by fewer ranks
    if dp != recorded:
        raise mixed_saves(
            f"its groups are shared by {dp} data-parallel ranks, {model.path} says dp_world_size {recorded}",
            first.path,
            "The files are from saves of different sizes under the same tag",
        )
    return dp


def _check_optimizer_files(states: RunStates, first: OptimizerStates, degrees: Parallel) -> None:
    """Raises CheckpointError unless each rank has its files, no file is left over, and all files list the same groups."""
    why = f"{first.path} says that {degrees.dp} ranks share each group (partition_count)"
    for rank in model_ranks(degrees):
        paths = of_model_rank(states.tag.optimizers, rank.number)
        if not paths:
            raise MissingFile(
                f"model-parallel rank {rank.number} has no file of its optimizer beside it",
                where=first.path,
                why="Its part of every weight would be missing",
                do="Copy the missing files from where the checkpoint was written",
            )
        check_ranks(paths, degrees.dp, "data-parallel", why=why)
        if states.is_zero3:
            check_ranks(of_model_rank(states.tag.zero3_models, rank.number), degrees.dp, "data-parallel", why=why)
        expected, *others = of_model_rank(states.optimizers, rank.number).values()
        for optimizer in (expected, *others):
            if optimizer.shared_by != expected.shared_by or optimizer.zero_stage != first.zero_stage:
                raise mixed_saves(
                    f"it has {optimizer.described_groups}, {expected.path} has {expected.described_groups}",
                    optimizer.path,
                    "The files are from saves of different sizes under the same tag",
                )
    for (_, mp), path in states.tag.optimizers.items():
        if mp >= (ranks := degrees.pp * degrees.tp):
            raise CheckpointError(
                f"the run had {ranks} model-parallel ranks, and no rank {mp}",
                where=path,
                why="The file is left over from another save",
                do="Move it away",
            )


def check_ranks(paths: Mapping[int, str], ranks: int, what: str, *, why: str) -> None:
    """Raises CheckpointError unless each of the ranks 0..ranks - 1 has a file, and there is no other. paths: by rank."""
    if missing := first_missing(paths, ranks):
        raise MissingFile(
            f"of {ranks} {what} ranks, {listed(missing)} {'has' if len(missing) == 1 else 'have'} no file",
            where=next(iter(paths.values()), None),
            why=why,
            do="Copy the missing files from where the checkpoint was written",
        )
    if extra := [path for rank, path in paths.items() if rank >= ranks]:
        raise CheckpointError(
            f"the run had {ranks} {what} ranks, and this file belongs to none of them",
            where=extra[0],
            why=f"{why}; the file is left over from a save of more ranks under the same tag, so its values are of another step",
            do=f"Move it away{f', and {len(extra) - 1} more like it' if len(extra) > 1 else ''}",
        )


def check_one_step(states: RunStates) -> None:
    """Raises CheckpointError if the model states are of different steps, or list different parameters on data-parallel ranks."""
    first = states.first_model
    firsts: dict[int, ModelStates] = {}
    for (_, mp), model in states.models.items():
        if model.facts.step != first.facts.step:
            raise mixed_saves(
                f"it is of step {model.facts.step}, {first.path} of step {first.facts.step}",
                model.path,
                "Files of different steps of the run lie under the same tag, so the weights are not of one moment",
            )
        expected = firsts.setdefault(mp, model)
        if (model.groups, model.frozen_shapes) != (expected.groups, expected.frozen_shapes):
            raise mixed_saves(
                f"its parameters (param_shapes) differ from those of {expected.path}", model.path, "The files are from different runs"
            )


def check_weights_of_masters(parts: Parts) -> None:
    """Raises CheckpointError if a parameter has a master but no weight in the model's files. Not for ZeRO-3, which stores masters only."""
    weights = parts.shapes("weight").keys() | parts.shapeless
    if missing := [name for name in parts.shapes("master") if name not in weights and not name.startswith(TIED_PREFIX)]:
        layer = missing[0].partition(".")[0]
        expert = re.search(r"experts\.(\d+)\.", missing[0])
        file = f"layer_{int(layer):02d}-model_states.pt is not there" if layer.isdigit() else "a file of a layer or an expert is not there"
        file = f"layer_*_expert_{expert[1]}_mp_rank_*_model_states.pt of one of the layers is not there" if expert else file
        raise MissingFile(
            f"the optimizer holds its master, but none of the model's files holds its weight: {file}",
            where=missing[0],
            why=f"{len(missing)} trained parameters have no weight",
            do="Copy the missing file from where the checkpoint was written",
        )


def check_masters(files: Files, index: Index) -> Index:
    """The index, with a note if the optimizer counted another number of steps than the run: it may have started with a new optimizer.

    Raises: CheckpointError if a master does not round to its weight: files of different runs, steps or ranks lie under the same tag.
    """
    counted, run_step, skipped = _steps_of_optimizer(files, index), index.facts.step, index.facts.state.get("skipped_steps", 0)
    is_same_step = counted is None or run_step is None or counted == run_step - (skipped if type(skipped) is int else 0)
    if wrong := wrong_master(files, index, per_file=_PER_FILE if is_same_step else _PER_FILE_IN_DOUBT):
        steps = "" if is_same_step else f"the optimizer has counted {counted} steps, the model's file is of step {run_step}, and "
        raise MixedSaves(
            f"{steps}the master in {wrong.master_path} does not round to the weight",
            where=f"{wrong.name} in {wrong.weight_path}",
            why="Model and optimizer are from different runs or steps, or files of ranks changed places; nothing tells which is right",
            do="Keep the files of one save only; or take the weights alone: move the optimizer's files away",
        )
    if is_same_step:
        return index
    note = f"the optimizer has counted {counted} steps, the run {run_step}"
    return replace(index, facts=replace(index.facts, notes=(*index.facts.notes, note)))


def _steps_of_optimizer(files: Files, index: Index) -> int | None:
    """The optimizer's step count, from a tensor or from the param groups; None if there is none."""
    for tensor in index.tensors:
        if tensor.kind == "step" and tensor.dtype.name == "F32" and len(tensor.shards):
            extent = tensor.shards.extent(0)
            return int(np.frombuffer(read_range(files, extent.path, extent.byte_offset, 4), np.float32)[0])
    steps = (group.settings.get("step") for group in index.param_groups())
    return next((step for step in steps if type(step) is int), None)
