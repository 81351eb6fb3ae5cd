"""What a tracer says about the tensors of one rank, as templates whose numbers are plain, with runs of experts folded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from reshard.geometry.dtypes import from_torch
from reshard.serving.learned.layout import HeldBox, TemplateAxis, TemplatePart, TemplateRun, TensorTemplate

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# What an engine does with each element, and the function of it that a conversion computes. A tensor with anything else is refused by name.
_KNOWN_FUNCTIONS: Mapping[tuple[str, ...], str] = {(): "", ("exp(x) in float32", "neg(x) in float32"): "-exp"}


def traced_tensor(document: Mapping[str, Any]) -> TensorTemplate:
    """One tensor of a tracer's answer. Its element type is of a function if it holds the function's values of all of its parts."""
    fill, problem = _rest(document)
    dtype, shape = from_torch(document["dtype"], where="the layout"), tuple(document["shape"])
    boxes: dict[tuple[str, ...], list[HeldBox]] = {}
    for source, start, at, axes, functions in document.get("parts", ()):
        boxes.setdefault(tuple(functions), []).append(HeldBox(source, tuple(start), tuple(at), tuple(map(tuple, axes))))
    place = attrgetter("at", "source")
    applied = {functions: sorted(_runs(of), key=place) for functions, of in boxes.items()}
    parts = sorted((part for of in applied.values() for part in of), key=place)
    if len(applied) == 1 and applied.keys() <= _KNOWN_FUNCTIONS.keys():
        dtype = dtype.of(_KNOWN_FUNCTIONS[next(iter(applied))])
    elif functions := next(filter(None, applied), None):
        problem = f"the engine applies {', then '.join(functions)} to {applied[functions][-1].source}"
    return TensorTemplate(dtype, shape, tuple(parts), fill, problem, document.get("kernel", ""))


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


def _runs(boxes: Iterable[HeldBox]) -> Iterator[TemplatePart]:
    """The boxes as parts, with equal boxes of tensors that are numbered through joined."""
    groups: dict[tuple[Any, ...], list[tuple[int, HeldBox]]] = {}
    for box in boxes:
        numbers = list(_NUMBER.finditer(box.source))
        if not numbers:
            yield _part(box)
            continue
        # Experts are the last number in a name: layers.{layer}.mlp.experts.{expert}.up_proj
        last = numbers[-1]
        key = box.source[: last.start()], box.source[last.end() :], box.start, box.axes, box.at[1:]
        groups.setdefault(key, []).append((int(last[0]), box))
    for (front, back, *_), members in groups.items():
        members.sort(key=lambda member: member[0])
        while members:
            (number, first), count = members[0], _length_of_run(members)
            if count > 1:
                run = TemplateRun(number, count, 0, members[1][1].at[0] - first.at[0])
                yield _part(first._replace(source=f"{front}{{run}}{back}"), run)
            else:
                yield _part(first)
            members = members[count:]


def _length_of_run(members: Sequence[tuple[int, HeldBox]]) -> int:
    """How many of the first boxes have consecutive numbers, and lie at equal distances along the first axis."""
    number, first = members[0]
    step = members[1][1].at[0] - first.at[0] if len(members) > 1 and first.at else 0
    count = 1
    while step > 0 and count < len(members):
        other, box = members[count]
        if other != number + count or box.at[0] != first.at[0] + count * step:
            break
        count += 1
    return count


def _part(box: HeldBox, run: TemplateRun | None = None) -> TemplatePart:
    return TemplatePart(box.source, box.start, box.at, tuple(TemplateAxis(*axis) for axis in box.axes), run)
