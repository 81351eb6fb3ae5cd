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
from reshard.opening.keywords import PathLike, checked_keywords, usual_values
from reshard.opening.models import model_at
from reshard.training import memory
from reshard.training.activations import Batch
from reshard.training.memory import Estimate, TrainingRun
from reshard.training.schedules import PipelineSchedule, fewest_microbatches
from reshard.verbs.look.keywords import EstimateOptions


@checked_keywords
def estimate(
    source: PathLike | Model | int | None = None,
    *,
    zero: int | Sequence[int] = memory.ZERO_STAGES,
    **options: Unpack[EstimateOptions],
) -> Estimate:
    """What each rank of a training run holds.

    source: a config.json, its folder, a checkpoint, the name of a known model, a Model, or a number of parameters.
    zero: ZeRO stages, 0 to 3; FSDP is 3.

    Raises: RequestError if the model does not divide by the sizes.
    """
    usual = usual_values(EstimateOptions)
    given = usual | {name: value for name, value in options.items() if value is not None}
    source = _subject(source, given["parameters"])
    _refuse_unused(source, given, usual)
    tp, pp, seq_len = given["tp"], given["pp"], given["seq_len"]
    is_split = tp > 1 if given["sequence_parallel"] is None else given["sequence_parallel"]
    about_batch = given["micro_batch"], tp, is_split, given["recompute"], given["flash_attention"] is False
    training = TrainingRun(
        parallel=Parallel(tp, pp, given["ep"], _data_parallel(given["gpus"], given["dp"], tp, pp)),
        schedule=PipelineSchedule(given["schedule"], pp, given["microbatches"], given["vp"]),
        batch=None if seq_len is None else Batch(seq_len, *about_batch),
        formula=given["activations"],
        bytes_per=given["bytes_per"] or memory.ADAM,
        stage_layers=given["stage_layers"],
        vocabulary_multiple=given["vocab_multiple"],
        link=given["link"],
    )
    subject = source if isinstance(source, int) else _trained(source, given["architecture"])
    result = memory.estimate(subject, training, (zero,) if isinstance(zero, int) else tuple(zero))
    max_bubble = given["max_bubble"]
    return result if max_bubble is None else replace(result, fewest_microbatches=fewest_microbatches(training.schedule, max_bubble))


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
    results = []
    for count in sorted(set(counts), key=lambda number: number or 0):
        for pp in sorted(set(pipelines)):
            asked = options.copy()
            asked["gpus"], asked["pp"] = count, pp
            results.append(estimate(source, zero=zero, **asked))
    return tuple(results)


def _refuse_unused(source: object, given: Mapping[str, object], usual: Mapping[str, object]) -> None:
    """Raises RequestError for an option that changes no number of the estimate."""
    for name in ("micro_batch", "recompute", "sequence_parallel", "flash_attention", "activations"):
        if given["seq_len"] is None and given[name] != usual[name]:
            raise _unused(name, "activations are counted with `seq_len=` only", "Add `seq_len=N`, or leave it out")
    for name in ("architecture", "stage_layers", "vocab_multiple"):
        if isinstance(source, int) and given[name] != usual[name]:
            raise _unused(name, "a number of parameters does not say which weights there are", "Give a model instead of `parameters=`")


def _unused(name: str, why: str, do: str) -> RequestError:
    return RequestError(f"`{name}=` changes nothing here", why=why, do=do)


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
