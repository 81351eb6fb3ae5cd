"""What a person wants to know of an index or a plan, as plain values that text and JSON both print."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from reshard.canonical.content import Content
from reshard.index.index import Index, Tensor, sharding_text
from reshard.models.model import Model
from reshard.plans.layout import TargetFile
from reshard.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class KindSummary:
    """How much of an index is of one role and element type."""

    kind: str
    dtype: str
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that differ by the numbers in their names only: the same weight in every layer.

    `state` tells what the optimizer keeps of the same shape and cut, such as "moment1, moment2 (F32)".
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    sharding: str
    state: str
    count: int


@dataclass(frozen=True, slots=True)
class RankSummary:
    """What one rank of a target holds. Ranges are half-open (start, stop); None where the model is not known."""

    ranks: dict[str, int]
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    layers: tuple[int, int] | None
    query_heads: tuple[int, int] | None
    kv_heads: tuple[int, int] | None
    vocabulary: tuple[int, int] | None
    padding_rows: int


def kinds(index: Index) -> tuple[KindSummary, ...]:
    """Bytes by role and element type, in the roles' order."""
    groups: dict[tuple[str, str], list[Tensor]] = {}
    for tensor in index.tensors:
        groups.setdefault((tensor.kind, tensor.dtype.name), []).append(tensor)
    return tuple(
        KindSummary(role, dtype, len(found), sum(t.elements for t in found), sum(t.nbytes for t in found))
        for (role, dtype), found in groups.items()
    )


def parameters(content: Content) -> int:
    """The number of the model's elements; a tied table counts once, scales of quantised weights not at all."""
    scales = {name for name, weight in content.model.weights.items() if weight.scale} if content.model else set()
    return sum(tensor.elements for name, tensor in content.weights.items() if name not in scales)


def groups(tensors: Iterable[Tensor]) -> tuple[TensorGroup, ...]:
    """The tensors with the numbers in their names taken together, and with what an optimizer keeps of each; weights first.

    Of step counts, one per weight and all alike, there is one group.
    """
    by_name: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        by_name.setdefault(tensor.name, []).append(tensor)
    found: dict[tuple[object, ...], list[Tensor]] = {}
    for same_name in by_name.values():
        for first, state in _with_state(same_name):
            pattern = first.kind if first.kind == "step" else re.sub(r"\d+", "#", first.name)
            found.setdefault((pattern, first.kind, first.dtype, first.shape, sharding_text(first), state), []).append(first)
    rows = [
        TensorGroup(_group_name(same), same[0].kind, same[0].dtype.name, same[0].shape, sharding_text(same[0]), str(key[-1]), len(same))
        for key, same in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: row.kind != "weight"))


def _with_state(same_name: list[Tensor]) -> Iterator[tuple[Tensor, str]]:
    """The weight of a name with the roles of what has its shape and cut; and what has not, by itself."""
    first = next((tensor for tensor in same_name if tensor.kind == "weight"), same_name[0])
    form = first.shape, sharding_text(first)
    alike = [t for t in same_name if t is not first and t.kind != "step" and (t.shape, sharding_text(t)) == form]
    by_dtype: dict[str, list[str]] = {}
    for tensor in alike:
        by_dtype.setdefault(tensor.dtype.name, []).append(tensor.kind)
    yield first, "; ".join(f"{', '.join(roles)} ({dtype})" for dtype, roles in by_dtype.items())
    known = {id(tensor) for tensor in (first, *alike)}
    yield from ((tensor, "") for tensor in same_name if id(tensor) not in known)


def _group_name(same: list[Tensor]) -> str:
    return "(of each weight)" if same[0].kind == "step" and len(same) > 1 else _common_name([tensor.name for tensor in same])


def _common_name(names: list[str]) -> str:
    """One name for several: each number that varies becomes {first..last}, or {a,b} where the numbers are not consecutive."""
    rows = [re.findall(r"\d+", name) for name in names]
    words = re.split(r"\d+", names[0])
    text = words[0]
    for column, word in zip(zip(*rows, strict=True), words[1:], strict=True):
        text += _range_text(sorted({int(number) for number in column})) + word
    return text


def _range_text(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers[:6])) + (",..." if len(numbers) > 6 else "") + "}"


def ranks(plan: Plan) -> tuple[RankSummary, ...]:
    """What each rank of a target holds; a target that is not split has one entry for all its files."""
    by_rank: dict[tuple[tuple[str, int], ...], list[TargetFile]] = {}
    for file in plan.layout.files:
        by_rank.setdefault(tuple(file.ranks.items()), []).append(file)
    return tuple(_rank(dict(key), files, plan.content.model) for key, files in by_rank.items())


def _rank(numbers: dict[str, int], files: list[TargetFile], model: Model | None) -> RankSummary:
    stored = [item.tensor for file in files for item in file.tensors]
    rows: dict[str, list[tuple[int, int]]] = {}
    layers: set[int] = set()
    padding = 0
    for tensor in stored:
        for section in tensor.sections:
            weight = model.weights.get(section.name) if model else None
            if weight is None or not section.box.sizes:
                continue
            rows.setdefault(weight.role, []).append((section.box.offsets[0], section.box.stops[0]))
            layers |= {weight.layer} if weight.layer is not None else set()
        if len(tensor.shape) > 1:
            padding = max(padding, tensor.filled // max(1, _row_length(tensor.shape)))
    head_dim = model.dimensions.get("head_dim", 1) if model else 1
    return RankSummary(
        ranks=numbers,
        files=tuple(file.path for file in files),
        tensors=len(stored),
        nbytes=sum(file.nbytes for file in files),
        layers=(min(layers), max(layers) + 1) if layers else None,
        query_heads=_hull(rows.get("attention.q"), head_dim),
        kv_heads=_hull(rows.get("attention.k"), head_dim),
        vocabulary=_hull(rows.get("embedding", rows.get("head")), 1),
        padding_rows=padding,
    )


def _row_length(shape: tuple[int, ...]) -> int:
    length = 1
    for size in shape[1:]:
        length *= size
    return length


def _hull(ranges: list[tuple[int, int]] | None, unit: int) -> tuple[int, int] | None:
    return (min(start for start, _ in ranges) // unit, -(-max(stop for _, stop in ranges) // unit)) if ranges else None


def casts(plan: Plan) -> Iterator[tuple[str, str, int]]:
    """(from, to, number of tensors) of each cast in a plan."""
    counted = Counter((str(route.source.dtype), str(route.target.dtype)) for route in plan.routes if route.is_cast)
    for (source, target), count in counted.items():
        yield source, target, count
