"""From what a tracer says about ranks to a LearnedLayout.

Sizes that were not traced are legal only after a traced size has been withheld, and the rules of the other sizes have predicted it exactly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from reshard.errors import ReshardError, UnsupportedError
from reshard.geometry.dtypes import DType, from_safetensors, from_torch
from reshard.geometry.meshes import Parallel
from reshard.geometry.quantities import grouped
from reshard.geometry.value import value
from reshard.serving.learned.fold import TracedRanks, folded_stage, unfolded
from reshard.serving.learned.layers import folded_layers
from reshard.serving.learned.layout import LearnedLayout, LearnedSizes, NamedTemplate, StageKey, TensorTemplate
from reshard.serving.learned.numbers import NoRule, Rule, TpRank, heads_of
from reshard.serving.learned.trace import traced_tensor

# Keys of a config that do not change what an engine loads.
UNIMPORTANT_KEYS = frozenset({"transformers_version", "_name_or_path", "use_cache", "dtype", "torch_dtype"})
_COUNTS = re.compile(r"((num|n)_(.*_)?|.*_)(heads?|groups?)(_kv)?|n_heads?")


@value
class TracedRank:
    """One rank of a traced run."""

    stage: StageKey
    """Its stage."""
    rank: TpRank
    """Its tensor-parallel size and rank."""
    model_class: str
    """The engine's class of the model."""
    dtype: DType
    """The element type in which the engine computes."""
    tensors: Mapping[str, TensorTemplate]
    """Its tensors."""
    softened: tuple[str, ...]
    """What the engine could not choose on that platform."""


def traced_rank(document: Mapping[str, Any]) -> TracedRank:
    """One line of a tracer's answer. Raises UnsupportedError if the rank could not be traced."""
    case, number = document["case"], document.get("rank", 0)
    if "failed" in document:
        sizes = " ".join(f"{name.upper()} {size}" for name, size in case.items() if size > 1) or "one rank"
        raise UnsupportedError(
            f"the engine does not load the model at {sizes}, rank {number}: {document['failed']}",
            why="A layout states what the engine loads, and nothing else",
            do="Leave out these sizes, or check with the engine itself that it serves the model at them",
        )
    tensors = {name: traced_tensor(traced) for name, traced in document["tensors"].items()}
    about = document["class"], from_torch(document["dtype"], where="the layout"), tensors, tuple(document["softened"])
    pp_rank, tp_rank = divmod(number, case["tp"])
    return TracedRank((case["pp"], case["ep"] > 1, pp_rank), (case["tp"], tp_rank), *about)


def learned_layout(about: Mapping[str, Any], ranks: Iterable[TracedRank], config: Mapping[str, Any]) -> LearnedLayout:
    """The layout of everything that was traced. about: the first line of the tracer's answer. config: the model's Hugging Face config.

    Raises: ReshardError if a fold does not give back what was traced, which is a defect.
    """
    traced = list(ranks)
    by_stage = {stage: {rank.rank: rank.tensors for rank in of} for stage, of in sorted(grouped(traced, attrgetter("stage")).items())}
    stages = {stage: folded_stage(of_stage) for stage, of_stage in by_stage.items()}
    for stage, templates in stages.items():
        _check_fold(templates, by_stage[stage])
    sizes = []
    for (pp, has_ep), alike in grouped(stages, lambda stage: stage[:2]).items():
        tps = tuple(sorted({tp for stage in alike for tp, _ in by_stage[stage]}))
        folded = [template for stage in alike for template in stages[stage]]
        sizes.append(LearnedSizes(tps, pp, has_ep, _withheld(tps, [by_stage[stage] for stage in alike], folded, counts_of(config))))
    layout = LearnedLayout(
        engine=about["engine"],
        engine_version=about["version"],
        platform=about["platform"],
        model_class=traced[0].model_class,
        dtype=traced[0].dtype,
        config=config_digests(config),
        counts=counts_of(config),
        sizes=tuple(sizes),
        sources=_sources(about["sources"]),
        stages=stages,
        softened=tuple(dict.fromkeys(line for rank in traced for line in rank.softened)),
    )
    return with_reads(layout)


