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

from reshard.errors import RequestError
from reshard.geometry.parallel import Parallel, stage_layers
from reshard.models.model import Model, Part
from reshard.models.roles import Heads, Split, Vocabulary
from reshard.models.splits import SplitRules, cut_of, problem


@dataclass(frozen=True, slots=True)
class WeightCount:
    """Weights that a rank holds: those that all data-parallel ranks share, and those of experts, which fewer of them do."""

    dense: int = 0
    experts: int = 0

    def __add__(self, other: WeightCount) -> WeightCount:
        return WeightCount(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True, slots=True)
class StageCount:
    """What each rank of one pipeline stage holds, and the largest layer (or table) of it. layers: None where only a number is known."""

    stage: int
    held: WeightCount
    layers: range | None = None
    largest: WeightCount = WeightCount()


def parameters(model: Model) -> int:
    """How many weights a model has; without layers that predict further tokens, which a checkpoint may leave out."""
    return sum(math.prod(part.array.shape) for part in _trained(model))


def layer_parts(model: Model) -> list[list[Part]]:
    """Per layer its parts; those of the first expert stand for all."""
    found: list[list[Part]] = [[] for _ in range(model.dimensions["layers"])]
    for part in _trained(model):
        if part.layer is not None and not part.expert:
            found[part.layer].append(part)
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
    held = {kind: _held(part, parallel.tp, rules) for kind, part in kinds.items()}

    def count(block: Counter[_Kind]) -> WeightCount:
        return sum((_share(held[kind], number, kinds[kind], parallel) for kind, number in block.items()), WeightCount())

    first, *inner, last = (count(block) for block in (before, *between, behind))
    found = []
    for stage in range(parallel.pp):
        own = stage_layers(counts, stage)
        there = [inner[layer] for layer in own] + [first] * (stage == 0) + [last] * (stage == parallel.pp - 1)
        found.append(StageCount(stage, sum(there, WeightCount()), own, max(there, key=lambda block: block.total)))
    return found


def stages_of_number(number: int, parallel: Parallel) -> list[StageCount]:
    """The same for a model of which only the number of weights is known: equal parts for all ranks."""
    if parallel.ep > 1:
        raise RequestError(f"--ep {parallel.ep}: how many of {number:,} parameters are experts' is not known", do="Give a model's config")
    return [StageCount(stage, WeightCount(-(-number // (parallel.tp * parallel.pp)))) for stage in range(parallel.pp)]


def vocabulary_rows(model: Model, tp: int, multiple: int = 1) -> int:
    """Rows of the head on one rank, padding included."""
    return SplitRules(model.dimensions, multiple * tp).padded_vocabulary(model.dimensions["vocab"]) // tp


_Kind = tuple[str, str, tuple[int, ...]]


def _trained(model: Model) -> Iterator[Part]:
    """The parts that training has: no scales of quantised weights, no layers that a checkpoint may leave out."""
    layers = model.dimensions["layers"]
    return (part for part in model.parts() if part.scale is None and (part.layer is None or part.layer < layers))


def _held(part: Part, tp: int, rules: SplitRules) -> int:
    """How many elements of it a tensor-parallel rank holds."""
    if cut_of(part, tp, rules) is None:
        return math.prod(part.array.shape)
    rows = part.array.shape[0]
    padded = rules.padded_vocabulary(rows) if isinstance(part.split, Vocabulary) else rows
    return -(-padded * math.prod(part.array.shape[1:]) // tp)


def _share(elements: int, number: int, part: Part, parallel: Parallel) -> WeightCount:
    """`number` parts alike: of a layer's experts each expert-parallel rank has an equal number."""
    return WeightCount(experts=elements * -(-number // parallel.ep)) if part.expert is not None else WeightCount(dense=elements * number)


def _check_tensors(parts: Iterable[Part], tp: int, rules: SplitRules) -> None:
    for part in sorted(parts, key=lambda each: _plainness(each.split)):
        if reason := problem(part, tp, rules):
            raise RequestError(f"--tp {tp} does not fit this model: {reason}", where=part.tensor)


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
