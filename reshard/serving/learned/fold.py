"""From traced ranks to templates. Three things fold: ranks (numbers become rules), layers (one template for many), and experts (parts.py).

A fold is checked by unfolding it: every rank that was traced must come out exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product

from reshard.serving.learned.layout import (
    NamedTemplate,
    Ranges,
    TemplateAxis,
    TemplatePart,
    TemplateRun,
    TensorTemplate,
    dtype_of,
    filled,
)
from reshard.serving.learned.numbers import Fixed, Number, TpRank, fitted, listed
from reshard.serving.learned.parts import TracedPart, TracedTensor

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
TracedRanks = Mapping[TpRank, Mapping[str, TracedTensor]]
"""(tp, tp_rank) -> name -> tensor, of one pipeline stage."""


def folded_stage(ranks: TracedRanks) -> tuple[NamedTemplate, ...]:
    """The tensors of a stage as templates."""
    by_name: dict[str, dict[TpRank, TracedTensor]] = {}
    for rank, tensors in ranks.items():
        for name, tensor in tensors.items():
            by_name.setdefault(name, {})[rank] = tensor
    found: dict[str, list[tuple[Mapping[int, tuple[int, ...]] | None, TensorTemplate]]] = {}
    for name, tensors in by_name.items():
        for alike in _alike(tensors):
            for group, template in _exact(alike):
                is_everywhere = len(group) == len(ranks)
                found.setdefault(name, []).append((None if is_everywhere else _by_size(group), template))
    return tuple(_folded_layers(found))


def _by_size(ranks: Iterable[TpRank]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for tp, rank in sorted(ranks):
        found.setdefault(tp, []).append(rank)
    return {tp: tuple(numbers) for tp, numbers in found.items()}


# ---- ranks


def _alike(tensors: Mapping[TpRank, TracedTensor]) -> Iterator[Mapping[TpRank, TracedTensor]]:
    """The ranks whose tensors consist of the same parts, up to numbers."""
    groups: dict[tuple[object, ...], dict[TpRank, TracedTensor]] = {}
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


def _exact(tensors: Mapping[TpRank, TracedTensor]) -> Iterator[tuple[Mapping[TpRank, TracedTensor], TensorTemplate]]:
    """The ranks in groups for which one template gives exactly what was traced: all, those of one size, or each rank alone."""
    template = _template(tensors)
    if len(tensors) == 1 or all(plain(_unfolded(template, (), rank)) == plain(tensor) for rank, tensor in tensors.items()):
        yield tensors, template
        return
    sizes = {tp for tp, _ in tensors}
    for key in sizes if len(sizes) > 1 else tensors:
        yield from _exact({rank: tensor for rank, tensor in tensors.items() if key in (rank, rank[0])})


def _part_key(part: TracedPart) -> tuple[object, ...]:
    return part.source, part.count > 0, part.run_axis, part.functions


def _is_subset(tensor: TracedTensor, of: TracedTensor) -> bool:
    """Whether the parts of a tensor are those of another, in the same order, or some of them are missing."""
    keys = iter([_part_key(part) for part in of.parts])
    return all(_part_key(part) in keys for part in tensor.parts)


def _template(tensors: Mapping[TpRank, TracedTensor]) -> TensorTemplate:
    """One template for all of these ranks."""
    first = max(tensors.values(), key=lambda tensor: len(tensor.parts))
    shape = tuple(_number({rank: tensor.shape[axis] for rank, tensor in tensors.items()}) for axis in range(len(first.shape)))
    parts = []
    for position, _ in enumerate(first.parts):
        found = {rank: part for rank, tensor in tensors.items() if (part := _part_at(tensor, first, position)) is not None}
        parts.append(_part(found, tensors))
    fill = next((tensor.fill for tensor in tensors.values() if tensor.fill is not None), None)
    kernel = next((tensor.kernel for tensor in tensors.values() if tensor.kernel), "")
    return TensorTemplate(dtype_of(first.dtype), shape, tuple(parts), fill, first.problem, kernel)


def _part_at(tensor: TracedTensor, of: TracedTensor, position: int) -> TracedPart | None:
    """The part of a tensor that stands for a part of another tensor; None if it has none."""
    if len(tensor.parts) == len(of.parts):
        return tensor.parts[position]
    key = _part_key(of.parts[position])
    before = sum(_part_key(part) == key for part in of.parts[:position])
    same = [part for part in tensor.parts if _part_key(part) == key]
    return same[before] if before < len(same) else None


def _part(found: Mapping[TpRank, TracedPart], ranks: Iterable[TpRank]) -> TemplatePart:
    first = max(found.values(), key=lambda part: len(part.axes))
    loops = []
    for number, (_, axis, _, source_axis, source_step) in enumerate(first.axes):
        here = {rank: _loop(part, first, number) for rank, part in found.items()}
        sizes = {rank: loop[0] if loop else 1 for rank, loop in here.items()}
        # A box that a rank lacks has a loop without turns.
        sizes |= {rank: 0 for rank in ranks if rank not in found} if number == 0 else {}
        steps = {rank: loop[2] for rank, loop in here.items() if loop}
        source_steps = {rank: loop[4] for rank, loop in here.items() if loop} or {next(iter(found)): source_step}
        loops.append(TemplateAxis(_number(sizes), axis, _number(steps), source_axis, _number(source_steps)))
    if not first.axes and len(found) < len(list(ranks)):
        loops.append(TemplateAxis(_number({rank: int(rank in found) for rank in ranks}), 0, Fixed(1), 0, Fixed(1)))
    start = tuple(_number({rank: part.start[axis] for rank, part in found.items()}) for axis in range(len(first.start)))
    at = tuple(_number({rank: part.at[axis] for rank, part in found.items()}) for axis in range(len(first.at)))
    run = None
    if first.count:
        firsts, counts = {rank: part.first for rank, part in found.items()}, {rank: part.count for rank, part in found.items()}
        run = TemplateRun(_number(firsts), _number(counts), first.run_axis, _number({rank: part.run_step for rank, part in found.items()}))
    return TemplatePart(first.source, start, at, tuple(loops), run)


def _loop(part: TracedPart, of: TracedPart, number: int) -> tuple[int, int, int, int, int] | None:
    """The loop of a part that stands for a loop of another part; None if it has one turn, and so is not there."""
    if len(part.axes) == len(of.axes) and [loop[1::2] for loop in part.axes] == [loop[1::2] for loop in of.axes]:
        return part.axes[number]
    wanted = of.axes[number]
    same = [loop for loop in part.axes if loop[1] == wanted[1] and loop[3] == wanted[3]]
    if len(same) > 1:
        same = [loop for loop in same if loop[4] == wanted[4]]
    return same[0] if same else None


def _number(points: Mapping[TpRank, int]) -> Number:
    return fitted(points) or listed(points)


# ---- layers


def _folded_layers(
    found: Mapping[str, list[tuple[Mapping[int, tuple[int, ...]] | None, TensorTemplate]]],
) -> Iterator[NamedTemplate]:
    """One entry for the tensors whose names and templates differ only in numbers."""
    groups: dict[tuple[object, ...], dict[tuple[int, ...], tuple[object, TensorTemplate]]] = {}
    for name, variants in found.items():
        pattern, numbers = _pattern(name)
        for ranks, template in variants:
            key = (pattern, _frozen(ranks), _without_numbers(template))
            groups.setdefault(key, {})[numbers] = ranks, template
    for (pattern, *_), members in groups.items():
        for same in _consistent(members):
            ranks, template = members[same[0]]
            for ranges in products(same):
                yield NamedTemplate(str(pattern), ranges, _named(template, same, members), ranks)  # type: ignore[arg-type]


def _frozen(ranks: Mapping[int, tuple[int, ...]] | None) -> object:
    return None if ranks is None else tuple(sorted(ranks.items()))


def _pattern(name: str) -> tuple[str, tuple[int, ...]]:
    """A name with {0}, {1}, ... in place of its numbers, and the numbers."""
    numbers = tuple(int(match[0]) for match in _NUMBER.finditer(name))
    position = iter(range(len(numbers)))
    return _NUMBER.sub(lambda _: f"{{{next(position)}}}", name), numbers


def _without_numbers(template: TensorTemplate) -> TensorTemplate:
    """The template with {} in place of every number in the names of its sources."""
    return replace(template, parts=tuple(replace(part, source=_NUMBER.sub("{}", part.source)) for part in template.parts))


def _slots(template: TensorTemplate) -> tuple[int, ...]:
    """The numbers in the names of a template's sources, in order."""
    return tuple(int(match[0]) for part in template.parts for match in _NUMBER.finditer(part.source))