def with_reads(layout: LearnedLayout) -> LearnedLayout:
    """The layout with the checkpoint tensors that the traced ranks do not read, or hold twice."""
    reads = [layout.reads(Parallel(tp, size.pp, tp if size.has_ep else 1)) for size in layout.sizes for tp in size.tp]
    unread = [name for name in layout.source_shapes if not any(counts.get(name) for counts, _ in reads)]
    return replace(layout, unread=tuple(unread), twice=tuple(sorted({name for _, twice in reads for name in twice})))


def config_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Key -> a digest of its value, for the keys that may change what an engine loads."""

    def digest(value: object) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]

    return {key: digest(value) for key, value in sorted(config.items()) if key not in UNIMPORTANT_KEYS}


def counts_of(config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of heads and groups in a config and in the configs inside of it."""
    counts: dict[str, int] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            counts |= {f"{key}.{inner}": number for inner, number in counts_of(value).items()}
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0 and _COUNTS.fullmatch(key):
            counts[key] = value
    return counts


def _sources(documents: Mapping[str, Any]) -> tuple[NamedTemplate, ...]:
    templates = {name: TensorTemplate(from_safetensors(dtype, where=name), tuple(shape)) for name, (dtype, shape) in documents.items()}
    return tuple(folded_layers({name: [(None, template)] for name, template in templates.items()}))


def _check_fold(templates: tuple[NamedTemplate, ...], ranks: TracedRanks) -> None:
    """Raises ReshardError unless the templates give back every rank."""
    if difference := _difference(templates, ranks):
        raise ReshardError(
            f"folding the layout changed it: {difference}",
            why="This is a defect of reshard, not of your input",
            do="Please report it with the model's config.json",
            id="defect",
        )


def _difference(templates: tuple[NamedTemplate, ...], ranks: TracedRanks) -> str | None:
    """The first tensor that the templates give otherwise than it was traced; None if there is none."""
    for rank, traced in ranks.items():
        here = (named for named in templates if named.is_on(*rank))
        try:
            predicted = {name: unfolded(named.template, numbers, rank) for named in here for name, numbers in named.names()}
        except NoRule as error:
            return f"TP {rank[0]}: {error}"
        if predicted.keys() != traced.keys():
            return f"{min(predicted.keys() ^ traced.keys())} at TP {rank[0]}, rank {rank[1]}"
        for name, tensor in traced.items():
            if predicted[name] != unfolded(tensor, (), rank):
                return f"{name} at TP {rank[0]}, rank {rank[1]}"
    return None


def _withheld(
    tps: tuple[int, ...], stages: Sequence[TracedRanks], templates: Sequence[NamedTemplate], counts: Mapping[str, int]
) -> int | None:
    """A traced size that the rules of the others predict exactly; None if there is none, or if not all numbers follow rules.

    Every number of heads in the rules must be one that the config states. Others may be an accident of the traced sizes.
    """
    rules = [number for named in templates for number in named.template.numbers if isinstance(number, Rule)]
    known = {0, 1, *counts.values()}
    is_certain = all(rule.word != "listed" and known.issuperset(heads_of(rule)) for rule in rules)
    if len(tps) < 3 or not is_certain or any(named.ranks is not None for named in templates):
        return None
    return next((size for size in reversed(tps) if all(_predicts(of_stage, size) for of_stage in stages)), None)


def _predicts(ranks: TracedRanks, size: int) -> bool:
    others = folded_stage({rank: tensors for rank, tensors in ranks.items() if rank[0] != size})
    return _difference(others, {rank: tensors for rank, tensors in ranks.items() if rank[0] == size}) is None
