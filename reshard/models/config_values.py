"""Values of a model's config by type. A config is input: a key may hold anything that JSON has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard.errors import RequestError


def value_at(value: Any, words: Iterable[str]) -> Any:
    """The value inside nested mappings and lists; None if there is none."""
    for word in words:
        if isinstance(value, list) and value and word.isdecimal():
            value = value[min(int(word), len(value) - 1)]  # a layer for multi-token prediction is like the last one of the list
        else:
            value = value.get(word) if isinstance(value, Mapping) else None
    return value


def with_value(config: Mapping[str, Any], words: Sequence[str], value: Any) -> dict[str, Any]:
    """The config with another value inside nested mappings; None removes the key."""
    key, *inner = words
    changed = with_value(config.get(key) or {}, inner, value) if inner else value
    if changed is None:
        return {name: each for name, each in config.items() if name != key}
    return {**config, key: changed}


def whole_number(config: Mapping[str, Any], key: str | None) -> int | None:
    """The whole number of a key; None if there is no key or the config does not set it. Raises RequestError if the value is not one, or
    below 0."""
    value = config.get(key) if key else None
    if value is not None and (not isinstance(value, int) or value < 0):
        raise _unexpected(key, value, "a whole number")
    return value


def number(config: Mapping[str, Any], key: str) -> float | None:
    """The number of a key; None if the config sets none. Raises RequestError if the value is not a finite number."""
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
        raise _unexpected(key, value, "a number")
    return value


def entries(config: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The list of a key; empty if the config sets none. Raises RequestError if the value is not a list."""
    value = config.get(key)
    if value is not None and not isinstance(value, list | tuple):
        raise _unexpected(key, value, "a list")
    return value or ()


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The settings below a key; empty if the config sets none. Raises RequestError if the value is not an object."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise _unexpected(key, value, "an object")
    return value or {}


def rotary_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the rotary positions: rope_parameters (since transformers 5) and rope_scaling (before). Raises RequestError."""
    return {**section(config, "rope_parameters"), **section(config, "rope_scaling")}


def rotary_base(config: Mapping[str, Any]) -> float:
    """The base of the rotary positions: 10000 if the config sets none. Raises RequestError."""
    return number(rotary_settings(config), "rope_theta") or number(config, "rope_theta") or 10000.0


def rotary_type(rope: Mapping[str, Any]) -> str:
    """The type of the rotary positions: "default" if the settings name none."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _unexpected(key: str | None, value: object, expected: str) -> RequestError:
    return RequestError(
        f"config.json gives {repr(value)[:80]} for {key}; {expected} is expected",
        why="The model's layout and settings follow from it",
        do="Correct the config, or give the model's own with `model=`",
    )
