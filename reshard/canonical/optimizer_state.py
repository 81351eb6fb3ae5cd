"""Optimizer state: the kind of each tensor that a torch optimizer stores, and the parameter that it belongs to.

    state         {parameter: {"step", "exp_avg", "exp_avg_sq", ...}}      parameter: a name, or a number
    param_groups  [{"params": [parameter, ...], "lr", ...}, ...]

Numbers count the parameters through all groups. A group lists its parameters in the order in which the trainer passed them, which is the
order of the model. Source: torch/optim/optimizer.py, Optimizer.state_dict. torch 2.6 and later store names beside the numbers
("param_names") if the optimizer was given names.

Among the tensors of a Content, optimizer state has the key "optim.state.<parameter>.<kind>", such as "optim.state.lm_head.weight.exp_avg".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from reshard.index.index import Kind, ParamGroup, Tensor

Shape = tuple[int, ...]

# The keys under which trainers store the optimizer in a state dict.
ROOTS = ("optim", "optimizer", "optimizers", "optimizer_state_dict", "optim_state_dict", "optimizer_state", "optimizer_states")
STATE_KINDS: Mapping[str, Kind] = {
    "exp_avg": "moment1",
    "exp_avg_sq": "moment2",
    "step": "step",
    "master_param": "master",
    "fp32_param": "master",
}
STEP, GROUPS = "step", "param_groups"
# The name that torch's optimizers give to each kind.
_TORCH_NAMES: Mapping[Kind, str] = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "step": STEP}
_PREFIX, _MASTER = "optim.state.", "master_param"
# The parameter, and the kind of its state with the numbers behind it.
_KEY = re.compile(r"(.*)\.((?!\d+(?:\.|$))[^.]+(?:\.\d+)*)", re.DOTALL)


def state_kind(name: str | None, parameter: Any, torch_name: str) -> tuple[Kind, str]:
    """The kind and the name that a tensor of optimizer state has in an Index.

    The name is that of the parameter; for tensors that are neither moment, step nor master it is "<name>.<torch_name>".
    name: the parameter's name. None if it is not known: the kind is then "state", and the name contains `parameter`, its number.
    torch_name: what the optimizer calls the tensor, such as "exp_avg".
    """
    kind = STATE_KINDS.get(torch_name)
    if name is None:
        return "state", f"optim.{'' if parameter == GROUPS else 'state.'}{parameter}.{torch_name}"
    return (kind, name) if kind else ("state", f"{name}.{torch_name}")


def names_for(
    optimizer: Mapping[str, Any],
    groups: Sequence[Sequence[Any]],
    shapes: Mapping[Any, Shape],
    parameters: Sequence[tuple[str, Shape]],
) -> tuple[Mapping[Any, str], list[str]]:
    """The name of every parameter that an optimizer's state dict lists, and notes that say how the names are known.

    A parameter that is listed by name has that name. If the names of numbers cannot be known, the result is empty and a note says why.
    optimizer: the state dict. groups: the parameters of each param group. shapes: the shape of each parameter's state. parameters: the
    names and shapes of the model's parameters, in the model's order.
    """
    listed = [parameter for group in groups for parameter in group] or list(shapes)
    if all(isinstance(parameter, str) for parameter in listed):
        return {parameter: parameter for parameter in listed}, []
    if not all(type(parameter) is int for parameter in listed):
        return {}, ["the optimizer's parameters are neither names nor numbers, so the names of its state are unknown"]
    if recorded := recorded_names(optimizer["param_groups"]):
        return recorded, []
    names = names_of_numbers(groups, shapes, parameters)
    if isinstance(names, str):
        return {}, [f"the optimizer numbers its parameters, and their names are not certain: {names}"]
    return names, ["the optimizer numbers its parameters; their names follow from the recorded order and the shapes"]


def state_key(tensor: Tensor) -> str | None:
    """The key "optim.state.<parameter>.<kind>" of a moment or step count; None for other tensors."""
    return state_key_of(tensor.name, _TORCH_NAMES[tensor.kind]) if tensor.kind in _TORCH_NAMES else None


def state_key_of(parameter: str, torch_name: str) -> str:
    """The key of a parameter's state of the kind that torch calls `torch_name`, such as "exp_avg"."""
    return f"{_PREFIX}{parameter}.{torch_name}"


