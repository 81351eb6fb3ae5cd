"""Whether a learned layout can be used: for this checkpoint, at these sizes, for this engine and platform; and what ranks hold then."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.meshes import Parallel
from reshard.serving.capacity import DegreeReport, DegreeRow, Stage
from reshard.serving.learned.layout import LearnedLayout, LearnedSizes, NamedTemplate, TensorTemplate
from reshard.serving.learned.learn import config_digests
from reshard.serving.learned.numbers import NoRule, TpRank, values
from reshard.serving.legality import check_expert_parallel

Shapes = Mapping[str, tuple[int, ...]]


def relearn(layout: LearnedLayout, parallel: Parallel | None = None) -> str:
    """The command that makes a layout in place of this one."""
    tp = str(parallel.tp) if parallel else ",".join(map(str, layout.sizes[0].tp))
    pp = f" --pp {parallel.pp}" if parallel and parallel.pp > 1 else ""
    ep = f" --ep {parallel.ep}" if parallel and parallel.ep > 1 else ""
    return f"`reshard learn MODEL --engine {layout.engine} --tp {tp}{pp}{ep} -o layout.json`"


def check_engine(layout: LearnedLayout, engine: str, version: str | None) -> None:
    """Raises RequestError if the layout is another engine's, or was learned from another version than the user asks for."""
    if layout.engine != engine:
        raise RequestError(
            f"`layout=`: the layout was learned from {layout.engine}, the target is {engine}", do=f"Use `to={layout.engine}`"
        )
    if version is not None and version != layout.engine_version:
        raise RequestError(
            f"`layout=`: it was learned from {engine} {layout.engine_version}, `engine_version=` asks for {version}",
            why="Other versions may name and fuse tensors in another way",
            do=f"Leave out `engine_version=`, or learn the layout from {engine} {version} with {relearn(layout)}",
        )


def check_config(layout: LearnedLayout, config: Mapping[str, Any] | None) -> None:
    """Raises RequestError, naming the first key, if the model's config is not the one that the layout was learned from."""
    if config is None:
        raise RequestError(
            "there is no config.json in the checkpoint or in its parent directory",
            why=f"{layout.engine} needs it, and the layout was learned from one",
            do="Add `model=DIR`, the directory with the model's config",
        )
    digests = config_digests(config)
    if different := sorted(key for key in layout.config.keys() | digests.keys() if layout.config.get(key) != digests.get(key)):
        key = different[0]
        others = f", and {len(different) - 1} more" if len(different) > 1 else ""
        state = "is not in this config" if key not in digests else "is not in that config" if key not in layout.config else "differs"
        raise RequestError(
            f"the layout was learned from another config.json: {key} {state}{others}",
            why="How ranks share the weights may depend on it",
            do=f"Learn the layout of this model with {relearn(layout)}",
        )


def check_sources(layout: LearnedLayout, shapes: Shapes, used: Collection[str]) -> None:
    """Raises RequestError, naming the first tensor, unless the checkpoint has the tensors that the layout was learned from.

    shapes: the checkpoint's tensors. used: those that the engine loads.
    """
    for name, shape in layout.source_shapes.items():
        if name in shapes and shapes[name] != shape:
            raise _does_not_fit(layout, name, f"it is {list(shapes[name])}, the layout was learned from {list(shape)}")
        if name not in shapes and name in used:
            raise _does_not_fit(layout, name, "the checkpoint has no such tensor, the one that the layout was learned from has it")
    if surplus := [name for name in shapes if name not in layout.source_shapes]:
        more = f" (nor {len(surplus) - 1} more)" if len(surplus) > 1 else ""
        raise _does_not_fit(layout, surplus[0], f"the checkpoint that the layout was learned from has no such tensor{more}")


def _does_not_fit(layout: LearnedLayout, name: str, what: str) -> RequestError:
    return RequestError(
        what,
        where=name,
        why="The layout does not fit this checkpoint",
        do=f"Learn the layout of this one with {relearn(layout)}; if the names differ by a prefix only, add `strip_prefix=`",
    )


def check_sizes(layout: LearnedLayout, parallel: Parallel) -> None:
    """Raises RequestError, with the reason, if the layout does not say what ranks hold at these sizes."""
    check_expert_parallel(parallel, layout.engine)
    if reason := size_problem(layout, parallel):
        raise RequestError(
            f"the layout does not cover {parallel}: {reason}",
            why=f"It covers {coverage(layout)}",
            do=f"Use one of these sizes, or learn the layout with {relearn(layout, parallel)}",
            id="illegal-sizes",
        )


def size_problem(layout: LearnedLayout, parallel: Parallel) -> str | None:
    """Why the layout does not say what ranks hold at these sizes; None if it does."""
    traced = next((sizes for sizes in layout.sizes if (sizes.pp, sizes.has_ep) == (parallel.pp, parallel.ep > 1)), None)
    if traced is None:
        with_ep = " with expert parallelism" if parallel.ep > 1 else ""
        return f"pipeline-parallel size {parallel.pp}{with_ep} was not traced"
    if parallel.tp in traced.tp:
        return None
    if traced.withheld is None:
        return f"TP {parallel.tp} was not traced, and the traced sizes do not tell it"
    return _count_problem(layout, traced, parallel.tp) or _rule_problem(layout, parallel)


