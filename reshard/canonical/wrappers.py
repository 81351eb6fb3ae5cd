"""Wrappers: the parts that wrappers of a model add to the names of its parameters, and their removal.

_fsdp_wrapped_module.        FSDP1
_orig_mod.                   torch.compile
_checkpoint_wrapped_module.  activation checkpointing
module.                      DistributedDataParallel, DeepSpeed; removed only if all weights start with it: a model may have such a part
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from reshard.errors import CheckpointError
from reshard.geometry.quantities import plural
from reshard.index.index import Index, ParamGroup

_INNER = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
_FRONT = "module."


def is_wrapper(prefix: str) -> bool:
    """Whether a prefix consists of parts that wrappers add."""
    return all(part in (*_INNER, _FRONT.rstrip(".")) for part in prefix.rstrip(".").split("."))


def unwrapped(name: str) -> str:
    """The name without the parts that only wrappers add. A leading "module." stays, because a model may have such a part."""
    if not any(part in name for part in _INNER):
        return name
    return ".".join(part for part in name.split(".") if part not in _INNER)


def without_wrappers(index: Index) -> Index:
    """The index with the names that the model itself has, and a note about the parts that were removed.

    Raises: CheckpointError if two tensors would get one name.
    """
    stored = "\n".join(tensor.name for tensor in index.tensors)
    if _FRONT not in stored and not any(part in stored for part in _INNER):
        return index
    names = {tensor.name: unwrapped(tensor.name) for tensor in index.tensors}
    model_names = [names[tensor.name] for tensor in index.tensors if tensor.kind in ("weight", "master")]
    while model_names and all(name.startswith(_FRONT) for name in model_names):
        model_names = [name.removeprefix(_FRONT) for name in model_names]
        names = {name: short.removeprefix(_FRONT) for name, short in names.items()}
    changed = {name: short for name, short in names.items() if name != short}
    if not changed:
        return index
    first_with: dict[tuple[str, str], str] = {}
    for tensor in index.tensors:
        if (other := first_with.setdefault((tensor.kind, names[tensor.name]), tensor.name)) != tensor.name:
            raise CheckpointError(
                f"{other} and {tensor.name} have the same name once the parts that wrappers add are removed",
                where=names[tensor.name],
                why="Nothing tells which of the two is the model's",
                do="Leave one out when saving the model",
            )
    tensors = tuple(replace(tensor, name=names[tensor.name]) for tensor in index.tensors)
    notes = (*index.facts.notes, f"parts that wrappers add were removed from {plural(len(changed), 'name')}: {_parts_text(changed)}")

    def groups() -> tuple[ParamGroup, ...]:
        return tuple(replace(group, names=tuple(names.get(name, name) for name in group.names)) for group in index.param_groups())

    tied = {names.get(alias, alias): names.get(name, name) for alias, name in index.facts.tied.items()}
    buffers = None if index.facts.buffers is None else tuple(names.get(name, name) for name in index.facts.buffers)
    facts = replace(index.facts, notes=notes, tied=tied, buffers=buffers)
    return replace(index, tensors=tensors, facts=facts, param_groups=groups)


def _parts_text(changed: dict[str, str]) -> str:
    """The removed parts, each with the number of names that had it."""
    counts = Counter(part for name, short in changed.items() for part in _removed_parts(name, short))
    return ", ".join(f"{part} ({count})" for part, count in counts.items())


def _removed_parts(name: str, short: str) -> Iterable[str]:
    """The different parts that were removed from a name."""
    parts = name.split(".")
    inner = [part for part in dict.fromkeys(parts) if part in _INNER]
    front = len(parts) - sum(part in _INNER for part in parts) - len(short.split("."))
    return [f"{part}." for part in inner] + [_FRONT] * (front > 0)
