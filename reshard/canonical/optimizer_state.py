"""Optimizer state: the kind of each tensor that a torch optimizer stores, and the parameter that it belongs to.

    state         {parameter: {"step", "exp_avg", "exp_avg_sq", ...}}      parameter: a name, or a number
    param_groups  [{"params": [parameter, ...], "lr", ...}, ...]

Numbers count the parameters through all groups. A group lists its parameters in the order in which the trainer passed them, which is the
order of the model. Source: torch/optim/optimizer.py, Optimizer.state_dict. torch 2.6 and later store names beside the numbers
("param_names") if the optimizer was given names.

State in 8 and 4 bits is several tensors, in whose place stand states with values in float32:

    torchao        w.exp_avg.codes, w.exp_avg.scale, w.exp_avg.qmap                         of w.exp_avg
    bitsandbytes   w.state1, w.absmax1, w.qmap1; small parameters have w.state1 in F32      of w.exp_avg, if w.state2 is there (Adam, LAMB)

bitsandbytes nests them under `__bnb_optimizer_quant_state__` since 0.48. Its blocks have 256 elements, in row-major order. Sources:
torchao/optim/quant_utils.py 0.18; bitsandbytes/optim/optimizer.py and functional.py 0.50.

Among the tensors of a Content, optimizer state has the key "optim.state.<parameter>.<kind>", such as "optim.state.lm_head.weight.exp_avg".
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from reshard.errors import some
from reshard.geometry.boxes import Shape
from reshard.geometry.dtypes import F32
from reshard.index.index import Kind, ParamGroup, Tensor
from reshard.index.origin import Mapped
from reshard.index.shards import Shards

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
# Where schedule-free optimizers keep the count of their steps, a setting of the param group (schedulefree/adamw_schedulefree.py, 1.4).
_SCHEDULE_FREE = "k"
NO_TENSOR = "state of the optimizer that is no tensor"
# Ends of the names of codes in 8 and 4 bits.
CODES = (".codes", ".state1")
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

    Each group lists its parameters in the order of the model. So the next parameter of the model is always the next one of some group, or
    one that the optimizer does not have: frozen, or of another optimizer, as beside Muon. If it could be two of these, both assignments
    are followed.

    groups: the numbers of each param group. shapes: the shapes of the parameters that have state. parameters: the names and shapes of the
    model's parameters, in the model's order.
    """
    numbers = [number for group in groups for number in group]
    if len(numbers) != len(set(numbers)):
        return "a number is in two param groups"
    skipped, sizes = len(parameters) - len(numbers), f"the optimizer has {len(numbers)} parameters, the model {len(parameters)}"
    if skipped < 0:
        return sizes
    # The number of assigned parameters in each group -> the assignments that lead there. Two are enough: more than one is ambiguous.
    assignments: dict[tuple[int, ...], list[_Assignment]] = {(0,) * len(groups): [None]}
    for position, (name, shape) in enumerate(parameters):
        longer: dict[tuple[int, ...], list[_Assignment]] = {}
        for used, shorter in assignments.items():
            if position - sum(used) < skipped:
                same_end = longer.setdefault(used, [])
                same_end.extend(shorter[: 2 - len(same_end)])
            for i, group in enumerate(groups):
                if used[i] < len(group) and shapes.get(number := group[used[i]], shape) == shape:
                    after = (*used[:i], used[i] + 1, *used[i + 1 :])
                    same_end = longer.setdefault(after, [])
                    same_end.extend((assignment, number, name) for assignment in shorter[: 2 - len(same_end)])
        if not longer and skipped:
            return f"{sizes}, and their shapes do not follow each other in the model"
        if not longer:
            return f"{name} has the shape {list(shape)}, but no param group continues with a parameter of this shape"
        if len(longer) * len(groups) > _MOST_ASSIGNMENTS:
            return "parameters of the same shape are in several param groups, in too many possible orders"
        assignments = longer
    (complete,) = assignments.values()
    if len(complete) > 1:
        return (f"{sizes}; " if skipped else "") + _difference(*complete)
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
    listed = tuple(groups())
    has_count = names["step"].keys() | counts_of_groups(listed).keys()
    has_count |= {name for group in listed if is_count(group.settings.get(_SCHEDULE_FREE)) for name in group.names}
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


_TORCHAO = re.compile(r"(.+)/codes")
_BITSANDBYTES = re.compile(r"(.*/)?state([12])")
_BLOCK = 256
# The names in torch of the two states of bitsandbytes. An optimizer with one has it for a purpose that the file does not tell.
_OF_TWO = {"1": "exp_avg", "2": "exp_avg_sq"}


