"""From the files of a universal checkpoint to its index.

    RunStates       what the model files hold                          read_model_files
    Parts           of weights                                         add_weights
    paths           which files of masters and states there are        parameter_files
    ParamGroup      with the step counts of ZeRO-3                     param_groups
    Parts           masters and moments, each of them whole            add_parameters
    Tensors         joined over tensor-parallel ranks                  Parts.join
    Index                                                              read

Weights come from the model files, masters and states from zero/.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.canonical.optimizer_state import STEP, counted, plain_settings
from reshard.containers import torch_zip
from reshard.containers.torch_zip import is_plain_tensor
from reshard.errors import CheckpointError, IncompleteError, MissingFile
from reshard.index.index import Index, Kind, ParamGroup, Tensor
from reshard.storage.files import Files

from ..layout.partitions import zero3_slice
from ..layout.states import Shape
from ..layout.tag import FP32, ZERO, ModelRank, find_universal_folder, model_ranks, open_tag
from .flat_buffers import FlatBuffer
from .index import config_shapes, join_rules, run_facts
from .one_save import check_masters, check_one_step, model_parallel_degrees
from .parts import MASTER, Parts, kind_and_name
from .run_states import RunStates, read_model_files
from .weights import add_objects, add_weights, tied_names

# zero/ holds parameters whole, as a run with one model-parallel rank would.
_ONLY_RANK = ModelRank(0, stage=0, tp_rank=0)


def read(files: Files, hints: Hints) -> Index:
    """The index of the universal checkpoint.

    Raises: CheckpointError if a trained parameter has no file, or the files contradict each other.
    """
    folder = find_universal_folder(files)
    if folder is None:
        raise IncompleteError("there is no folder zero/ with the states of parameters", where=files.root)
    tag = open_tag(files, folder)
    # reshard writes model states for ZeRO-1, 2 and others for ZeRO-3. Those for ZeRO-1, 2 hold the tensors.
    states = read_model_files(files, replace(tag, zero3_models={}) if tag.models else tag)
    check_one_step(states)
    degrees, tied, builder = model_parallel_degrees(states), tied_names(states), IndexBuilder("universal", files)
    weights, whole = Parts(builder), Parts(builder)
    for rank in model_ranks(degrees):
        add_weights(weights, states, rank)
    shapes = {name: shape for model in states.models.values() for group in model.groups or () for name, shape in group}
    listed, names = parameter_files(files, folder, shapes), weights.shapes("weight").keys()
    # ds_to_universal writes untrained tensors to zero/, too, cast to full precision. The model file has the originals.
    if cast_copies := {name for name, _ in listed if shapes and name not in shapes and name in names}:
        note = f"{len(cast_copies)} tensors of the model file are in {ZERO} a second time, cast; the model file's are read"
        builder.add_notes([note])
    chosen = {key: path for key, path in listed.items() if key[0] not in cast_copies}
    check_leftover_parameters(chosen, shapes, names)
    shared = f"{folder}{ZERO}optimizer_state.pt"
    root = torch_zip.read(files, shared, locate=False) if files.size(shared) is not None else None
    groups = list(param_groups(root, states)) if isinstance(root, Mapping) else []
    counts = step_counts(files, chosen, {name: count for _, of_group in groups for name, count in of_group.items()})
    add_objects(builder, states)
    add_parameters(whole, chosen, shapes)
    for name, count in counts.items():
        if is_plain_tensor(count):
            whole.add_whole(_ONLY_RANK, "step", name, count)
    builder.add_files([*states.tag.paths(), *chosen.values(), *([shared] if isinstance(root, Mapping) else [])])
    for parts, tp in ((weights, degrees.tp), (whole, 1)):
        parts.add_second_names(tied)
        parts.join(join_rules(states, config_shapes(hints)), tp)
    builder.param_groups = tuple(counted(group, counts) for group, _ in groups)
    check_states_of_groups(chosen, [group.names for group in builder.param_groups], folder + ZERO)
    return builder.build(replace(run_facts(states), producer="DeepSpeed universal", tied=tied, config=hints.config))


def parameter_files(files: Files, folder: str, trained: Collection[str]) -> dict[tuple[str, str], str]:
    """The files zero/<parameter>/<state>.pt, by parameter and state: "fp32", "exp_avg", "step", ...

    trained: names of the parameters that need a master; empty if the model files do not list them.
    Raises: CheckpointError if a trained parameter has no master.
    """
    zero = folder + ZERO
    if missing := [name for name in trained if files.size(f"{zero}{name}/{FP32}.pt") is None]:
        raise MissingFile(
            f"there is no {ZERO}{missing[0]}/{FP32}.pt"
            + (f", nor those of {len(missing) - 1} more parameters" if len(missing) > 1 else ""),
            where=missing[0],
            why="The model file lists it among the trained parameters; the conversion was not finished, or a folder was lost",
            do="Convert again, or copy the folder from where it was written",
        )
    paths: dict[tuple[str, str], str] = {}
    for parameter in files.list(zero):
        for path in files.list(parameter) if parameter.endswith("/") else ():
            if path.endswith(".pt"):
                paths[parameter.removeprefix(zero).rstrip("/"), path.removeprefix(parameter).removesuffix(".pt")] = path
    return paths


def check_leftover_parameters(read: Mapping[tuple[str, str], str], trained: Collection[str], weights: Collection[str]) -> None:
    """Raises CheckpointError if there are files of a parameter that the model files list neither as trained nor as a weight."""
    for (name, _), path in read.items():
        if trained and name not in trained and name not in weights:
            raise CheckpointError(
                f"{name} is not in param_shapes of the model files",
                where=path,
                why="All trained parameters are listed there, so the folder is left over from another conversion",
                do="Move the folder away",
            )


def check_values(files: Files, index: Index) -> Index:
    """The index, after a check of its masters. Found by this name (adapter/format.py).

    Raises: CheckpointError if a master does not round to its weight, or a state has other axes than its weight.
    """
    _check_shapes_of_states(index)
    return check_masters(files, index)


def _check_shapes_of_states(index: Index) -> None:
    """Raises CheckpointError if a master or a moment has other axes than its weight, unless it is flat. Axis 0 is not compared: vocabulary
    padding may be cut off."""
    owners = {**index.by_kind("master"), **index.by_kind("weight")}
    kinds: tuple[Kind, ...] = ("master", "moment1", "moment2")
    for state in (state for kind in kinds for state in index.by_kind(kind).values()):
        owner = owners.get(state.name)
        if owner is None or (len(state.shape) == 1 and len(owner.shape) > 1):
            continue
        if len(state.shape) != len(owner.shape) or state.shape[1:] != owner.shape[1:]:
            raise CheckpointError(
                f"{state.shards.path(0)} has it as {list(state.shape)}, {owner.shards.path(0)} as {list(owner.shape)}",
                where=state.name,
                why="The files are of different parameters, or from different models",
                do="Convert again, or copy the files again from where they were written",
            )


def check_states_of_groups(read: Iterable[tuple[str, str]], groups: Iterable[Sequence[str]], zero: str) -> None:
    """Raises CheckpointError if a parameter lacks a file that all other parameters of its param group have. read: their states."""
    states: dict[str, set[str]] = {}
    for name, state in read:
        states.setdefault(name, set()).add(state)
    for group in groups:
        listed = [states[name] for name in group if name in states]
        for name in group:
            for state in sorted(set().union(*listed) - states.get(name, set())) if name in states else ():
                if sum(state in of_parameter for of_parameter in listed) == len(listed) - 1:
                    raise CheckpointError(
                        "the file is not there, and all other parameters of its param group have one",
                        where=f"{zero}{name}/{state}.pt",
                        why="It was lost in a copy; a run would resume with other optimizer state",
                        do="Copy the file from where the checkpoint was written",
                    )


def add_parameters(parts: Parts, read: Mapping[tuple[str, str], str], shapes: Mapping[str, Shape]) -> None:
    """Add the masters and states in the files of parameters, without step counts. shapes: of the trained parameters.

    Raises: CheckpointError if a flat tensor does not have the elements of its parameter.
    """
    for (parameter, state), path in read.items():
        if state == STEP:
            continue
        root = torch_zip.read(parts.builder.files, path, locate=False)
        tensor = root.get("param") if isinstance(root, Mapping) else root
        kind, name = kind_and_name(parameter, MASTER if state == FP32 else state)
        if not is_plain_tensor(tensor):
            parts.add_other(kind, name, tensor, path)
            continue
        shape = shapes.get(parameter, tensor.shape)
        if len(tensor.shape) != 1 or shape == tensor.shape:
            parts.add_whole(_ONLY_RANK, kind, name, tensor)
            continue
        if math.prod(shape) != tensor.shape[0]:
            raise CheckpointError(f"it has {tensor.shape[0]:,} elements, param_shapes says {list(shape)}", where=path)
        pieces = FlatBuffer({0: tensor}, parts.locations).shards(zero3_slice(name, shape, ranks=1))
        parts.add(_ONLY_RANK, Tensor(name, tensor.dtype, shape, kind, pieces))


def param_groups(root: Mapping[str, Any], states: RunStates) -> Iterator[tuple[ParamGroup, dict[str, Any]]]:
    """The param groups, from the root of optimizer_state.pt, with the step count of each parameter: a tensor, a number or None.

    From ZeRO-3 everything is below optimizer_state_dict: "params" lists the flat groups of each param group, and state/<flat group>/step
    is the step count. Where a group has none, that of the first counts, which DeepSpeed loads for all groups. From ZeRO-1 and 2 the param
    groups are at the root, and each is one flat group.
    Source: load_hp_checkpoint_state_from_checkpoint_dir_stage3 in deepspeed/runtime/zero/stage3.py (0.19.8).
    """
    inner = root.get("optimizer_state_dict")
    zero3 = inner if isinstance(inner, Mapping) else {}
    stored, by_group = (zero3 or root).get("param_groups"), zero3.get("state")
    for number, settings in enumerate(stored if isinstance(stored, list) else ()):
        if not isinstance(settings, Mapping):
            continue
        listed = settings.get("params") if zero3 else [number]
        counts: dict[str, Any] = {}
        for group in (group for group in listed if type(group) is int) if isinstance(listed, list) else ():
            states_of = [by_group.get(group), by_group.get(0)] if isinstance(by_group, Mapping) else []
            count = next((state[STEP] for state in states_of if isinstance(state, Mapping) and STEP in state), None)
            lists = (model.groups[group] for model in states.models.values() if model.groups and group < len(model.groups))
            counts |= {name: count for parameters in lists for name, _ in parameters}
        yield ParamGroup(tuple(counts), plain_settings(settings, without=["params"])), counts


def step_counts(files: Files, read: Mapping[tuple[str, str], str], of_groups: Mapping[str, Any]) -> dict[str, Any]:
    """The step count of each parameter that has moments, a tensor or a number: that of its own file, otherwise that of its flat group."""
    counts: dict[str, Any] = {}
    for (name, state), path in read.items():
        if state == STEP:
            counts[name] = torch_zip.read(files, path, locate=False)
        elif state != FP32 and name in of_groups:
            counts.setdefault(name, of_groups[name])
    return counts
