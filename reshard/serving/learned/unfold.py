"""From templates back to the tensors of one rank, in the form of a trace; and the comparison of the two."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from reshard.serving.learned.layout import NamedTemplate, TemplatePart, TensorTemplate, filled
from reshard.serving.learned.numbers import TpRank
from reshard.serving.learned.parts import TracedPart, TracedTensor


def unfolded(templates: Iterable[NamedTemplate], rank: TpRank) -> dict[str, TracedTensor]:
    """What the templates say about one rank, in the form of a trace. Runs of experts are given one by one."""
    found = {}
    for each in templates:
        if not each.is_on(*rank):
            continue
        for name, numbers in each.names():
            found[name] = unfolded_tensor(each.template, numbers, rank)
    return found


def unfolded_tensor(template: TensorTemplate, numbers: tuple[int, ...], rank: TpRank) -> TracedTensor:
    """What a template says about one tensor of one rank. numbers: those in its name."""
    shape = tuple(number.at(*rank) for number in template.shape)
    parts = tuple(part for each in template.parts for part in _unfolded_part(each, numbers, rank))
    return TracedTensor(template.dtype, shape, parts, template.fill, template.problem, template.kernel)


def _unfolded_part(part: TemplatePart, numbers: tuple[int, ...], rank: TpRank) -> Iterator[TracedPart]:
    start, at = tuple(number.at(*rank) for number in part.start), tuple(number.at(*rank) for number in part.at)
    loops = [(each.size.at(*rank), each.axis, each.step.at(*rank), each.source_axis, each.source_step.at(*rank)) for each in part.axes]
    if any(loop[0] == 0 for loop in loops):
        return
    axes = tuple(loop for loop in loops if loop[0] > 1)
    if part.run is None:
        yield TracedPart(filled(part.source, numbers), 0, 0, 0, 0, start, at, axes, ())
        return
    first, step = part.run.first.at(*rank), part.run.step.at(*rank)
    for number in range(part.run.count.at(*rank)):
        here = tuple(where + number * step * (axis == part.run.axis) for axis, where in enumerate(at))
        yield TracedPart(filled(part.source, numbers, first + number), 0, 0, 0, 0, start, here, axes, ())


def plain(tensor: TracedTensor) -> TracedTensor:
    """A traced tensor with its runs given one by one, and its parts in one order, so that two can be compared."""
    parts = [each for part in tensor.parts for each in _one_by_one(part)]
    covered = sum(math.prod(loop[0] for loop in part.axes) for part in parts)
    fill = tensor.fill if covered < math.prod(tensor.shape) else None
    return replace(tensor, parts=tuple(sorted(parts, key=lambda part: (part.at, part.source, part.start))), fill=fill, kernel="")


def _one_by_one(part: TracedPart) -> Iterator[TracedPart]:
    if not part.count:
        yield replace(part, axes=tuple(sorted(part.axes)), functions=())
    for number in range(part.count):
        at = tuple(where + number * part.run_step * (axis == part.run_axis) for axis, where in enumerate(part.at))
        source = part.source.replace("{run}", str(part.first + number))
        yield TracedPart(source, 0, 0, 0, 0, part.start, at, tuple(sorted(part.axes)), ())
