"""Whether the files of a tag are from one save: each rank has its file, no file is left over, all files are of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from reshard.adapter.rank_files import first_missing, listed
from reshard.engine.masters import wrong_master
from reshard.errors import CheckpointError, MissingFile, MixedSaves
from reshard.index.index import Index
from reshard.storage.files import Files, read_range

from ..layout.states import TIED_PREFIX, ModelStates
from .parts import Contents
from .run_states import RunStates

# The model's files list the parameters in the order of the masters. So a wrong master is in a wrong file, where few or none round.
# If the steps differ, which may be right or not, many are compared.
_PER_FILE, _PER_FILE_IN_DOUBT = 2, 2000


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
        if model.step != first.step:
            raise MixedSaves(
                f"it is of step {model.step}, {first.path} of step {first.step}",
                where=model.path,
                why="Files of different steps of the run lie under the same tag, so the weights are not of one moment",
                do="Keep the files of one save only",
            )
        expected = firsts.setdefault(mp, model)
        if (model.groups, model.frozen_shapes) != (expected.groups, expected.frozen_shapes):
            raise CheckpointError(
                f"its parameters (param_shapes) differ from those of {expected.path}",
                where=model.path,
                why="The files are from different runs",
                do="Keep the files of one save only",
            )


def check_weights_of_masters(contents: Contents) -> None:
    """Raises CheckpointError if a parameter has a master but no weight in the model's files. Not for ZeRO-3, which stores masters only."""
    weights = contents.names("weight") | {*contents.shapeless}
    masters = dict.fromkeys(part.name for part in contents.parts if part.kind == "master")
    if missing := [name for name in masters if name not in weights and not name.startswith(TIED_PREFIX)]:
        layer = missing[0].partition(".")[0]
        file = f"layer_{int(layer):02d}-model_states.pt is not there" if layer.isdigit() else "a file of a layer or an expert is not there"
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
