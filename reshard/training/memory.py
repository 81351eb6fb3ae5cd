"""What training needs: bytes per rank of weights, gradients, optimizer state and activations, the pipeline's bubble, what a ring moves.

Mixed-precision training with Adam keeps 16 bytes per parameter: 2 of weight, 2 of gradient, and 4 each of master, first and second moment.
ZeRO divides them over data-parallel ranks, one more with each stage:

    stage                  weights   gradients   optimizer state     7 B parameters on 8 ranks
    0  every rank all      2         2           12                  112 GB
    1  optimizer state     2         2           12 / N              38.5 GB
    2  + gradients         2         2 / N       12 / N              26.25 GB
    3  + weights (FSDP)    2 / N     2 / N       12 / N              14 GB

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054), figure 1 and
section 7 for what is moved. All numbers here are integers; a part that does not come out even is rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from reshard.errors import RequestError, check_word
from reshard.geometry.parallel import ONE_RANK, Parallel
from reshard.models.model import Model
from reshard.training import collectives
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
from reshard.training.schedules import NO_PIPELINE, Schedule

ZERO_STAGES = (0, 1, 2, 3)
FORMULAS = ("published", "itemised")


@dataclass(frozen=True, slots=True)
class BytesPer:
    """Bytes that one parameter takes: mixed precision with Adam, where nothing else is said."""

    weight: int = 2
    gradient: int = 2
    master: int = 4
    moment: int = 4
    moments: int = 2

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) < 0:
                raise RequestError(f"--{each.name}-bytes {getattr(self, each.name)}: a number of bytes is 0 or more")

    @property
    def optimizer(self) -> int:
        return self.master + self.moments * self.moment


ADAM = BytesPer()


@dataclass(frozen=True, slots=True)
class Training:
    """A run: its sizes, its schedule, its microbatch (None: activations are not counted), and what is assumed.

    formula: of activations, the paper's or with each model's own widths. link: bytes per second that a rank sends.
    """

    parallel: Parallel = ONE_RANK
    schedule: Schedule = NO_PIPELINE
    batch: Batch | None = None
    formula: str = "published"
    bytes_per: BytesPer = ADAM
    stage_layers: tuple[int, ...] | None = None
    vocabulary_multiple: int = 1
    link: int | None = None

    def __post_init__(self) -> None:
        check_word("--activations", self.formula, FORMULAS)


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What the fullest rank of one stage holds. transient: what a part of a step needs on top, a gathered layer under ZeRO-3, a layer's
    activations while they are computed again."""

    stage: int
    layers: range | None
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int | None
    transient: int | None

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.states + (self.activations or 0) + (self.transient or 0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sends to the other data-parallel ranks in one optimizer step by ring collectives; seconds, if the link is known."""

    gradients: int
    weights: int
    seconds: float | None

    @property
    def total(self) -> int:
        return self.gradients + self.weights


@dataclass(frozen=True, slots=True)
class Strategy:
    """One ZeRO stage: every pipeline stage's rank, and what the fullest rank's parameters cost in traffic."""

    zero: int
    stages: tuple[RankBytes, ...]
    moved: Traffic

    @property
    def fullest(self) -> RankBytes:
        return max(self.stages, key=lambda rank: rank.total)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer for one model and run. layer_activations: bytes of one microbatch in the layer that keeps most."""

    parameters: int
    training: Training
    strategies: tuple[Strategy, ...]
    layer_activations: int | None = None
    assumptions: tuple[str, ...] = field(default=())


def estimate(source: Model | int, training: Training, zero_stages: Sequence[int] = ZERO_STAGES) -> Estimate:
    """What each rank holds under each of the ZeRO stages; `source` is a model, or a number of parameters.

    Raises: RequestError if the model does not divide by the sizes.
    """
    if isinstance(source, int):
        if training.batch is not None:
            raise RequestError("a number of parameters does not say how large activations are", do="Give a model's config, or no --seq-len")
        if training.schedule.chunks > 1 or training.stage_layers:
            raise RequestError("a number of parameters does not say which layers there are", do="Give a model's config")
        counts, count = stages_of_number(source, training.parallel), source
        kept: list[SavedActivations] = []
    else:
        counts = stages_of_model(source, training.parallel, training.stage_layers, training.vocabulary_multiple)
        _check_chunks(training, counts)
        count = parameters(source)
        kept = _kept(source, training)
    activations = [_activations(source, kept, stage, training) for stage in counts]
    strategies = []
    for zero in zero_stages:
        ranks = tuple(_rank(stage, held, kept, training, zero) for stage, held in zip(counts, activations, strict=True))
        strategies.append(Strategy(zero, ranks, moved(max((s.held for s in counts), key=lambda held: held.total), training, zero)))
    layer = max((each.nbytes(training.batch) for each in kept), default=None) if training.batch else None
    return Estimate(count, training, tuple(strategies), layer, _assumptions(source, training, zero_stages))


def moved(held: WeightCount, training: Training, zero: int) -> Traffic:
    """What a rank with so many weights sends per step.

    Stages 0 and 1 reduce gradients once per step, 2 and 3 after every microbatch, into which they have no room to add up. Stage 0 reduces
    them to all ranks; the others each rank's part, and send updated weights around: 1 and 2 once, 3 before forward and before backward of
    every microbatch.
    """
    rounds = training.schedule.microbatches
    gradients = weights = 0
    for elements, ranks in ((held.dense, training.parallel.dp), (held.experts, expert_ranks(training.parallel))):
        gradient, weight = elements * training.bytes_per.gradient, elements * training.bytes_per.weight
        if zero == 0:
            gradients += collectives.all_reduce_bytes(gradient, ranks)
            continue
        gradients += collectives.reduce_scatter_bytes(gradient, ranks) * (rounds if zero >= 2 else 1)
        weights += collectives.all_gather_bytes(weight, ranks) * (2 * rounds if zero == 3 else 1)
    link = training.link
    return Traffic(gradients, weights, None if link is None else collectives.seconds(gradients + weights, link))


def _rank(stage: StageCount, activations: int | None, kept: Sequence[SavedActivations], training: Training, zero: int) -> RankBytes:
    each = training.bytes_per
    dp, expert_dp = training.parallel.dp, expert_ranks(training.parallel)
    whole = stage.held.total
    part = -(-stage.held.dense // dp) + -(-stage.held.experts // expert_dp)
    transient = None
    if stage.layers is not None:
        gathered = stage.largest.total * each.weight if zero == 3 and dp > 1 else 0
        transient = gathered + _computed_again(stage, kept, training)
    return RankBytes(
        stage.stage,
        stage.layers,
        whole,
        weights=each.weight * (part if zero >= 3 else whole),
        gradients=each.gradient * (part if zero >= 2 else whole),
        optimizer=each.optimizer * (part if zero >= 1 else whole),
        activations=activations,
        transient=transient,
    )


def _kept(model: Model, training: Training) -> list[SavedActivations]:
    if training.batch is None:
        return []
    if training.formula == "published":
        return [published(model)] * model.dimensions["layers"]
    return [itemised(model, layer) for layer in layer_parts(model)]


def _activations(source: Model | int, kept: Sequence[SavedActivations], stage: StageCount, training: Training) -> int | None:
    """What a stage keeps for all microbatches in flight. With interleaved chunks a stage has layers of every part of the model; those of
    a contiguous stage stand for them, which is the same where all layers are alike."""
    batch = training.batch
    if batch is None or isinstance(source, int) or stage.layers is None:
        return None
    in_flight = training.schedule.in_flight(stage.stage)
    nbytes = in_flight * sum(kept[layer].nbytes(batch) for layer in stage.layers)
    if stage.stage == 0:
        nbytes += math.ceil(in_flight) * embedding_bytes(source, batch)
    if stage.stage == training.parallel.pp - 1:
        rows = vocabulary_rows(source, training.parallel.tp, training.vocabulary_multiple)
        nbytes += (training.schedule.microbatches if training.schedule.name == "gpipe" else 1) * head_bytes(source, batch, rows)
    return math.ceil(nbytes)


def _computed_again(stage: StageCount, kept: Sequence[SavedActivations], training: Training) -> int:
    """With recomputation, all that one layer keeps while its backward pass runs, beside what is kept anyway."""
    batch = training.batch
    if batch is None or batch.recompute == "none" or not stage.layers:
        return 0
    return max(kept[layer].nbytes(batch, "none") - kept[layer].nbytes(batch) for layer in stage.layers)


def _check_chunks(training: Training, counts: Sequence[StageCount]) -> None:
    chunks = training.schedule.chunks
    uneven = [len(stage.layers or ()) for stage in counts if len(stage.layers or ()) % chunks]
    if uneven:
        raise RequestError(f"--vp {chunks} does not divide the {uneven[0]} layers of a stage")


def _assumptions(source: Model | int, training: Training, zero_stages: Sequence[int]) -> tuple[str, ...]:
    """Everything that a number rests on and the model does not say, as sentences."""
    each, parallel, schedule, batch = training.bytes_per, training.parallel, training.schedule, training.batch
    said = [
        f"bytes per parameter: {each.weight} weight + {each.gradient} gradient + {each.master} master + {each.moments} x {each.moment} "
        f"moments = {each.weight + each.gradient + each.optimizer}",
        "every division comes out even, rounded up; fragmentation, buffers of the frameworks and the CUDA context come on top",
    ]
    if isinstance(source, int):
        said.append("all parameters divide by TP and PP; a config says what each rank really holds")
    else:
        said.append(_tables_said(source, training))
        if source.mtp_layers:
            said.append(f"the {source.mtp_layers} layer(s) that predict further tokens are not counted")
    if parallel.pp > 1 and max(zero_stages) >= 2:
        said.append("DeepSpeed's pipelines refuse ZeRO-2 and 3; others have them")
    if isinstance(source, Model) and 3 in zero_stages and parallel.dp > 1:
        said.append("transient, ZeRO-3: the largest layer or table, gathered; one gathered in advance comes on top")
    if batch is not None:
        said.extend(_activations_said(training))
    elif isinstance(source, Model):
        said.append("activations are not counted: say --seq-len")
    if parallel.pp > 1:
        said.append(
            f"bubble: part of the whole time, {schedule.name}, {schedule.microbatches} microbatch(es) of equal time, "
            "stages equally long, sending free"
        )
    if parallel.dp > 1:
        said.append("traffic: ring collectives over the data-parallel ranks, one direction, latency and overlap not counted")
        said.append("gradients are reduced once per step, under ZeRO-2 and 3 after every microbatch; ZeRO-3 gathers weights twice for each")
    return tuple(said)


def _tables_said(model: Model, training: Training) -> str:
    rows = "rows of tables are padded to a multiple of "
    padded = f"{rows}{training.vocabulary_multiple * training.parallel.tp}"
    copy = "; the last stage has a copy of the tied table" if model.is_tied and training.parallel.pp > 1 else ""
    return padded + copy


def _activations_said(training: Training) -> list[str]:
    batch = training.batch
    assert batch is not None
    formulas = {
        "published": "activations per layer: s b h (34 + 5 a s / h) without TP, Korthikanti et al. 2022, a GPT with an MLP of 4 h; "
        "--activations itemised counts this model's own widths",
        "itemised": "activations per layer: counted tensor by tensor with this model's widths, as Korthikanti et al. 2022 do for a GPT",
    }
    said = [formulas[training.formula] + "; 2 bytes each, 1 for dropout masks, 4 for logits"]
    if batch.scores and batch.recompute == "none":
        said.append("attention scores are kept, 5 a s / h of it; FlashAttention keeps none: say --flash-attention")
    if batch.tp > 1 and not batch.sequence_parallel:
        said.append("without sequence parallelism every TP rank keeps 10 h of the 34 h: say --sequence-parallel")
    if batch.recompute != "none":
        said.append("transient, recomputation: what one layer keeps while its backward pass runs")
    return said
