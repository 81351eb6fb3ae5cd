"""reshard degrees: the parallel sizes at which a model can be served, and what each GPU holds at each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.documents import document
from reshard.verbs.look.keywords import DegreeOptions

from ... import options
from ...replies import Reply

if TYPE_CHECKING:
    from reshard.serving.capacity import DegreeRow


@options.command("degrees", "reshard degrees llama-3-8b --tp 1,2,4,8", "reshard degrees step-1000 --gpu-memory 80GiB --max-model-len 8192")
@options.checkpoint("source", shell_complete=options.model_names)
@click.option("--to", default="vllm", metavar="ENGINE", help="The serving engine's format (default: vllm).")
@options.sizes("--tp", "1,2,4,8", "Tensor-parallel sizes (default: 1,2,4,8).")
@options.sizes("--pp", "1,2", "Pipeline-parallel sizes (default: 1,2).")
@click.option("--ep", is_flag=True, help="Distribute whole experts over the tensor-parallel ranks.")
@options.keywords(DegreeOptions, "gpu_memory", "max_model_len", "gpu_memory_utilization", "reserve", "dtype", "keep_dtype", "dequantize")
@options.keywords(DegreeOptions, "kv_dtype", "engine_version", "layout", "weights")
@options.choice
@options.model
@options.page
def command(source: str, **given: Any) -> Reply:
    """List the valid TP x PP sizes of the model in SOURCE, what each GPU holds, and how many tokens fit.

    SOURCE is a checkpoint, a Hugging Face config.json, its directory, or the name of a known model, such as llama-3-70b. No weight is read.
    `reshard plan` shows what one conversion would write.
    """
    import reshard
    from reshard.pages.memory import degree_sections

    report = reshard.degrees(source, **given)
    return Reply(document(report, degrees=list(map(_row, report.rows))), degree_sections(report, source))


def _row(row: DegreeRow) -> dict[str, Any]:
    gpus, cache = row.parallel.tp * row.parallel.pp, row.cache_per_token if row.fullest else None
    return document(row, gpus=gpus, legal=row.problem is None, kv_bytes_per_token=cache)
