"""DeepSpeed's universal checkpoints: every parameter whole, in a folder of its own, to be loaded at any world size.

    latest_universal                                     the tag's name
    <tag>/zero/<parameter>/fp32.pt, exp_avg.pt, ...      {"param": tensor, "cat_dim": 0, ...}; from ZeRO-3 a bare tensor of one axis
    <tag>/zero/<parameter>/step.pt                       ZeRO-1 and 2 only
    <tag>/zero/optimizer_state.pt                        param groups; from ZeRO-3 also rank 0's rows, which say nothing
    <tag>/mp_rank_MM_model_states.pt, or zero_pp_rank_D_mp_rank_MM_model_states.pt
                                                         copies of the training run's

What is written is loaded by ZeRO-1, 2 and 3 alike: both kinds of model states are there, and optimizer_state.pt holds what either
looks for. Source: deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py; measured on 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.adapter.format import Format, Hints
from reshard.adapter.model_files import ModelFiles
from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import plain_settings
from reshard.containers import torch_zip
from reshard.containers.torch_zip import is_stored
from reshard.errors import CheckpointError, RequestError
from reshard.index.index import Index, ParamGroup, RunFacts, StoredFile, Tensor
from reshard.plans.layout import Layout, Sidecar, TargetFile
from reshard.plans.target import Target
from reshard.storage.files import Files, inside, read_whole

from ..layout.partitions import flat_part
from ..layout.states import ModelStates, Shape
from ..layout.tag import open_tag
from ..layout.tensor_parallel import says
from ..read.checks import check_steps_agree, topology_of
from ..read.index import joins_of, models_of, state_of
from ..read.join import Part, Reading, role_of
from ..read.weights import add_aliases, read_fragments, read_weights
from ..write.training_state import Training, size, stage, stored_dtype, training_of

_LATEST = "latest_universal"
_FOLDER = "zero/"
_MASTER = "fp32"


class Universal(Format):
    name = "universal"
    summary = "DeepSpeed universal checkpoints: every parameter whole, loaded at any world size"
    owns = ("*/zero/*.pt", "zero/*.pt", _LATEST)
    keeps_names = True
    keeps_optimizer = True

    def detect(self, files: Files) -> str | None:
        folder = _find(files)
        return None if folder is None else f"{folder}{_FOLDER}"

    def read(self, files: Files, hints: Hints) -> Index:
        folder = _find(files)
        if folder is None:
            raise CheckpointError("there is no folder zero/ with a parameter's states", where=files.root)
        return _read(files, folder, hints)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        target.parallel.allow(what="a universal checkpoint, which any number of ranks can load")
        return _lay_out(content, target, companions)


def _find(files: Files) -> str | None:
    """The folder that holds zero/, as a prefix; None if there is none."""
    listing = files.list()
    if _is_universal(files, ""):
        return ""
    if _LATEST in listing:
        text = read_whole(files, _LATEST, limit=4096).decode("utf-8", "replace").strip()
        folder = inside(text, where=_LATEST).rstrip("/") + "/" if text else "/"
        if not _is_universal(files, folder):
            raise CheckpointError(
                f"it names the tag {text!r}, which is not there, or holds no {_FOLDER}",
                where=_LATEST,
                why="The conversion that wrote it was not finished, or its result was removed",
                do="Give the folder that holds zero/, or convert again",
            )
        return folder
    inner = [path for path in listing if path.endswith("/") and _is_universal(files, path)]
    return inner[0] if len(inner) == 1 else None


def _is_universal(files: Files, folder: str) -> bool:
    if folder + _FOLDER not in files.list(folder):
        return False
    return any(files.size(path) is not None or files.size(f"{path}{_MASTER}.pt") is not None for path in files.list(folder + _FOLDER))


# ---- reading ----


def _read(files: Files, folder: str, hints: Hints) -> Index:
    tag = open_tag(files, folder)
    tag = replace(tag, zero_models={}) if tag.models else tag
    models = models_of(files, tag)
    topology = topology_of(tag, models)
    check_steps_agree(models)
    first = next(iter(models.values()))
    reading, parameters = (Reading(files, tag, hints, aliases=dict(first.aliases)) for _ in range(2))
    for mp_rank in range(topology.pp * topology.tp):
        own = {dp: states for (dp, mp), states in models.items() if mp == mp_rank}
        states, place = own[min(own)], topology.place(mp_rank)
        reading.objects.update(dict.fromkeys(states.client))
        if states.module is not None or tag.layers:
            read_weights(reading, states, place)
        read_fragments(reading, own, place)
    trained = {name: shape for states in models.values() for group in states.groups or () for name, shape in group}
    paths = list(_read_parameters(parameters, folder, trained, {name for _, name in reading.parts}))
    add_aliases(reading)
    add_aliases(parameters)
    joins = joins_of(first, hints)
    tensors = (*reading.tensors(joins, topology.tp), *parameters.tensors(joins, 1))
    facts = RunFacts(
        "DeepSpeed universal",
        first.version,
        first.step,
        {},
        hints.config,
        tuple(dict.fromkeys((*reading.notes, *parameters.notes))),
        state=state_of(first, {}),
        tied=dict(reading.aliases),
        buffers=None if first.buffers is None else tuple(sorted(first.buffers)),
    )
    stored = tuple(StoredFile(path, files.size(path) or 0) for path in (*tag.paths(), *paths))
    groups = tuple(_param_groups(files, f"{folder}{_FOLDER}optimizer_state.pt", list(models.values())))
    return Index("universal", tensors, stored, facts, objects=tuple(reading.objects), param_groups=lambda: groups)


def _read_parameters(reading: Reading, folder: str, trained: Mapping[str, Shape], weights: set[str]) -> Iterator[str]:
    """Every parameter's folder; yields the paths that were read.

    Raises: CheckpointError if a trained parameter has none.
    """
    files, derived = reading.files, []
    folders = [path for path in files.list(folder + _FOLDER) if path.endswith("/")]
    names = {path.removeprefix(folder + _FOLDER).rstrip("/"): path for path in folders}
    if missing := [name for name in trained if files.size(f"{folder}{_FOLDER}{name}/{_MASTER}.pt") is None]:
        raise CheckpointError(
            f"there is no {_FOLDER}{missing[0]}/{_MASTER}.pt" + (f", nor that of {len(missing) - 1} more" if len(missing) > 1 else ""),
            where=missing[0],
            why="The model file lists it among the trained parameters; the conversion was not finished, or a folder was lost",
            do="Convert again, or copy the folder from where it was written",
        )
    for name, path in names.items():
        if trained and name not in trained and name in weights:
            # The converter writes what is not trained a second time, cast to full precision: the model file has the original.
            derived.append(name)
            continue
        for each in files.list(path):
            if each.endswith(".pt"):
                yield each
                _read_state(reading, name, each.removeprefix(path).removesuffix(".pt"), each, trained.get(name))
    if derived:
        reading.notes.append(f"{len(derived)} tensors of the model file are in {_FOLDER} a second time, cast; the model file's are read")


def _read_state(reading: Reading, name: str, kind: str, path: str, shape: Shape | None) -> None:
    content = torch_zip.read(reading.files, path, locate=False)
    tensor = content.get("param") if isinstance(content, Mapping) else content
    if not is_stored(tensor):
        reading.objects[f"{name}.{kind}"] = None
        return
    role, full = role_of(name, kind, master=_MASTER)
    if len(tensor.shape) == 1 and shape is not None and shape != tensor.shape:
        if math.prod(shape) != tensor.shape[0]:
            raise CheckpointError(f"it has {tensor.shape[0]:,} elements, param_shapes says {list(shape)}", where=path)
        reading.add(role, full, Part(0, 0, tensor.dtype, shape, flat_part(tensor, shape, reading.locations)))
    else:
        reading.add_whole(role, full, tensor, (0, 0))


def _param_groups(files: Files, path: str, models: list[ModelStates]) -> Iterator[ParamGroup]:
    """The settings of the groups, with the parameters of each as the model files list them."""
    if files.size(path) is None:
        return
    root = torch_zip.read(files, path, locate=False)
    base = root.get("optimizer_state_dict") if isinstance(root, Mapping) else None
    groups = base.get("param_groups") if isinstance(base, Mapping) else root.get("param_groups") if isinstance(root, Mapping) else None
    for number, group in enumerate(groups if isinstance(groups, list) else ()):
        listed = group.get("params") if isinstance(base, Mapping) and isinstance(group, Mapping) else [number]
        names = dict.fromkeys(
            name
            for states in models
            for g in (listed if isinstance(listed, list) else ())
            if type(g) is int and states.groups and g < len(states.groups)
            for name, _ in states.groups[g]
        )
        yield ParamGroup(tuple(names), plain_settings(group, without=["params"]))


# ---- writing ----


def _lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    training = training_of(content, target, "a universal checkpoint")
    tag = f"global_step{training.step}_universal"
    files = [_model_file(training, f"{tag}/mp_rank_00_model_states.pt", training.rest)]
    files.append(_model_file(training, f"{tag}/zero_pp_rank_0_mp_rank_00_model_states.pt", {}))
    files.append(_optimizer_file(training, f"{tag}/{_FOLDER}optimizer_state.pt"))
    for name in (name for group in training.groups for name in group.names):
        if "/" in name:
            raise RequestError("its name has a slash, and would be a folder's", where=name, do="Rename it, or write --to hf")
        files.extend(_parameter_files(training, f"{tag}/{_FOLDER}{name}", name))
    dtypes = {tensor.dtype for tensor in content.weights.values()}
    sidecars = (*companions.sidecars(dtypes), Sidecar(_LATEST, tag.encode()))
    copies = {alias: name for alias, name in training.aliases.items() if alias in content.tensors}
    return Layout("universal", tuple(files), sidecars, target.parallel, _notes(training), copies)


def _notes(training: Training) -> tuple[str, ...]:
    """ZeRO-3's loader of universal checkpoints (stage3.py, 0.19.8) gives every group the first one's settings."""
    if len({repr(sorted(group.settings.items())) for group in training.groups}) == 1:
        return training.notes()
    warning = (
        "the param groups' settings differ; loading this under ZeRO-3, DeepSpeed gives all of them the first one's: use --to deepspeed"
    )
    return (*training.notes(), warning)


def _parameter_files(training: Training, folder: str, name: str) -> Iterator[TargetFile]:
    content = training.content
    for kind, key in {_MASTER: name, **training.states[name]}.items():
        file, tensor = TorchFile(f"{folder}/{kind}.pt"), content.tensors[key]
        call = file.whole(key, tensor, stored_dtype(tensor))
        is_whole = tensor.shape == training.shape(name) and kind != "step"
        yield file.close({"param": call, **_how_to_cut(training, name)} if is_whole else call)


def _how_to_cut(training: Training, name: str) -> dict[str, Any]:
    """How tensor-parallel ranks cut it when they load it, where the source's run said so; along axis 0 otherwise."""
    info = training.content.facts.state.get("universal_checkpoint_info") or {}
    if says(info, "tp_replicated_parameter_patterns", name) or says(info, "parameter_to_average_patterns", name):
        return {}
    vocabulary = {"vocab_tensor": True} if says(info, "vocabulary_parameter_patterns", name) else {}
    if says(info, "parameter_with_2_sub_params_cat_dim_0", name):
        return {"cat_dim": 0, "param_n_sub_params": 2, **vocabulary}
    return {"cat_dim": 1 if says(info, "parameter_with_row_parallelism_patterns", name) else 0, **vocabulary}


