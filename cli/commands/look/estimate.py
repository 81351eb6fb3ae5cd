"""reshard estimate: what training needs on each rank, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.documents import document
from reshard.geometry.quantities import plural
from reshard.verbs.look.keywords import EstimateOptions

from ... import options
from ...json_output import show_json
from ...tables import count_text, nbytes_text, show, show_table

if TYPE_CHECKING:
    from reshard.training.memory import Estimate, Fit, RankBytes, Strategy

# What people call the stages.
STRATEGIES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
_NAMES = ("ddp", "zero1", "zero2", "zero3, fsdp")
_BYTES_PER = (("weight", 2, "weights"), ("gradient", 2, "gradients"), ("master", 4, "the master copy"), ("moment", 4, "each moment"))


def _bytes_option(name: str, usual: int, what: str) -> options.Decorator[Any]:
    text = f"Bytes per parameter of {what} (default: {usual})."
    return click.option(f"--{name}-bytes", type=click.IntRange(0), default=usual, metavar="N", help=text)


@options.command("estimate", "reshard estimate llama-3-8b --gpus 8", "reshard estimate --parameters 7B --gpus 8")
@options.checkpoint("source", required=False)
@options.keywords(EstimateOptions, "parameters")
@click.option("--gpus", type=options.NUMBERS, metavar="N,N,..", help="Ranks in all (default: as many as the sizes need).")
@click.option("--gpu-memory", type=options.SIZE, metavar="SIZE", help="Memory of one GPU, e.g. 80GiB: say what fits.")
@options.keywords(EstimateOptions, "max_bubble", "dp", "tp")
@click.option("--pp", type=options.NUMBERS, default="1", metavar="N,N,..", help="Pipeline-parallel sizes.")
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
@options.as_json
def command(source: str | None, parameters: int | None, zero: int | None, strategy: str | None, as_json: bool, **given: Any) -> None:
    """Estimate training memory per rank before you launch: weights, gradients, optimizer state and activations, for DDP, ZeRO and FSDP.

    SOURCE is a checkpoint, a Hugging Face config.json, its directory, or the name of a known model, such as llama-3-70b; no weights are
    read. Several numbers of --gpus or --pp give a table of strategies and sizes, and the bubbles of the pipelines. With --gpu-memory, the
    smallest of these numbers that fits is named, and with --parameters also the largest model.
    """
    import reshard
    from reshard.errors import RequestError
    from reshard.training.memory import ZERO_STAGES, BytesPer, fits
    from reshard.verbs.look.estimate import estimates

    page = options.page_of(given)
    named = STRATEGIES[strategy] if strategy else None
    if zero is not None and named is not None and zero != named:
        raise RequestError(f"--zero {zero} and --strategy {strategy} contradict each other", do="Give one of them")
    chosen = zero if zero is not None else named
    bytes_per = BytesPer(**{name: given.pop(f"{name}_bytes") for name, _, _ in _BYTES_PER}, moments=given.pop("moments"))
    gpu_counts, nbytes, pipelines = given.pop("gpus"), given.pop("gpu_memory"), given.pop("pp")
    about: dict[str, Any] = {"zero": ZERO_STAGES if chosen is None else chosen, "bytes_per": bytes_per, **given}
    found = estimates(source, gpu_counts or (None,), pipelines=pipelines, parameters=parameters, **about)
    last = found[-1].training

    def of_parameters(count: int, zero: int) -> Estimate:
        return reshard.estimate(count, **{**about, "zero": zero, "gpus": last.gpus, "pp": last.parallel.pp, "max_bubble": None})

    fitting = fits(found, nbytes, of_parameters if parameters is not None else None) if nbytes is not None else ()
    page.write(lambda pages: pages.estimate_page(found, nbytes))
    if as_json:
        show_json({**estimate_document(found[-1]), **_list_document(found, fitting)})
        return
    exact, short = f"{found[0].parameters:,}", count_text(found[0].parameters)
    of = f"{exact} parameters" + (f" ({short})" if short != exact else "")
    if len(found) == 1:
        show_estimate(of, found[0])
    else:
        _show_list(of, found)
    for sentence in found[-1].assumptions:
        show(f"  assumed    {sentence}")
    _show_fits(found, fitting, nbytes)


def _list_document(found: Sequence[Estimate], fitting: Sequence[Fit]) -> dict[str, Any]:
    """What several sizes, the memory of a GPU and a bubble add to the estimate of the largest sizes."""
    from reshard.training.memory import schedules_of
    from reshard.training.schedules import bubbles

    return {
        "by_gpus": [
            {
                "gpus": each.training.gpus,
                "pp": each.training.parallel.pp,
                "fewest_microbatches": each.fewest_microbatches,
                "totals": {_short_name(strategy.zero): strategy.fullest.total for strategy in each.strategies},
            }
            for each in found
        ],
        "fits": [{"strategy": _short_name(fit.zero), "gpus": fit.gpus, "parameters": fit.parameters} for fit in fitting],
        "bubbles": [
            {"stages": schedule.stages, "microbatches": count, "bubble": bubble}
            for schedule in schedules_of(found)
            for count, bubble in bubbles(schedule)
        ],
        "fewest_microbatches": found[-1].fewest_microbatches,
    }


def _show_list(of: str, found: Sequence[Estimate]) -> None:
    """A table of strategies and numbers of GPUs: what the fullest rank holds."""
    runs = [each.training for each in found]
    several = len({run.parallel.pp for run in runs}) > 1
    counts = [f"{run.gpus}" + (f", PP {run.parallel.pp}" if several else "") for run in runs]
    show(f"{of}: bytes on the fullest rank")
    show()
    rows = [
        (_NAMES[strategy.zero], *(_bytes(each.strategies[number].fullest.total) for each in found))
        for number, strategy in enumerate(found[0].strategies)
    ]
    show_table(rows, ("GPUs", *counts))
    _show_bubbles(found)
    show()


def _show_bubbles(found: Sequence[Estimate]) -> None:
    """A table of pipelines and numbers of microbatches: the share of the time that stages wait."""
    from reshard.training.memory import schedules_of
    from reshard.training.schedules import bubbles

    lines = {f"PP {schedule.stages}": dict(bubbles(schedule)) for schedule in schedules_of(found)}
    counts = sorted({count for line in lines.values() for count in line})
    if lines:
        show()
        rows = [(name, *(f"{100 * line[count]:.3g} %" if count in line else "" for count in counts)) for name, line in lines.items()]
        show_table(rows, ("bubble at microbatches", *map(str, counts)))


def _show_fits(found: Sequence[Estimate], fitting: Sequence[Fit], nbytes: int | None) -> None:
    for fit in fitting:
        at = f"fits from {plural(fit.gpus, 'GPU')} on" if fit.gpus else "fits at none of these numbers of GPUs"
        largest = f"; the largest model has {count_text(fit.parameters)} parameters" if fit.parameters is not None else ""
        show(f"  {_bytes(nbytes or 0):<9}  {_NAMES[fit.zero]}: {at}{largest}")
    fewest = {each.training.schedule.stages: each.fewest_microbatches for each in found if each.fewest_microbatches is not None}
    for stages, count in fewest.items():
        of = f" at PP {stages}" if len(fewest) > 1 else ""
        show(f"  bubble     needs at least {plural(count, 'microbatch', 'microbatches')}{of}")


def _short_name(zero: int) -> str:
    return _NAMES[zero].partition(",")[0]


def estimate_document(found: Estimate) -> dict[str, Any]:
    """The estimate with stable keys."""
    parallel, schedule, batch = found.training.parallel, found.training.schedule, found.training.batch
    in_flight = [float(schedule.in_flight(stage)) for stage in range(schedule.stages)]
    return {
        "parameters": found.parameters,
        "gpus": found.training.gpus,
        "parallel": {axis: getattr(parallel, axis) for axis in ("dp", "tp", "pp", "ep")},
        "pipeline": document(schedule, bubble=float(schedule.bubble), microbatches_in_flight=in_flight),
        "batch": batch and document(batch, flash_attention=not batch.scores, layer_activations=found.layer_activations),
        "strategies": [{"strategy": _short_name(each.zero), **document(each)} for each in found.strategies],
        "assumptions": list(found.assumptions),
    }


def show_estimate(of: str, found: Estimate) -> None:
    """Per strategy the fullest rank; per pipeline stage its rank; what is sent and waited for."""
    parallel, schedule = found.training.parallel, found.training.schedule
    show(f"{of} on {found.training.gpus} GPU{'s' if found.training.gpus > 1 else ''}: {parallel}")
    show()
    rows = [(_NAMES[each.zero], *_cells(each.fullest)) for each in found.strategies]
    show_table(rows, ("per rank", *_COLUMNS))
    if parallel.pp > 1:
        for each in found.strategies:
            show()
            stages = [(_stage(rank), count_text(rank.parameters), *_cells(rank)) for rank in each.stages]
            show_table(stages, (f"{_NAMES[each.zero]}, by stage", "parameters", *_COLUMNS))
    show()
    if found.layer_activations is not None:
        show(f"  a layer    keeps {_bytes(found.layer_activations)} for one microbatch")
    if schedule.stages > 1:
        show(f"  bubble     {float(schedule.bubble):.1%} of the time: {schedule.name}, {schedule.stages} stages, {_count(schedule)}")
    if parallel.dp > 1:
        for each in found.strategies:
            _show_moved(each)


_COLUMNS = ("weights", "gradients", "optimizer", "states", "activations", "transient", "total")


def _cells(rank: RankBytes) -> tuple[str, ...]:
    return tuple("-" if (value := getattr(rank, name)) is None else _bytes(value) for name in _COLUMNS)


def _stage(rank: RankBytes) -> str:
    return f"{rank.stage}: layers {rank.layers.start}..{rank.layers.stop - 1}" if rank.layers else str(rank.stage)


def _count(schedule: Any) -> str:
    chunks = f" in {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    return f"{schedule.microbatches} microbatch{'es' if schedule.microbatches > 1 else ''}{chunks}"


def _show_moved(each: Strategy) -> None:
    moved = each.traffic
    parts = f"{_bytes(moved.gradients)} of gradients" + (f", {_bytes(moved.weights)} of weights" if moved.weights else "")
    time = "" if moved.seconds is None else f" in {moved.seconds:.3g} s"
    show(f"  sent       {_NAMES[each.zero]}: {_bytes(moved.total)} per rank and step{time} ({parts})")


def _bytes(nbytes: int) -> str:
    return nbytes_text(nbytes, digits=4)
