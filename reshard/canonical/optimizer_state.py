"""What a torch optimizer's state is to the run, and which parameter it belongs to where the file gives numbers instead of names.

    state         {parameter: {"step", "exp_avg", "exp_avg_sq", ...}}      parameter: a name, or a number
    param_groups  [{"params": [parameter, ...], "lr", ...}, ...]

Numbers count the parameters through the groups, in each group in the order in which the trainer listed them: the model's. Source:
torch/optim/optimizer.py, Optimizer.state_dict; torch 2.6 and later keep the names beside them ("param_names") if given any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.index.index import Kind, ParamGroup, Tensor

Shape = tuple[int, ...]

ROOTS = ("optim", "optimizer", "optimizers", "optimizer_state_dict", "optim_state_dict", "optimizer_state")
STATE_KINDS: Mapping[str, Kind] = {
    "exp_avg": "moment1",
    "exp_avg_sq": "moment2",
    "step": "step",
    "master_param": "master",
    "fp32_param": "master",
}
# The other way: by what name torch's optimizers keep a role.
_KINDS: Mapping[Kind, str] = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "step": "step"}
_PREFIX, _MASTER = "optim.state.", "master_param"


def state_kind(name: str | None, parameter: Any, kind: str) -> tuple[Kind, str]:
    """Kind and name of what an optimizer keeps of a parameter; of kinds without a role of their own it is "<name>.<kind>".

    Where the parameter has no name it is state of the run, called by its number.
    """
    role = STATE_KINDS.get(kind)
    if name is None:
        return "state", f"optim.state.{parameter}.{kind}"
    return (role, name) if role else ("state", f"{name}.{kind}")


def names_for(
    optimizer: Mapping[str, Any],
    groups: Sequence[Sequence[Any]],
    shapes: Mapping[Any, Shape],
    parameters: Sequence[tuple[str, Shape]],
) -> tuple[Mapping[Any, str], list[str]]:
    """The name of every parameter that an optimizer's state dict lists, and notes for a reader on how they are known.

    Names stand for themselves. Without a way to know, the result is empty, and the note says why.
    """
    listed = [each for group in groups for each in group] or list(shapes)
    if all(isinstance(each, str) for each in listed):
        return {each: each for each in listed}, []
    if not all(type(each) is int for each in listed):
        return {}, ["the optimizer's parameters are neither names nor numbers; its state stays unnamed"]
    if recorded := recorded_names(optimizer["param_groups"]):
        return recorded, []
    found = names_of_numbers(groups, shapes, parameters)
    if isinstance(found, Unnamed):
        return {}, [f"the optimizer numbers its parameters, and which is which is not certain: {found.reason}"]
    return found, ["the optimizer numbers its parameters; their names follow from the recorded order and the shapes"]


def state_key(tensor: Tensor) -> str | None:
    """One name for a parameter's state among all tensors, "optim.state.<parameter>.<kind>"; None if it belongs to no parameter."""
    if tensor.kind in _KINDS:
        return f"{_PREFIX}{tensor.name}.{_KINDS[tensor.kind]}"
    return None


def master_key(parameter: str) -> str:
    """The key of a parameter's full-precision copy."""
    return f"{_PREFIX}{parameter}.{_MASTER}"


def is_master_key(key: str) -> bool:
    return key.startswith(_PREFIX) and key.endswith(f".{_MASTER}")


def is_state_key(key: str) -> bool:
    """Whether a canonical name is a key of `state_key`, and not a weight's name."""
    return key.startswith(_PREFIX)


def parameter_and_kind(key: str) -> tuple[str, str]:
    """The two parts of a `state_key`; no kind of torch's has a dot in it."""
    name, _, kind = key.removeprefix(_PREFIX).rpartition(".")
    return name, kind


def is_unnamed(tensor: Tensor) -> bool:
    """Whether it is the state of a parameter that is known by its number only."""
    return tensor.kind == "state" and tensor.name.startswith(_PREFIX)


@dataclass(frozen=True, slots=True)
class Unnamed:
    """Why numbers cannot be given names."""

    reason: str


