"""A value as a JSON document: its keys are its fields. docs/generate.py makes the schemas of documents from the same keys.

A class whose document has other keys, or another order, lists them as words in `JSON`: `name`, or `key=attribute` where the two differ.
The attribute may be a method without parameters, or a path such as `completeness.reason`, which is None where a part of it is None.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def keys_of(cls: type) -> Mapping[str, str]:
    """The keys of the documents of a class, and the attribute that each shows."""
    if words := getattr(cls, "JSON", ""):
        pairs = (word.partition("=") for word in words.split())
        return {key: attribute or key for key, _, attribute in pairs}
    assert is_dataclass(cls), f"a {cls.__name__} has no keys"
    return {{"nbytes": "bytes"}.get(field.name, field.name): field.name for field in fields(cls)}


def document(value: object, **given: object) -> dict[str, Any]:
    """A value as a document. given: keys that its attributes do not tell; they stand where `JSON` has them, or at the end."""
    keys = keys_of(value.__class__)
    shown = {key: given[key] if key in given else _at(value, path) for key, path in keys.items()}
    return {key: to_json(inner) for key, inner in (shown | given).items()}


def to_json(value: object) -> Any:
    """A value as what JSON knows, which is no infinity and no NaN: they are null. A range is [start, stop]."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, Mapping):
        return {str(key): to_json(inner) for key, inner in value.items()}
    return list(map(to_json, value)) if isinstance(value, Collection) else document(value)


def _at(value: Any, path: str) -> object:
    for name in path.split("."):
        value = getattr(value, name) if value is not None else None
        value = value() if callable(value) else value
    return value
