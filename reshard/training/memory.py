"""Memory of a training run: bytes of weights, gradients, optimizer state and activations per rank, and the traffic of an optimizer step.

Mixed-precision training with Adam needs 16 bytes per parameter: 2 of weight, 2 of gradient, and 4 each of master, first and second moment.
Each ZeRO stage splits one more of the three kinds below over the N data-parallel ranks (2, 2 and 12 are bytes per parameter):

    stage                  weights   gradients   optimizer state     7 B parameters on 8 ranks
    0  nothing is split    2         2           12                  112 GB
    1  optimizer state     2         2           12 / N              38.5 GB
    2  + gradients         2         2 / N       12 / N              26.25 GB
    3  + weights (FSDP)    2 / N     2 / N       12 / N              14 GB

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054), figure 1 and
section 7 for the traffic. All byte counts in the code are integers, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields

from reshard.errors import RequestError, check_word
from reshard.geometry.meshes import ONE_RANK, Parallel
from reshard.geometry.quantities import plural
from reshard.geometry.table import Table
from reshard.geometry.value import Tabular, value
from reshard.models.model import Model
from reshard.training.activations import Batch, SavedActivations, embedding_bytes, head_bytes, itemised, published
from reshard.training.parameter_counts import (
    StageCount,
    WeightCount,
    expert_ranks,
    layer_parts,
    parameters,
    stages_of_model,
    stages_of_number,
    vocabulary_rows,
)
from reshard.training.schedules import NO_PIPELINE, PipelineSchedule

ZERO_STAGES = (0, 1, 2, 3)
FORMULAS = ("published", "itemised")
# No model has more parameters than this.
_MOST_PARAMETERS = 1 << 50


@value
class BytesPer:
    """Bytes per parameter. The defaults are those of mixed precision with Adam."""

    weight: int = 2
    """Bytes of the weight."""
    gradient: int = 2
    """Bytes of the gradient."""
    master: int = 4
    """Bytes of the full-precision copy; 0 if there is none."""
    moment: int = 4
    """Bytes of one moment of the optimizer."""
    moments: int = 2
    """Number of moments."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise RequestError(f"`{field.name}_bytes={getattr(self, field.name)}`: a number of bytes is 0 or more")

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer state: master and moments."""
        return self.master + self.moments * self.moment


ADAM = BytesPer()


@value
class TrainingRun:
    """What the memory of a training run depends on, apart from the model and the ZeRO stage."""

    parallel: Parallel = ONE_RANK
    """The parallel sizes."""
    schedule: PipelineSchedule = NO_PIPELINE
    """The pipeline's schedule."""
    batch: Batch | None = None
    """One microbatch; None: activations are not counted."""
    formula: str = "published"
    """The formula for activations: the paper's (published), or the model's own widths (itemised)."""
    bytes_per: BytesPer = ADAM
    """Bytes per parameter."""
    stage_layers: tuple[int, ...] | None = None
    """The number of layers on each stage; None: as equal as possible."""
    vocabulary_multiple: int = 1
    """Vocabulary tables are padded to a multiple of this * tp rows."""
    link: int | None = None
    """Bytes per second that a rank sends; None: times are not computed."""

    def __post_init__(self) -> None:
        check_word("`activations=`", self.formula, FORMULAS)

    @property
    def gpus(self) -> int:
        """The number of ranks in all."""
        return self.parallel.dp * self.parallel.tp * self.parallel.pp


