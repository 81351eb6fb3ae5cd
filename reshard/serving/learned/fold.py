"""From traced ranks to templates: numbers become rules of the rank.

Three things fold: ranks (here), layers (layers.py), and experts (trace.py). Every fold is checked by unfolding it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from reshard.geometry.dtypes import DType
from reshard.serving.learned.layers import Ranks, folded_layers
from reshard.serving.learned.layout import HeldBox, NamedTemplate, TemplateAxis, TemplatePart, TemplateRun, TensorTemplate
from reshard.serving.learned.numbers import Number, TpRank, fitted, listed, values

TracedRanks = Mapping[TpRank, Mapping[str, TensorTemplate]]
"""(tp, tp_rank) -> name -> tensor, of one pipeline stage."""


def folded_stage(ranks: TracedRanks) -> tuple[NamedTemplate, ...]:
    """The tensors of a stage as templates."""
    by_name: dict[str, dict[TpRank, TensorTemplate]] = {}
    for rank, tensors in ranks.items():
        for name, tensor in tensors.items():
            by_name.setdefault(name, {})[rank] = tensor
    variants: dict[str, list[tuple[Ranks, TensorTemplate]]] = {}
    for name, of_name in by_name.items():
        for alike in _alike(of_name):
            for group, template in _exact(alike):
                by_size = {tp: tuple(sorted(rank for size, rank in group if size == tp)) for tp, _ in sorted(group)}
                variants.setdefault(name, []).append((None if len(group) == len(ranks) else by_size, template))
    return tuple(folded_layers(variants))


def _alike(tensors: Mapping[TpRank, TensorTemplate]) -> Iterator[Mapping[TpRank, TensorTemplate]]:
    """The ranks whose tensors consist of the same parts, up to numbers."""
    groups: dict[tuple[object, ...], dict[TpRank, TensorTemplate]] = {}
    most = max(tensors.values(), key=lambda tensor: (len(tensor.parts), sum(len(part.axes) for part in tensor.parts)))
    for rank, tensor in tensors.items():
        # What padding leaves of a rank's share may be nothing.
        kind = most if _is_subset(tensor, most) else tensor
        key = (tensor.dtype, len(tensor.shape), tensor.problem, *map(_part_key, kind.parts))
        groups.setdefault(key, {})[rank] = tensor
    for group in groups.values():
        fills = {tensor.fill for tensor in group.values()} - {None}
        if len(fills) > 1:
            yield from ({rank: tensor} for rank, tensor in group.items())
        else:
            yield group


def _exact(tensors: Mapping[TpRank, TensorTemplate]) -> Iterator[tuple[Mapping[TpRank, TensorTemplate], TensorTemplate]]:
    """The ranks in groups for which one template gives exactly what was traced: all, those of one size, or each rank alone."""
    template = _template(tensors)
    if len(tensors) == 1 or all(unfolded(template, (), rank) == unfolded(tensor, (), rank) for rank, tensor in tensors.items()):
        yield tensors, template
        return
    sizes = sorted({tp for tp, _ in tensors})
    groups = [{rank: tensor for rank, tensor in tensors.items() if rank[0] == tp} for tp in sizes]
    for group in groups if len(groups) > 1 else [{rank: tensor} for rank, tensor in tensors.items()]:
        yield from _exact(group)


def _part_key(part: TemplatePart) -> tuple[str, bool]:
    return part.source, part.run is not None


def _is_subset(tensor: TensorTemplate, of: TensorTemplate) -> bool:
    """Whether the parts of a tensor are those of another, in the same order, or some of them are missing."""
    keys = iter([_part_key(part) for part in of.parts])
    return all(_part_key(part) in keys for part in tensor.parts)


def _template(tensors: Mapping[TpRank, TensorTemplate]) -> TensorTemplate:
    """One template for all of these ranks."""
    first = max(tensors.values(), key=lambda tensor: len(tensor.parts))
    parts = []
    for position, _ in enumerate(first.parts):
        by_rank = {rank: part for rank, tensor in tensors.items() if (part := _part_at(tensor, first, position)) is not None}
        parts.append(_part(by_rank, tensors))
    fill = next((tensor.fill for tensor in tensors.values() if tensor.fill is not None), None)
    kernel = next((tensor.kernel for tensor in tensors.values() if tensor.kernel), "")
    shape = _numbers({rank: tensor.shape for rank, tensor in tensors.items()})
    return TensorTemplate(first.dtype, shape, tuple(parts), fill, first.problem, kernel)


def _part_at(tensor: TensorTemplate, of: TensorTemplate, position: int) -> TemplatePart | None:
    """The part of a tensor that stands for a part of another tensor; None if it has none."""
    if len(tensor.parts) == len(of.parts):
        return tensor.parts[position]
    key = _part_key(of.parts[position])
    before = sum(_part_key(part) == key for part in of.parts[:position])
    same = [part for part in tensor.parts if _part_key(part) == key]
    return same[before] if before < len(same) else None


def _part(by_rank: Mapping[TpRank, TemplatePart], ranks: Collection[TpRank]) -> TemplatePart:
    first = max(by_rank.values(), key=lambda part: len(part.axes))
    loops = []
    for number, wanted in enumerate(first.axes):
        here = {rank: loop for rank, part in by_rank.items() if (loop := _loop(part, first, number))}
        # A loop that is not there has one turn. A box that a rank lacks has a loop without turns.
        sizes: dict[TpRank, Number] = {rank: here[rank].size if rank in here else 1 for rank in by_rank}
        sizes |= {rank: 0 for rank in ranks if rank not in by_rank} if number == 0 else {}
        steps = _numbers({rank: (loop.step, loop.source_step) for rank, loop in here.items()})
        loops.append(TemplateAxis(_number(sizes), wanted.axis, steps[0], wanted.source_axis, steps[1]))
    if not first.axes and len(by_rank) < len(ranks):
        loops.append(TemplateAxis(_number({rank: int(rank in by_rank) for rank in ranks}), 0, 1, 0, 1))
    start = _numbers({rank: part.start for rank, part in by_rank.items()})
    at = _numbers({rank: part.at for rank, part in by_rank.items()})
    runs = _numbers({rank: part.run for rank, part in by_rank.items() if part.run})
    run = TemplateRun(runs[0], runs[1], first.run.axis, runs[3]) if first.run else None
    return TemplatePart(first.source, start, at, tuple(loops), run)


def _loop(part: TemplatePart, of: TemplatePart, number: int) -> TemplateAxis | None:
    """The loop of a part that stands for a loop of another part; None if it has one turn, and so is not there."""
    wanted = of.axes[number]
    if [(loop.axis, loop.source_axis) for loop in part.axes] == [(loop.axis, loop.source_axis) for loop in of.axes]:
        return part.axes[number]
    same = [loop for loop in part.axes if (loop.axis, loop.source_axis) == (wanted.axis, wanted.source_axis)]
    if len(same) > 1:
        same = [loop for loop in same if loop.source_step == wanted.source_step]
    return same[0] if same else None


def _numbers(rows: Mapping[TpRank, Sequence[Number]]) -> tuple[Number, ...]:
    """The numbers that are each of these rows on its rank."""
    return tuple(_number(dict(zip(rows, column, strict=True))) for column in zip(*rows.values(), strict=True))


def _number(points: Mapping[TpRank, Number]) -> Number:
    """The number that is each of these on its rank."""
    of_ranks = {rank: values([number], rank)[0] for rank, number in points.items()}
    rule = fitted(of_ranks)
    return listed(of_ranks) if rule is None else rule


Unfolded = tuple[DType, tuple[int, ...], list[HeldBox], float | None, str]


def unfolded(template: TensorTemplate, numbers: tuple[int, ...], rank: TpRank) -> Unfolded:
    """What a template says about a tensor of one rank, box by box in one order, so that two can be compared: the element type, the shape,
    the boxes, the value of all other elements, and why they are not known. numbers: those in the tensor's name."""
    shape = values(template.shape, rank)
    boxes = sorted(box._replace(axes=tuple(sorted(box.axes))) for part in template.parts for box in part.on(numbers, rank))
    covered = sum(math.prod(loop[0] for loop in box.axes) for box in boxes)
    return template.dtype, shape, boxes, template.fill if covered < math.prod(shape) else None, template.problem
