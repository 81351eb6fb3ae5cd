"""The keys of a saved state dict: which of them are weights, which are state of an optimizer, and of which parameter.

    ("model", "layers.0.weight")                        a weight
    ("optim", "state", "layers.0.weight", "exp_avg")    state of a parameter by name, nested
    ("optimizer", "state", "7", "exp_avg")              state of a parameter by number
    ("optimizer", "state.layers.0.weight.exp_avg")      state of a parameter in a flattened state dict
    ("optimizer", 0, "state", ...)                      one of a list of optimizers
    ("optimizers", "AdamW", "state", ...)               Composer's, by their classes
    ("state", "model", ...), ("state", "optimizers", ...)   Composer keeps all in the state of its trainer
    ("train_state", "step")                             neither; tensor_classes.py decides
    ("ema", "layers.0.weight")                          beside ("model", ...): another model, whose names keep their root

`add_folder` adds what a folder holds to an index. The forms are those of get_state_dict, Optimizer.state_dict and torchtitan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.adapter.dcp_reader import DcpFolder
from reshard.adapter.index_builder import IndexBuilder
from reshard.canonical.optimizer_state import ROOTS as OPTIMIZER_ROOTS
from reshard.canonical.optimizer_state import STEP, names_for, note_on_plain, parameter_and_kind, plain_groups, plain_settings, state_kind
from reshard.canonical.tensor_classes import MODEL_ROOTS, RUN_ROOTS
from reshard.containers.dcp_metadata import BytesItem, DcpMetadata, TensorItem
from reshard.geometry.boxes import Shape
from reshard.geometry.value import value
from reshard.index.index import Kind, ParamGroup, Tensor

KeyPath = tuple[str | int, ...]
# (an optimizer's root key, the parameter's number there) -> the parameter's name
NumberNames = Mapping[tuple[str, int], str]

# The parts of an optimizer's state dict.
_PARTS = ("state", "param_groups")
# Root keys that hold the roots of the whole run, and no tensors of their own.
_CONTAINERS = ("app",)


@value
class StateKey:
    """What a key in an optimizer's state dict means."""

    root: str
    """The optimizer's root key, as `optimizer_path` gives it."""
    parameter: str | int
    """The parameter's name or number."""
    kind: str
    """The optimizer's word for the state: "exp_avg", "step", ..."""


def key_path(metadata: DcpMetadata, fqn: str) -> KeyPath:
    """The keys on the way to a value in the saved state dict, without the model's roots."""
    path = stored_path(metadata, fqn)
    return path[len(_roots(path)) :]


def optimizer_path(path: KeyPath) -> tuple[str, KeyPath]:
    """The root key of an optimizer, with its number if it is one of a list, and the keys below it; ("", ()) for any other path."""
    root, dot, rest_of_key = str(path[0]).partition(".")
    if root not in OPTIMIZER_ROOTS:
        return "", ()
    below: KeyPath = (rest_of_key, *path[1:]) if dot else path[1:]
    while below and (isinstance(below[0], int) or (below[0] not in _PARTS and below[1:2] and below[1] in _PARTS)):
        root, below = f"{root}.{below[0]}", below[1:]
    return root, below


def state_key(path: KeyPath) -> StateKey | None:
    """What a path means in an optimizer's state dict; None if it is not state of a parameter."""
    root, below = optimizer_path(path)
    if below[:1] == ("state",) and len(below) > 2:
        return StateKey(root, _number_or_name(below[1]), ".".join(map(str, below[2:])))
    if len(below) == 1 and str(below[0]).startswith("state."):
        name, kind = parameter_and_kind(str(below[0]).removeprefix("state."))
        return StateKey(root, _number_or_name(name), kind) if name else None
    return None