def _consistent(members: Mapping[tuple[int, ...], tuple[object, TensorTemplate]]) -> list[list[tuple[int, ...]]]:
    """The members in groups in which every number of a source's name is a number of the tensor's name, or always the same."""
    groups: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    references = _references(members)
    for numbers, (_, template) in members.items():
        slots = _slots(template)
        kept = tuple(
            slot if reference is None or numbers[reference] != slot else f"{{{reference}}}"
            for slot, reference in zip(slots, references, strict=True)
        )
        groups.setdefault(kept, []).append(numbers)
    return list(groups.values())


def _references(members: Mapping[tuple[int, ...], tuple[object, TensorTemplate]]) -> list[int | None]:
    """For each number in the sources' names, the number in the tensor's name that it equals most often; None if it equals none."""
    rows = [(numbers, _slots(template)) for numbers, (_, template) in members.items()]
    names, slots = len(rows[0][0]), len(rows[0][1])
    found: list[int | None] = []
    for slot in range(slots):
        hits = [sum(numbers[position] == row[slot] for numbers, row in rows) for position in range(names)]
        found.append(hits.index(max(hits)) if hits and max(hits) else None)
    return found


def _named(
    template: TensorTemplate, same: list[tuple[int, ...]], members: Mapping[tuple[int, ...], tuple[object, TensorTemplate]]
) -> TensorTemplate:
    """The template of the first of these members, with references in the names of its sources."""
    references = iter(_references(members))
    numbers = same[0]

    def named(match: re.Match[str]) -> str:
        reference = next(references)
        return match[0] if reference is None or numbers[reference] != int(match[0]) else f"{{{reference}}}"

    return replace(template, parts=tuple(replace(part, source=_NUMBER.sub(named, part.source)) for part in template.parts))


