"""Memory, described once: the parallel sizes at which a model can be served, and what a training run needs on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from reshard.geometry.quantities import grouped, nbytes_text, plural
from reshard.pages.sections import Drawing, Facts, Head, OnPage, Rows, Section
from reshard.pages.texts import count_text
from reshard.training.memory import schedules_of
from reshard.training.schedules import bubbles

if TYPE_CHECKING:
    from reshard.serving.capacity import DegreeReport, DegreeRow
    from reshard.training.memory import Estimate, Fit, RankBytes, Strategy
    from reshard.training.schedules import PipelineSchedule

STRATEGY_NAMES = ("ddp", "zero1", "zero2", "zero3, fsdp")
"""What people call the stages of ZeRO."""
_COLUMNS = ("weights", "gradients", "optimizer", "states", "activations", "transient", "total")
_bytes = partial(nbytes_text, digits=4)


def degree_sections(report: DegreeReport, source: str = "") -> Iterator[Section]:
    """One row per choice of sizes: what the fullest GPU holds, or why the engine would refuse them. source: the model as the user named
    it."""
    memory, best = report.memory, report.smallest_that_fits
    verdict, tone = (f"fits: {best.parallel}", "good") if best else ("does not fit", "bad") if memory else ("", "good")
    named = source or report.model_type
    size = f", {count_text(report.parameters)} parameters" if report.parameters else ""
    title = f"{named}{size}: what the fullest GPU holds"
    tiles = [
        ("model", report.model_type),
        ("memory of a GPU", nbytes_text(memory.nbytes) if memory else None),
        ("fewest GPUs", best.parallel.tp * best.parallel.pp if best else None),
    ]
    yield Head(title, "degrees", verdict, tone, tiles)
    yield Drawing("The fullest GPU", "value", (report,))
    yield from (title, "")
    headings = ["TP", "PP", "GPUs", "weights", "replicated", "KV per token"]
    if memory:
        headings += ["left for KV", "tokens"] + ([f"sequences of {memory.max_model_len:,}"] if memory.max_model_len else [])
    has_experts = any(row.parallel.ep > 1 for row in report.rows)
    headings[2:2] = ["EP"] if has_experts else []
    if legal := [_degree_cells(row, has_experts) for row in report.rows if row.problem is None]:
        yield from (Rows(headings, legal, "Sizes"), "")
    refused = grouped((row for row in report.rows if row.problem), lambda row: row.problem)
    yield Facts(
        [
            ("fits", f"{best.parallel}: the fewest GPUs" if best else None),
            *(("refused", f"{', '.join(str(row.parallel) for row in rows)}: {problem}") for problem, rows in refused.items()),
            ("taken", ", ".join(map(str, report.others)) or None),
            ("assumed", report.assumptions),
        ],
        width=9,
    )


def _degree_cells(row: DegreeRow, has_experts: bool) -> list[object]:
    sizes, fullest, capacity = row.parallel, row.fullest, row.capacity
    assert fullest is not None
    cells: list[object] = [sizes.tp, sizes.pp, *([sizes.ep] if has_experts else []), sizes.tp * sizes.pp]
    cells += [_bytes(fullest.weights), _bytes(fullest.replicated), _bytes(row.cache_per_token)]
    if capacity:
        cells += [_bytes(capacity.nbytes) if capacity.nbytes > 0 else f"lacks {_bytes(-capacity.nbytes)}", capacity.tokens]
        cells += [] if capacity.sequences is None else [capacity.sequences]
    return cells


def estimate_sections(
    estimates: Sequence[Estimate], fitting: Sequence[Fit], gpu_memory: int | None, source: str | None = None
) -> Iterator[Section]:
    """What the fullest rank holds in each strategy, at each number of GPUs. gpu_memory: of one GPU, in bytes; None: not said. source: the
    model as the user named it; None for a number of parameters."""
    last, parameters = estimates[-1], estimates[0].parameters
    exact, short = f"{parameters:,}", count_text(parameters)
    of = f"{exact} parameters" + (f" ({short})" if short != exact else "")
    fits = [strategy.zero for estimate in estimates for strategy in estimate.strategies if strategy.fullest.total <= (gpu_memory or 0)]
    verdict, tone = ("", "good") if gpu_memory is None else ("does not fit", "bad")
    if fits:
        verdict, tone = f"fits with {f'ZeRO-{min(fits)}' if min(fits) else 'DDP'}", "good"
    memory = nbytes_text(gpu_memory) if gpu_memory is not None else None
    tiles = [("parameters", short), ("GPUs", " or ".join(dict.fromkeys(f"{estimate.training.gpus:,}" for estimate in estimates)))]
    yield Head(
        f"{f'{source}, ' if source else ''}{short} parameters: training memory",
        "estimate",
        verdict,
        tone,
        [*tiles, ("memory of a GPU", memory)],
    )
    for estimate in estimates:
        yield Drawing(f"The fullest rank on {estimate.training.parallel}", "memory", (estimate, gpu_memory))
        yield OnPage(_strategies(estimate))
    yield from _one(of, last) if len(estimates) == 1 else _several(of, estimates)
    fewest = {run.training.schedule.stages: run.fewest_microbatches for run in estimates if run.fewest_microbatches is not None}
    yield Facts(
        [
            *(_one_facts(last) if len(estimates) == 1 else ()),
            ("assumed", last.assumptions),
            *((_bytes(gpu_memory or 0), _fit_text(fit)) for fit in fitting),
            *(("bubble", _fewest_text(count, f" at PP {stages}" if len(fewest) > 1 else "")) for stages, count in fewest.items()),
        ],
        width=9,
    )
    if waits := _bubbles(estimates):
        yield from (Drawing("Pipeline bubble", "bubbles", (schedules_of(estimates),)), OnPage(waits))


def _fit_text(fit: Fit) -> str:
    at = f"fits from {plural(fit.gpus, 'GPU')} on" if fit.gpus else "fits at none of these numbers of GPUs"
    largest = f"; the largest model has {count_text(fit.parameters)} parameters" if fit.parameters is not None else ""
    return f"{STRATEGY_NAMES[fit.zero]}: {at}{largest}"


def _fewest_text(count: int, of: str) -> str:
    return f"needs at least {plural(count, 'microbatch', 'microbatches')}{of}"


def _several(of: str, estimates: Sequence[Estimate]) -> Iterator[Section]:
    """Strategies and numbers of GPUs, and the bubbles of pipelines."""
    several = len({estimate.training.parallel.pp for estimate in estimates}) > 1
    counts = [f"{estimate.training.gpus}" + (f", PP {estimate.training.parallel.pp}" if several else "") for estimate in estimates]
    rows = [
        (STRATEGY_NAMES[strategy.zero], *(_bytes(estimate.strategies[number].fullest.total) for estimate in estimates))
        for number, strategy in enumerate(estimates[0].strategies)
    ]
    yield from (f"{of}: bytes on the fullest rank", "", Rows(("GPUs", *counts), rows, "The fullest rank"))
    if waits := _bubbles(estimates):
        yield from ("", replace(waits, title=""))
    yield ""


def _one(of: str, estimate: Estimate) -> Iterator[Section]:
    """Per strategy the fullest rank; per pipeline stage its rank."""
    gpus, parallel = estimate.training.gpus, estimate.training.parallel
    yield from (f"{of} on {plural(gpus, 'GPU')}: {parallel}", "", replace(_strategies(estimate), title=""))
    for strategy, names in _distinct(estimate) if parallel.pp > 1 else ():
        stages = [(_stage(rank), count_text(rank.parameters), *_cells(rank)) for rank in strategy.stages]
        name = f"{names}, by stage"
        yield from ("", Rows((name, "parameters", *_COLUMNS), stages, name))
    yield ""


def _bubbles(estimates: Sequence[Estimate]) -> Rows | None:
    """Pipelines and numbers of microbatches: the share of the time that stages wait; None without a pipeline."""
    lines = {f"PP {schedule.stages}": dict(bubbles(schedule)) for schedule in schedules_of(estimates)}
    counts = sorted({count for line in lines.values() for count in line})
    rows = [(name, *(f"{100 * line[count]:.3g} %" if count in line else "" for count in counts)) for name, line in lines.items()]
    return Rows(("bubble at microbatches", *map(str, counts)), rows, "Bubbles") if rows else None


def _strategies(estimate: Estimate) -> Rows:
    rows = [(names, *_cells(strategy.fullest)) for strategy, names in _distinct(estimate)]
    return Rows(("per rank", *_COLUMNS), rows, f"In numbers on {estimate.training.parallel}")


def _distinct(estimate: Estimate) -> list[tuple[Strategy, str]]:
    """The strategies by which ranks hold different bytes, each with the names of those that are equal: without data-parallel ranks, ZeRO
    changes nothing."""
    same = grouped(estimate.strategies, lambda run: tuple((_stage(rank), *_cells(rank)) for rank in (run.fullest, *run.stages)))
    return [(group[0], ", ".join(STRATEGY_NAMES[run.zero] for run in group)) for group in same.values()]


def _one_facts(estimate: Estimate) -> Iterator[tuple[str, object]]:
    """What a layer keeps, the bubble, and what is sent."""
    schedule = estimate.training.schedule
    if estimate.layer_activations is not None:
        yield "a layer", f"keeps {_bytes(estimate.layer_activations)} for one microbatch"
    if schedule.stages > 1:
        yield "bubble", f"{float(schedule.bubble):.1%} of the time: {schedule.name}, {schedule.stages} stages, {_microbatches(schedule)}"
    if estimate.training.parallel.dp > 1:
        yield "sent", [*map(_sent, estimate.strategies)]


def _cells(rank: RankBytes) -> tuple[str, ...]:
    return tuple("-" if (value := getattr(rank, name)) is None else _bytes(value) for name in _COLUMNS)


def _stage(rank: RankBytes) -> str:
    return f"{rank.stage}: layers {rank.layers.start}..{rank.layers.stop - 1}" if rank.layers else str(rank.stage)


def _microbatches(schedule: PipelineSchedule) -> str:
    chunks = f" in {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    return f"{plural(schedule.microbatches, 'microbatch', 'microbatches')}{chunks}"


def _sent(strategy: Strategy) -> str:
    moved = strategy.traffic
    parts = f"{_bytes(moved.gradients)} of gradients" + (f", {_bytes(moved.weights)} of weights" if moved.weights else "")
    time = "" if moved.seconds is None else f" in {moved.seconds:.3g} s"
    return f"{STRATEGY_NAMES[strategy.zero]}: {_bytes(moved.total)} per rank and step{time} ({parts})"
