"""How many weights a training rank holds: a model's exact counts, divided over tensor-, pipeline- and expert-parallel ranks.

A training framework divides what a role splits into equal parts, KV heads included (megatron-core 0.16.1, Attention: linear_qkv has
(q + 2 kv) / tp rows even with more ranks than KV heads); norms, routers and biases behind a row-parallel linear are on every rank. The
stages of a pipeline have equally many layers, the first ones one more where that does not come out even (DeepSpeed, partition_uniform). The
first stage has what the declaration names before the layers, the last one the rest, and a copy of the embedding if the head is tied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from reshard.architecture import Model, ModelWeight, evaluate
from reshard.errors import RequestError
from reshard.parallel import Parallel, stage_layers
from reshard.roles import SPLITS, Heads, Replicate, Row, Split, Vocabulary
from reshard.splits import SplitRules, problem


@dataclass(frozen=True, slots=True)
class Features:
    """What one role is in a weight: its shape as [out features, in features], or [features] of a bias or a norm."""

    role: str
    name: str
    shape: tuple[int, ...]

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[-1]

    @property
    def is_expert(self) -> bool:
        """Whether it is one of the experts that a router chooses from."""
        return self.role.startswith("expert.")

    @property
    def is_weight(self) -> bool:
        """Whether it is no bias."""
        return self.name.endswith("weight")


@dataclass(frozen=True, slots=True)
class Count:
    """Weights that a rank holds: those that all data-parallel ranks share, and those of experts, which fewer of them do."""

    dense: int = 0
    experts: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True, slots=True)
class StageCount:
    """What each rank of one pipeline stage holds, and the largest layer (or table) of it. layers: None where only a number is known."""

    stage: int
    held: Count
    layers: range | None = None
    largest: Count = Count()


def features(model: Model, weight: ModelWeight) -> Iterator[Features]:
    """The roles in a weight, each with its shape: one, or those that are fused in it."""
    declared = weight.declared
    transposed = declared is not None and declared.transposed and len(weight.shape) == 2
    shape = weight.shape[::-1] if transposed else weight.shape
    held = declared.holds if declared else {}
    if not held:
        yield Features(weight.role, weight.name, shape)
    for role, rows in held.items():
        yield Features(role, weight.name, (evaluate(rows, model.dimensions), *shape[1:]))


def parameters(model: Model) -> int:
    """How many weights a model has; without layers that predict further tokens, which a checkpoint may leave out."""
    return sum(math.prod(weight.shape) for weight in model.weights.values() if not weight.optional)


def layer_features(model: Model) -> list[list[Features]]:
    """Per layer its roles, each once: those of the first expert stand for all."""
    found: list[list[Features]] = [[] for _ in range(model.dimensions["layers"])]
    for weight in model.weights.values():
        if weight.layer is not None and not weight.optional and not weight.expert:
            found[weight.layer].extend(features(model, weight))
    return found


def stages_of_model(
    model: Model, parallel: Parallel, layers: tuple[int, ...] | None = None, vocabulary_multiple: int = 1
) -> list[StageCount]:
    """Per pipeline stage what its fullest rank holds. layers: of each stage, where they are not as equal as can be.

    vocabulary_multiple: tables have a multiple of it, times tp, rows, as Megatron pads them (--make-vocab-size-divisible-by).

    Raises: RequestError if the model does not divide, naming the numbers.
    """
    rules = SplitRules(model.dimensions, vocabulary_multiple * parallel.tp)
    _check_experts(model, parallel)
    counts = _stage_sizes(model.dimensions["layers"], parallel.pp, layers)
    before, between, behind = Counter[Features](), [Counter[Features]() for _ in range(sum(counts))], Counter[Features]()
    for weight in model.weights.values():
        if not weight.optional:
            into = between[weight.layer] if weight.layer is not None else behind if any(between) else before
            into.update(_alike(each) for each in features(model, weight))
    if model.is_tied and parallel.pp > 1:
        behind.update(feature for feature in before if feature.role == "embedding")
    blocks = (before, *between, behind)
    every = {feature for block in blocks for feature in block}
    _check_tensors(every, parallel.tp, rules)
    held = {feature: _held(feature, parallel, rules) for feature in every}
    first, *inner, last = (sum((_share(held[each], n, each, parallel) for each, n in block.items()), Count()) for block in blocks)
    found = []
    for stage in range(parallel.pp):
        own = stage_layers(counts, stage)
        there = [inner[layer] for layer in own] + [first] * (stage == 0) + [last] * (stage == parallel.pp - 1)
        found.append(StageCount(stage, sum(there, Count()), own, max(there, key=lambda block: block.total)))
    return found


def stages_of_number(number: int, parallel: Parallel) -> list[StageCount]:
    """The same for a model of which only the number of weights is known: equal parts for all ranks."""
    if parallel.ep > 1:
        raise RequestError(f"--ep {parallel.ep}: how many of {number:,} parameters are experts' is not known", do="Give a model's config")
    return [StageCount(stage, Count(-(-number // (parallel.tp * parallel.pp)))) for stage in range(parallel.pp)]


def vocabulary_rows(model: Model, tp: int, multiple: int = 1) -> int:
    """Rows of the head on one rank, padding included."""
    return SplitRules(model.dimensions, multiple * tp).padded_vocabulary(model.dimensions["vocab"]) // tp


def _alike(feature: Features) -> Features:
    """Without the numbers in its name: the same weight of every layer and expert."""
    return Features(feature.role, "." + feature.name.rpartition(".")[2], feature.shape)


def _held(feature: Features, parallel: Parallel, rules: SplitRules) -> int:
    """How many elements of it a tensor-parallel rank holds."""
    split, elements = SPLITS[feature.role], math.prod(feature.shape)
    if isinstance(split, Replicate) or (isinstance(split, Row) and len(feature.shape) == 1):
        return elements
    if isinstance(split, Vocabulary):
        return rules.padded_vocabulary(feature.shape[0]) // parallel.tp * math.prod(feature.shape[1:])
    return -(-elements // parallel.tp)


def _share(elements: int, number: int, feature: Features, parallel: Parallel) -> Count:
    """`number` weights alike: of a layer's experts each expert-parallel rank has an equal part."""
    return Count(experts=elements * -(-number // parallel.ep)) if feature.is_expert else Count(dense=elements * number)


def _check_tensors(every: Iterable[Features], tp: int, rules: SplitRules) -> None:
    for feature in sorted(every, key=lambda each: (_plainness(SPLITS[each.role]), each.role, each.shape)):
        if reason := problem(SPLITS[feature.role], feature.shape, tp, rules):
            raise RequestError(f"--tp {tp} does not fit this model: {reason}", where=feature.role)


def _plainness(split: Split) -> int:
    """Heads first, those of queries before all: that they do not divide is what a person understands best."""
    return (1 if split.copies else 0) if isinstance(split, Heads) else 2


def _check_experts(model: Model, parallel: Parallel) -> None:
    experts = model.dimensions.get("experts")
    if parallel.ep > 1 and not experts:
        raise RequestError(f"--ep {parallel.ep}: a {model.architecture.model_type} model has no experts", do="Leave out --ep")
    if experts and experts % parallel.ep:
        raise RequestError(f"--ep {parallel.ep} does not divide the {experts} experts of a layer")
    if parallel.dp % parallel.ep:
        raise RequestError(
            f"--ep {parallel.ep} does not divide the {parallel.dp} data-parallel ranks",
            why="Expert-parallel ranks are data-parallel ones that have different experts",
        )


def _stage_sizes(layers: int, pp: int, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    if asked is None and pp > layers:
        raise RequestError(f"--pp {pp}: the model has {layers} layers, and every stage needs one")
    if asked is None:
        return tuple(layers // pp + (stage < layers % pp) for stage in range(pp))
    if len(asked) != pp or sum(asked) != layers:
        raise RequestError(
            f"--stage-layers {','.join(map(str, asked))}: {len(asked)} stages with {sum(asked)} layers",
            why=f"The model has {layers} layers, for --pp {pp}",
        )
    return asked


def expert_ranks(parallel: Parallel) -> int:
    """How many data-parallel ranks share the same experts."""
    return parallel.dp // parallel.ep