@value
class ModelRoots:
    """The keys on the way to the main model's state dict."""

    common: int
    """The number of roots that the names of all tensors lose."""
    main: str | None
    """The next root, which only the main model's tensors have; None if the model is not beside other roots."""

    @staticmethod
    def of(metadata: DcpMetadata) -> ModelRoots:
        """The roots of a state dict. Of several that may be a model's, the first of MODEL_ROOTS is the main one."""
        of_models = (fqn for fqn in metadata.tensors if not optimizer_path(key_path(metadata, fqn))[0])
        paths = list(dict.fromkeys(_roots(stored_path(metadata, fqn)) for fqn in of_models))
        common = 0
        while paths and all(len(roots) > common for roots in paths) and len({roots[common] for roots in paths}) == 1:
            common += 1
        next_roots = {roots[common] if len(roots) > common else None for roots in paths}
        # {"model": {"net": {...}, "head.weight": ...}} is one model, in which "net" is a part.
        inside_model = None in next_roots and bool(paths) and bool(paths[0][:common]) and paths[0][common - 1] not in _CONTAINERS
        models = [root for root in MODEL_ROOTS if root in next_roots]
        return ModelRoots(common, models[0] if len(next_roots) > 1 and models and not inside_model else None)

    def name(self, path: KeyPath) -> tuple[str, str | None]:
        """The name of a tensor in the model, and the root beside the main model that it is under (None: it is the main model's)."""
        below = path[self.common :]
        if self.main is None:
            return fqn_of(below), None
        if len(below) > 1 and below[0] == self.main:
            return fqn_of(below[len(_roots(below)) :]), None
        if len(below) > 1:  # {"ema": {"model": {...}}}
            below = (below[0], *below[1:][len(_roots(below[1:])) :])
        dotted = fqn_of(below)
        return dotted, dotted.partition(".")[0]


def stored_path(metadata: DcpMetadata, fqn: str) -> KeyPath:
    """The keys on the way to a value in the saved state dict; only the flat name if the metadata has no planner's data for it."""
    path = (metadata.planner or {}).get(fqn) or (fqn,)
    return path[1:] if path[0] == "state" and path[1:2] in (("model",), ("optimizers",)) else path


def _roots(path: KeyPath) -> KeyPath:
    """The model's roots with which a path begins."""
    count = 0
    while count < len(path) - 1 and path[count] in MODEL_ROOTS:
        count += 1
    return path[:count]


def fqn_of(path: KeyPath) -> str:
    """The flat name of an entry."""
    return ".".join(map(str, path))


def kind_and_name(path: KeyPath, names: NumberNames, roots: ModelRoots, part: str = "") -> tuple[Kind, str, str | None]:
    """What a tensor is to the run, its name in the model, and the root beside the main model that it is under, if any.

    path: all keys on the way to it. part: what follows, such as ".codes", if it is a part of what lies there.
    """
    whole, path = path, path[len(_roots(path)) :]
    if (state := state_key(path)) is not None:
        name = state.parameter if isinstance(state.parameter, str) else names.get((state.root, state.parameter))
        return *state_kind(name, state.parameter, f"{state.kind}{part}"), None
    if optimizer_path(path)[0]:
        return "state", f"{fqn_of(path)}{part}", None
    return "weight", *roots.name(whole)