def _model_file(training: Training, path: str, rest: Mapping[str, Tensor]) -> TargetFile:
    file = TorchFile(path)
    module = {name: file.whole(name, tensor) for name, tensor in rest.items()}
    return file.close(
        {
            "module": module,
            "buffer_names": list(rest),
            "optimizer": None,
            "param_shapes": [{name: size(training.shape(name)) for name in group.names} for group in training.groups],
            "frozen_param_shapes": None,
            "shared_params": dict(training.aliases),
            "frozen_param_fragments": None,
            **training.run_states(1),
        }
    )


def _optimizer_file(training: Training, path: str) -> TargetFile:
    """What ZeRO-1 and 2 look for at the root, and ZeRO-3 below optimizer_state_dict."""
    file = TorchFile(path)
    first = training.groups[0]
    state: dict[str, Any] = {}
    if key := training.states[first.names[0]].get("step"):
        state["step"] = file.whole(key, training.content.tensors[key])
    elif "step" in first.settings:
        state["step"] = first.settings["step"]
    groups = [training.settings(group, [number]) for number, group in enumerate(training.groups)]
    return file.close(
        {
            "zero_stage": stage(2),
            **training.scaler(),
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: state}, "param_groups": groups},
            "ds_version": training.version,
        }
    )


FORMAT = Universal()
