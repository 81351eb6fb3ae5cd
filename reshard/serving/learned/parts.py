"""What a tracer says about the tensors of one rank, as values, with runs of experts folded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.value import value

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@value
class TracedPart:
    """A box of a checkpoint tensor in a traced tensor, or a run of such boxes of checkpoint tensors that are numbered through."""

    source: str
    """The checkpoint tensor. In a run, {run} stands for the number."""
    first: int
    """The number of the first tensor of a run."""
    count: int
    """The number of tensors; 0: not a run."""
    run_axis: int
    """The axis of the traced tensor along which the run lies."""
    run_step: int
    """The distance of neighbours of the run along that axis."""
    start: tuple[int, ...]
    """Where the box starts in the checkpoint tensor."""
    at: tuple[int, ...]
    """Where it starts in the traced tensor."""
    axes: tuple[tuple[int, int, int, int, int], ...]
    """For each loop: its length, the axis and the step in the traced tensor, the axis and the step in the checkpoint tensor."""
    functions: tuple[str, ...]
    """What is applied to each element."""


@value
class TracedTensor:
    """A tensor of one rank."""

    dtype: DType
    """Its element type; of a function, if it holds the function's values of all of its parts."""
    shape: tuple[int, ...]
    """Its shape."""
    parts: tuple[TracedPart, ...]
    """The boxes of checkpoint tensors that it holds."""
    fill: float | None
    """The value of all other elements; None if there are none."""
    problem: str
    """Why its elements are not known; empty if they are."""
    kernel: str
    """Why its shape depends on a kernel that the platform chooses; empty if it does not."""


def traced_tensor(document: Mapping[str, Any]) -> TracedTensor:
    """One tensor of a tracer's answer."""
    parts = tuple(_runs(_part(each) for each in document.get("parts", ())))
    fill, problem = _rest(document)
    dtype, applied = from_torch(document["dtype"], where="the layout"), {part.functions: part for part in parts}
    if len(applied) == 1 and applied.keys() <= KNOWN_FUNCTIONS.keys():
        dtype = dtype.of(KNOWN_FUNCTIONS[parts[0].functions])
    elif functions := next(filter(None, applied), None):
        problem = f"the engine applies {', then '.join(functions)} to {applied[functions].source}"
    return TracedTensor(dtype, tuple(document["shape"]), parts, fill, problem, document.get("kernel", ""))


# What an engine does with each element, and the function of it that a conversion computes. A tensor with anything else is refused by name.
KNOWN_FUNCTIONS: Mapping[tuple[str, ...], str] = {(): "", ("exp(x) in float32", "neg(x) in float32"): "-exp"}


def _part(document: Any) -> TracedPart:
    source, start, at, axes, functions = document
    return TracedPart(source, 0, 0, 0, 0, tuple(start), tuple(at), tuple(map(tuple, axes)), tuple(functions))


def _rest(document: Mapping[str, Any]) -> tuple[float | None, str]:
    """The value of the elements that no checkpoint tensor fills, and why they are not known."""
    if "unknown" in document:
        return None, f"its elements could not be followed ({document['unknown']})"
    values: set[float] = set()
    for kind, count, what in document["rest"]:
        if kind == "fill":
            values.add(what)
        elif kind == "real":
            own = document["values"]
            if isinstance(own, str):
                return None, f"the engine computes {own} for it"
            values.update(own)
        elif kind == "unset":
            return None, f"the engine leaves {count} of its elements unset"
        else:
            return None, f"the engine computes it ({what})"
    if len(values) > 1:
        return None, f"it holds {len(values)} different constants"
    return next(iter(values), None), ""


def _runs(parts: Iterable[TracedPart]) -> list[TracedPart]:
    """The parts, with equal boxes of tensors that are numbered through joined."""
    groups: dict[tuple[str, object], list[tuple[int, TracedPart]]] = {}
    alone: list[TracedPart] = []
    for part in parts:
        numbers = list(_NUMBER.finditer(part.source))
        if not numbers:
            alone.append(part)
            continue
        # Experts are the last number in a name: layers.{layer}.mlp.experts.{expert}.up_proj
        last = numbers[-1]
        pattern = f"{part.source[: last.start()]}{{run}}{part.source[last.end() :]}"
        key = pattern, (part.start, part.axes, part.functions, part.at[1:])
        groups.setdefault(key, []).append((int(last[0]), part))
    for (pattern, _), members in groups.items():
        alone.extend(_joined(pattern, sorted(members, key=lambda each: each[0])))
    return sorted(alone, key=lambda part: (part.at, part.source))


def _joined(pattern: str, members: list[tuple[int, TracedPart]]) -> list[TracedPart]:
    """Runs of at least two consecutive numbers at equal distances along the first axis; all others stay as they are."""
    found: list[TracedPart] = []
    start = 0
    while start < len(members):
        (number, first), stop = members[start], start + 1
        step = members[stop][1].at[0] - first.at[0] if stop < len(members) and first.at else 0
        while step > 0 and stop < len(members):
            other, part = members[stop]
            if other != number + stop - start or part.at[0] != first.at[0] + (stop - start) * step:
                break
            stop += 1
        if stop - start > 1:
            run = (pattern, number, stop - start, 0, step, first.start, first.at, first.axes, first.functions)
            found.append(TracedPart(*run))
        else:
            found.append(first)
            stop = start + 1
        start = stop
    return found
