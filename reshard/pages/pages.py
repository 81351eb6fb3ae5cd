"""The pages of `--html`: what a verb found, as one self-contained file. Each function fills a Page from a value that the verb returned."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from reshard.geometry.quantities import nbytes_text, plural
from reshard.health.model_files import missing_in_target
from reshard.measures.changes import columns_of
from reshard.pages.pictures import bubble_picture, picture_of, plan_maps, plan_transfers
from reshard.pages.shard_maps import share_table, tensor_map, tree_list
from reshard.picture.drawing import heat_map
from reshard.picture.page import Html, Page, element, facts, folded, joined, meter, table
from reshard.plans import summary
from reshard.storage.output_file import OutputFile
from reshard.training.memory import schedules_of
from reshard.verbs.look.diff import Diff

if TYPE_CHECKING:
    from reshard.engine.compare import Comparison
    from reshard.health.findings import Report
    from reshard.index.index import Tensor
    from reshard.plans.plan import Plan
    from reshard.requests.checkpoint import Checkpoint
    from reshard.requests.keywords import PathLike
    from reshard.requests.outlook import Outlook
    from reshard.serving.capacity import DegreeReport
    from reshard.training.memory import Estimate


# What a page shows; the rest is counted.
_MOST_ROWS, _MOST_CELLS, _MOST_DIFFERENCES = 256, 64, 1000


def write_page(page: Page, path: PathLike, *, interactive: bool = False, spelled: Callable[[str], str] = str) -> int:
    """Write a page to an output file (storage/output_file.py), and return its length in bytes. spelled: how texts name keywords."""
    file = OutputFile.at(path)
    return file.write(spelled(page.render(interactive=interactive)).encode("utf-8", "replace"))


def checkpoint_page(checkpoint: Checkpoint, outlook: Outlook, tensors: list[Tensor]) -> Page:
    """What a checkpoint is, who holds what, and what it holds. tensors: those that are drawn one by one."""
    index, run = checkpoint.index, checkpoint.index.facts
    tree, page = checkpoint.tree, Page(checkpoint.path)
    nbytes = sum(file.nbytes for file in index.files)
    page.add(
        "Summary",
        facts(
            [
                ("format", " ".join(filter(None, (index.format, run.producer, run.version)))),
                ("model", _model(checkpoint)),
                *([("step", run.step)] if run.step is not None else []),
                *([("mesh", f"{run.mesh}: {run.mesh.ranks} ranks")] if run.mesh else []),
                *([("run", ", ".join(f"{name} {size}" for name, size in run.parallel.items()))] if run.parallel else []),
                ("stored", f"{plural(len(index.tensors), 'tensor')} in {plural(len(index.files), 'file')}, {nbytes_text(nbytes)}"),
                ("complete", _error(outlook.problem) if outlook.problem else "no piece of a tensor is missing"),
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
    page.add("Who holds what", picture_of(checkpoint))
    for by in ("rank", "file"):
        content = share_table(index, by)
        page.add(
            f"Bytes by {by}",
            folded(f"{plural(content.count('<tr>') - 1, 'row')}", content, is_open=content.count("<tr>") <= 17) if content else "",
        )
    page.add("Bytes by layer", folded("Every layer", share_table(index, "layer")))
    page.add("Tensors", tree_list(tree))
    return page


def plan_page(plan: Plan) -> Page:
    """A plan: who holds what in the source and in the target, and who reads from whom."""
    totals = plan.totals()
    page = Page(f"{plan.source.format} to {plan.layout.format} for {plan.layout.parallel}")
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
    """How many bytes of each target file come from each source file."""
    cells = plan_transfers(plan)
    sources, targets = (sorted({pair[side] for pair in cells}, key=_by_numbers) for side in (0, 1))
    if len(sources) * len(targets) < 2 or len(targets) > _MOST_CELLS or len(sources) > _MOST_CELLS:
        text = f"{plural(len(sources), 'source file')} and {plural(len(targets), 'target file')} are too many, or too few, to draw."
        return element("p", text, class_="dim")
    most = max(cells.values()) or 1
    rows = [(target, [cells.get((source, target), 0) / most for source in sources]) for target in targets]
    picture = heat_map(
        [str(number) for number in range(len(sources))], rows, title="Bytes that each target file reads from each source file"
    )
    listed = table(("column", "source file"), list(enumerate(sources)))
    return joined((picture, element("p", f"The darkest cell is {nbytes_text(most)}.", class_="dim"), folded("The columns", listed)))


def _by_numbers(path: str) -> list[object]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]


def comparison_page(result: Comparison, title: str) -> Page:
    """What `verify` found, or what `diff` measured: then with a map of layers and roles."""
    page = Page(title)
    outcome = "equal" if result.equal else _error(plural(len(result.differences), "difference"))
    compared = f"{plural(result.tensors, 'tensor')}, {nbytes_text(result.nbytes)}"
    bad = [("not finite", _error(str(each))) for each in result.not_finite()] if isinstance(result, Diff) else []
    page.add("Summary", facts([*bad, ("result", outcome), ("compared", compared), *(("note", note) for note in result.notes)]))
    if isinstance(result, Diff) and result.changes:
        page.add("Change by layer and role", picture_of(result))
        for name, rows in (("role", result.by_role()), ("layer", result.by_layer()), ("tensor", result.largest())):
            content = table(*columns_of(name, rows[:_MOST_DIFFERENCES]))
            page.add(f"Change by {name}", folded(f"{plural(len(rows), name)}", content, is_open=len(rows) <= 20) if rows else "")
    differences = [(each.name, each.kind, each.detail) for each in result.differences[:_MOST_DIFFERENCES]]
    more = len(result.differences) - len(differences)
    listed = table(("tensor or file", "what", "how"), differences) if differences else ""
    page.add("Differences", listed, element("p", f"{more:,} more are not shown.", class_="dim") if more else "")
    return page


def report_page(report: Report) -> Page:
    """The findings of `doctor`."""
    page = Page(f"{report.path}: {report.counts_text()}")
    counts = f"{plural(report.tensors, 'tensor')}, {plural(report.files, 'file')}"
    read = f", {nbytes_text(report.nbytes)} read" if report.nbytes else ""
    page.add("Summary", facts([("format", report.format or "not known"), ("checked", counts + read), ("findings", report.counts_text())]))
    rows = []
    for each in report.findings[:_MOST_DIFFERENCES]:
        severity = _error(each.severity) if each.severity == "error" else each.severity
        where = (each.tensor or "", each.file or "", "" if each.rank is None else str(each.rank))
        rows.append((severity, each.id, *where, each.detail, each.do))
    page.add("Findings", table(("severity", "id", "tensor", "file", "rank", "what", "what to do"), rows) if rows else "")
    return page


def degrees_page(report: DegreeReport) -> Page:
    """What the fullest GPU holds at each choice of sizes: weights, replicated weights, and room for the KV cache."""
    page, memory = Page(f"{report.model_type}: what the fullest GPU holds"), report.memory
    page.add("The fullest GPU", picture_of(report))
    refused = [(str(row.parallel), row.problem) for row in report.rows if row.problem]
    page.add("Refused", table(("sizes", "why"), refused) if refused else "")
    about = [("assumed", text) for text in report.assumptions]
    page.add("Assumptions", facts([*([("GPU memory", nbytes_text(memory.nbytes))] if memory else []), *about]))
    return page


def estimate_page(estimates: Sequence[Estimate]) -> Page:
    """What the fullest rank holds in each strategy, for each number of GPUs, and the bubble of the pipeline."""
    found = estimates[-1]
    page = Page(f"{found.parameters:,} parameters: training memory")
    for each in estimates:
        page.add(f"The fullest rank on {each.training.parallel}", picture_of(each))
    if pipelines := schedules_of(estimates):
        page.add("Pipeline bubble", bubble_picture(pipelines))
    page.add("Assumptions", facts(("assumed", text) for text in found.assumptions))
    return page


def _model(checkpoint: Checkpoint) -> str:
    model = checkpoint.model
    if model is None:
        return "not known"
    return f"{model.architecture.model_type}: {', '.join(f'{name} {size:,}' for name, size in list(model.dimensions.items())[:8])}"


def _error(text: str) -> Html:
    return element("span", text, class_="error")
