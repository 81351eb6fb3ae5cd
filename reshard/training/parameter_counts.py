"""The number of parameters on a training rank: a model's exact counts, split over tensor-, pipeline- and expert-parallel ranks.

A training framework splits a weight into equal parts, also with more ranks than KV heads (megatron-core 0.16.1, Attention: linear_qkv has
(q + 2 kv) / tp rows). Norms, routers and the biases of row-parallel linear layers are on every rank. The stages of a pipeline have the same
number of layers; the remainder goes one by one to the first stages (DeepSpeed, partition_uniform). The first stage also holds the weights
that the declaration names before the layers. The last stage holds the others, and a copy of the embedding if the head is tied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from reshard.errors import RequestError
from reshard.geometry.meshes import Parallel, stage_layers
from reshard.geometry.value import value
from reshard.models.model import Model
from reshard.models.parts import Part
from reshard.models.splits import SplitRules, cut_of, problem
from reshard.serving.legality import check_has_experts


@value
class WeightCount:
    """Parameters on one rank."""

    dense: int = 0
    """Parameters outside of the experts. All data-parallel ranks have the same ones."""
    experts: int = 0
    """Parameters of experts. Only `expert_ranks` data-parallel ranks have the same ones."""

    def __add__(self, other: WeightCount) -> WeightCount:
        return WeightCount(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        """All parameters."""
        return self.dense + self.experts


@value
class StageCount:
    """Parameters on each rank of one pipeline stage."""

    stage: int
    """The stage's number."""
    weights: WeightCount
    """All parameters of a rank."""
    layers: range | None = None
    """The stage's layers; None if only the model's number of parameters is known."""
    largest: WeightCount = WeightCount()
    """Parameters of the largest layer or table on a rank."""


def parameters(model: Model) -> int:
    """The number of a model's parameters, without the layers for multi-token prediction, which a checkpoint may lack."""
    return sum(math.prod(part.array.shape) for part in _trained(model))


def layer_parts(model: Model) -> list[list[Part]]:
    """The parts of each layer, with those of its first expert only."""
    by_layer: list[list[Part]] = [[] for _ in range(model.dimensions["layers"])]
    for part in _trained(model):
        if part.layer is not None and not part.expert:
            by_layer[part.layer].append(part)
    return by_layer


def stages_of_model(
    model: Model, parallel: Parallel, layers: tuple[int, ...] | None = None, vocabulary_multiple: int = 1
) -> list[StageCount]:
    """Parameters of the fullest rank of each pipeline stage.

    layers: the number of layers on each stage (default: as equal as possible). vocabulary_multiple: tables are padded to a multiple of
    vocabulary_multiple * tp rows, as Megatron pads them (--make-vocab-size-divisible-by).

    Raises: RequestError, naming the numbers, if the model does not split over the sizes.
    """
    rules = SplitRules(vocabulary_multiple * parallel.tp)
    _check_experts(model, parallel)
    counts = _stage_sizes(model.dimensions["layers"], parallel.pp, layers)
    before, between, behind = Counter[_Kind](), [Counter[_Kind]() for _ in range(sum(counts))], Counter[_Kind]()
    kinds: dict[_Kind, Part] = {}
    for part in _trained(model):
        kind = (part.role, part.parameter, part.array.shape)
        kinds.setdefault(kind, part)
        into = between[part.layer] if part.layer is not None else behind if any(between) else before
        into[kind] += 1
    if model.is_tied and parallel.pp > 1:
        behind.update(kind for kind in before if kind[0] == "embedding")
    _check_tensors(kinds.values(), parallel.tp, rules)
    elements = {kind: _elements(part, parallel.tp, rules) for kind, part in kinds.items()}

    def count(block: Counter[_Kind]) -> WeightCount:
        return sum((_share(elements[kind], number, kinds[kind], parallel) for kind, number in block.items()), WeightCount())

    first, *inner, last = (count(block) for block in (before, *between, behind))
    stages = []
    for stage in range(parallel.pp):
        numbers = stage_layers(counts, stage)
        blocks = [inner[layer] for layer in numbers] + [first] * (stage == 0) + [last] * (stage == parallel.pp - 1)
        stages.append(StageCount(stage, sum(blocks, WeightCount()), numbers, max(blocks, key=lambda block: block.total)))
    return stages


