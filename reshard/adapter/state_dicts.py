"""State dicts as trainers save them: what lies at the root of a file, and which part of it is the model or the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.canonical.optimizer_state import ROOTS
from reshard.containers import torch_zip
from reshard.containers.distributed_tensors import class_of
from reshard.containers.torch_zip import is_stored
from reshard.errors import CheckpointError
from reshard.storage.files import Files

# Words under which trainers keep the model's state dict, the outermost first.
MODEL_ROOTS = ("model", "module", "state_dict", "model_state_dict", "net", "network", "ema", "app")


# A dict of a file can hold itself.
_DEEPEST = 8
# What FSDP1 calls the one flat parameter of a wrapped module in LOCAL_STATE_DICT.
FLAT = "_flat_param"


def has_flat_parameters(files: Files, path: str) -> bool:
    """Whether a torch.save file holds flat parameters; False also for a file that cannot be read, which its reader will tell."""
    try:
        content, _ = model_part(torch_zip.read(files, path, locate=False))
    except CheckpointError:
        return False
    return content is not None and any(str(name).endswith(FLAT) for name in content)


def holds_tensors(files: Files, path: str) -> bool:
    """Whether a torch.save file holds a dict of tensors; False also for a file that cannot be read."""
    try:
        return model_part(torch_zip.read(files, path, locate=False))[0] is not None
    except CheckpointError:
        return False


def holds_parts(files: Files, path: str) -> bool:
    """Whether a torch.save file holds tensors of which other files have the rest; False also for a file that cannot be read."""
    try:
        content, _ = model_part(torch_zip.read(files, path, locate=False))
    except CheckpointError:
        return False
    return content is not None and any(class_of(value) in ("DTensor", "ShardedTensor") for value in content.values())


def is_tensor(value: Any) -> bool:
    return is_stored(value) or class_of(value) in ("DTensor", "ShardedTensor")


def flat(module: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What a state dict holds by whole names; Megatron's GPT models nest theirs, {"language_model": {"encoder": ...}}."""
    for name, value in module.items():
        if isinstance(value, Mapping) and depth < _DEEPEST:
            yield from flat(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value


def model_part(root: Any) -> tuple[Mapping[Any, Any] | None, list[str]]:
    """The dict of the model's tensors, which lies below words that say so or is the root itself; and the names of what lies beside it.

    A word counts before the root's own tensors: {"model": {...}, "step": a tensor} is no model with one weight called "step".
    """
    beside: list[str] = []
    for _ in range(_DEEPEST):
        if not isinstance(root, Mapping):
            break
        inner = next((word for word in MODEL_ROOTS if isinstance(root.get(word), Mapping) and root[word]), None)
        if inner is None:
            return (root if any(is_tensor(value) for value in root.values()) else None), beside
        beside.extend(str(key) for key in root if key != inner)
        root = root[inner]
    return None, beside


def optimizer_part(root: Any, depth: int = 0) -> Mapping[str, Any] | None:
    """The dict with "state" and "param_groups", which is the root itself or lies below a word that says so."""
    if not isinstance(root, Mapping) or depth == _DEEPEST:
        return None
    if isinstance(root.get("state"), Mapping) and "param_groups" in root:
        return root
    found = (optimizer_part(root[word], depth + 1) for word in ROOTS if word in root)
    return next((part for part in found if part is not None), None)


def states(optimizer: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """(parameter's name or number, kind of state, value) of everything that an optimizer's state dict keeps of its parameters."""
    for parameter, kinds in optimizer["state"].items():
        if isinstance(kinds, Mapping):
            yield from ((parameter, str(kind), value) for kind, value in kinds.items())


def group_numbers(optimizer: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """The parameters, by name or number, of each param group."""
    groups = optimizer.get("param_groups")
    listed = [group.get("params") for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    return tuple(tuple(params) for params in listed if isinstance(params, list | tuple))
