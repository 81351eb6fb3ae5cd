"""Several adapters as one, with weights w and scales s, as PEFT's add_weighted_adapter combines them.

    cat      A = [A1 * w1 * s1; A2 * w2 * s2], B = [B1, B2]      the sum of the updates. The rank of all modules is the sum of the largest
                                                                 ranks of the adapters, as in PEFT; what is left of a factor is zero
    linear   A = A1 * c1 + A2 * c2, B = B1 * |c1| + B2 * |c2|    c = sqrt(|w * s|) with the sign of w * s: the update has the products of
                                                                 A1 with B2 and of A2 with B1 besides

The new scale is 1. PEFT keeps use_rslora, so its adapter has the scale sqrt(r) where those of the training used rsLoRA; here it is off.
PEFT refuses target_parameters. Here the experts of a parameter are combined one by one: A is (E, r, in), B is (out, r, E).

Source: peft 0.21.2, tuners/lora/model.py and utils/merge_utils.py; compared in tests/peft.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.canonical.adapters.base import AdaptedBase
from reshard.canonical.adapters.reading import read_adapter
from reshard.canonical.adapters.updates import Update, part
from reshard.canonical.lora import LoraSettings
from reshard.canonical.renaming import PREFIX, TRAINED_TOKENS, adapter_name
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import F32
from reshard.geometry.value import value
from reshard.index.origin import Tensor, Term, Weighted
from reshard.models.model import Model

_PAIRS = {"lora_A.weight": "lora_B.weight", "lora_embedding_A": "lora_embedding_B"}


@value(eq=False)
class Source:
    """One of the adapters that are combined."""

    path: str
    """Its directory, for messages."""
    settings: LoraSettings
    """Its settings."""
    tensors: Mapping[str, Tensor]
    """Its tensors, by their names in the file of PEFT."""
    weight: float
    """Its weight."""


@value(eq=False)
class _Pair:
    """The factors of a module, or of a parameter of all experts, in one adapter."""

    a: Tensor
    """lora_A"""
    b: Tensor
    """lora_B"""
    rank: int
    """That of one expert."""
    scale: float
    """That of its adapter."""
    way: object
    """How the product lies on the weight: adapters with different ways are not added factor by factor."""
    weight: float
    """That of its adapter."""


def combined(sources: Sequence[Source], how: str, model: Model | None) -> tuple[LoraSettings, dict[str, Tensor]]:
    """The settings and the tensors of one adapter in the place of several. how: "cat" or "linear". model: that of the base, which tells
    where experts lie in a factor.

    Raises: UnsupportedError for what is not combined: DoRA, biases, different ranks with `linear`, experts in different forms;
    RequestError for experts without a model, or whole weights in two adapters; what `read_adapter` raises.
    """
    pairs: dict[str, dict[int, _Pair]] = {}
    whole: dict[str, tuple[Source, Tensor]] = {}
    for number, source in enumerate(sources):
        source.settings.check_mergeable()
        of_modules, others = _taken_apart(source)
        for name, tensor in others.items():
            _check_whole(name, source, [held for held, _ in whole.values()])
            whole[name] = source, tensor
        known = _known(source, model)
        for module, (a, b) in of_modules.items():
            pairs.setdefault(module, {})[number] = _pair(source, module, a, b, known)
    ranks = [max((own[number].rank for own in pairs.values() if number in own), default=0) for number in range(len(sources))]
    config = _config(sources, how, sum(ranks), next((held for held, _ in whole.values()), None))
    tensors = {name: tensor for name, (_, tensor) in whole.items()}
    for module, own in pairs.items():
        _check_same(module, [own[number] for number in sorted(own)], how)
        made = _in_a_row(list(own.values()), sum(ranks)) if how == "cat" else _added(list(own.values()))
        tensors |= {tensor.name: tensor for tensor in made}
    return LoraSettings(config), tensors


def _taken_apart(source: Source) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """The factors of an adapter by their module, and its other tensors: whole weights, and trained rows."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in source.tensors.items():
        parsed = adapter_name(name)
        if parsed is None or parsed.parameter == TRAINED_TOKENS:
            others[name] = tensor
        elif parsed.parameter in _PAIRS:
            b = source.tensors.get(f"{PREFIX}{parsed.module}.{_PAIRS[parsed.parameter]}")
            if b is None or len(tensor.shape) != len(b.shape) or len(b.shape) not in (2, 3):
                raise UnsupportedError(f"its lora_A {list(tensor.shape)} has no lora_B like it", where=f"{name} in {source.path}")
            pairs[parsed.module] = tensor, b
        elif parsed.parameter not in _PAIRS.values():
            raise UnsupportedError(
                f"adapters with {parsed.parameter} are not combined",
                where=f"{name} in {source.path}",
                why="It belongs to the update of one adapter, and factors are combined",
                do="Merge the adapters into the base one after the other: `merge_adapter=` without `combine=`",
            )
    return pairs, others


