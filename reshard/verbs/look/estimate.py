"""The verb `estimate`: what training needs on each rank, before it runs. Reads a config, or a checkpoint's metadata; no weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from reshard.errors import RequestError
from reshard.geometry.meshes import Parallel
from reshard.geometry.quantities import parse_count
from reshard.models.architecture import Architecture
from reshard.models.model import Model
from reshard.models.quantization import without_quantization
from reshard.requests.keywords import PathLike, checked_keywords
from reshard.requests.opening import model_at
from reshard.training import memory
from reshard.training.activations import Batch
from reshard.training.memory import Estimate, TrainingRun
from reshard.training.schedules import Schedule, fewest_microbatches
from reshard.verbs.look.keywords import EstimateOptions


@checked_keywords
def estimate(
    source: PathLike | Model | int | None = None,
    *,
    zero: int | Sequence[int] = memory.ZERO_STAGES,
    **options: Unpack[EstimateOptions],
) -> Estimate:
    """What each rank of a training run holds.

    source: a folder with the model's config, a checkpoint, a Model, or a number of parameters. zero: ZeRO stages, 0 to 3; FSDP is 3.

    Raises: RequestError if the model does not divide by the sizes.
    """
    source = _subject(source, options.get("parameters"))
    _refuse_unused(source, options)
    tp, pp, ep = options.get("tp", 1), options.get("pp", 1), options.get("ep", 1)
    training = TrainingRun(
        parallel=Parallel(tp, pp, ep, _data_parallel(options.get("gpus"), options.get("dp"), tp, pp)),
        schedule=Schedule(options.get("schedule", "1f1b"), pp, options.get("microbatches", 1), options.get("vp", 1)),
        batch=_batch(options, tp),
        formula=options.get("activations", "published"),
        bytes_per=options.get("bytes_per", memory.ADAM),
        stage_layers=options.get("stage_layers"),
        vocabulary_multiple=options.get("vocab_multiple", 1),
        link=options.get("link"),
    )
    subject = source if isinstance(source, int) else _trained(source, options.get("architecture"))
    found = memory.estimate(subject, training, (zero,) if isinstance(zero, int) else tuple(zero))
    max_bubble = options.get("max_bubble")
    return found if max_bubble is None else replace(found, fewest_microbatches=fewest_microbatches(training.schedule, max_bubble))


def _subject(source: PathLike | Model | int | None, parameters: int | str | None) -> PathLike | Model | int:
    """What is estimated: a model or a number of parameters."""
    if (source is None) == (parameters is None):
        raise RequestError("give either a model or a number of parameters", do="Give a directory with a config.json, or `parameters=7B`")
    return parse_count(parameters, "`parameters=`") if parameters is not None else source  # type: ignore[return-value]


def estimates(
    source: PathLike | Model | int | None,
    counts: Sequence[int | None],
    *,
    pipelines: Sequence[int] = (1,),
    zero: int | Sequence[int] = memory.ZERO_STAGES,
    **options: Unpack[EstimateOptions],
) -> tuple[Estimate, ...]:
    """`estimate` for each number of GPUs and each pipeline-parallel size, in rising order. counts: the numbers of GPUs; None: as many as
    the sizes need."""
    found = []
    for count in sorted(set(counts), key=lambda each: each or 0):
        for pp in sorted(set(pipelines)):
            each = options.copy()
            each["gpus"], each["pp"] = count, pp
            found.append(estimate(source, zero=zero, **each))
    return tuple(found)


# The options about activations, and the values with which they change nothing.
_OF_ACTIVATIONS: Mapping[str, object] = {
    "micro_batch": 1,
    "recompute": "none",
    "sequence_parallel": False,
    "flash_attention": False,
    "activations": "published",
}


def _refuse_unused(source: object, options: EstimateOptions) -> None:
    """Raises RequestError for an option that changes no number of the estimate."""
    given: dict[str, object] = {name: value for name, value in options.items() if value is not None}
    if options.get("seq_len") is None:
        for name, usual in _OF_ACTIVATIONS.items():
            if given.get(name, usual) != usual:
                raise _unused(name, "activations are counted with `seq_len=` only", "Add `seq_len=N`, or leave it out")
    if isinstance(source, int):
        for name, usual in (("architecture", None), ("stage_layers", None), ("vocab_multiple", 1)):
            if given.get(name, usual) != usual:
                raise _unused(name, "a number of parameters does not say which weights there are", "Give a model instead of `parameters=`")


def _unused(name: str, why: str, do: str) -> RequestError:
    return RequestError(f"`{name}=` changes nothing here", why=why, do=do)


def _batch(options: EstimateOptions, tp: int) -> Batch | None:
    """One microbatch; None if activations are not counted."""
    seq_len = options.get("seq_len")
    if seq_len is None:
        return None
    return Batch(
        seq_len,
        options.get("micro_batch", 1),
        tp,
        options.get("sequence_parallel", False),
        options.get("recompute", "none"),
        scores=not options.get("flash_attention", False),
    )


def _trained(source: PathLike | Model, architecture: Architecture | PathLike | None) -> Model:
    """The model as it is trained: not quantized."""
    model = source if isinstance(source, Model) else model_at(source, architecture)
    return Model(model.architecture, without_quantization(model.config))


def _data_parallel(gpus: int | None, dp: int | None, tp: int, pp: int) -> int:
    """The number of data-parallel ranks. Raises RequestError if the numbers contradict each other."""
    if gpus is None:
        return dp or 1
    if gpus % (tp * pp) or (dp is not None and dp * tp * pp != gpus):
        product = " x ".join(f"{name} {size}" for name, size in (("DP", dp), ("TP", tp), ("PP", pp)) if size)
        raise RequestError(
            f"{gpus} GPUs are not {product}",
            do=f"Use {tp * pp * dp} GPUs, or leave out `dp=`" if dp else f"Use a multiple of {tp * pp} GPUs, or change `tp=` or `pp=`",
        )
    return gpus // (tp * pp)
