"""reshard plan: at which degrees a model can be served, and what each GPU holds then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import options
from .tables import nbytes_text, show, show_json, table

if TYPE_CHECKING:
    from reshard.serving.capacity import CacheCapacity, DegreeReport, DegreeRow, Stage


@click.command("plan")
@click.argument("source")
@click.option("--to", default="vllm", metavar="ENGINE", help="The serving engine's format (default vllm).")
@click.option("--tp", type=options.NumbersParam(), default="1,2,4,8", metavar="N,N,..", help="Tensor-parallel sizes (default 1,2,4,8).")
@click.option("--pp", type=options.NumbersParam(), default="1,2", metavar="N,N,..", help="Pipeline-parallel sizes (default 1,2).")
@click.option("--ep", is_flag=True, help="Tensor-parallel ranks share whole experts.")
@click.option(
    "--gpu-memory", type=options.SizeParam(), metavar="SIZE", help="Of one GPU, such as 80GiB: how many tokens fit beside the weights."
)
@click.option("--max-model-len", type=click.IntRange(1), metavar="N", help="Tokens of the longest sequence: how many such fit at once.")
@click.option("--gpu-memory-utilization", type=float, default=0.9, metavar="PART", help="Of a GPU that the engine takes (default 0.9).")
@click.option(
    "--reserve", type=options.SizeParam(), default=0, metavar="SIZE", help="Of that, for activations and CUDA graphs (default 0)."
)
@click.option("--dtype", metavar="DTYPE", help="Cast floating-point weights, or what a bare config does not say: bf16, fp16 ...")
@click.option("--keep-dtype", multiple=True, metavar="GLOB", help="Exempt tensors of these names from --dtype.")
@click.option("--dequantize", is_flag=True, help="Quantised weights as values, in --dtype or bf16.")
@click.option("--kv-dtype", metavar="DTYPE", help="Of the KV cache: fp8 ... (default: the model's).")
@click.option("--engine-version", metavar="V", help="The serving engine's version (default: the newest known).")
@click.option("--weights", type=click.Choice(["model", "master"]), help="The model's copy or the optimizer's full-precision one.")
@options.model
@options.as_json
def command(source: str, as_json: bool, **asked: Any) -> None:
    """Which TP x PP are legal for the model in SOURCE, what each GPU holds, how many tokens fit.

    SOURCE is a checkpoint, or a directory with nothing but a Hugging Face config.json; no weight is read. What one conversion would
    write, `reshard convert --dry-run` shows.
    """
    import reshard

    found = reshard.degrees(source, **asked)
    show_json(document(found)) if as_json else show_degrees(found)


def document(found: DegreeReport) -> dict[str, Any]:
    """The table with stable keys."""
    memory = found.memory
    return {
        "model_type": found.model_type,
        "kv_dtype": found.cache_dtype.torch,
        "memory": memory
        and {
            "gpu_memory": memory.nbytes,
            "gpu_memory_utilization": memory.utilization,
            "reserve": memory.reserve,
            "usable": memory.usable,
            "max_model_len": memory.max_model_len,
        },
        "degrees": [_degree(row) for row in found.rows],
        "assumptions": list(found.assumptions),
    }


def _degree(row: DegreeRow) -> dict[str, Any]:
    fullest, sizes = row.fullest, row.parallel
    return {
        "tp": sizes.tp,
        "pp": sizes.pp,
        "ep": sizes.ep,
        "gpus": sizes.tp * sizes.pp,
        "legal": row.problem is None,
        "problem": row.problem,
        "weights": fullest and fullest.weights,
        "replicated": fullest and fullest.replicated,
        "kv_bytes_per_token": fullest and row.cache_per_token,
        "room": _room(row.room),
        "stages": [_stage(stage) for stage in row.stages],
    }


def _room(room: CacheCapacity | None) -> dict[str, Any] | None:
    return None if room is None else {"fits": room.cache > 0, "kv_bytes": room.cache, "tokens": room.tokens, "sequences": room.sequences}


def _stage(stage: Stage) -> dict[str, Any]:
    return {
        "layers": [stage.layers.start, stage.layers.stop],
        "weights": stage.weights,
        "replicated": stage.replicated,
        "kv_bytes_per_token": stage.cache_per_token,
        "kv_bytes_per_sequence": stage.cache_per_sequence,
    }


def show_degrees(found: DegreeReport) -> None:
    """One row per degree: what the fullest rank holds, or why the engine would refuse it."""
    memory = found.memory
    headings = ["TP", "PP", "GPUs", "weights", "replicated", "KV per token"]
    if memory:
        headings += ["left for KV", "tokens"] + ([f"sequences of {memory.max_model_len:,}"] if memory.max_model_len else [])
    has_experts = any(row.parallel.ep > 1 for row in found.rows)
    headings[2:2] = ["EP"] if has_experts else []
    legal = [row for row in found.rows if row.problem is None]
    show(f"{found.model_type}: what the fullest GPU holds")
    show()
    if legal:
        show(table([_cells(row, has_experts, memory is not None) for row in legal], headings))
        show()
    refused: dict[str, list[str]] = {}
    for row in found.rows:
        if row.problem is not None:
            refused.setdefault(row.problem, []).append(str(row.parallel))
    for problem, sizes in refused.items():
        show(f"  not        {', '.join(sizes)}: {problem}")
    for sentence in found.assumptions:
        show(f"  assumed    {sentence}")


def _cells(row: DegreeRow, has_experts: bool, with_room: bool) -> tuple[object, ...]:
    sizes, fullest, room = row.parallel, row.fullest, row.room
    assert fullest is not None
    cells: list[object] = [sizes.tp, sizes.pp, *([sizes.ep] if has_experts else []), sizes.tp * sizes.pp]
    cells += [_bytes(fullest.weights), _bytes(fullest.replicated), _bytes(row.cache_per_token)]
    if with_room and room:
        too_much = room.cache <= 0
        cells += [f"{_bytes(-room.cache)} too much" if too_much else _bytes(room.cache), room.tokens]
        cells += [] if room.sequences is None else [room.sequences]
    return tuple(cells)


def _bytes(nbytes: int) -> str:
    return nbytes_text(nbytes, digits=4)