def master_key(parameter: str) -> str:
    """The key of a parameter's full-precision copy."""
    return state_key_of(parameter, _MASTER)


def is_master_key(key: str) -> bool:
    """Whether a key is that of a full-precision copy."""
    return key.startswith(_PREFIX) and key.endswith(f".{_MASTER}")


def is_state_key(key: str) -> bool:
    """Whether a key of a Content is that of optimizer state or a master, and not the name of a weight."""
    return key.startswith(_PREFIX)


def parameter_and_kind(key: str) -> tuple[str, str]:
    """The parameter and the name in torch of a key such as `state_key` makes: "exp_avg"; for an element of a list with its number, "GG.0";
    in nested dicts with the keys, "block/factors.0"."""
    match = _KEY.fullmatch(key.removeprefix(_PREFIX))
    return (match[1], match[2]) if match else ("", key)


def kind_path(kind: str) -> tuple[str | int, ...]:
    """The keys and numbers that lead to a kind of state in the state dict of a parameter: ("GG", 0) of "GG.0"."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"[./]", kind))


def kind_of_path(path: Iterable[str | int]) -> str:
    """The kind of state at these keys and numbers: "GG.0" of ("GG", 0)."""
    return "".join(f".{part}" if str(part).isdecimal() else f"/{part}" for part in path).lstrip("/")


def owner(tensor: Tensor, weights: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The parameter that a tensor of kind "state" belongs to, one of the weights, and the kind of its state; None if there is none."""
    parts = tensor.name.split(".") if tensor.kind == "state" else []
    names = ((".".join(parts[:count]), parts[count:]) for count in range(len(parts) - 1, 0, -1))
    return next(((name, kind_of_path(path)) for name, path in names if name in weights and not path[0].isdecimal()), None)


def is_unnamed(tensor: Tensor) -> bool:
    """Whether a tensor is optimizer state whose parameter is known only by its number."""
    return tensor.kind == "state" and tensor.name.startswith(_PREFIX)


def names_of_numbers(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, Shape], parameters: Sequence[tuple[str, Shape]]
) -> dict[int, str] | str:
    """The name of every numbered parameter, if the recorded order and the shapes allow only one assignment; otherwise the reason.

    Each group lists its parameters in the order of the model, and the groups together list all of them. So the next parameter of the model
    is always the next one of some group. If it could be the next one of two groups, both assignments are followed.

    groups: the numbers of each param group. shapes: the shapes of the parameters that have state. parameters: the names and shapes of the
    model's parameters, in the model's order.
    """
    numbers = [number for group in groups for number in group]
    if len(numbers) != len(set(numbers)):
        return "a number is in two param groups"
    if len(numbers) != len(parameters):
        return f"the optimizer has {len(numbers)} parameters, the model {len(parameters)}"
    # The number of assigned parameters in each group -> the assignments that lead there. Two are enough: more than one is ambiguous.
    assignments: dict[tuple[int, ...], list[_Assignment]] = {(0,) * len(groups): [None]}
    for name, shape in parameters:
        longer: dict[tuple[int, ...], list[_Assignment]] = {}
        for used, shorter in assignments.items():
            for i, group in enumerate(groups):
                if used[i] < len(group) and shapes.get(number := group[used[i]], shape) == shape:
                    after = (*used[:i], used[i] + 1, *used[i + 1 :])
                    same_end = longer.setdefault(after, [])
                    same_end.extend((assignment, number, name) for assignment in shorter[: 2 - len(same_end)])
        if not longer:
            return f"{name} has the shape {list(shape)}, but no param group continues with a parameter of this shape"
        if len(longer) * len(groups) > _MOST_ASSIGNMENTS:
            return "parameters of the same shape are in several param groups, in too many possible orders"
        assignments = longer
    (complete,) = assignments.values()
    if len(complete) > 1:
        return _difference(*complete)
    return dict(_steps(complete[0]))


_MOST_ASSIGNMENTS = 1 << 14
# A linked list of (assignment before it, number, name), from the last parameter to the first; None is the empty one.
_Assignment = Any


def _steps(assignment: _Assignment) -> Iterable[tuple[int, str]]:
    """(number, name) of each assigned parameter, the last one first."""
    while assignment is not None:
        assignment, number, name = assignment
        yield number, name