def _number_or_name(key: str | int) -> str | int:
    """The planner turns the numbers of a dict into text. A model has no parameter whose name is a number."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def number_names(folder: DcpFolder, parameters: Mapping[str, Shape]) -> tuple[NumberNames, list[str]]:
    """The names of the numbered parameters that are known for certain, and notes on how they are known or why they are not.

    parameters: name -> shape of the model's parameters, in the model's order.
    """
    names: dict[tuple[str, int], str] = {}
    notes: list[str] = []
    for root, shapes in _shapes_by_number(folder).items():
        settings = _settings_by_group(folder, root, {"params", "param_names"})
        groups = [settings[key] for key in sorted(settings, key=lambda key: (isinstance(key, str), key))]
        numbers = [group["params"] for group in groups if isinstance(group.get("params"), list)]
        names_of_root, notes_of_root = names_for({"param_groups": groups}, numbers, shapes, list(parameters.items()))
        notes.extend(notes_of_root)
        names.update({(root, number): name for number, name in names_of_root.items()})
    return names, notes


def param_groups(folder: DcpFolder, names: NumberNames) -> list[ParamGroup]:
    """The param groups of every optimizer in the directory. Reads the entries that hold their settings."""
    roots = dict.fromkeys(optimizer_path(key_path(folder.metadata, fqn))[0] for fqn in folder.metadata.objects)
    groups: list[ParamGroup] = []
    for root in filter(None, roots):
        settings = _settings_by_group(folder, root, None)
        numbered = [settings[key] for key in sorted(key for key in settings if isinstance(key, int))]
        names_of_root: dict[Any, str] = {number: name for (of_root, number), name in names.items() if of_root == root}
        names_of_root |= {name: name for group in numbered for name in group.get("params", ()) if isinstance(name, str)}
        groups.extend(plain_groups(numbered, names_of_root, _counts(folder, root)))
        groups.extend(_grouped({name: group for name, group in settings.items() if isinstance(name, str)}))
    return groups


def _shapes_by_number(folder: DcpFolder) -> dict[str, dict[int, Shape]]:
    """Root key of an optimizer -> number of a parameter -> shape of its state."""
    shapes: dict[str, dict[int, Shape]] = {}
    for fqn, item in folder.metadata.tensors.items():
        state = state_key(key_path(folder.metadata, fqn))
        if state and isinstance(state.parameter, int) and item.shape and "." not in state.kind:
            shapes.setdefault(state.root, {})[state.parameter] = item.shape
    return shapes


def _settings_by_group(folder: DcpFolder, root: str, wanted: set[str] | None) -> dict[Any, dict[str, Any]]:
    """The settings of an optimizer by number of the param group; in a flattened state dict, by name of the parameter.

    wanted: the settings to read; None for all.
    """
    chosen: list[tuple[Any, str, BytesItem | TensorItem]] = []
    tensors = folder.metadata.tensors.items()
    numbers = {fqn: item for fqn, item in tensors if is_setting(key_path(folder.metadata, fqn), item)}
    entries: dict[str, BytesItem | TensorItem] = {**folder.metadata.objects, **numbers}
    for fqn, item in entries.items():
        of_root, below = optimizer_path(key_path(folder.metadata, fqn))
        if of_root != root or not below or not str(below[0]).startswith("param_groups"):
            continue
        group: str | int
        if below[0] == "param_groups" and len(below) > 2:
            group, setting = below[1], ".".join(map(str, below[2:]))
        else:
            name, _, setting = str(below[0]).removeprefix("param_groups.").rpartition(".")
            group = int(name) if name.isdecimal() else name
        if wanted is None or setting in wanted:
            chosen.append((group, setting, item))
    settings: dict[Any, dict[str, Any]] = {}
    lists: dict[tuple[Any, str], dict[int, Any]] = {}
    for (group, setting, _), value in zip(chosen, folder.settings([item for _, _, item in chosen]), strict=True):
        name, _, number = setting.rpartition(".")
        if name and number.isdecimal():  # torch flattens a list in which there is a tensor, such as betas
            of_list = lists.setdefault((group, name), {})
            of_list[int(number)] = value
            setting, value = name, of_list
        settings.setdefault(group, {})[setting] = value
    for group, name in lists:
        settings[group][name] = [value for _, value in sorted(lists[group, name].items())]
    return settings


def may_be_array(path: KeyPath, place: tuple[Kind, str, str | None]) -> bool:
    """Whether an object can be an array among the weights or in the state of a parameter. place: the result of `kind_and_name`.

    Settings, step counts and the state of the run, such as schedules and recipes, are many, and are read when they are needed.
    """
    root, below = optimizer_path(path)
    if root:
        return bool(below) and str(below[0]).partition(".")[0] == "state" and str(path[-1]).rpartition(".")[2] != STEP
    _, name, beside = place
    return beside is None and name.partition(".")[0] not in RUN_ROOTS and not name.endswith("_extra_state")


def is_setting(path: KeyPath, item: TensorItem) -> bool:
    """Whether a tensor is a setting of a param group, such as a learning rate: it has one element, and its number is read."""
    below = optimizer_path(path)[1]
    return bool(below) and str(below[0]).startswith("param_groups") and math.prod(item.shape) == 1 and len(item.chunks) > 0


def _counts(folder: DcpFolder, root: str) -> dict[Any, dict[str, Any]]:
    """The step counts that an optimizer keeps as plain numbers, as state by parameter."""
    keys = {fqn: state_key(key_path(folder.metadata, fqn)) for fqn in folder.metadata.objects}
    chosen = {fqn: key.parameter for fqn, key in keys.items() if key and (key.root, key.kind) == (root, STEP)}
    values = folder.values([folder.metadata.objects[fqn] for fqn in chosen])
    return {parameter: {STEP: value} for parameter, value in zip(chosen.values(), values, strict=True)}


def _grouped(settings_by_parameter: Mapping[str, Mapping[str, Any]]) -> Iterator[ParamGroup]:
    """A flattened state dict repeats the settings for every parameter. Parameters with equal settings were one group."""
    groups: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for name, settings in settings_by_parameter.items():
        plain = plain_settings(settings)
        groups.setdefault(repr(sorted(plain.items())), ([], plain))[0].append(name)
    yield from (ParamGroup(tuple(names), settings) for names, settings in groups.values())


def add_folder(builder: IndexBuilder, folder: DcpFolder, parameters: Mapping[str, Shape]) -> list[str]:
    """Add the tensors of a folder to an index, under the names of the model's parameters. Returns the roots beside the main model.

    parameters: name -> shape of the model's parameters, in the model's order.
    """
    names, notes = number_names(folder, parameters)
    roots, beside = ModelRoots.of(folder.metadata), dict[str, None]()
    for fqn, item in folder.metadata.tensors.items():
        if is_setting(key_path(folder.metadata, fqn), item):
            continue
        for part, (dtype, shape, shards) in folder.parts(item).items():
            kind, name, root = kind_and_name(stored_path(folder.metadata, fqn), names, roots, part)
            builder.add_tensor(Tensor(name, dtype, shape, kind, shards))
            beside.update({root: None} if root else {})
    builder.add_notes(notes)
    arrays = set(_add_arrays(builder, folder, names, roots))
    others = [name for name in folder.metadata.objects if name not in arrays]
    builder.add_objects(folder.prefix + name for name in others)
    states = ((name, state_key(key_path(folder.metadata, name))) for name in others)
    builder.add_notes(note_on_plain([name for name, state in states if state and state.kind != STEP]))
    builder.add_files(folder.paths)
    return list(beside)


def _add_arrays(builder: IndexBuilder, folder: DcpFolder, names: NumberNames, roots: ModelRoots) -> Iterator[str]:
    """Add the arrays among the objects that stand beside the weights or in the state of a parameter. Returns the names of these objects."""
    placed = {fqn: kind_and_name(stored_path(folder.metadata, fqn), names, roots) for fqn in folder.metadata.objects}
    chosen = [fqn for fqn, place in placed.items() if may_be_array(key_path(folder.metadata, fqn), place)]
    if not chosen:
        return
    from reshard.adapter.state_dicts import decoded  # few checkpoints have such objects

    for fqn, value in zip(chosen, folder.values([folder.metadata.objects[fqn] for fqn in chosen]), strict=True):
        path, (kind, name, _) = folder.prefix + folder.metadata.objects[fqn].path, placed[fqn]
        arrays, _ = decoded({name: value}, path)
        for full_name, local in arrays:
            builder.add(kind, full_name, local, path)
        yield from [fqn] if arrays else []
