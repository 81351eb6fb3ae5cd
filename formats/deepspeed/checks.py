"""Whether the files of a tag are those of one save: all ranks there, none left over, all of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.errors import CheckpointError

from .assembly import Topology
from .states import ModelStates, OptimizerStates
from .tag import Tag, check_ranks


def topology_of(tag: Tag, models: Mapping[tuple[int, int], ModelStates]) -> Topology:
    """The degrees that the files tell. Raises CheckpointError if a model-parallel rank has no file, or there is one too many."""
    first = next(iter(models.values()))
    mp_ranks = sorted({mp for _, mp in models})
    mp = first.mp or len(mp_ranks)
    if first.pp_and_tp:
        pp, tp = first.pp_and_tp
    else:
        # Older files tell the product only; a layer's files tell how many tensor-parallel ranks there are.
        tp = 1 + max((numbers[1] for numbers in tag.layers), default=0) if tag.layers else mp
        pp = max(1, mp // tp)
    paths = {rank: next(states.path for (_, mp), states in models.items() if mp == rank) for rank in mp_ranks}
    check_ranks(paths, pp * tp, "model-parallel", why=f"{first.path} says pipeline-parallel size {pp}, tensor-parallel size {tp}")
    return Topology(pp, tp, 1)


def data_parallel_ranks(
    tag: Tag,
    models: Mapping[tuple[int, int], ModelStates],
    optimizers: Mapping[tuple[int, int], OptimizerStates],
    topology: Topology,
) -> int:
    """How many data-parallel ranks have files. Raises CheckpointError if one is missing, left over, or of another save."""
    first = next(iter(models.values()))
    if not optimizers:
        if tag.zero_models and first.dp:
            for mp_rank in range(topology.pp * topology.tp):
                paths = {dp: states.path for (dp, mp), states in models.items() if mp == mp_rank}
                check_ranks(paths, first.dp, "data-parallel", why=f"{first.path} says dp_world_size {first.dp}")
        return first.dp or 1
    told = next(iter(optimizers.values()))
    if odd := [states.path for states in optimizers.values() if (states.stage == 3) != bool(tag.zero_models)]:
        raise CheckpointError(
            f"its optimizer is {'not ' if tag.zero_models else ''}of ZeRO-3, {first.path} is {'' if tag.zero_models else 'not'}",
            where=odd[0],
            why="Two saves lie under the same tag; which of them is meant cannot be known",
            do="Move the files of the older save away",
        )
    ranks = max(told.ranks, default=0) or (first.dp or 0)
    if told.stage == 2 and first.dp and any(count and count < first.dp for count in told.ranks):
        ranks = first.dp  # expert groups are shared by fewer ranks than there are
    if not ranks:
        ranks = 1 + max(dp for dp, _ in optimizers)
    if told.stage != 3 and first.dp and first.dp != ranks:
        raise CheckpointError(
            f"its groups are shared by {ranks} data-parallel ranks, {first.path} says dp_world_size {first.dp}",
            where=told.path,
            why="The files are from saves of different sizes under the same tag",
            do="Keep the files of one save only",
        )
    for mp_rank in range(topology.pp * topology.tp):
        paths = {dp: path for (dp, mp), path in tag.optimizers.items() if mp == mp_rank}
        if not paths:
            raise CheckpointError(
                f"model-parallel rank {mp_rank} has no file of its optimizer beside it",
                where=told.path,
                why="Its part of every weight would be missing",
                do="Copy the missing files from where the checkpoint was written",
            )
        check_ranks(paths, ranks, "data-parallel", why=f"{told.path} says that {ranks} ranks share each group (partition_count)")
        if tag.zero_models:
            paths = {dp: states.path for (dp, mp), states in models.items() if mp == mp_rank}
            check_ranks(paths, ranks, "data-parallel", why=f"{told.path} says that {ranks} ranks share each group (partition_count)")
    for (_, mp), states in optimizers.items():
        if len(states.masters) != len(optimizers[0, mp].masters) or (states.stage, states.ranks) != (told.stage, optimizers[0, mp].ranks):
            raise CheckpointError(
                f"it has {len(states.masters)} groups shared by {_some(states.ranks)} ranks, "
                f"{optimizers[0, mp].path} has {len(optimizers[0, mp].masters)} shared by {_some(optimizers[0, mp].ranks)}",
                where=states.path,
                why="The files are from saves of different sizes under the same tag",
                do="Keep the files of one save only",
            )
    if beyond := [path for (_, mp), path in tag.optimizers.items() if mp >= topology.pp * topology.tp]:
        raise CheckpointError(
            "there is no such model-parallel rank", where=beyond[0], why="It is left over from another save", do="Move it away"
        )
    return ranks


def _some(counts: Sequence[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(counts))) or "no"


def check_steps_agree(models: Mapping[tuple[int, int], ModelStates]) -> None:
    """Raises CheckpointError if the files are of different steps, or the data-parallel ranks' of different parameters."""
    first = next(iter(models.values()))
    for states in models.values():
        if states.step != first.step:
            raise CheckpointError(
                f"it is of step {states.step}, {first.path} of step {first.step}",
                where=states.path,
                why="Files of different steps of the run lie under the same tag, so the weights are not of one moment",
                do="Keep the files of one save only",
            )
    for (_, mp), states in models.items():
        own = next(other for (_, rank), other in models.items() if rank == mp)
        if (states.groups, states.frozen_shapes) != (own.groups, own.frozen_shapes):
            raise CheckpointError(
                f"its parameters (param_shapes) are others than those of {own.path}",
                where=states.path,
                why="The files are from different runs",
                do="Keep the files of one save only",
            )