def _check_whole(name: str, source: Source, holders: Sequence[Source]) -> None:
    """Raises RequestError if a whole weight is not that of one adapter alone, with the weight 1."""
    if source.weight != 1 or any(holder is not source for holder in holders):
        raise RequestError(
            f"`adapter_weight={source.weight:g}`: the adapter holds whole weights"
            if source.weight != 1
            else "two of the adapters hold whole weights",
            where=f"{name} in {source.path}",
            why="They replace those of the base, so they have no factor, and only one adapter can give them",
            do="Give this adapter the weight 1, and combine it with adapters that hold factors alone",
        )


def _known(source: Source, model: Model | None) -> Mapping[str, Update]:
    """An update of each module, by the module's name in the file; empty if the model is not known."""
    if model is None:
        return {}
    base = AdaptedBase(model, None, source.path, source.settings.config.get("base_model_name_or_path"))
    updates = (update for update in read_adapter(base, source.settings, source.tensors).updates if isinstance(update, Update))
    return {name.module: update for update in updates if (name := adapter_name(update.a.name)) is not None}


def _pair(source: Source, module: str, a: Tensor, b: Tensor, known: Mapping[str, Update]) -> _Pair:
    """The factors of a module with their rank and scale."""
    update = known.get(module)
    if update is not None:
        return _Pair(a, b, update.rank, update.scale, ("lora_A" in update.a.name, update.array.tiles[0].axes), source.weight)
    if module.endswith((".experts", ".base_layer")) or len(a.shape) == 3 or source.settings.target_parameters:
        raise RequestError(
            "the adapter changes parameters of all experts, and the base model is not known",
            where=f"{module} in {source.path}",
            why="The config of the base tells where each expert lies in the factors",
            do="Name its directory with `model=DIR`",
        )
    return _Pair(a, b, a.shape[0], source.settings.scale(module, a.shape[0]), None, source.weight)


def _check_same(module: str, pairs: Sequence[_Pair], how: str) -> None:
    """Raises UnsupportedError if the factors of a module are not of one form, or with `linear` not of one shape."""
    first = pairs[0]
    for other in pairs[1:]:
        ours, theirs = (
            (len(pair.a.shape), pair.a.shape[-1], pair.b.shape[-2], pair.way, _experts(pair.a, pair.rank), _experts(pair.b, pair.rank))
            for pair in (first, other)
        )
        if ours != theirs:
            raise UnsupportedError(
                f"lora_A {list(first.a.shape)} and {list(other.a.shape)}, or their lora_B, are of two forms",
                where=module,
                why="Factors are combined in the form in which they are stored",
                do="Write each adapter with `to=peft` and `experts=split` first",
            )
        if how == "linear" and other.rank != first.rank:
            raise UnsupportedError(
                f"`combine=linear`: the ranks are {first.rank} and {other.rank}",
                where=module,
                why="The factors are added element by element",
                do="Combine them with `combine=cat`",
            )


