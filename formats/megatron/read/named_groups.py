"""The param groups of Megatron-FSDP: every setting of every parameter is an object of its own, and groups are the parameters whose settings
are equal.

    optimizer.param_to_group_meta.module.module.decoder.layers.0.mlp.linear_fc2.weight.lr     0.0003
                                                                                      .step   2

Source: megatron/core/optimizer/distrib_optimizer.py (_param_groups_to_param2group_meta) of 0.19.2.
"""

from __future__ import annotations

import re
from typing import Any

from reshard.adapter.dcp_reader import DcpFolder
from reshard.canonical.optimizer_state import plain_settings
from reshard.errors import CheckpointError
from reshard.index.index import ParamGroup

from ..layout.names import parse_key
from ..layout.parameters import Parameters, model_tensor
from ..layout.tensors import MegatronModel

_SETTING = re.compile(r"optimizer\.(?:\d+\.)?param_to_group_meta\.(.*)")


def named_groups(stored: DcpFolder, model: MegatronModel) -> tuple[ParamGroup, ...]:
    """The param groups, each with the canonical names of its parameters."""
    metadata = stored.metadata
    parameters = Parameters.of(metadata.tensors)
    entries = {key: match[1] for key in (*metadata.objects, *metadata.tensors) if (match := _SETTING.fullmatch(key))}
    items = [metadata.objects.get(key) or metadata.tensors[key] for key in entries]
    settings: dict[str, dict[str, Any]] = {}
    for key, value in zip(entries.values(), stored.settings(items), strict=True):
        if parts := parameters.split(key):
            _put(settings.setdefault(parts[0], {}), parts[1], value)
    groups: dict[str, tuple[dict[str, None], dict[str, Any]]] = {}
    for parameter, own in settings.items():
        names, _ = groups.setdefault(repr(sorted(own.items())), ({}, own))
        names.update(dict.fromkeys(_weights_in(parameter, model)))
    position = {name: i for i, name in enumerate(model.shapes)}  # groups follow the order of the model
    return tuple(ParamGroup(tuple(sorted(names, key=position.__getitem__)), plain_settings(own)) for names, own in groups.values())


def _put(settings: dict[str, Any], path: list[str], value: Any) -> None:
    """Put a setting at its path. The elements of a list have entries of their own, in order."""
    if len(path) == 1:
        settings[path[0]] = value
    elif path[1].isdecimal():
        settings.setdefault(path[0], []).append(value)


def _weights_in(parameter: str, model: MegatronModel) -> tuple[str, ...]:
    """The canonical names in a parameter; none if the model does not have it."""
    try:
        return model_tensor(model, parse_key(parameter).in_model(model.layers), parameter).names
    except CheckpointError:
        return ()
