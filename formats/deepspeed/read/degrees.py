"""The parallel sizes of the run that saved a tag, and whether the tag has the files of exactly these ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from reshard.errors import CheckpointError, IncompleteError

from ..layout.degrees import RunDegrees
from ..layout.experts import group_ranks
from ..layout.states import OptimizerStates
from .checks import check_ranks
from .run_states import RunStates


def degrees_of_run(states: RunStates) -> RunDegrees:
    """The parallel sizes recorded in the files.

    Raises: CheckpointError if a rank has no file, or a file is left over from a save of other sizes.
    """
    degrees = model_parallel_degrees(states)
    model, first = states.first_model, states.first_optimizer
    if first is None and states.is_zero3:
        raise IncompleteError(
            "the optimizer's files are missing, and with ZeRO-3 they hold the only copy of the weights",
            where=model.path,
            do="Copy *_optim_states.pt from where the checkpoint was written",
        )
    if first is None:
        return replace(degrees, dp=model.dp or 1, ep=_ep_of_optimizer_files(states))
    dp = _dp_of_optimizer(states, first)
    _check_optimizer_files(states, first, replace(degrees, dp=dp))
    return replace(degrees, dp=dp, ep=_ep_of_groups(states, degrees))


def model_parallel_degrees(states: RunStates) -> RunDegrees:
    """The pipeline-parallel and tensor-parallel size recorded in the files.

    Raises: CheckpointError if a model-parallel rank has no model states, or model states are left over.
    """
    first, ranks = states.first_model, sorted({mp for _, mp in states.models})
    if first.pp_and_tp:
        pp, tp = first.pp_and_tp
    else:
        # Older files hold only the product pp * tp; tp follows from the names of layer files.
        mp = first.mp or len(ranks)
        tp = 1 + max(tp_rank for _, tp_rank in states.tag.layers) if states.tag.layers else mp
        pp = max(1, mp // tp)
    paths = {rank: next(iter(states.models_of(rank).values())).path for rank in ranks}
    check_ranks(paths, pp * tp, "model-parallel", why=f"{first.path} says pipeline-parallel size {pp}, tensor-parallel size {tp}")
    return RunDegrees(pp, tp)


def _ep_of_optimizer_files(states: RunStates) -> int:
    """The expert-parallel size without ZeRO: each expert-parallel rank has a file of its own."""
    sizes = [1]
    for mp_rank in {mp for _, mp in states.expert_optimizers}:
        paths = {ep: path for (ep, mp), path in states.tag.expert_optimizers.items() if mp == mp_rank}
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
    dp = max(first.partition_counts, default=0) or model.dp or 1 + max(dp_rank for dp_rank, _ in states.optimizers)
    if first.zero_stage == 3 or not model.dp:
        return dp
    if any(0 < count < model.dp for count in first.partition_counts):
        return model.dp  # groups of experts are shared by fewer ranks
    if dp != model.dp:
        raise CheckpointError(
            f"its groups are shared by {dp} data-parallel ranks, {model.path} says dp_world_size {model.dp}",
            where=first.path,
            why="The files are from saves of different sizes under the same tag",
            do="Keep the files of one save only",
        )
    return dp


def _check_optimizer_files(states: RunStates, first: OptimizerStates, degrees: RunDegrees) -> None:
    """Raises CheckpointError unless each rank has its files, no file is left over, and all files list the same groups."""
    why = f"{first.path} says that {degrees.dp} ranks share each group (partition_count)"
    for rank in degrees.each_model_rank():
        paths = {dp: path for (dp, mp), path in states.tag.optimizers.items() if mp == rank.number}
        if not paths:
            raise IncompleteError(
                f"model-parallel rank {rank.number} has no file of its optimizer beside it",
                where=first.path,
                why="Its part of every weight would be missing",
                do="Copy the missing files from where the checkpoint was written",
            )
        check_ranks(paths, degrees.dp, "data-parallel", why=why)
        if states.is_zero3:
            models = {dp: model.path for dp, model in states.models_of(rank.number).items()}
            check_ranks(models, degrees.dp, "data-parallel", why=why)
        _check_groups(states.optimizers_of(rank.number)[0], states.optimizers_of(rank.number).values(), first)
    for (_, mp), path in states.tag.optimizers.items():
        if mp >= degrees.model_ranks:
            raise CheckpointError(
                f"the run had {degrees.model_ranks} model-parallel ranks, and no rank {mp}",
                where=path,
                why="The file is left over from another save",
                do="Move it away",
            )


def _check_groups(expected: OptimizerStates, optimizers: Iterable[OptimizerStates], first: OptimizerStates) -> None:
    """Raises CheckpointError if the data-parallel ranks of one model-parallel rank list different groups."""
    for optimizer in optimizers:
        has_equal_groups = len(optimizer.masters) == len(expected.masters) and optimizer.partition_counts == expected.partition_counts
        if not has_equal_groups or optimizer.zero_stage != first.zero_stage:
            raise CheckpointError(
                f"it has {_described_groups(optimizer)}, {expected.path} has {_described_groups(expected)}",
                where=optimizer.path,
                why="The files are from saves of different sizes under the same tag",
                do="Keep the files of one save only",
            )


def _described_groups(optimizer: OptimizerStates) -> str:
    counts = ", ".join(map(str, dict.fromkeys(optimizer.partition_counts))) or "no"
    return f"{len(optimizer.masters)} groups shared by {counts} ranks"


def _ep_of_groups(states: RunStates, degrees: RunDegrees) -> int:
    """The expert-parallel size with ZeRO: the ranks that share a group of dense parameters, divided by those that share one of experts."""
    sizes = [1]
    for rank in degrees.each_model_rank():
        models, optimizers = states.models_of(rank.number), states.optimizers_of(rank.number)
        for group in range(len(optimizers[0].masters)):
            sizes.append(len(group_ranks(models[min(models)], optimizers, group)))
    return max(sizes)
