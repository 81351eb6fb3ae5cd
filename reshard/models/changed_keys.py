"""The keys in which one config describes another layout than a second one: other sizes, other weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.errors import ReshardError
from reshard.geometry.value import value
from reshard.models.architecture import Architecture
from reshard.models.config_values import value_at, with_value
from reshard.models.lookup import find_model
from reshard.models.quantization_settings import without_quantization

_MOST = 60


@value
class ChangedKey:
    """A key of a config with two values. None: the config does not set it."""

    key: str
    """The key; a dot leads into an inner config, as in "text_config.hidden_size"."""
    old: Any
    """The value in the first config."""
    new: Any
    """The value in the second one."""

    def __str__(self) -> str:
        old, new = ("not set" if value is None else json.dumps(value)[:_MOST] for value in (self.old, self.new))
        return f"{self.key} {old} -> {new}"


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], architecture: Architecture | None = None) -> tuple[ChangedKey, ...]:
    """The keys that give the model another layout in the second config than in the first; empty if its declaration is not known.

    Each key is tried alone: it counts if the first config with that value of the second one has other dimensions or weights. So keys that
    no declaration reads, such as torch_dtype, do not count. Settings of a quantization are compared with the weights when these are read.
    """
    old, new = without_quantization(old), without_quantization(new)
    layout = None if old == new else _layout(old, architecture)
    if layout is None or layout == _layout(new, architecture):
        return ()
    changed = list(_differences(old, new))
    alone = [each for each in changed if _layout(with_value(old, each.key.split("."), each.new), architecture) != layout]
    return tuple(alone or changed)


def _layout(config: Mapping[str, Any], architecture: Architecture | None) -> object:
    """What the layout of the weights follows from; None if the config describes no declared model."""
    try:
        model = find_model(config, architecture)
        if model is None:
            return None
        in_layers = [model.dimensions_in(layer) for layer in range(model.dimensions.get("layers", 0))]
        weights = {name: (weight.role, weight.shape, weight.declared) for name, weight in model.weights.items()}
        return model.dimensions, in_layers, model.is_tied, weights
    except ReshardError:
        return None


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[ChangedKey]:
    """Every key with two values, those of inner configs one by one."""
    for key in dict.fromkeys((*new, *old)):
        values = value_at(old, [key]), value_at(new, [key])
        if all(isinstance(value, Mapping) for value in values):
            yield from _differences(*values, f"{prefix}{key}.")
        elif values[0] != values[1]:
            yield ChangedKey(prefix + key, *values)
