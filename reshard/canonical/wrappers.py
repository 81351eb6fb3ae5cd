"""Names as a wrapped model spells them: what wrappers put into the names of the parameters inside, and taking it out again.

_fsdp_wrapped_module.        FSDP1
_orig_mod.                   torch.compile
_checkpoint_wrapped_module.  activation checkpointing
module.                      DistributedDataParallel, DeepSpeed; only at the front of all names, where it cannot be the model's own
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from reshard.errors import CheckpointError
from reshard.index.index import Index, ParamGroup

_INNER = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
_FRONT = "module."


def is_wrapper(prefix: str) -> bool:
    """Whether a prefix is made of parts that wrappers put there."""
    return all(part in (*_INNER, _FRONT.rstrip(".")) for part in prefix.rstrip(".").split("."))


def unwrapped(name: str) -> str:
    """The name without the parts that can only come from a wrapper."""
    if not any(part in name for part in _INNER):
        return name
    return ".".join(part for part in name.split(".") if part not in _INNER)


def without_wrappers(index: Index) -> Index:
    """The index with the names that the model itself has, and a note on what was taken off.

    Raises: CheckpointError if two tensors would then have one name.
    """
    names = {tensor.name: unwrapped(tensor.name) for tensor in index.tensors}
    own = [names[tensor.name] for tensor in index.tensors if tensor.kind in ("weight", "master")]
    while own and all(name.startswith(_FRONT) for name in own):
        own = [name.removeprefix(_FRONT) for name in own]
        names = {name: short.removeprefix(_FRONT) for name, short in names.items()}
    changed = {name: short for name, short in names.items() if name != short}
    if not changed:
        return index
    taken: dict[tuple[str, str], str] = {}
    for tensor in index.tensors:
        if (other := taken.setdefault((tensor.kind, names[tensor.name]), tensor.name)) != tensor.name:
            raise CheckpointError(
                f"without what wrappers put into the names, {other} and {tensor.name} are the same",
                where=names[tensor.name],
                why="Which of them is the model's cannot be known",
                do="Leave one out when saving the model",
            )
    tensors = tuple(replace(tensor, name=names[tensor.name]) for tensor in index.tensors)
    notes = (*index.facts.notes, f"taken off the names of {len(changed)} tensors, as wrappers put it there: {_parts(changed)}")

    def groups() -> tuple[ParamGroup, ...]:
        return tuple(replace(group, names=tuple(names.get(name, name) for name in group.names)) for group in index.param_groups())

    tied = {names.get(alias, alias): names.get(name, name) for alias, name in index.facts.tied.items()}
    buffers = None if index.facts.buffers is None else tuple(names.get(name, name) for name in index.facts.buffers)
    facts = replace(index.facts, notes=notes, tied=tied, buffers=buffers)
    return replace(index, tensors=tensors, facts=facts, param_groups=groups)


def _parts(changed: dict[str, str]) -> str:
    counted = Counter(part for name, short in changed.items() for part in _taken(name, short))
    return ", ".join(f"{part} ({count})" for part, count in counted.items())


def _taken(name: str, short: str) -> Iterable[str]:
    """The wrapper parts of a name: each inner one once, and the front ones."""
    parts = name.split(".")
    inner = [part for part in dict.fromkeys(parts) if part in _INNER]
    front = len(parts) - sum(part in _INNER for part in parts) - len(short.split("."))
    return [f"{part}." for part in inner] + [_FRONT] * (front > 0)