def _difference(first: _Assignment, second: _Assignment) -> str:
    """A sentence about the first parameter whose name differs between two assignments."""
    other = dict(_steps(second))
    number, name = next((number, name) for number, name in reversed(list(_steps(first))) if other[number] != name)
    return f"number {number} could be {name} or {other[number]}: they have the same shape, and the order does not distinguish them"


def recorded_names(groups: Sequence[Mapping[Any, Any]]) -> dict[int, str] | None:
    """The name of every number, from the "param_names" that torch 2.6 and later store; None if a group has none."""
    recorded: dict[int, str] = {}
    for group in groups:
        numbers, names = group.get("params"), group.get("param_names")
        if not isinstance(numbers, list) or not isinstance(names, list | tuple) or len(names) != len(numbers):
            return None
        if not all(isinstance(name, str) for name in names):
            return None
        recorded.update(zip(numbers, names, strict=True))
    return recorded


def plain_groups(groups: Any, names: Mapping[Any, str], state: Mapping[Any, Any] | None = None) -> tuple[ParamGroup, ...]:
    """The param groups of a state dict, with the names of their parameters. Settings that are not plain values are left out.

    names: the name of each parameter as the state dict lists it; unnamed numbers are left out. state: the state of each parameter.
    """
    counts = {names.get(parameter, parameter): kinds.get(STEP) for parameter, kinds in (state or {}).items() if isinstance(kinds, Mapping)}
    plain = []
    for group in groups if isinstance(groups, list) else ():
        listed = group.get("params", group.get("param_names")) if isinstance(group, Mapping) else None
        if isinstance(listed, list | tuple):
            named = tuple(names.get(parameter, parameter) for parameter in listed if parameter in names or isinstance(parameter, str))
            plain.append(counted(ParamGroup(named, plain_settings(group, without=("params", "param_names"))), counts))
    return tuple(plain)


def counted(group: ParamGroup, counts: Mapping[str, Any]) -> ParamGroup:
    """The group with the step count that the optimizer keeps as a plain number of its parameters, as the setting "step".

    counts: the step count of each parameter. A group whose counts differ gets none; `uncounted` then finds its parameters.
    """
    numbers = {count for name in group.names if is_count(count := counts.get(name))}
    return replace(group, settings={**group.settings, STEP: numbers.pop()}) if len(numbers) == 1 else group


def is_count(value: Any) -> TypeGuard[float]:
    """Whether a value is a step count as a plain number."""
    return type(value) in (int, float) and 0 <= value < 1 << 53 and value == int(value)


def counts_of_groups(groups: Iterable[ParamGroup]) -> dict[str, int]:
    """By parameter, the step count that its param group has as a setting."""
    return {name: int(group.settings[STEP]) for group in groups if is_count(group.settings.get(STEP)) for name in group.names}


def uncounted(states: Iterable[tuple[Kind, str]], groups: Callable[[], Iterable[ParamGroup]]) -> tuple[str, ...]:
    """The parameters with second moments and without a step count, neither as a tensor nor as a setting of their param group.

    Adam divides its moments by 1 - beta ** step: with moments and no count, a run does not resume, or starts that correction anew.
    Optimizers without second moments, such as Lion, need no count.

    states: the kind and the parameter of each tensor. groups: reads the param groups.
    """
    names: dict[Kind, dict[str, None]] = {"moment2": {}, "step": {}}
    for kind, name in states:
        if kind in names:
            names[kind][name] = None
    if names["moment2"].keys() <= names["step"].keys():
        return ()
    has_count = names["step"].keys() | counts_of_groups(groups()).keys()
    return tuple(name for name in names["moment2"] if name not in has_count)


def plain_settings(group: Mapping[Any, Any], *, without: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a param group that are plain values, except those in `without`."""
    return {str(key): value for key, value in group.items() if key not in without and is_plain(value)}


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value of a pickle consists of numbers, text, None, and tuples, lists and dicts of them, at most 4 deep and 1000 long."""
    if isinstance(value, tuple | list | dict) and (depth == 4 or len(value) > 1000):
        return False
    if isinstance(value, tuple | list):
        return all(is_plain(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item, depth + 1) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)