def products(rows: Iterable[tuple[int, ...]]) -> Iterator[Ranges]:
    """The rows of numbers as products of ranges: together they are exactly the rows."""
    rows = sorted(rows)
    if not rows or not rows[0]:
        yield from (() for _ in rows[:1])
        return
    whole = tuple(tuple(sorted({row[position] for row in rows})) for position in range(len(rows[0])))
    if len(rows) == len(set(rows)) and sum(1 for _ in product(*whole)) == len(rows):
        yield whole
        return
    by_rest: dict[tuple[int, ...], list[int]] = {}
    for first, *rest in rows:
        by_rest.setdefault(tuple(rest), []).append(first)
    by_firsts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for rest, firsts in by_rest.items():
        by_firsts.setdefault(tuple(firsts), []).append(rest)
    for firsts, rests in by_firsts.items():
        yield from ((firsts, *ranges) for ranges in products(rests))


def folded_names(names: Iterable[tuple[str, tuple[object, ...]]]) -> Iterator[tuple[str, Ranges, tuple[object, ...]]]:
    """Names with facts -> patterns with ranges and the same facts."""
    groups: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    for name, facts in names:
        pattern, numbers = _pattern(name)
        groups.setdefault((pattern, *facts), []).append(numbers)
    for (pattern, *facts), rows in groups.items():
        for ranges in products(rows):
            yield str(pattern), ranges, tuple(facts)


def unfolded(templates: Iterable[NamedTemplate], rank: TpRank) -> dict[str, TracedTensor]:
    """What the templates say about one rank, in the form of a trace. Runs of experts are given one by one."""
    found = {}
    for each in templates:
        if not each.is_on(*rank):
            continue
        for name, numbers in each.names():
            found[name] = _unfolded(each.template, numbers, rank)
    return found


def _unfolded(template: TensorTemplate, numbers: tuple[int, ...], rank: TpRank) -> TracedTensor:
    shape = tuple(number.at(*rank) for number in template.shape)
    parts = tuple(part for each in template.parts for part in _unfolded_part(each, numbers, rank))
    return TracedTensor(template.dtype.torch, shape, parts, template.fill, template.problem, template.kernel)


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
