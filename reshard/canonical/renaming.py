"""Renaming the tensors of an index; and wrappers, which add parts to the names of a model's parameters.

_fsdp_wrapped_module.        FSDP1
_orig_mod.                   torch.compile
_checkpoint_wrapped_module.  activation checkpointing
module.                      DistributedDataParallel, DeepSpeed; removed only if all weights start with it: a model may have such a part
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from reshard.errors import CheckpointError
from reshard.geometry.quantities import plural
from reshard.index.index import Index, ParamGroup, Tensor

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


def renamed(index: Index, tensors: Iterable[Tensor], new_names: Callable[[str], tuple[str, ...]], note: str | None = None) -> Index:
    """The index with these tensors in place of its own, and their new names in the param groups and facts.

    new_names: the names of what is stored under a name: none, one or several. note: what to say about it.
    """

    def chained(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(new for name in names for new in new_names(name))

    def groups() -> tuple[ParamGroup, ...]:
        return tuple(replace(group, names=chained(group.names)) for group in index.param_groups())

    pairs = ((new_names(alias), new_names(name)) for alias, name in index.facts.tied.items())
    facts = replace(
        index.facts,
        notes=(*index.facts.notes, note) if note else index.facts.notes,
        buffers=None if index.facts.buffers is None else chained(index.facts.buffers),
        tied={aliases[0]: names[0] for aliases, names in pairs if aliases and names},
    )
    return replace(index, tensors=tuple(tensors), facts=facts, param_groups=groups)


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
    counts = Counter(part for name, short in changed.items() for part in _removed_parts(name, short))
    parts = ", ".join(f"{part} ({count})" for part, count in counts.items())
    note = f"parts that wrappers add were removed from {plural(len(changed), 'name')}: {parts}"
    tensors = (replace(tensor, name=names[tensor.name]) for tensor in index.tensors)
    return renamed(index, tensors, lambda name: (names.get(name, name),), note)


def _removed_parts(name: str, short: str) -> Iterable[str]:
    """The different parts that were removed from a name."""
    parts = name.split(".")
    inner = [part for part in dict.fromkeys(parts) if part in _INNER]
    front = len(parts) - sum(part in _INNER for part in parts) - len(short.split("."))
    return [f"{part}." for part in inner] + [_FRONT] * (front > 0)
