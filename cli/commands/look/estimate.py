"""reshard estimate: what training needs on each rank, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.documents import document
from reshard.verbs.look.keywords import EstimateOptions

from ... import options
from ...replies import Reply

if TYPE_CHECKING:
    from reshard.training.memory import Estimate, Fit

# What people call the stages.
STRATEGIES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
_BYTES_PER = (("weight", 2, "weights"), ("gradient", 2, "gradients"), ("master", 4, "the master copy"), ("moment", 4, "each moment"))


def _bytes_option(name: str, usual: int, what: str) -> options.Decorator[Any]:
    text = f"Bytes per parameter of {what} (default: {usual})."
    return click.option(f"--{name}-bytes", type=click.IntRange(0), default=usual, metavar="N", help=text)


@options.command("estimate", "reshard estimate llama-3-8b --gpus 8", "reshard estimate --parameters 7B --gpus 8")
@options.checkpoint("source", required=False, shell_complete=options.model_names)
@options.keywords(EstimateOptions, "parameters")
@click.option("--gpus", type=options.NUMBERS, metavar="N,N,..", help="Ranks in all (default: as many as the sizes need).")
@click.option("--gpu-memory", type=options.SIZE, metavar="SIZE", help="Memory of one GPU, e.g. 80GiB: say what fits.")
@options.keywords(EstimateOptions, "max_bubble", "dp", "tp")
@options.sizes("--pp", "1", "Pipeline-parallel sizes.")
@options.keywords(EstimateOptions, "ep")
@click.option("--zero", type=click.IntRange(0, 3), metavar="STAGE", help="ZeRO stage; 3 is FSDP (default: a table of all).")
@click.option("--strategy", type=click.Choice(list(STRATEGIES)), help="The same as --zero, by name.")
@options.keywords(EstimateOptions, "seq_len", "micro_batch", "microbatches", "schedule", "vp", "stage_layers", "recompute")
@options.keywords(EstimateOptions, "sequence_parallel", "flash_attention", "activations", "vocab_multiple", "link")
@options.together(*(_bytes_option(*row) for row in _BYTES_PER))
@click.option("--moments", type=click.IntRange(0), default=2, metavar="N", help="Number of moments of the optimizer (default: 2).")
@options.choice
@options.architecture
@options.page
def command(source: str | None, parameters: int | None, zero: int | None, strategy: str | None, **given: Any) -> Reply:
    """Estimate training memory per rank before you launch: weights, gradients, optimizer state and activations, for DDP, ZeRO and FSDP.

    SOURCE is a checkpoint, a Hugging Face config.json, its directory, or the name of a known model, such as llama-3-70b; no weights are
    read. Several numbers of --gpus or --pp give a table of strategies and sizes, and the bubbles of the pipelines. With --gpu-memory, the
    smallest of these numbers that fits is named, and with --parameters also the largest model.
    """
    import reshard
    from reshard.errors import RequestError
    from reshard.pages.memory import estimate_sections
    from reshard.training.memory import ZERO_STAGES, BytesPer, fits
    from reshard.verbs.look.estimate import estimates

    named = STRATEGIES[strategy] if strategy else None
    if zero is not None and named is not None and zero != named:
        raise RequestError(f"--zero {zero} and --strategy {strategy} contradict each other", do="Give one of them")
    chosen = zero if zero is not None else named
    bytes_per = BytesPer(**{name: given.pop(f"{name}_bytes") for name, _, _ in _BYTES_PER}, moments=given.pop("moments"))
    gpu_counts, nbytes, pipelines = given.pop("gpus"), given.pop("gpu_memory"), given.pop("pp")
    about: dict[str, Any] = {"zero": ZERO_STAGES if chosen is None else chosen, "bytes_per": bytes_per, **given}
    estimated = estimates(source, gpu_counts or (None,), pipelines=pipelines, parameters=parameters, **about)
    last = estimated[-1].training

    def of_parameters(count: int, zero: int) -> Estimate:
        return reshard.estimate(count, **{**about, "zero": zero, "gpus": last.gpus, "pp": last.parallel.pp, "max_bubble": None})

    fitting = fits(estimated, nbytes, of_parameters if parameters is not None else None) if nbytes is not None else ()
    made = {**estimate_document(estimated[-1]), **_list_document(estimated, fitting)}
    return Reply(made, estimate_sections(estimated, fitting, nbytes, source))


def _list_document(estimated: Sequence[Estimate], fitting: Sequence[Fit]) -> dict[str, Any]:
    """What several sizes, the memory of a GPU and a bubble add to the estimate of the largest sizes."""
    from reshard.training.memory import schedules_of
    from reshard.training.schedules import bubbles

    return {
        "by_gpus": [
            {
                "gpus": estimate.training.gpus,
                "pp": estimate.training.parallel.pp,
                "fewest_microbatches": estimate.fewest_microbatches,
                "totals": {_short_name(strategy.zero): strategy.fullest.total for strategy in estimate.strategies},
            }
            for estimate in estimated
        ],
        "fits": [{"strategy": _short_name(fit.zero), "gpus": fit.gpus, "parameters": fit.parameters} for fit in fitting],
        "bubbles": [
            {"stages": schedule.stages, "microbatches": count, "bubble": bubble}
            for schedule in schedules_of(estimated)
            for count, bubble in bubbles(schedule)
        ],
        "fewest_microbatches": estimated[-1].fewest_microbatches,
    }


def _short_name(zero: int) -> str:
    from reshard.pages.memory import STRATEGY_NAMES

    return STRATEGY_NAMES[zero].partition(",")[0]


def estimate_document(estimate: Estimate) -> dict[str, Any]:
    """The estimate with stable keys."""
    parallel, schedule, batch = estimate.training.parallel, estimate.training.schedule, estimate.training.batch
    in_flight = [float(schedule.in_flight(stage)) for stage in range(schedule.stages)]
    return {
        "parameters": estimate.parameters,
        "gpus": estimate.training.gpus,
        "parallel": {axis: getattr(parallel, axis) for axis in ("dp", "tp", "pp", "ep")},
        "pipeline": document(schedule, bubble=float(schedule.bubble), microbatches_in_flight=in_flight),
        "batch": batch and document(batch, flash_attention=not batch.scores, layer_activations=estimate.layer_activations),
        "strategies": [{"strategy": _short_name(strategy.zero), **document(strategy)} for strategy in estimate.strategies],
        "assumptions": list(estimate.assumptions),
    }