def _count_problem(layout: LearnedLayout, traced: LearnedSizes, tp: int) -> str | None:
    """Why the ranks may share heads or groups in a way that no traced size has shown."""
    for key, count in layout.counts.items():
        replication_was_seen = any(size > count for size in traced.tp)
        if count % tp and not (replication_was_seen and tp % count == 0):
            return f"{tp} ranks share {key} = {count} in a way that no traced size shows"
    return None


def _rule_problem(layout: LearnedLayout, parallel: Parallel) -> str | None:
    """Why a number has no value at these sizes."""
    for pp_rank in range(parallel.pp):
        for tensor in layout.stage(parallel, pp_rank):
            try:
                for rank in range(parallel.tp):
                    values(tensor.template.numbers, (parallel.tp, rank))
            except NoRule as error:
                return f"{tensor.name}: {error}"
    return None


def coverage(layout: LearnedLayout) -> str:
    """The sizes that a layout covers, in words."""
    words = []
    for sizes in layout.sizes:
        tp = f"TP {', '.join(map(str, sizes.tp))}" + (" and sizes that divide the heads in the same way" if sizes.withheld else "")
        words.append(tp + (f" with PP {sizes.pp}" if sizes.pp > 1 else "") + (" with EP" if sizes.has_ep else ""))
    return "; ".join(words)


def check_known(layout: LearnedLayout, templates: Mapping[str, TensorTemplate], *, accept_platform: bool) -> None:
    """Raises UnsupportedError for the first tensor whose elements are not known, or whose shape depends on the platform."""
    for name, template in templates.items():
        if template.problem:
            raise UnsupportedError(
                template.problem,
                where=name,
                why="Only copies, casts and constants are converted; anything else is not guessed",
                do=f"Convert to hf, which {layout.engine} loads as well",
            )
    touched = {name: template.kernel for name, template in templates.items() if template.kernel}
    if touched and not accept_platform:
        name, reason = next(iter(touched.items()))
        others = f" (and {len(touched) - 1} more tensors)" if len(touched) > 1 else ""
        raise UnsupportedError(
            f"its shape depends on the platform{others}: {reason}",
            where=name,
            why=f"The layout was learned on {layout.platform}; another platform may expect another shape",
            do="If the engine allocates the same shapes where it will run, add `accept_platform=True`. Otherwise learn the layout there",
        )


def held_sources(layout: LearnedLayout, parallel: Parallel) -> Iterator[tuple[str, TensorTemplate, tuple[str, ...]]]:
    """The tensors of all ranks, each with the checkpoint tensors that it holds parts of."""
    for pp_rank in range(parallel.pp):
        for tp_rank in range(parallel.tp):
            for name, numbers, template in layout.rank_templates(parallel, tp_rank, pp_rank):
                boxes = (box for part in template.parts for box in part.on(numbers, (parallel.tp, tp_rank)))
                yield name, template, tuple(box.source for box in boxes)


def check_reads(layout: LearnedLayout, parallel: Parallel) -> None:
    """Raises RequestError unless the ranks together hold every element of each checkpoint tensor, and no rank an element twice; but for
    the tensors that the traced engine did not read, or held twice."""
    counts, twice = layout.reads(parallel)
    for name, shape in layout.source_shapes.items():
        count, elements = counts.get(name, 0), math.prod(shape)
        if (count < elements and not (count == 0 and name in layout.unread)) or (name in twice and name not in layout.twice):
            raise RequestError(
                f"the layout gives {count:,} of its {elements:,} elements to the ranks{', some of them twice' if name in twice else ''}",
                where=name,
                why="The engine reads each element once, unless the layout says otherwise, which those of reshard before 0.3 do not",
                do=f"Learn it again with {relearn(layout, parallel)}",
            )


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
    tensors = layout.stage(parallel, pp_rank)
    ranks = [(parallel.tp, rank) for rank in range(parallel.tp)]
    weights = {rank: sum(_nbytes(tensor, rank) for tensor in tensors if tensor.is_on(*rank)) for rank in ranks}
    fullest = max(weights, key=lambda rank: weights[rank])
    others = [rank for rank in ranks if rank != fullest]
    replicated = sum(_nbytes(tensor, fullest) for tensor in tensors if any(_is_same(tensor, fullest, other) for other in others))
    layers = [number for tensor in tensors for number in (tensor.ranges[0] if tensor.ranges else ())]
    return Stage(range(min(layers), max(layers) + 1) if layers else range(0), weights[fullest], replicated, 0, None)


def _nbytes(named: NamedTemplate, rank: TpRank) -> int:
    shape = values(named.template.shape, rank)
    return math.prod(map(len, named.ranges)) * math.prod(shape) * named.template.dtype.itemsize


def _is_same(named: NamedTemplate, rank: TpRank, other: TpRank) -> bool:
    """Whether two ranks hold the same boxes."""
    numbers = tuple(named.template.numbers)
    return named.is_on(*rank) and named.is_on(*other) and values(numbers, rank) == values(numbers, other)
