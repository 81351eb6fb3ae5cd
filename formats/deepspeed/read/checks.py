"""Whether the files of a tag are those of one save: all ranks there, none left over, all of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.index.index import Index, Tensor
from reshard.storage.files import Files, read

from ..layout.states import ModelStates, OptimizerStates
from ..layout.tag import Tag, check_ranks
from .join import Topology


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
                _check_models(models, mp_rank, first.dp, f"{first.path} says dp_world_size {first.dp}")
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
    why = f"{told.path} says that {ranks} ranks share each group (partition_count)"
    for mp_rank in range(topology.pp * topology.tp):
        paths = {dp: path for (dp, mp), path in tag.optimizers.items() if mp == mp_rank}
        if not paths:
            raise CheckpointError(
                f"model-parallel rank {mp_rank} has no file of its optimizer beside it",
                where=told.path,
                why="Its part of every weight would be missing",
                do="Copy the missing files from where the checkpoint was written",
            )
        check_ranks(paths, ranks, "data-parallel", why=why)
        if tag.zero_models:
            _check_models(models, mp_rank, ranks, why)
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


def _check_models(models: Mapping[tuple[int, int], ModelStates], mp_rank: int, ranks: int, why: str) -> None:
    """Raises CheckpointError unless one model-parallel rank has model states of every data-parallel rank."""
    check_ranks({dp: states.path for (dp, mp), states in models.items() if mp == mp_rank}, ranks, "data-parallel", why=why)


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


def check_same_moment(files: Files, index: Index) -> Index:
    """The index, with a note if the optimizer has counted other steps than the run.

    Then some elements of the model's copy are looked at, too: masters round to it if they are of the same step. An optimizer that was
    begun anew has counted fewer steps, and fits.
    Raises: CheckpointError if they do not round to it.
    """
    counted, run, skipped = _counted(files, index), index.facts.step, index.facts.state.get("skipped_steps", 0)
    if counted is None or run is None or counted == run - (skipped if type(skipped) is int else 0):
        return index
    weights = index.by_kind("weight")
    for name, master in index.by_kind("master").items():
        weight = weights.get(name)
        if weight is None or not len(master.shards) or len(weight.shards) != 1 or (found := _sample(files, master, weight)) is None:
            continue
        ours, theirs = found
        if not np.array_equal(cast(ours, master.dtype, weight.dtype), theirs):
            raise CheckpointError(
                f"the optimizer has counted {counted} steps, the model's file is of step {run}, and the master of {name} in "
                f"{master.shards.path(0)} does not round to the model's copy",
                where=weight.shards.path(0),
                why="Model and optimizer are from different steps of the run: a save under this tag was not finished, or files were mixed",
                do="Take another tag, or keep the files of one save only",
            )
    note = f"the optimizer has counted {counted} steps, the run {run}"
    return replace(index, facts=replace(index.facts, notes=(*index.facts.notes, note)))


def _counted(files: Files, index: Index) -> int | None:
    for tensor in index.tensors:
        if tensor.kind == "step" and tensor.dtype.name == "F32" and len(tensor.shards):
            extent = tensor.shards.extent(0)
            return int(np.frombuffer(read(files, extent.path, extent.byte_offset, 4), np.float32)[0])
    told = [group.settings.get("step") for group in index.param_groups()]
    return next((step for step in told if type(step) is int), None)


_SAMPLED = 64


def _sample(files: Files, master: Tensor, weight: Tensor) -> tuple[Block, Block] | None:
    """The first elements of the master's first piece, and the same ones of the model's copy, as words."""
    found = []
    first = master.shards.box(0)
    if not first.sizes:
        return None
    box = Box(first.offsets, (*(1 for _ in first.sizes[:-1]), min(first.sizes[-1], _SAMPLED)))
    for tensor in (master, weight):
        piece = tensor.shards.piece(0)
        if piece.extent.strides[-1] != 1 or not piece.box.contains(box):
            return None
        raw = read(files, piece.extent.path, piece.byte_offset_of(box), box.volume * tensor.dtype.itemsize)
        found.append(np.frombuffer(bytearray(raw), tensor.dtype.word))
    return found[0], found[1]
