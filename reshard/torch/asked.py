"""What a trainer's state dict asks for: its flat names, turned into tensors and settings of a checkpoint.

    model.layers.0.mlp.up_proj.weight                           a weight; before it may stand roots (model., state_dict.) and wrappers
    optim.state.layers.0.mlp.up_proj.weight.exp_avg             state of a parameter by name, nested or flattened
    optim.param_groups.0.lr                                     a setting of a group, which lists its parameters under .params
    optim.param_groups.layers.0.mlp.up_proj.weight.lr           a setting of a flattened state dict, by parameter

These are the names of torch.distributed.checkpoint.state_dict (torch 2.13): get_model_state_dict and get_optimizer_state_dict, without and
with `flatten_optimizer_state_dict`, under any key of the state dict that is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import ROOTS, STEP, kind_of_path, master_key, state_key_of
from reshard.canonical.renaming import unwrapped
from reshard.canonical.tensor_classes import MODEL_ROOTS
from reshard.errors import RequestError, some
from reshard.geometry.value import value
from reshard.index.index import ParamGroup, Tensor

_OPTIMIZER = re.compile(r"((?:[^.]+\.)*?)(state|param_groups)\.(.+)\.([^.]+)", re.DOTALL)
_MOST_SHOWN = 8


@value
class StateName:
    """A name below an optimizer."""

    root: str
    """The keys before it, with a dot at the end."""
    is_setting: bool
    """Whether it is a setting of a param group, and not state of a parameter."""
    owner: str
    """The trainer's name of the parameter; of a setting also the number of the group."""
    kind: str
    """What the optimizer calls it: exp_avg, step, lr."""


def state_name(name: str) -> StateName | None:
    """What a flat name means below an optimizer; None if it is not below one."""
    match = _OPTIMIZER.fullmatch(name)
    if match is None:
        return None
    keys = [key for key in match[1].split(".") if key and not key.isdecimal()]
    if keys and keys[-1] not in ROOTS:
        return None
    owner, kind = match[3], match[4]
    inner, _, last = owner.rpartition(".")
    if kind.isdecimal() and inner:  # an element of a list: betas.0
        owner, kind = inner, kind_of_path((last, int(kind)))
    return StateName(match[1], match[2] == "param_groups", owner, kind)