@value
class RankBytes:
    """What the fullest rank of one pipeline stage holds, in bytes."""

    JSON = "stage layers parameters weights gradients optimizer states activations transient total"

    stage: int
    """The pipeline stage."""
    layers: range | None
    """The stage's layers; None if only the model's number of parameters is known."""
    parameters: int
    """Number of parameters, before ZeRO splits them."""
    weights: int
    """Bytes of weights."""
    gradients: int
    """Bytes of gradients."""
    optimizer: int
    """Bytes of optimizer state: masters and moments."""
    activations: int | None
    """Bytes of activations of all microbatches in flight; None if they are not counted."""
    transient: int | None
    """Bytes that are needed on top for a part of a step: a layer that ZeRO-3 gathers, and activations of a layer that are computed again.
    None if only the model's number of parameters is known."""

    @property
    def states(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Bytes of everything that is counted."""
        return self.states + (self.activations or 0) + (self.transient or 0)


@value
class Traffic:
    """What one rank sends to the other data-parallel ranks in one optimizer step, by ring collectives."""

    JSON = "gradients weights total seconds"

    gradients: int
    """Bytes of gradients."""
    weights: int
    """Bytes of weights."""
    seconds: float | None
    """The time that it takes; None if the link's bandwidth is not given."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.gradients + self.weights


@value
class Strategy:
    """Memory and traffic under one ZeRO stage."""

    JSON = "zero fullest stages data_parallel_traffic=traffic"

    zero: int
    """The ZeRO stage."""
    stages: tuple[RankBytes, ...]
    """The fullest rank of each pipeline stage."""
    traffic: Traffic
    """The traffic of the rank with most parameters."""

    @property
    def fullest(self) -> RankBytes:
        """The rank that needs most memory."""
        return max(self.stages, key=lambda rank: rank.total)


@value
class Estimate(Tabular):
    """Memory and traffic of one training run, under several ZeRO stages."""

    parameters: int
    """The model's number of parameters."""
    training: TrainingRun
    """The run."""
    strategies: tuple[Strategy, ...]
    """One for each ZeRO stage."""
    layer_activations: int | None = None
    """Bytes of one microbatch's activations in the layer that saves most; None if activations are not counted."""
    assumptions: tuple[str, ...] = ()
    """What the numbers assume, as sentences."""
    fewest_microbatches: int | None = None
    """The fewest microbatches for the largest bubble that was asked for; None if none was."""

    def table(self) -> Table:
        """A row for each ZeRO stage and pipeline stage: the bytes of its fullest rank."""
        columns = ("zero", "stage", "parameters", "weights", "gradients", "optimizer", "states", "activations", "transient", "total")
        ranks = ((strategy.zero, rank) for strategy in self.strategies for rank in strategy.stages)
        return Table(columns, tuple((zero, *(getattr(rank, name) for name in columns[1:])) for zero, rank in ranks))

    def __repr__(self) -> str:
        return f"Estimate({plural(self.parameters, 'parameter')}, {plural(self.training.gpus, 'GPU')}, {len(self.strategies)} ZeRO stages)"


def estimate(source: Model | int, training: TrainingRun, zero_stages: Sequence[int] = ZERO_STAGES) -> Estimate:
    """What each rank holds and sends under each of the ZeRO stages. `source` is a model, or a number of parameters.

    Raises: RequestError if the model does not split over the sizes, or a number of parameters is not enough to answer.
    """
    if isinstance(source, int):
        if training.batch is not None:
            raise RequestError(
                "a number of parameters does not say how large activations are", do="Give a model's config, or no `seq_len=`"
            )
        if training.schedule.chunks > 1 or training.stage_layers:
            raise RequestError("a number of parameters does not say which layers there are", do="Give a model's config")
        stage_counts, number = stages_of_number(source, training.parallel), source
        saved: list[SavedActivations] = []
    else:
        stage_counts = stages_of_model(source, training.parallel, training.stage_layers, training.vocabulary_multiple)
        _check_chunks(training, stage_counts)
        number = parameters(source)
        saved = _saved_activations(source, training)
    activations = [_activations(source, saved, stage, training) for stage in stage_counts]
    most_weights = max((stage.weights for stage in stage_counts), key=lambda weights: weights.total)
    strategies = []
    for zero in zero_stages:
        ranks = tuple(_rank(stage, nbytes, saved, training, zero) for stage, nbytes in zip(stage_counts, activations, strict=True))
        strategies.append(Strategy(zero, ranks, traffic(most_weights, training, zero)))
    layer_bytes = max((layer.nbytes(training.batch) for layer in saved), default=None) if training.batch else None
    return Estimate(number, training, tuple(strategies), layer_bytes, _assumptions(source, training, zero_stages))


def traffic(weights_of_rank: WeightCount, training: TrainingRun, zero: int) -> Traffic:
    """What a rank with that number of parameters sends per optimizer step.

    ZeRO stages 0 and 1 reduce gradients once per step. Stages 2 and 3 keep no whole gradients to add to, so they reduce them after
    every microbatch. Stage 0 uses an all-reduce. The others use a reduce-scatter and gather the updated weights: stages 1 and 2 once, stage
    3 before the forward and before the backward pass of every microbatch.
    """
    rounds = training.schedule.microbatches
    gradients = weights = 0
    for elements, ranks in ((weights_of_rank.dense, training.parallel.dp), (weights_of_rank.experts, expert_ranks(training.parallel))):
        gradient, weight = elements * training.bytes_per.gradient, elements * training.bytes_per.weight
        if zero == 0:
            gradients += all_reduce_bytes(gradient, ranks)
            continue
        gradients += gathered_bytes(gradient, ranks) * (rounds if zero >= 2 else 1)
        weights += gathered_bytes(weight, ranks) * (2 * rounds if zero == 3 else 1)
    return Traffic(gradients, weights, None if training.link is None else (gradients + weights) / training.link)


# Ring collectives over N ranks. An all-reduce of M bytes is a reduce-scatter and an all-gather. In each of them a rank sends N - 1 of N
# equal parts (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends in an all-reduce: 2 M (N - 1) / N, rounded up."""
    return -(-2 * nbytes * (ranks - 1) // ranks)


def gathered_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends in an all-gather or a reduce-scatter: M (N - 1) / N, rounded up. M: the whole result or input."""
    return -(-nbytes * (ranks - 1) // ranks)


def _rank(stage: StageCount, activations: int | None, saved: Sequence[SavedActivations], training: TrainingRun, zero: int) -> RankBytes:
    bytes_per = training.bytes_per
    dp, expert_dp = training.parallel.dp, expert_ranks(training.parallel)
    whole = stage.weights.total
    part = -(-stage.weights.dense // dp) + -(-stage.weights.experts // expert_dp)
    transient = None
    if stage.layers is not None:
        gathered = stage.largest.total * bytes_per.weight if zero == 3 and dp > 1 else 0
        transient = gathered + _recomputed(stage, saved, training)
    return RankBytes(
        stage.stage,
        stage.layers,
        whole,
        weights=bytes_per.weight * (part if zero >= 3 else whole),
        gradients=bytes_per.gradient * (part if zero >= 2 else whole),
        optimizer=bytes_per.optimizer * (part if zero >= 1 else whole),
        activations=activations,
        transient=transient,
    )


def _saved_activations(model: Model, training: TrainingRun) -> list[SavedActivations]:
    """The activations that each layer saves; empty if activations are not counted."""
    if training.batch is None:
        return []
    if training.formula == "published":
        return [published(model)] * model.dimensions["layers"]
    return [itemised(model, layer) for layer in layer_parts(model)]


def _activations(source: Model | int, saved: Sequence[SavedActivations], stage: StageCount, training: TrainingRun) -> int | None:
    """Bytes of activations on a rank of a stage, for all microbatches in flight; None if they are not counted.

    With the interleaved schedule, the layers of a stage are not contiguous. They are counted as if they were, which gives the same number
    if all layers are equal.
    """
    batch = training.batch
    if batch is None or isinstance(source, int) or stage.layers is None:
        return None
    in_flight = training.schedule.in_flight(stage.stage)
    nbytes = in_flight * sum(saved[layer].nbytes(batch) for layer in stage.layers)
    if stage.stage == 0:
        nbytes += math.ceil(in_flight) * embedding_bytes(source, batch)
    if stage.stage == training.parallel.pp - 1:
        rows = vocabulary_rows(source, training.parallel.tp, training.vocabulary_multiple)
        nbytes += (training.schedule.microbatches if training.schedule.name == "gpipe" else 1) * head_bytes(source, batch, rows)
    return math.ceil(nbytes)


def _recomputed(stage: StageCount, saved: Sequence[SavedActivations], training: TrainingRun) -> int:
    """Bytes of activations that one layer computes again and holds during its backward pass, on top of its saved activations."""
    batch = training.batch
    if batch is None or batch.recompute == "none" or not stage.layers:
        return 0
    return max(saved[layer].nbytes(batch, "none") - saved[layer].nbytes(batch) for layer in stage.layers)


def _check_chunks(training: TrainingRun, counts: Sequence[StageCount]) -> None:
    chunks = training.schedule.chunks
    uneven = [len(stage.layers or ()) for stage in counts if len(stage.layers or ()) % chunks]
    if uneven:
        raise RequestError(f"`vp={chunks}` does not divide the {uneven[0]} layers of a stage", id="illegal-sizes")


def _assumptions(source: Model | int, training: TrainingRun, zero_stages: Sequence[int]) -> tuple[str, ...]:
    """What the numbers assume and the model does not say, as sentences."""
    bytes_per, parallel, schedule, batch = training.bytes_per, training.parallel, training.schedule, training.batch
    sentences = [
        f"bytes per parameter: {bytes_per.weight} weight + {bytes_per.gradient} gradient + {bytes_per.master} master + "
        f"{bytes_per.moments} x {bytes_per.moment} moments = {bytes_per.weight + bytes_per.gradient + bytes_per.optimizer}",
        "all ranks hold equal parts, rounded up; fragmentation, buffers of the frameworks and the CUDA context come on top",
    ]
    if isinstance(source, int):
        sentences.append("TP and PP split all parameters; with a config, the exact number on each rank is counted")
    else:
        copy = "; the last stage has a copy of the tied table" if source.is_tied and parallel.pp > 1 else ""
        sentences.append(f"rows of tables are padded to a multiple of {training.vocabulary_multiple * parallel.tp}{copy}")
        if source.mtp_layers:
            sentences.append(f"layers that predict further tokens are not counted: {source.mtp_layers}")
    if parallel.pp > 1 and max(zero_stages) >= 2:
        sentences.append("DeepSpeed refuses ZeRO-2 and 3 with a pipeline; other frameworks support them")
    if isinstance(source, Model) and 3 in zero_stages and parallel.dp > 1:
        sentences.append("transient, ZeRO-3: the largest layer or table, gathered; one that is gathered in advance comes on top")
    if batch is not None:
        sentences.extend(_about_activations(batch, training.formula))
    elif isinstance(source, Model):
        sentences.append("activations are not counted: give `seq_len=`")
    if parallel.pp > 1:
        microbatches = plural(schedule.microbatches, "microbatch", "microbatches")
        sentences.append(
            f"bubble: fraction of the time; {schedule.name}, {microbatches} of equal time, equal stages, sending takes no time"
        )
    if parallel.dp > 1:
        sentences.append("traffic: ring collectives over the data-parallel ranks, one direction, without latency and overlap")
        sentences.append(
            "gradients are reduced once per step, under ZeRO-2 and 3 after every microbatch; ZeRO-3 gathers weights twice for each"
        )
    return tuple(sentences)


def _about_activations(batch: Batch, formula: str) -> list[str]:
    formulas = {
        "published": "activations per layer: s b h (34 + 5 a s / h) without TP, Korthikanti et al. 2022, for a GPT with an MLP of 4 h",
        "itemised": "activations per layer: counted tensor by tensor with this model's widths, as Korthikanti et al. 2022 do for a GPT; "
        "`activations=published` uses their formula",
    }
    sentences = [formulas[formula] + "; 2 bytes each, 1 for dropout masks, 4 for logits"]
    if batch.scores and batch.recompute == "none":
        sentences.append("attention scores are saved; FlashAttention saves none")
    elif batch.recompute == "none":
        sentences.append("no attention scores are saved, as with FlashAttention; `flash_attention=False` counts them")
    if batch.tp > 1 and batch.sequence_parallel:
        sentences.append("sequence parallelism splits all activations over the TP ranks; `sequence_parallel=False` counts without it")
    elif batch.tp > 1:
        sentences.append("without sequence parallelism every TP rank saves the activations between the linear layers whole")
    if batch.recompute != "none":
        sentences.append("transient, recomputation: the activations of one layer during its backward pass")
    return sentences


@value
class Fit:
    """What one strategy makes of a GPU's memory."""

    zero: int
    """The ZeRO stage; 3 is FSDP."""
    gpus: int | None
    """The smallest of the numbers of GPUs at which the fullest rank fits; None if it fits at none."""
    parameters: int | None
    """The largest number of parameters that fits at the largest number of GPUs; None if a model was given, not a number of parameters."""


def fits(estimates: Sequence[Estimate], nbytes: int, of_parameters: Callable[[int, int], Estimate] | None = None) -> tuple[Fit, ...]:
    """For each strategy, what fits into `nbytes` bytes on every GPU.

    estimates: the same model on rising numbers of GPUs. of_parameters: the estimate of a number of parameters at one ZeRO stage, on the
    largest number of GPUs.
    """
    result = []
    for number, strategy in enumerate(estimates[0].strategies):
        fitting = [estimate for estimate in estimates if estimate.strategies[number].fullest.total <= nbytes]
        largest = _largest(lambda count, zero=strategy.zero: of_parameters(count, zero), nbytes) if of_parameters else None  # type: ignore[misc]
        result.append(Fit(strategy.zero, fitting[0].training.gpus if fitting else None, largest))
    return tuple(result)


def _largest(estimate: Callable[[int], Estimate], nbytes: int) -> int:
    """The largest number of parameters whose fullest rank fits, to three digits; 0 if none fits."""
    low, high = 0, _MOST_PARAMETERS
    while high - low > max(1, low // 2000):
        middle = (low + high) // 2
        low, high = (middle, high) if estimate(middle).strategies[0].fullest.total <= nbytes else (low, middle)
    return low


def schedules_of(estimates: Sequence[Estimate]) -> tuple[PipelineSchedule, ...]:
    """The pipelines of several estimates, each number of stages once, the shortest first."""
    by_stages = {estimate.training.schedule.stages: estimate.training.schedule for estimate in estimates}
    return tuple(by_stages[stages] for stages in sorted(by_stages) if stages > 1)
