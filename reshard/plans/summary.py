"""Summaries of an index or a plan, as plain values that the command line prints as text or JSON."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from reshard.canonical.dequantization import quantized_families, quantized_names
from reshard.canonical.renaming import is_of_adapter
from reshard.geometry.documents import document
from reshard.geometry.quantities import grouped
from reshard.geometry.value import value
from reshard.index.index import Index, element_count

if TYPE_CHECKING:
    from reshard.canonical.content import Content
    from reshard.models.model import Model
    from reshard.plans.layout import TargetFile
    from reshard.plans.plan import Plan


@value
class KindSummary:
    """The tensors of an index that have one kind and element type."""

    kind: str
    """The kind, such as "weight"."""
    dtype: str
    """The element type."""
    tensors: int
    """The number of tensors."""
    elements: int
    """The number of their elements."""
    nbytes: int
    """Their bytes, stored once."""


@value
class ExpertSummary:
    """The routed experts of a model, as its config says."""

    JSON = "number per_token active_parameters"

    number: int
    """The experts of one layer."""
    per_token: int | None
    """The experts that each token is sent to; None if the config does not say it."""
    idle_parameters: int | None
    """The parameters of the experts that a token is not sent to, in all layers; None if that is not known."""


@value
class AdapterSummary:
    """A LoRA adapter in a checkpoint."""

    modules: tuple[str, ...]
    """The modules that it adapts, such as "q_proj"."""
    ranks: tuple[int, ...]
    """The ranks of its matrices; usually one."""
    tensors: int
    """The number of its tensors."""
    parameters: int
    """The number of its parameters."""
    nbytes: int
    """Its bytes."""


@value
class DropSummary:
    """The tensors of one kind that a plan leaves out for one reason."""

    reason: str
    """Why they are left out."""
    kind: str
    """Their kind, such as "moment1"."""
    tensors: int
    """The number of tensors."""
    nbytes: int
    """Their bytes."""
    example: str
    """The name of one of them."""

    def to_json(self) -> dict[str, Any]:
        """The group as plain values with stable keys."""
        return document(self)


@value
class RankSummary:
    """The content of one rank of a target. Ranges are half-open (start, stop), and None if the model is not known."""

    ranks: dict[str, int]
    """The rank, such as {"tp": 3, "pp": 0}; empty if the target is not split."""
    files: tuple[str, ...]
    """Its files."""
    tensors: int
    """The number of its stored tensors."""
    nbytes: int
    """The bytes of its files."""
    layers: tuple[int, int] | None
    """Its layers."""
    query_heads: tuple[int, int] | None
    """Its query heads."""
    kv_heads: tuple[int, int] | None
    """Its KV heads."""
    vocabulary: tuple[int, int] | None
    """Its rows of the vocabulary."""
    padding_rows: int
    """The most padding rows in one of its tensors."""


def kinds(index: Index) -> tuple[KindSummary, ...]:
    """The tensors of an index by kind and element type, in the order in which these first occur."""
    rows = []
    for (kind, dtype), tensors in grouped(index.tensors, lambda tensor: (tensor.kind, tensor.dtype.name)).items():
        elements = element_count(tensors)
        rows.append(KindSummary(kind, dtype, len(tensors), elements, elements * tensors[0].dtype.itemsize))
    return tuple(rows)


def parameter_count(content: Content, config: Mapping[str, Any] | None) -> int:
    """The number of the model's parameters. A tied embedding counts once; buffers and adapters do not, nor what stands beside the elements
    of quantized weights. Elements that share a stored word count one by one."""
    quantized = quantized_names(content, config)
    plain = element_count(t for name, t in content.weights.items() if t.kind in ("weight", "master") and name not in quantized)
    return plain + sum(family.elements for family in quantized_families(content, config))


def experts(model: Model) -> ExpertSummary | None:
    """The routed experts of a model; None if it has none. Shared experts work on every token and are not counted."""
    elements = sum(weight.elements for weight in model.weights.values() if weight.role.startswith("expert."))
    if not elements:
        return None
    number, per_token = model.dimensions["experts"], model.experts_per_token
    return ExpertSummary(number, per_token, None if per_token is None else elements // number * (number - per_token))


def adapter(index: Index) -> AdapterSummary | None:
    """The LoRA adapter in an index; None if there is none. Masters count only where there is no other copy."""
    parts = list(index.by_kind("adapter").values()) or [tensor for tensor in index.tensors if is_of_adapter(tensor)]
    if not parts:
        return None
    factors = [tensor.name.lower() for tensor in parts if ".lora_" in tensor.name.lower()]
    modules = dict.fromkeys(name.partition(".lora_")[0].removesuffix(".base_layer").rpartition(".")[2] for name in factors)
    ranks = {tensor.shape[0] for tensor in parts if re.search(r"lora_a\b", tensor.name.lower()) and tensor.shape}
    return AdapterSummary(tuple(modules), tuple(sorted(ranks)), len(parts), sum(t.elements for t in parts), sum(t.nbytes for t in parts))


def drops(plan: Plan) -> tuple[DropSummary, ...]:
    """What the plan leaves out, by reason and kind, in the order of the plan."""
    groups = grouped(plan.drops, lambda drop: (drop.reason, drop.kind))
    return tuple(DropSummary(*key, len(group), sum(drop.nbytes for drop in group), group[0].name) for key, group in groups.items())


def ranks(plan: Plan) -> tuple[RankSummary, ...]:
    """The content of each rank of a target. Files that belong to no rank are one entry."""
    by_rank = grouped(plan.layout.files, lambda file: tuple(file.ranks.items()))
    return tuple(_rank(dict(key), files, plan.content.model) for key, files in by_rank.items())


_ROLES_OF_RANKS = ("attention.q", "attention.k", "embedding", "head")


def _rank(numbers: dict[str, int], files: list[TargetFile], model: Model | None) -> RankSummary:
    rows: dict[str, list[tuple[int, int]]] = {}
    layers: set[int] = set()
    declared = model.weights if model else {}
    for sections in (of_file for file in files for of_file in file.sections()):
        pattern, weights = sections.pattern, [declared.get(name) for name in sections.names]
        layers |= {weight.layer for weight in weights if weight is not None and weight.layer is not None}
        for row, weight in enumerate(weights):
            if weight is not None and weight.role in _ROLES_OF_RANKS and pattern.ndim_of(row):
                start = int(pattern.offsets[row, 0])
                rows.setdefault(weight.role, []).append((start, start + int(pattern.sizes[row, 0])))
    padded = (item.tensor for file in files for item in file.filled if len(item.tensor.shape) > 1)
    padding = max((tensor.filled // max(1, math.prod(tensor.shape[1:])) for tensor in padded), default=0)
    head_dim = model.dimensions.get("head_dim", 1) if model else 1
    return RankSummary(
        ranks=numbers,
        files=tuple(file.path for file in files),
        tensors=sum(len(file.tensors) for file in files),
        nbytes=sum(file.nbytes for file in files),
        layers=(min(layers), max(layers) + 1) if layers else None,
        query_heads=_hull(rows.get("attention.q"), head_dim),
        kv_heads=_hull(rows.get("attention.k"), head_dim),
        vocabulary=_hull(rows.get("embedding", rows.get("head")), 1),
        padding_rows=padding,
    )


def _hull(ranges: list[tuple[int, int]] | None, unit: int) -> tuple[int, int] | None:
    """The smallest range that contains all ranges, in units of `unit` rows."""
    return (min(start for start, _ in ranges) // unit, -(-max(stop for _, stop in ranges) // unit)) if ranges else None


def casts(plan: Plan) -> Iterator[tuple[str, str, int]]:
    """(from, to, number of tensors) of each cast in a plan."""
    counted = Counter((str(route.source.dtype), str(route.target.dtype)) for route in plan.routes if route.is_cast)
    for (source, target), count in counted.items():
        yield source, target, count