def names_of_numbers(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, Shape], parameters: Sequence[tuple[str, Shape]]
) -> dict[int, str] | Unnamed:
    """The name of every number, if the recorded order leaves only one way to give them.

    groups: the numbers of each param group. shapes: of the state, where there is any. parameters: the model's, in its order.
    Each group lists its parameters in the model's order, and together they are all of them; so going through the model, the next
    parameter is the next one of some group. If two groups could take it, both ways are followed.
    """
    numbers = [number for group in groups for number in group]
    if len(numbers) != len(set(numbers)):
        return Unnamed("a number is in two param groups")
    if len(numbers) != len(parameters):
        return Unnamed(f"the optimizer has {len(numbers)} parameters, the model {len(parameters)}")
    # How far each group has been used up -> the ways to get there (at most two are kept: more than one is ambiguous).
    ways: dict[tuple[int, ...], list[_Way]] = {(0,) * len(groups): [None]}
    for name, shape in parameters:
        further: dict[tuple[int, ...], list[_Way]] = {}
        for used, reached in ways.items():
            for i, group in enumerate(groups):
                if used[i] < len(group) and shapes.get(number := group[used[i]], shape) == shape:
                    after = (*used[:i], used[i] + 1, *used[i + 1 :])
                    known = further.setdefault(after, [])
                    known.extend((way, number, name) for way in reached[: 2 - len(known)])
        if not further:
            return Unnamed(f"no param group goes on with a parameter of the shape {list(shape)}, which {name} has")
        if len(further) * len(groups) > _MOST_WAYS:
            return Unnamed("parameters of the same shape are in several param groups, in too many possible orders")
        ways = further
    (found,) = ways.values()
    if len(found) > 1:
        return Unnamed(_difference(*found))
    return dict(_steps(found[0]))


_MOST_WAYS = 1 << 14
# A linked list from the last assignment to the first.
_Way = Any


def _steps(way: _Way) -> Iterable[tuple[int, str]]:
    while way is not None:
        way, number, name = way
        yield number, name


def _difference(first: _Way, second: _Way) -> str:
    other = dict(_steps(second))
    number, name = next((number, name) for number, name in reversed(list(_steps(first))) if other[number] != name)
    return f"number {number} could be {name} or {other[number]}: they have the same shape, and the order does not tell them apart"


def recorded_names(groups: Sequence[Mapping[Any, Any]]) -> dict[int, str] | None:
    """The names beside the numbers ("param_names", torch >= 2.6); None if any group has none."""
    found: dict[int, str] = {}
    for group in groups:
        numbers, names = group.get("params"), group.get("param_names")
        if not isinstance(numbers, list) or not isinstance(names, list | tuple) or len(names) != len(numbers):
            return None
        if not all(isinstance(name, str) for name in names):
            return None
        found.update(zip(numbers, names, strict=True))
    return found


def plain_groups(groups: Any, names: Mapping[Any, str]) -> tuple[ParamGroup, ...]:
    """The param groups of a state dict, with names for their parameters; settings that are no plain values are left out."""
    found = []
    for group in groups if isinstance(groups, list) else ():
        listed = group.get("params", group.get("param_names")) if isinstance(group, Mapping) else None
        if isinstance(listed, list | tuple):
            named = tuple(names.get(each, each) for each in listed if each in names or isinstance(each, str))
            found.append(ParamGroup(named, plain_settings(group, without=("params", "param_names"))))
    return tuple(found)


def plain_settings(group: Mapping[Any, Any], *, without: Sequence[str] = ()) -> dict[str, Any]:
    """What a param group holds that is plain values."""
    return {str(key): value for key, value in group.items() if key not in without and is_plain(value)}


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value of a pickle is made of numbers, text, None and tuples, lists and dicts of them, not many and not deep."""
    if isinstance(value, tuple | list | dict) and (depth == 4 or len(value) > 1000):
        return False
    if isinstance(value, tuple | list):
        return all(is_plain(each, depth + 1) for each in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(each, depth + 1) for key, each in value.items())
    return value is None or type(value) in (bool, int, float, str)
