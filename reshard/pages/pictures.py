"""How values are drawn. `picture_of(value)` is the one entry: what notebooks, `value.picture()` and pages show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import singledispatch
from itertools import islice

from reshard.engine.views import View
from reshard.geometry.quantities import by_numbers, nbytes_text, plural
from reshard.geometry.table import Table, cell_text
from reshard.geometry.value import Tabular
from reshard.index.fold import fold
from reshard.live.plan.transfer_plan import TransferPlan
from reshard.measures.changes import Change, sum_of
from reshard.opening.checkpoint import Checkpoint
from reshard.pages.readings import bubble_reading, change_reading, degrees_reading, memory_reading, percent, reads_reading
from reshard.pages.shard_maps import lanes_of, shard_map, tree_list
from reshard.picture.drawing import curves, heat_map, in_notebook, shortened, stacked
from reshard.picture.page import Html, element, folded, joined, said, table
from reshard.plans.plan import Plan
from reshard.serving.capacity import DegreeReport
from reshard.training.memory import Estimate
from reshard.training.schedules import PipelineSchedule, bubbles
from reshard.verbs.look.diff import Diff

_MOST_RANKS, _MOST_CELLS = 64, 48
_MOST_ROWS = 200
_LEAST = 1e-6
"""The relative change that is drawn lightest; ten times as much is a sixth darker."""


def draw(value: object, for_notebook: bool) -> str:
    """The picture of a value. for_notebook: with its colours, and what a notebook shows beside it."""
    if not for_notebook:
        return str(picture_of(value))
    if isinstance(value, Tabular):
        picture = () if picture_of.dispatch(type(value)) is picture_of.dispatch(Tabular) else (picture_of(value),)
        return in_notebook(joined((element("p", repr(value)), *picture, _rows(value.table()))))
    if isinstance(value, Checkpoint):
        about = f"{value.path}: {value.format}, {plural(len(value.index.tensors), 'tensor')}"
        return in_notebook(joined((element("p", about), picture_of(value), tree_list(value.tree))))
    return in_notebook(picture_of(value))


@singledispatch
def picture_of(value: object) -> Html:
    """A value as SVG with captions, or as a table.

    Raises: TypeError if nothing here draws values of its class.
    """
    raise TypeError(f"a {type(value).__name__} has no picture")


@picture_of.register
def _(checkpoint: Checkpoint) -> Html:
    """Who holds what; empty if every tensor is in one piece."""
    return shard_map(checkpoint.tree)


@picture_of.register
def _(result: Tabular) -> Html:
    """Its rows, where no picture shows more."""
    return _rows(result.table())


@picture_of.register
def _rows(rows: Table) -> Html:
    """The first rows."""
    cells = [tuple(cell if type(cell) is int else cell_text(cell) for cell in row) for row in rows.rows[:_MOST_ROWS]]
    more = f"and {plural(len(rows) - _MOST_ROWS, 'more row')}" if len(rows) > _MOST_ROWS else None
    return table(rows.columns, cells, caption=more)


@picture_of.register
def _(view: View) -> Html:
    """The first tensors as a table."""
    rows = [(tensor.name, tensor.dtype.name, str(list(tensor.shape)), tensor.nbytes) for tensor in islice(view.values(), 100)]
    return table(("name", "dtype", "shape", "bytes"), rows, caption=repr(view))


@picture_of.register
def _(plan: Plan) -> Html:
    """Who holds what in the source and in the target, one above the other."""
    order = plan.content.model.weights if plan.content.model else ()
    source, target = (fold(tensors, order) for tensors in ([r.source for r in plan.routes], [r.target for r in plan.routes]))
    titles = [element("h4", title) for title in (f"Source: {plan.source.format}", f"Target: {plan.layout.format}")]
    return joined((titles[0], shard_map(source), titles[1], shard_map(target)))


@picture_of.register
def _(plan: TransferPlan) -> Html:
    """Who sends how much to whom: a row for each source rank, a column for each target rank of a replica."""
    traffic = plan.report.traffic[:_MOST_RANKS, :_MOST_RANKS]
    most = max(int(traffic.max(initial=0)), 1)
    rows = [(f"source {rank}", [nbytes / most for nbytes in row]) for rank, row in enumerate(traffic.tolist())]
    picture = heat_map(
        [str(rank) for rank in range(traffic.shape[1])],
        rows,
        title=f"{plan.source} (rows) to {plan.target} (columns)",
        axes=("from", "to target rank"),
        scale=("0 B", nbytes_text(most)),
    )
    out = plan.report.bytes_out
    most_of = percent(float(out.max(initial=0)) / (plan.nbytes or 1))
    text = said(f"{nbytes_text(plan.nbytes)} in all, {most_of} of it from source rank {int(out.argmax()) if len(out) else 0}.")
    hidden = max(0, len(plan.sources) - _MOST_RANKS), max(0, len(plan.memories) - _MOST_RANKS)
    more = f"{hidden[0]} source ranks and {hidden[1]} target ranks are not drawn." if any(hidden) else ""
    return joined((text, picture, element("p", more, class_="dim") if more else ""))


@picture_of.register
def _(report: DegreeReport) -> Html:
    """Stacked bars: the weights that a GPU holds alone, those that others hold as well, and what is left for the KV cache."""
    best, rows = report.smallest_that_fits, []
    for row in report.rows:
        if (stage := row.fullest) is None:
            continue
        room = max(row.capacity.nbytes, 0) if row.capacity else 0
        after = f", {nbytes_text(room)} for the KV cache" if room else ", does not fit" if row.capacity else ""
        text = ("fewest GPUs: " if row is best else "") + nbytes_text(stage.weights) + after
        rows.append((f"TP {row.parallel.tp} PP {row.parallel.pp}", (stage.weights - stage.replicated, stage.replicated, room), text))
    limit = report.memory.usable if report.memory else None
    names = ("weights", "replicated weights", "room for the KV cache")
    note = element("p", f"The line is the memory that the engine may use: {nbytes_text(limit)}.", class_="dim") if limit else ""
    return joined((said(degrees_reading(report)), stacked(rows, names, title="Bytes on the fullest GPU", limit=limit), note))


@picture_of.register
def memory_bars(estimate: Estimate, gpu_memory: int | None = None) -> Html:
    """Stacked bars for each strategy: weights, gradients, optimizer state, activations and what is needed for a moment; with a line at
    the memory of a GPU."""
    names = ("weights", "gradients", "optimizer", "activations", "transient")
    rows = []
    for strategy in estimate.strategies:
        rank = strategy.fullest
        label = f"ZeRO-{strategy.zero}" if strategy.zero else "DDP"
        after = ", does not fit" if gpu_memory is not None and rank.total > gpu_memory else ""
        rows.append((label, tuple(float(getattr(rank, name) or 0) for name in names), nbytes_text(rank.total) + after))
    note = element("p", f"The line is the memory of one GPU: {nbytes_text(gpu_memory)}.", class_="dim") if gpu_memory else ""
    sentence = said(memory_reading(estimate, gpu_memory))
    return joined((sentence, stacked(rows, names, title="Bytes on the fullest rank", limit=gpu_memory), note))


@picture_of.register
def _(diff: Diff) -> Html:
    """Roles x layers: the relative L2 change of each, on a logarithmic scale. What belongs to no layer is the last column."""
    groups: dict[tuple[str, int | None], list[Change]] = {}
    for change in diff.changes:
        groups.setdefault((change.role, change.layer), []).append(change)
    cells = {key: sum_of("", parts) for key, parts in groups.items()}
    layers: list[int | None] = [*sorted({layer for _, layer in cells if layer is not None})]
    columns = [*layers, *([None] if any(layer is None for _, layer in cells) else [])]
    roles = list(dict.fromkeys(role for role, _ in cells))
    rows = [(role, [_shade(cells[role, layer]) if (role, layer) in cells else None for layer in columns]) for role in roles]
    picture = heat_map(
        ["-" if layer is None else str(layer) for layer in columns],
        rows,
        title="Relative L2 change by layer and role",
        axes=("role", "layer; -: in no layer"),
        scale=("equal", "changed by its whole length; each swatch is a factor of 16"),
    )
    return joined((said(change_reading(diff.changes)), picture))


def _shade(change: Change) -> float:
    relative = change.relative
    if not change.changed or relative == 0:
        return 0.0
    return min(max(math.log(min(relative, 1.0) / _LEAST) / -math.log(_LEAST), 0.02), 1.0)


def transfers(plan: Plan) -> Html:
    """How many bytes of each target file come from each source file, replicas not counted. Where there are more files than are drawn, lanes
    of neighbours. Empty for one file from one file."""
    itemsizes = {route.name: route.target.dtype.itemsize for route in plan.routes}
    copies = [copy for copy in plan.copies() if not copy.replica]
    paths = ({copy.source for copy in copies}, {copy.target for copy in copies})
    columns, rows = (lanes_of(sorted(side, key=by_numbers), _MOST_CELLS) for side in paths)
    if len(columns) * len(rows) < 2:
        return Html("")
    exact, sums = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for copy in copies:
        exact[copy.source, copy.target] += copy.box.volume * itemsizes[copy.name]
    for (source, target), nbytes in exact.items():
        sums[columns[source], rows[target]] += nbytes
    names, most = list(dict.fromkeys(columns.values())), max(sums.values()) or 1
    picture = heat_map(
        [str(number) for number in range(1, len(names) + 1)],
        [(shortened(row, 40), [sums[name, row] / most for name in names]) for row in dict.fromkeys(rows.values())],
        title="Bytes that each target file reads from each source file",
        axes=("target file", "source file"),
        scale=("0 B", nbytes_text(most)),
    )
    return joined((said(reads_reading(exact)), picture, folded("The columns", table(("column", "source file"), list(enumerate(names, 1))))))


def bubble_curves(schedules: Sequence[PipelineSchedule]) -> Html:
    """The share of the time that pipelines wait, against the number of microbatches: a curve of each."""
    points = {f"PP {schedule.stages}": bubbles(schedule) for schedule in schedules}
    picture = curves(points, title="Pipeline bubble against microbatches", x_name="microbatches", y_name="bubble")
    return joined((said(bubble_reading(schedules)), picture))
