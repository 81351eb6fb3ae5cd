"""The pages of `--html`: what a verb found, as one self-contained file. Each function fills a Page from a value that the verb returned."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from reshard import __version__
from reshard.geometry.quantities import nbytes_text, plural
from reshard.health.model_files import missing_in_target
from reshard.measures.changes import columns_of
from reshard.pages.pictures import bubble_picture, memory_bars, picture_of, plan_maps, plan_transfers
from reshard.pages.shard_maps import layer_map, name_of_lane, share_table, tensor_map, tree_list
from reshard.picture.drawing import heat_map, shortened
from reshard.picture.page import Headline, Html, Page, element, facts, folded, joined, meter, sentence, table
from reshard.plans import summary
from reshard.storage.output_file import OutputFile
from reshard.training.memory import schedules_of
from reshard.verbs.look.diff import Diff

if TYPE_CHECKING:
    from reshard.engine.compare import Comparison
    from reshard.health.findings import Finding, Report
    from reshard.index.index import Tensor
    from reshard.opening.checkpoint import Checkpoint
    from reshard.opening.keywords import PathLike
    from reshard.plans.plan import Plan
    from reshard.requests.outlook import Outlook
    from reshard.serving.capacity import DegreeReport
    from reshard.training.memory import Estimate


# What a page shows; the rest is counted.
_MOST_ROWS, _MOST_CELLS, _MOST_DIFFERENCES = 256, 48, 1000


def write_page(page: Page, path: PathLike, *, interactive: bool = False, spelled: Callable[[str], str] = str, command: str = "") -> int:
    """Write a page to an output file (storage/output_file.py), and return its length in bytes.

    spelled: how texts name keywords. command: what made the page. The date is today's, or that of SOURCE_DATE_EPOCH, so that equal content
    gives equal bytes.
    """
    file = OutputFile.at(path)
    seconds = os.environ.get("SOURCE_DATE_EPOCH", "")
    day = datetime.fromtimestamp(int(seconds), UTC) if seconds.isdecimal() else datetime.now(UTC)
    page.origin = f"Made by reshard {__version__} on {day:%Y-%m-%d}" + (f" with: {command}" if command else "")
    return file.write(spelled(page.render(interactive=interactive)).encode("utf-8", "replace"))


def checkpoint_page(
    checkpoint: Checkpoint, outlook: Outlook, tensors: list[Tensor], headline: Sequence[tuple[str, object]] = (), command: str | None = None
) -> Page:
    """What a checkpoint is, who holds what, and what it holds.

    tensors: those that are drawn one by one. headline: (name, value): what stands first. command: the one that goes on from here.
    """
    index, run = checkpoint.index, checkpoint.index.facts
    nbytes = sum(file.nbytes for file in index.files)
    verdict, tone = ("partial", "bad") if outlook.problem else ("complete", "good")
    page = Page(checkpoint.path, Headline("checkpoint", verdict, tone, headline, command))
    page.add(
        "Summary",
        facts(
            [
                *([("problem", _error(outlook.problem))] if outlook.problem else []),
                ("format", " ".join(filter(None, (index.format, run.producer, run.version)))),
                ("model", _model(checkpoint)),
                *([("step", run.step)] if run.step is not None else []),
                *([("mesh", f"{run.mesh}: {run.mesh.ranks} ranks")] if run.mesh else []),
                *([("run", ", ".join(f"{name} {size}" for name, size in run.parallel.items()))] if run.parallel else []),
                ("stored", f"{plural(len(index.tensors), 'tensor')} in {plural(len(index.files), 'file')}, {nbytes_text(nbytes)}"),
                *(("serves", f"{name} at TP {', '.join(map(str, sizes))}") for name, sizes in outlook.engines.items()),
                *(("needed", text) for text in outlook.needed),
                *([("padding", nbytes_text(sum(each.nbytes for each in index.constants)))] if index.constants else []),
                *(("note", note) for note in run.notes),
            ]
        ),
    )
    kinds = [(row.kind, row.dtype, row.tensors, row.elements, nbytes_text(row.nbytes)) for row in summary.kinds(index)]
    page.add("Kinds", table(("kind", "dtype", "tensors", "elements", "bytes"), kinds))
    for tensor in tensors:
        page.add(tensor.name, element("p", f"{tensor.kind} {tensor.dtype} {list(tensor.shape)}"), tensor_map(tensor))
    page.add("Layers", layer_map(index))
    page.add("Who holds what", picture_of(checkpoint))
    for by in ("rank", "file", "layer"):
        content = share_table(index, by)
        rows = content.count("<tr>") - 1
        page.add(f"Bytes by {by}", folded(plural(rows, "row"), content, is_open=rows <= 16 and by != "layer") if content else "")
    page.add("Tensors", tree_list(checkpoint.tree))
    return page


def plan_page(plan: Plan) -> Page:
    """A plan: who holds what in the source and in the target, and who reads from whom."""
    totals = plan.totals()
    headline = [
        ("tensors", totals.tensors),
        ("files", totals.files),
        ("read", nbytes_text(totals.read)),
        ("written", nbytes_text(totals.written)),
        ("ranks", len(summary.ranks(plan))),
    ]
    page = Page(f"{plan.source.format} to {plan.layout.format} for {plan.layout.parallel}", Headline("plan", "proven", facts=headline))
    page.add(
        "Summary",
        facts(
            [
                ("tensors", f"{plural(totals.tensors, 'tensor')} into {plural(totals.files, 'file')}"),
                ("read", nbytes_text(totals.read) + (f", and {nbytes_text(totals.compared)} of replicas" if totals.compared else "")),
                ("written", f"{nbytes_text(totals.written)}: {nbytes_text(totals.copied)} copied, {nbytes_text(totals.filled)} filled"),
                *(("cast", f"{plural(number, 'tensor')} from {source} to {target}") for source, target, number in summary.casts(plan)),
                *(("skipped", f"{drop.tensors:,} {drop.kind}: {drop.reason}") for drop in summary.drops(plan)),
                *(("missing", finding.detail) for finding in missing_in_target(plan)),
                *(("note", note) for note in plan.layout.notes),
                ("checked", "every output byte has exactly one source; every source tensor is used or listed as skipped"),
            ]
        ),
    )
    source, target = plan_maps(plan)
    page.add("Source: who holds what", source)
    page.add("Target: who holds what", target)
    page.add("Who reads from whom", _readers(plan))
    ranks = summary.ranks(plan)
    most = max((rank.nbytes for rank in ranks), default=1) or 1
    rows = [(_ranks(rank.ranks), rank.tensors, nbytes_text(rank.nbytes), meter(rank.nbytes / most)) for rank in ranks[:_MOST_ROWS]]
    page.add("Bytes by rank", table(("rank", "tensors", "bytes", ""), rows))
    return page


def _ranks(numbers: Mapping[str, int]) -> str:
    return " ".join(f"{name} {number}" for name, number in numbers.items()) or "-"


def _readers(plan: Plan) -> Html:
    """How many bytes of each target file come from each source file; files that are more than are drawn are lanes of neighbours."""
    cells = plan_transfers(plan)
    sources, targets = (sorted({pair[side] for pair in cells}, key=_by_numbers) for side in (0, 1))
    if len(sources) * len(targets) < 2:
        return Html("")
    columns, rows = _lanes(sources), _lanes(targets)
    sums: dict[tuple[str, str], int] = {}
    for (source, target), nbytes in cells.items():
        lane = columns[source], rows[target]
        sums[lane] = sums.get(lane, 0) + nbytes
    names, most = list(dict.fromkeys(columns.values())), max(sums.values()) or 1
    picture = heat_map(
        [str(number) for number in range(1, len(names) + 1)],
        [(shortened(row, 40), [sums.get((name, row), 0) / most for name in names]) for row in dict.fromkeys(rows.values())],
        title="Bytes that each target file reads from each source file",
        axes=("target file", "source file"),
        scale=("0 B", nbytes_text(most)),
    )
    listed = table(("column", "source file"), list(enumerate(names, 1)))
    return joined((picture, folded("The columns", listed)))


def _lanes(paths: Sequence[str]) -> dict[str, str]:
    """The lane of each file: itself, or one of neighbours where files are more than are drawn."""
    together = -(-len(paths) // _MOST_CELLS)
    groups = [paths[start : start + together] for start in range(0, len(paths), together)]
    return {path: name_of_lane(group) for group in groups for path in group}


def _by_numbers(path: str) -> list[object]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]


def comparison_page(result: Comparison, title: str) -> Page:
    """What `verify` found, or what `diff` measured: then with a map of layers and roles."""
    verdict, tone = ("equal", "good") if result.equal else (plural(len(result.differences), "difference"), "bad")
    headline: list[tuple[str, object]] = [("compared", plural(result.tensors, "tensor")), ("bytes", nbytes_text(result.nbytes))]
    if isinstance(result, Diff) and result.changes:
        total = result.total()
        headline += [
            ("tensors changed", sum(bool(each.changed) for each in result.changes)),
            ("elements changed", f"{100 * total.share:.3g} %"),
        ]
        headline += [("relative L2", f"{total.relative:.3g}"), ("largest", f"{total.largest:.3g}")]
    not_finite = result.not_finite() if isinstance(result, Diff) else []
    page = Page(title, Headline("comparison", str(not_finite[0]) if not_finite else verdict, "bad" if not_finite else tone, headline))
    bad = [("not finite", _error(str(each))) for each in not_finite]
    page.add("Summary", facts([*bad, ("result", verdict), *(("note", note) for note in result.notes)]))
    if isinstance(result, Diff) and result.changes:
        page.add("Change by layer and role", picture_of(result))
        for name, rows in (("role", result.by_role()), ("layer", result.by_layer()), ("tensor", result.largest())):
            content = table(*columns_of(name, rows[:_MOST_DIFFERENCES]))
            page.add(f"Change by {name}", folded(f"{plural(len(rows), name)}", content, is_open=len(rows) <= 20) if rows else "")
    measured = {each.name for each in result.changes if each.changed} if isinstance(result, Diff) else set()
    every = [(each.name, each.kind, each.detail) for each in result.differences if each.name not in measured]
    differences = every[:_MOST_DIFFERENCES]
    more = len(every) - len(differences)
    listed = table(("tensor or file", "what", "how"), differences) if differences else ""
    page.add("Differences", listed, element("p", f"{more:,} more are not shown.", class_="dim") if more else "")
    return page


def report_page(report: Report) -> Page:
    """The findings of `doctor`, the worst first."""
    counts = report.counts_text()
    tone = "bad" if report.fails() else "open" if report.findings else "good"
    headline = [("format", report.format or "not known"), ("tensors", report.tensors), ("files", report.files)]
    headline += [("weights read", nbytes_text(report.nbytes))] if report.nbytes else []
    page = Page(report.path, Headline("health", counts, tone, headline))
    shown = report.findings[:_MOST_DIFFERENCES]
    more = len(report.findings) - len(shown)
    rest = element("p", f"{more:,} more are not shown.", class_="dim") if more else ""
    page.add("Findings", *map(_finding, shown), rest)
    return page


def _finding(each: Finding) -> Html:
    places = (each.tensor, each.file, None if each.rank is None else f"rank {each.rank}")
    where = [element("span", place, class_="at") for place in places if place]
    title = element("span", f"{each.severity}: {each.id}", class_="error" if each.severity == "error" else None)
    parts = [element("p", title, *(part for place in where for part in (" · ", place))), element("p", sentence(each.detail))]
    if each.do:
        parts.append(element("p", sentence(each.do), class_="dim"))
    return element("div", *parts, class_=f"finding is-{each.severity}")


def degrees_page(report: DegreeReport) -> Page:
    """What the fullest GPU holds at each choice of sizes: weights, replicated weights, and room for the KV cache."""
    memory, best = report.memory, report.smallest_that_fits
    verdict, tone = (f"fits: {best.parallel}", "good") if best else ("does not fit", "bad") if memory else ("", "good")
    headline: list[tuple[str, object]] = [("model", report.model_type)]
    headline += [("memory of a GPU", nbytes_text(memory.nbytes))] if memory else []
    headline += [("fewest GPUs", best.parallel.tp * best.parallel.pp)] if best else []
    page = Page(f"{report.model_type}: what the fullest GPU holds", Headline("degrees", verdict, tone, headline))
    page.add("The fullest GPU", picture_of(report))
    refused = [(str(row.parallel), row.problem) for row in report.rows if row.problem]
    page.add("Refused", table(("sizes", "why"), refused) if refused else "")
    about = [("assumed", text) for text in report.assumptions]
    page.add("Assumptions", facts([*([("GPU memory", nbytes_text(memory.nbytes))] if memory else []), *about]))
    return page


def estimate_page(estimates: Sequence[Estimate], gpu_memory: int | None = None) -> Page:
    """What the fullest rank holds in each strategy, for each number of GPUs, and the bubble of the pipeline. gpu_memory: of one GPU, in
    bytes; None: not said."""
    found = estimates[-1]
    headline: list[tuple[str, object]] = [("parameters", found.parameters), ("GPUs", " or ".join(dict.fromkeys(map(_gpus, estimates))))]
    verdict, tone = "", "good"
    if gpu_memory is not None:
        fits = any(strategy.fullest.total <= gpu_memory for each in estimates for strategy in each.strategies)
        verdict, tone = ("fits", "good") if fits else ("does not fit", "bad")
        headline.append(("memory of a GPU", nbytes_text(gpu_memory)))
    page = Page(f"{found.parameters:,} parameters: training memory", Headline("estimate", verdict, tone, headline))
    for each in estimates:
        page.add(f"The fullest rank on {each.training.parallel}", memory_bars(each, gpu_memory), _memory_table(each))
    if pipelines := schedules_of(estimates):
        page.add("Pipeline bubble", bubble_picture(pipelines))
    page.add("Assumptions", facts(("assumed", text) for text in found.assumptions))
    return page


def _gpus(each: Estimate) -> str:
    return f"{each.training.gpus:,}"


def _memory_table(each: Estimate) -> Html:
    """What the fullest rank holds in each strategy, in numbers."""
    parts = ("weights", "gradients", "optimizer", "activations", "transient", "total")
    rows = [
        (f"ZeRO-{strategy.zero}" if strategy.zero else "DDP", *(_bytes_or_none(getattr(strategy.fullest, part)) for part in parts))
        for strategy in each.strategies
    ]
    return table(("strategy", *parts), rows)


def _bytes_or_none(nbytes: float | None) -> str:
    return "-" if nbytes is None else nbytes_text(int(nbytes))


def _model(checkpoint: Checkpoint) -> str:
    model = checkpoint.sized_model
    if model is None:
        return checkpoint.config_problem or "not known"
    return f"{model.architecture.model_type}: {', '.join(f'{name} {size:,}' for name, size in list(model.dimensions.items())[:8])}"


def _error(text: str) -> Html:
    return element("span", sentence(text), class_="error")
