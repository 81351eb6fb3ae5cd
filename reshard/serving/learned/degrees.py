"""What each rank holds by a learned layout, at several parallel sizes."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.geometry.parallel import Parallel
from reshard.serving.capacity import DegreeReport, DegreeRow, Stage
from reshard.serving.learned.fit import coverage, size_problem
from reshard.serving.learned.layout import LearnedLayout, NamedTemplate, elements


def learned_degree_report(layout: LearnedLayout, model_type: str, parallels: Sequence[Parallel]) -> DegreeReport:
    """What ranks hold at each of the parallel sizes, or why the layout does not cover them."""
    rows = []
    for parallel in parallels:
        problem = size_problem(layout, parallel)
        stages = () if problem else tuple(_stage(layout, parallel, pp_rank) for pp_rank in range(parallel.pp))
        rows.append(DegreeRow(parallel, problem and f"the layout does not cover it: {problem}", stages))
    assumptions = (
        f"weights as {layout.engine} {layout.engine_version} loads them, by a learned layout that covers {coverage(layout)}",
        "the KV cache is not counted, since a layout says nothing about it",
    )
    return DegreeReport(model_type, layout.dtype, None, tuple(rows), assumptions)


def _stage(layout: LearnedLayout, parallel: Parallel, pp_rank: int) -> Stage:
    tensors = layout.stage(parallel, pp_rank).tensors
    ranks = [(parallel.tp, rank) for rank in range(parallel.tp)]
    weights = {rank: sum(_nbytes(each, rank) for each in tensors if each.is_on(*rank)) for rank in ranks}
    fullest = max(weights, key=lambda rank: weights[rank])
    others = [rank for rank in ranks if rank != fullest]
    replicated = sum(_nbytes(each, fullest) for each in tensors if any(_is_same(each, fullest, other) for other in others))
    layers = [number for each in tensors for number in (each.ranges[0] if each.ranges else ())]
    return Stage(range(min(layers), max(layers) + 1) if layers else range(0), weights[fullest], replicated, 0, None)


def _nbytes(named: NamedTemplate, rank: tuple[int, int]) -> int:
    count = 1
    for values in named.ranges:
        count *= len(values)
    return count * elements(named.template, rank) * named.template.dtype.itemsize


def _is_same(named: NamedTemplate, rank: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two ranks hold the same boxes."""
    if not (named.is_on(*rank) and named.is_on(*other)):
        return False
    template = named.template
    numbers = [*template.shape]
    for part in template.parts:
        numbers += [*part.start, *part.at, *(number for axis in part.axes for number in (axis.size, axis.step, axis.source_step))]
        numbers += [part.run.first, part.run.count] if part.run else []
    return all(number.at(*rank) == number.at(*other) for number in numbers)