def _experts(factor: Tensor, rank: int) -> int:
    """How many experts a factor is of: A [E*r, in], B [out, r*E], or both with a first axis of experts."""
    if len(factor.shape) == 3:
        return factor.shape[0]
    return factor.shape[0 if "lora_A" in factor.name or "embedding_A" in factor.name else 1] // rank


def _in_a_row(pairs: Sequence[_Pair], rank: int) -> Iterator[Tensor]:
    """The two factors of several adapters, each with the ranks of all, one after the other."""
    first, experts = pairs[0], _experts(pairs[0].a, pairs[0].rank)
    of_a, of_b = list[Term](), list[Term]()
    start = 0
    for pair in pairs:
        factors, own = (pair.weight, pair.scale), pair.rank
        if len(pair.a.shape) == 3:
            of_a.append(Term(Box((0, start, 0), pair.a.shape), pair.a, factors))
            of_b.append(Term(Box((0, 0, start), pair.b.shape), pair.b, ()))
        else:
            width = pair.a.shape[1]
            for number in range(experts):
                rows = part(pair.a, (number * own, 0), ((own, 0, 1), (width, 1, 1)))
                of_a.append(Term(Box((number * rank + start, 0), (own, width)), rows, factors))
            of_b.append(Term(Box((0, start * experts), pair.b.shape), pair.b, ()))
        start += own
    outer, own = first.a.shape[:-2], rank if len(first.a.shape) == 3 else rank * experts
    yield replace(first.a, dtype=F32, shape=(*outer, own, first.a.shape[-1]), origin=Weighted(tuple(of_a)))
    yield replace(first.b, dtype=F32, shape=(*outer, first.b.shape[-2], own), origin=Weighted(tuple(of_b)))


def _added(pairs: Sequence[_Pair]) -> Iterator[Tensor]:
    """The two factors of several adapters, added element by element."""
    for which in ("a", "b"):
        terms = list[Term]()
        for pair in pairs:
            tensor, product = getattr(pair, which), pair.weight * pair.scale
            factor = math.sqrt(abs(product)) * (-1 if product < 0 and which == "a" else 1)
            terms.append(Term(Box.whole(tensor.shape), tensor, (factor,)))
        yield replace(terms[0].tensor, dtype=F32, origin=Weighted(tuple(terms)))


def _config(sources: Sequence[Source], how: str, rank: int, holder: Source | None) -> dict[str, Any]:
    """The settings of the new adapter, whose scale is 1. rank: the sum of the ranks. holder: the adapter that holds whole weights.

    Raises: UnsupportedError if the adapters' ranks differ with `linear`, or one names its modules in a list and another by an expression.
    """
    configs = [source.settings.config for source in sources]
    ranks = {"r": rank, "rank_pattern": {}}
    if how == "linear":
        ranks = {key: configs[0].get(key) or empty for key, empty in (("r", 0), ("rank_pattern", {}))}
        if any({key: config.get(key) or empty for key, empty in (("r", 0), ("rank_pattern", {}))} != ranks for config in configs):
            raise UnsupportedError(
                "`combine=linear`: the adapters have different ranks",
                where=sources[-1].path,
                why="The factors are added element by element",
                do="Combine them with `combine=cat`",
            )
    targets = [config.get("target_modules") for config in configs]
    modules: Any
    if all(isinstance(target, str) for target in targets):
        modules = targets[0] if len({*targets}) == 1 else "|".join(f"({target})" for target in targets)
    elif any(isinstance(target, str) for target in targets):
        raise UnsupportedError("target_modules is a list in one adapter, and an expression in another", where=sources[-1].path)
    else:
        modules = sorted({str(name) for target in targets for name in target or ()})
    parameters = list(dict.fromkeys(name for source in sources for name in source.settings.target_parameters))
    whole = {key: holder.settings.config.get(key) if holder else None for key in ("modules_to_save", "trainable_token_indices")}
    return {
        **configs[0],
        **whole,
        **ranks,
        "lora_alpha": ranks["r"],
        "alpha_pattern": ranks["rank_pattern"],
        "use_rslora": False,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "bias": holder.settings.config.get("bias", "none") if holder else "none",
    }
