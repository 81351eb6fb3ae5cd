"""The optimizers in a DCP directory: the names of the parameters that they number, and their param groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.adapter.dcp_reader import DcpFolder
from reshard.canonical.optimizer_state import STEP, names_for, plain_groups, plain_settings
from reshard.containers.dcp_metadata import BytesItem
from reshard.index.index import ParamGroup

from .keys import NumberNames, key_path, optimizer_path, state_key

Shape = tuple[int, ...]


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
        if state and isinstance(state.parameter, int) and state.kind != "step":
            shapes.setdefault(state.root, {})[state.parameter] = item.shape
    return shapes


def _settings_by_group(folder: DcpFolder, root: str, wanted: set[str] | None) -> dict[Any, dict[str, Any]]:
    """The settings of an optimizer by number of the param group; in a flattened state dict, by name of the parameter.

    wanted: the settings to read; None for all.
    """
    chosen: list[tuple[Any, str, BytesItem]] = []
    for fqn, item in folder.metadata.objects.items():
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
    for (group, setting, _), value in zip(chosen, folder.values([item for _, _, item in chosen]), strict=True):
        settings.setdefault(group, {})[setting] = value
    return settings


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