def with_values(states: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The states by key, those in 8 and 4 bits as tensors of their values. What is not of a known form stays as it is.

    states: by the keys of `optimizer_state.state_key_of`. weights: those that the states belong to, by name. keep: leave the states of
    bitsandbytes, which are plain tensors of a state dict.
    """
    values = dict(states)
    for key in states if any(tensor.name.endswith(CODES) for tensor in states.values()) else ():
        parameter, kind = parameter_and_kind(key)
        if parameter not in weights:
            continue
        shape = weights[parameter].shape
        if match := _TORCHAO.fullmatch(kind):
            name, beside = match[1], {part: f"{match[1]}/{part}" for part in ("scale", "qmap")}
        elif not keep and (match := _BITSANDBYTES.fullmatch(kind)):
            prefix, number = match[1] or "", match[2]
            has_two = all(_has_shape(states, state_key_of(parameter, f"{prefix}state{other}"), shape) for other in _OF_TWO)
            name = _OF_TWO[number] if has_two else f"state{number}"
            beside = {"scale": f"{prefix}absmax{number}", "qmap": f"{prefix}qmap{number}"}
        else:
            continue
        parts = {part: states.get(state_key_of(parameter, other)) for part, other in beside.items()}
        tensor = _valued(states[key], parts, shape, _BLOCK if match.re is _BITSANDBYTES else None)
        if tensor is None:
            continue
        for other in (kind, *beside.values()):
            values.pop(state_key_of(parameter, other), None)
        of_kind = STATE_KINDS.get(name, "state")
        values[state_key_of(parameter, name)] = replace(
            tensor, kind=of_kind, name=parameter if name in STATE_KINDS else f"{parameter}.{name}"
        )
    return values


def note_on_plain(names: Sequence[str]) -> list[str]:
    """A note on states that are no tensors: no place of an index has them."""
    return [f"{NO_TENSOR} is left out: {some(names)}"] if names else []


def note_on_codes(tensors: Iterable[Tensor]) -> Iterator[str]:
    """A note that names the classes of state in 8 and 4 bits among the tensors."""
    by_name = {tensor.name: tensor for tensor in tensors if tensor.kind == "state"}
    counts = Counter[str]()
    for name, tensor in by_name.items():
        if name.endswith(".codes"):
            table = by_name.get(f"{name.removesuffix('.codes')}.qmap")
            counts[_CLASSES.get(table.elements if table else 0, "a class of torchao")] += 1
        elif name.endswith((".state1", ".state2")) and tensor.dtype.name == "U8":
            counts["bitsandbytes"] += 1
    if counts:
        yield f"optimizer state in 8 or 4 bits: {', '.join(f'{count} of {name}' for name, count in counts.items())}"


# By the number of values of its table.
_CLASSES = {256: "torchao's OptimState8bit", 16: "torchao's OptimState4bit", 0: "torchao's OptimStateFp8"}


def _has_shape(states: Mapping[str, Tensor], key: str, shape: tuple[int, ...]) -> bool:
    return key in states and states[key].shape == shape


def _valued(codes: Tensor, parts: Mapping[str, Tensor | None], shape: tuple[int, ...], block: int | None) -> Tensor | None:
    """The state with values; None if its parts have no known form. block: the elements of a block; None: scales divide them evenly."""
    elements, scale, table = math.prod(shape), parts["scale"], parts["qmap"]
    if codes.dtype == F32 and codes.shape == shape and scale is None:
        return codes
    if scale is None or scale.dtype != F32 or len(scale.shape) != 1 or not 0 < scale.shape[0] <= elements:
        return None
    block = block or elements // scale.shape[0]
    per_code, values = (1, 256) if codes.shape == shape else (2, 16)
    if codes.shape != shape and codes.shape != (elements // 2,):
        return None
    if -(-elements // block) != scale.shape[0] or block % per_code:
        return None
    if (table is None and codes.dtype.name != "F8_E4M3") or (table and (table.dtype, table.shape) != (F32, (values,))):
        return None
    origin = Mapped(f"{8 // per_code}-bit state", codes, scale, table, block, is_state=True)
    return replace(codes, dtype=F32, shape=shape, origin=origin, shards=codes.shards if per_code == 1 else _rows_of(codes, shape))


def _rows_of(codes: Tensor, shape: tuple[int, ...]) -> Shards:
    """The pieces of codes of two elements as boxes of rows of the state."""
    row = math.prod(shape[1:])
    starts, counts = codes.shards.offsets * 2 // row, codes.shards.sizes * 2 // row
    zeros = np.zeros((len(starts), len(shape) - 1), np.int64)
    return codes.shards.replaced(
        offsets=np.concatenate([starts, zeros], axis=1), sizes=np.concatenate([counts, zeros + np.array(shape[1:], np.int64)], axis=1)
    )