def stages_of_number(number: int, parallel: Parallel) -> list[StageCount]:
    """Parameters of a rank of each pipeline stage, if only the model's number of parameters is known: equal parts for all ranks."""
    if parallel.ep > 1:
        raise RequestError(
            f"`ep={parallel.ep}`: a number of parameters does not say how many of the {number:,} belong to experts",
            do="Give a model's config",
            id="illegal-sizes",
        )
    return [StageCount(stage, WeightCount(-(-number // (parallel.tp * parallel.pp)))) for stage in range(parallel.pp)]


def vocabulary_rows(model: Model, tp: int, multiple: int = 1) -> int:
    """Rows of the head on one rank, padding included."""
    return SplitRules(multiple * tp).padded_vocabulary(model.dimensions["vocab"]) // tp


_Kind = tuple[str, str, tuple[int, ...]]


def _trained(model: Model) -> Iterator[Part]:
    """The parts that are counted as trained: no scales of quantized weights, no layers for multi-token prediction."""
    layers = model.dimensions["layers"]
    return (part for part in model.parts() if not part.is_scale and (part.layer is None or part.layer < layers))


def _elements(part: Part, tp: int, rules: SplitRules) -> int:
    """The number of a part's elements on one tensor-parallel rank."""
    if cut_of(part, tp) is None:
        return math.prod(part.array.shape)
    rows = part.array.shape[0]
    padded = rules.padded_vocabulary(rows) if part.split.is_padded else rows
    return -(-padded * math.prod(part.array.shape[1:]) // tp)


def _share(elements: int, number: int, part: Part, parallel: Parallel) -> WeightCount:
    """The parameters of `number` parts of one kind on one rank, each with `elements` elements there. ep divides the experts evenly."""
    return WeightCount(experts=elements * -(-number // parallel.ep)) if part.expert is not None else WeightCount(dense=elements * number)


def _check_tensors(parts: Iterable[Part], tp: int, rules: SplitRules) -> None:
    # Query heads first, then KV heads: people understand a size that does not divide the heads best.
    for part in sorted(parts, key=lambda part: (not part.split.heads, part.split.copies)):
        if reason := problem(part, tp, rules):
            raise RequestError(f"`tp={tp}` does not fit this model: {reason}", where=part.tensor, id="illegal-sizes")


def _check_experts(model: Model, parallel: Parallel) -> None:
    experts = model.dimensions.get("experts")
    check_has_experts(model, parallel)
    if experts and experts % parallel.ep:
        raise RequestError(f"`ep={parallel.ep}` does not divide the {experts} experts of a layer", id="illegal-sizes")
    if parallel.dp % parallel.ep:
        raise RequestError(
            f"`ep={parallel.ep}` does not divide the {parallel.dp} data-parallel ranks",
            why="Expert-parallel ranks are data-parallel ranks with different experts",
            id="illegal-sizes",
        )


def _stage_sizes(layers: int, pp: int, requested: tuple[int, ...] | None) -> tuple[int, ...]:
    if requested is None and pp > layers:
        raise RequestError(f"`pp={pp}`: the model has {layers} layers, and every stage needs one", id="illegal-sizes")
    if requested is None:
        return tuple(layers // pp + (stage < layers % pp) for stage in range(pp))
    if len(requested) != pp or sum(requested) != layers:
        raise RequestError(
            f"`stage_layers=` {','.join(map(str, requested))}: {len(requested)} stages with {sum(requested)} layers",
            why=f"The model has {layers} layers, and `pp=` is {pp}",
        )
    return requested


def expert_ranks(parallel: Parallel) -> int:
    """The number of data-parallel ranks that have the same experts."""
    return parallel.dp // parallel.ep
