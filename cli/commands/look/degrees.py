"""reshard degrees: the parallel sizes at which a model can be served, and what each GPU holds at each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.documents import document
from reshard.verbs.look.keywords import DegreeOptions

from ... import options
from ...json_output import show_json
from ...tables import nbytes_text, show, show_table

if TYPE_CHECKING:
    from reshard.serving.capacity import DegreeReport, DegreeRow


@options.command("degrees", "reshard degrees llama-3-8b --tp 1,2,4,8", "reshard degrees step-1000 --gpu-memory 80GiB --max-model-len 8192")
@options.checkpoint("source")
@click.option("--to", default="vllm", metavar="ENGINE", help="The serving engine's format (default: vllm).")
@click.option("--tp", type=options.NUMBERS, default="1,2,4,8", metavar="N,N,..", help="Tensor-parallel sizes (default: 1,2,4,8).")
@click.option("--pp", type=options.NUMBERS, default="1,2", metavar="N,N,..", help="Pipeline-parallel sizes (default: 1,2).")
@click.option("--ep", is_flag=True, help="Distribute whole experts over the tensor-parallel ranks.")
@options.keywords(DegreeOptions, "gpu_memory", "max_model_len", "gpu_memory_utilization", "reserve", "dtype", "keep_dtype", "dequantize")
@options.keywords(DegreeOptions, "kv_dtype", "engine_version", "layout", "weights")
@options.choice
@options.model
@options.page
@options.as_json
def command(source: str, as_json: bool, **given: Any) -> None:
    """List the valid TP x PP sizes of the model in SOURCE, what each GPU holds, and how many tokens fit.

    SOURCE is a checkpoint, a Hugging Face config.json, its directory, or the name of a known model, such as llama-3-70b. No weight is read.
    `reshard plan` shows what one conversion would write.
    """
    import reshard

    page = options.page_of(given)
    report = reshard.degrees(source, **given)
    page.write(lambda pages: pages.degrees_page(report))
    show_json(document(report, degrees=list(map(_row, report.rows)))) if as_json else show_degrees(report)


def _row(row: DegreeRow) -> dict[str, Any]:
    gpus, cache = row.parallel.tp * row.parallel.pp, row.cache_per_token if row.fullest else None
    return document(row, gpus=gpus, legal=row.problem is None, kv_bytes_per_token=cache)


def show_degrees(report: DegreeReport) -> None:
    """Print one row per choice of sizes: what the fullest rank holds, or why the engine would refuse them."""
    memory = report.memory
    headings = ["TP", "PP", "GPUs", "weights", "replicated", "KV per token"]
    if memory:
        headings += ["left for KV", "tokens"] + ([f"sequences of {memory.max_model_len:,}"] if memory.max_model_len else [])
    has_experts = any(row.parallel.ep > 1 for row in report.rows)
    headings[2:2] = ["EP"] if has_experts else []
    legal = [row for row in report.rows if row.problem is None]
    show(f"{report.model_type}: what the fullest GPU holds")
    show()
    if legal:
        show_table([_cells(row, has_experts) for row in legal], headings)
        show()
    if best := report.smallest_that_fits:
        show(f"  fits       {best.parallel}: the fewest GPUs")
    refused: dict[str, list[str]] = {}
    for row in report.rows:
        if row.problem is not None:
            refused.setdefault(row.problem, []).append(str(row.parallel))
    for problem, sizes in refused.items():
        show(f"  refused    {', '.join(sizes)}: {problem}")
    for sentence in report.assumptions:
        show(f"  assumed    {sentence}")


def _cells(row: DegreeRow, has_experts: bool) -> tuple[object, ...]:
    sizes, fullest, capacity = row.parallel, row.fullest, row.capacity
    assert fullest is not None
    cells: list[object] = [sizes.tp, sizes.pp, *([sizes.ep] if has_experts else []), sizes.tp * sizes.pp]
    cells += [_bytes(fullest.weights), _bytes(fullest.replicated), _bytes(row.cache_per_token)]
    if capacity:
        cells += [_bytes(capacity.nbytes) if capacity.nbytes > 0 else f"lacks {_bytes(-capacity.nbytes)}", capacity.tokens]
        cells += [] if capacity.sequences is None else [capacity.sequences]
    return tuple(cells)


def _bytes(nbytes: int) -> str:
    return nbytes_text(nbytes, digits=4)
