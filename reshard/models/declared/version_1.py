"""Version 1 of the language, which reshard 0.1.0 read: the same document in version 2.

    version 1                        version 2
    like: llama                      extends: llama      (take over its weights)
                                     like: llama         (engines take the model for a llama)
    extra_layers: KEY                mtp_layers: KEY
    sparse: all                      sparse_layers: all
    {holds: [...], by: heads}        {fuses: [...], interleaved_by: heads}
    {layers: extra}                  {layers: mtp}
    extra.embedding, ...             mtp.embedding, ...

A file without `language:` is in version 1.
"""

from __future__ import annotations

from typing import Any

from reshard.models.declared.node import Document, Node, Path

_KEYS = {"extra_layers": "mtp_layers", "sparse": "sparse_layers"}
_WEIGHT_KEYS = {"holds": "fuses", "by": "interleaved_by"}
_NEW_KEYS = ("extends", "class", "engines", *_KEYS.values(), *_WEIGHT_KEYS.values())


def in_version_2(document: Document, file: str) -> Document:
    """A document of version 1 in version 2. Raises RequestError if the document uses keys of version 2."""
    if not isinstance(document.value, dict):
        return document
    _refuse_new_keys(Node.of(document, file))
    value = {_KEYS.get(key, key): inner for key, inner in document.value.items()}
    lines = {_renamed(path): line for path, line in document.lines.items()}
    if "like" in value:
        value["extends"] = value["like"]
        lines["extends",] = lines["like",]
    if isinstance(value.get("weights"), dict):
        value["weights"] = {name: _weight(weight) for name, weight in value["weights"].items()}
    return Document(value, lines)


def _refuse_new_keys(root: Node) -> None:
    weights = root.value.get("weights")
    nodes = [root, *(root.inner("weights", weights).mapping().values() if isinstance(weights, dict) else ())]
    for node in nodes:
        for key in _NEW_KEYS:
            if isinstance(node.value, dict) and key in node.value:
                raise node.inner(key, None).error(
                    f"version 1 of the language has no key {key!r}",
                    why="A file without `language:` is in version 1",
                    do="Add the line `language: 2` at the top of the file",
                )


def _renamed(path: Path) -> Path:
    if path[0] == "weights" and len(path) > 2:
        return (*path[:2], _WEIGHT_KEYS.get(path[2], path[2]), *path[3:])
    return (_KEYS.get(path[0], path[0]), *path[1:])


def _weight(weight: Any) -> Any:
    if not isinstance(weight, dict):
        return _role(weight)
    keys = {_WEIGHT_KEYS.get(key, key): value for key, value in weight.items()}
    if keys.get("layers") == "extra":
        keys["layers"] = "mtp"
    return {key: _roles(value) if key in ("role", "fuses") else value for key, value in keys.items()}


def _roles(value: Any) -> Any:
    if isinstance(value, dict):
        return {_role(role): rows for role, rows in value.items()}
    return [_role(role) for role in value] if isinstance(value, list) else _role(value)


def _role(role: Any) -> Any:
    return "mtp." + role.removeprefix("extra.") if isinstance(role, str) and role.startswith("extra.") else role
