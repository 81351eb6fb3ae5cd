"""The keys of a saved state dict: which of them are weights, which are state of an optimizer, and of which parameter.

    ("model", "layers.0.weight")                        a weight
    ("optim", "state", "layers.0.weight", "exp_avg")    state of a parameter by name, nested
    ("optimizer", "state", "7", "exp_avg")              state of a parameter by number
    ("optimizer", "state.layers.0.weight.exp_avg")      state of a parameter in a flattened state dict
    ("optimizer", 0, "state", ...)                      one of a list of optimizers
    ("train_state", "step")                             state of the run

These are the forms of get_state_dict, of Optimizer.state_dict and of torchtitan (fixtures/dcp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.adapter.state_dicts import MODEL_ROOTS
from reshard.canonical.optimizer_state import ROOTS as OPTIMIZER_ROOTS
from reshard.canonical.optimizer_state import state_kind
from reshard.containers.dcp_metadata import DcpMetadata
from reshard.index.index import Kind

KeyPath = tuple[str | int, ...]
# (an optimizer's root key, the parameter's number there) -> the parameter's name
NumberNames = Mapping[tuple[str, int], str]

# Root keys under which trainers keep state that is neither the model's nor the optimizer's.
_RUN_ROOTS = {"train_state", "lr_scheduler", "scheduler", "lr_schedulers", "dataloader", "rng", "rng_state", "extra_state", "random_states"}


@dataclass(frozen=True, slots=True)
class StateKey:
    """What a key in an optimizer's state dict means."""

    root: str
    """The optimizer's root key, as `optimizer_path` gives it."""
    parameter: str | int
    """The parameter's name or number."""
    kind: str
    """The optimizer's word for the state: "exp_avg", "step", ..."""


def key_path(metadata: DcpMetadata, fqn: str) -> KeyPath:
    """The keys on the way to a value in the saved state dict, without the model's roots.

    If the metadata has no planner's data for it, the flat name is the only key.
    """
    path = (metadata.planner or {}).get(fqn) or (fqn,)
    while len(path) > 1 and path[0] in MODEL_ROOTS:
        path = path[1:]
    return path


def optimizer_path(path: KeyPath) -> tuple[str, KeyPath]:
    """The root key of an optimizer, with its number if it is one of a list, and the keys below it; ("", ()) for any other path."""
    root, dot, rest_of_key = str(path[0]).partition(".")
    if root not in OPTIMIZER_ROOTS:
        return "", ()
    below: KeyPath = (rest_of_key, *path[1:]) if dot else path[1:]
    while below and isinstance(below[0], int):
        root, below = f"{root}.{below[0]}", below[1:]
    return root, below


def state_key(path: KeyPath) -> StateKey | None:
    """What a path means in an optimizer's state dict; None if it is not state of a parameter."""
    root, below = optimizer_path(path)
    if below[:1] == ("state",) and len(below) > 2:
        return StateKey(root, _number_or_name(below[1]), ".".join(map(str, below[2:])))
    if len(below) == 1 and str(below[0]).startswith("state."):
        name, _, kind = str(below[0]).removeprefix("state.").rpartition(".")
        return StateKey(root, _number_or_name(name), kind) if name else None
    return None


def kind_and_name(path: KeyPath, names: NumberNames) -> tuple[Kind, str]:
    """What a tensor is to the run, and its name in the model."""
    if (state := state_key(path)) is not None:
        name = state.parameter if isinstance(state.parameter, str) else names.get((state.root, state.parameter))
        return state_kind(name, state.parameter, state.kind)
    dotted = ".".join(map(str, path))
    is_of_the_run = optimizer_path(path)[0] or str(path[0]).partition(".")[0] in _RUN_ROOTS
    return "state" if is_of_the_run else "weight", dotted


def _number_or_name(key: str | int) -> str | int:
    """The planner turns the numbers of a dict into text. A model has no parameter whose name is a number."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key
