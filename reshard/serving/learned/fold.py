"""From traced ranks to templates: numbers become rules of the rank.

Three things fold: ranks (here), layers (layers.py), and experts (parts.py). Every fold is checked by unfolding it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from reshard.serving.learned.layers import Ranks, folded_layers
from reshard.serving.learned.layout import NamedTemplate, TemplateAxis, TemplatePart, TemplateRun, TensorTemplate
from reshard.serving.learned.numbers import Fixed, Number, TpRank, fitted, listed
from reshard.serving.learned.parts import TracedPart, TracedTensor
from reshard.serving.learned.unfold import plain, unfolded_tensor

TracedRanks = Mapping[TpRank, Mapping[str, TracedTensor]]
"""(tp, tp_rank) -> name -> tensor, of one pipeline stage."""


def folded_stage(ranks: TracedRanks) -> tuple[NamedTemplate, ...]:
    """The tensors of a stage as templates."""
    by_name: dict[str, dict[TpRank, TracedTensor]] = {}
    for rank, tensors in ranks.items():
        for name, tensor in tensors.items():
            by_name.setdefault(name, {})[rank] = tensor
    found: dict[str, list[tuple[Ranks, TensorTemplate]]] = {}
    for name, of_name in by_name.items():
        for alike in _alike(of_name):
            for group, template in _exact(alike):
                is_everywhere = len(group) == len(ranks)
                found.setdefault(name, []).append((None if is_everywhere else _by_size(group), template))
    return tuple(folded_layers(found))


def _by_size(ranks: Iterable[TpRank]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for tp, rank in sorted(ranks):
        found.setdefault(tp, []).append(rank)
    return {tp: tuple(numbers) for tp, numbers in found.items()}


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
    if len(tensors) == 1 or all(plain(unfolded_tensor(template, (), rank)) == plain(tensor) for rank, tensor in tensors.items()):
        yield tensors, template
        return
    sizes = sorted({tp for tp, _ in tensors})
    groups = [{rank: tensor for rank, tensor in tensors.items() if rank[0] == tp} for tp in sizes]
    for group in groups if len(groups) > 1 else [{rank: tensor} for rank, tensor in tensors.items()]:
        yield from _exact(group)


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
    return TensorTemplate(first.dtype, shape, tuple(parts), fill, first.problem, kernel)


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
