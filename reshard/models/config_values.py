"""Values of a model's config by type. A config is input: a key may hold anything that JSON has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from reshard.errors import RequestError


def value_at(value: Any, words: Iterable[str], missing: Any = None) -> Any:
    """The value inside nested mappings and lists; None if there is none. missing: the value if a mapping on the way lacks the key."""
    for word in words:
        if isinstance(value, Mapping) and word.isdecimal() and word not in value:  # transformers 5.23 saves layer 5 of 30 as "05"
            word = next((key for key in value if key.isdecimal() and int(key) == int(word)), word)
        if isinstance(value, list) and value and word.isdecimal():
            value = value[min(int(word), len(value) - 1)]  # a layer for multi-token prediction is like the last one of the list
        elif isinstance(value, Mapping) and word not in value:
            return missing
        else:
            value = value.get(word) if isinstance(value, Mapping) else None
    return value


def stated_class(config: Mapping[str, Any]) -> str | None:
    """The first class of a config's `architectures`; None if it names none."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def with_value(config: Mapping[str, Any], words: Sequence[str], value: Any) -> dict[str, Any]:
    """The config with another value inside nested mappings; None removes the key."""
    key, *inner = words
    changed = with_value(config.get(key) or {}, inner, value) if inner else value
    if changed is None:
        return {name: setting for name, setting in config.items() if name != key}
    return {**config, key: changed}


def component_class(config: Mapping[str, Any] | None) -> str | None:
    """The class of a component of a diffusers pipeline, such as a transformer or a VAE; None for other configs. The components of
    transformers name theirs under `architectures` (diffusers 0.42, configuration_utils.py and pipelines/pipeline_loading_utils.py)."""
    named = (config or {}).get("_class_name")
    return named if isinstance(named, str) and not (config or {}).get("architectures") else None


def whole_number(config: Mapping[str, Any], key: str | None) -> int | None:
    """The whole number of a key; None if there is no key or the config does not set it. Raises RequestError if the value is not one, or
    below 0."""
    return _checked(config, key, "a whole number", lambda value: isinstance(value, int) and value >= 0)  # type: ignore[no-any-return]


def number(config: Mapping[str, Any], key: str) -> float | None:
    """The number of a key; None if the config sets none. Raises RequestError if the value is not a finite number."""
    return _checked(  # type: ignore[no-any-return]
        config, key, "a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )


def entries(config: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The list of a key; empty if the config sets none. Raises RequestError if the value is not a list."""
    return _checked(config, key, "a list", lambda value: isinstance(value, list | tuple)) or ()


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The settings below a key; empty if the config sets none. Raises RequestError if the value is not an object."""
    return _checked(config, key, "an object", lambda value: isinstance(value, Mapping)) or {}


def rotary_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the rotary positions: rope_parameters (since transformers 5) and rope_scaling (before). Raises RequestError."""
    return {**section(config, "rope_parameters"), **section(config, "rope_scaling")}


def rotary_base(config: Mapping[str, Any]) -> float:
    """The base of the rotary positions: 10000 if the config sets none. Raises RequestError."""
    return number(rotary_settings(config), "rope_theta") or number(config, "rope_theta") or 10000.0


def rotary_type(rope: Mapping[str, Any]) -> str:
    """The type of the rotary positions: "default" if the settings name none."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _checked(config: Mapping[str, Any], key: str | None, expected: str, fits: Callable[[Any], bool]) -> Any:
    """The value of a key; None if the config does not set it. Raises RequestError if it does not fit."""
    value = config.get(key) if key else None
    if value is None or fits(value):
        return value
    raise RequestError(
        f"config.json gives {repr(value)[:80]} for {key}; {expected} is expected",
        why="The model's layout and settings follow from it",
        do="Correct the config, or give the model's own with `model=`",
    )