class AskedNames:
    """The tensors and settings of a checkpoint by the names that a trainer gives them.

    prefix: what stands before the names of the weights; None: roots of state dicts and wrappers are tried.
    """

    def __init__(self, content: Content, prefix: str | None = None) -> None:
        self._content, self._prefix = content, prefix
        self._weights = content.weights
        self._aliases = {**content.facts.tied, **(content.model.aliases if content.model else {})}
        roots = [name.partition(".")[0] for name in self._weights]
        # A trainer may hold the inner module of what was saved: its names lack the first part that most weights have.
        common = max(set(roots), key=roots.count, default="")
        self._inner = f"{common}." if common and roots.count(common) * 2 > len(roots) else None
        self.askers: dict[str, str] = {}
        """Weight -> the trainer's name under which it was asked for."""
        self.asked: set[str] = set()
        """The weights that were asked for, by their names or those of aliases."""
        self.fused: Mapping[str, str] = {}
        """The trainer's own names of tensors that hold weights of other names -> the first of these."""

    def weight(self, name: str) -> str | None:
        """The weight that the trainer calls so; None if the checkpoint has none.

        Raises: RequestError if another name has asked for the same weight, and is not its alias.
        """
        weight = self._found(name)
        if weight is None:
            return None
        self.asked.add(weight)
        if any(candidate in self._aliases for candidate in self._candidates(name)):
            return weight
        if (other := self.askers.setdefault(weight, name)) != name:
            raise RequestError(
                f"{other} and {name} both stand for {weight}",
                why="The checkpoint holds one model, and the state dict asks for it twice",
                do="Name the part of the state dict that is meant with `prefix=`, and load the other from its own checkpoint",
            )
        return weight

    def state(self, asked: StateName) -> Tensor | None:
        """The stored tensor of a parameter's state; None if there is none."""
        parameter = self._found(asked.owner)
        return None if parameter is None else self._content.tensors.get(state_key_of(parameter, asked.kind))

    def step(self, asked: StateName) -> int | None:
        """The step count of a parameter that is kept as a setting of its param group; None if it is kept otherwise."""
        parameter = self._found(asked.owner) if asked.kind == STEP else None
        return None if parameter is None else self._content.step_counts.get(parameter)

    def master(self, weight: str) -> Tensor | None:
        """The full-precision copy of a weight, if there is one beside it."""
        return self._content.tensors.get(master_key(weight))

    def part(self, weight: str, kind: str, *, masters: bool) -> Tensor | None:
        """The stored tensor of a weight, or of its state of a kind. masters: the full-precision copy, if there is one."""
        if kind:
            return self._content.tensors.get(state_key_of(weight, kind))
        return (self.master(weight) if masters else None) or self._weights.get(weight)

    def own_name(self, name: str) -> str:
        """The name that a tensor of the trainer has in its model: without what stands before the names of weights that are known."""
        known = ((unwrapped(asker), weight) for weight, asker in self.askers.items())
        prefix = next((asker.removesuffix(weight) for asker, weight in known if asker.endswith(weight)), self._prefix or "")
        return unwrapped(name).removeprefix(prefix)

    def setting(self, asked: StateName, listed: Iterable[str] | None, groups: tuple[ParamGroup, ...]) -> tuple[Any, ...]:
        """The values that a setting has in the checkpoint for the parameters of the trainer's group, without repetition.

        listed: the trainer's names of the parameters in the group; None: they are not known. groups: those of the checkpoint.
        """
        of_group = asked.owner.isdecimal()
        names = {self._found(name) for name in (listed or () if of_group else [asked.owner])}
        is_known = listed is not None or not of_group
        kind, dot, number = asked.kind.partition(".")
        values = []
        for group in groups:
            if kind in group.settings and not (is_known and names.isdisjoint(group.names)):
                whole = group.settings[kind]
                values.append(whole[int(number)] if dot and isinstance(whole, list | tuple) and int(number) < len(whole) else whole)
        return tuple(given for i, given in enumerate(values) if given not in values[:i])

    def not_asked_for(self, names: Iterable[str]) -> list[str]:
        """The weights of the checkpoint that nobody has asked for. names: those that somebody has."""
        asked = {*names}
        return [name for name in self._weights if name not in asked and name not in self._content.unknown and name not in self._aliases]

    def _found(self, name: str) -> str | None:
        weights = (weight for candidate in self._candidates(name) if (weight := self._aliases.get(candidate, candidate)) in self._weights)
        return next(weights, None) or self.fused.get(unwrapped(name))

    def _candidates(self, name: str) -> Iterator[str]:
        """The names under which the checkpoint may have what the trainer calls so, the most likely first."""
        if self._prefix:
            if not name.startswith(self._prefix):
                return
            name = name.removeprefix(self._prefix)
        short = unwrapped(name)
        while True:
            yield short
            if self._inner and not self._prefix:
                yield self._inner + short
            root, dot, below = short.partition(".")
            if self._prefix or not dot or root not in MODEL_ROOTS:
                return
            short = below


def about_names(missing: Iterable[str], surplus: Iterable[str], where: str) -> RequestError:
    """The error for names that only one side has. missing: asked for by the trainer. surplus: in the checkpoint alone."""
    ours, theirs = [*surplus], [*missing]
    said = [f"the trainer asks for {some(theirs, most=_MOST_SHOWN)}, which the checkpoint does not have"] if theirs else []
    said += [f"the checkpoint has {some(ours, most=_MOST_SHOWN)}, which the trainer does not ask for"] if ours else []
    return RequestError(
        "; ".join(said),
        where=where,
        why="A part of the model would keep the values that it was started with" if theirs else "A part of what was trained would be lost",
        do="Compare the names: `prefix=` names what the trainer puts before them, `model=DIR` the config of this model; what is left out "
        "on purpose needs `planner=DefaultLoadPlanner(allow_partial_load=True)`",
    )


def in_form_of(value: Any, current: Any) -> Any:
    """A setting in the form that the trainer has it: betas are a tuple, JSON has lists."""
    return tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value


def listed_names(state: Mapping[str, Any], asked: StateName) -> list[str] | None:
    """The trainer's names of the parameters in the group of a setting; None if its state dict does not list them."""
    listed = state.get(f"{asked.root}param_groups.{asked.owner}.params")
    return [entry for entry in listed if isinstance(entry, str)] if isinstance(listed, list) else None
