"""Judgements of single elements, rows, tensors and experts: what no trained weight has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.geometry.quantities import plural
from reshard.health.findings import Finding, found
from reshard.health.values import Measured, place_of
from reshard.index.name_parts import expert_of, is_scale, is_stacked_experts, is_table

# The largest number of fp16. Weights that are trained in 16 bits are far smaller.
_LARGEST_FP16 = 65504.0


def bad_numbers(measured: Sequence[Measured]) -> Iterator[Finding]:
    """NaN, infinite and huge elements, negative second moments, and scales that are no positive numbers."""
    for entry in measured:
        statistics, tensor = entry.statistics, entry.tensor
        if tensor.kind == "state":
            continue  # the run's own; a mask may be infinite
        what = "" if tensor.kind == "weight" else f" of its {tensor.kind}"
        if is_scale(tensor.name) and not tensor.dtype.floating:
            continue  # exponents, or integers that stored_forms.py knows how to read
        if is_scale(tensor.name):
            counts = {"NaN": statistics.nan, "infinite": statistics.inf, "zero": statistics.zeros, "negative": statistics.negatives}
            yield from bad_scale(tensor.name, statistics.elements, counts)
            continue
        if statistics.nan:
            detail = f"{statistics.nan:,} of {statistics.elements:,} elements{what} are NaN{_first_at(statistics.first_nan)}"
            yield found("nan", detail, **_where(entry, statistics.first_nan))
        if statistics.inf:
            detail = f"{statistics.inf:,} of {statistics.elements:,} elements{what} are infinite{_first_at(statistics.first_inf)}"
            yield found("inf", detail, **_where(entry, statistics.first_inf))
        if tensor.kind in ("weight", "master") and statistics.largest > _LARGEST_FP16:
            yield found("huge-value", f"an element{what} has the magnitude {statistics.largest:.3g}", tensor=tensor.name)
        if tensor.kind == "moment2" and statistics.negatives:
            yield found(
                "negative-moment", f"{statistics.negatives:,} of {statistics.elements:,} elements are below zero", tensor=tensor.name
            )


def bad_scale(name: str, number: int, counts: Mapping[str, int]) -> Iterator[Finding]:
    """A finding about scales that are no positive numbers, if there are some. number: of all. counts: by the word for them."""
    if faulty := ", ".join(f"{count:,} are {word}" for word, count in counts.items() if count):
        yield found("bad-scale", f"of {plural(number, 'scale')}, {faulty}", tensor=name)


def _first_at(element: tuple[int, ...] | None) -> str:
    return f", first at {list(element)}" if element else ""


def _where(entry: Measured, element: tuple[int, ...] | None) -> dict[str, Any]:
    """The tensor, and the file and rank of an element, as keywords of `found`."""
    file, rank = place_of(entry.tensor, element) if element is not None else (None, None)
    return {"tensor": entry.name, "file": file, "rank": rank}


def lifeless_tensors(measured: Sequence[Measured]) -> Iterator[Finding]:
    """Matrices and rows that are zero or constant. Vectors are counted only: biases begin as zeros, norms as ones."""
    vectors: list[str] = []
    # If all matrices of an expert are zero, the expert is found, and not its tensors.
    matrices = [entry for entry in measured if _is_weight(entry) and len(entry.tensor.shape) > 1]
    alive = {None, *(expert_of(entry.name) for entry in matrices if not entry.statistics.is_zero)}
    for entry in measured:
        statistics, name = entry.statistics, entry.name
        if not _is_weight(entry) or statistics.elements < 2:
            continue
        if len(entry.tensor.shape) < 2 or max(entry.tensor.shape) == statistics.elements:
            if statistics.is_constant:
                vectors.append(name)
        elif statistics.is_zero:
            if expert_of(name) in alive:
                yield found("zero-tensor", f"all {statistics.elements:,} elements of {list(entry.tensor.shape)} are zero", tensor=name)
        elif statistics.is_constant:
            yield found("constant-tensor", f"all {statistics.elements:,} elements of {list(entry.tensor.shape)} are equal", tensor=name)
        else:
            yield from _rows(entry)
    if vectors:
        yield found("constant-vectors", f"{plural(len(vectors), 'vector')} of one value, such as {vectors[0]}")


def _is_weight(entry: Measured) -> bool:
    return entry.tensor.kind in ("weight", "master") and entry.is_complete and entry.tensor.dtype.floating and not is_scale(entry.name)


def _rows(entry: Measured) -> Iterator[Finding]:
    statistics, name = entry.statistics, entry.name
    if is_stacked_experts(name, entry.tensor.shape) and any(statistics.slices.values()):
        return  # dead_experts judges whole experts
    where = _where(entry, statistics.first_odd_row)
    at = _first_at(statistics.first_odd_row)
    if is_table(name):
        if odd := statistics.zero_rows + statistics.constant_rows:
            yield found("unused-rows", f"{odd:,} of {plural(statistics.rows, 'row')} are zero or constant{at}", **where)
        return
    if statistics.zero_rows:
        yield found("zero-rows", f"{statistics.zero_rows:,} of {plural(statistics.rows, 'row')} are zero{at}", **where)
    if statistics.constant_rows:
        yield found("constant-rows", f"{statistics.constant_rows:,} of {plural(statistics.rows, 'row')} have one value{at}", **where)


def dead_experts(measured: Sequence[Measured]) -> Iterator[Finding]:
    """Experts whose matrices, or whose moments, are all zero."""
    # By group of experts, and whether it is about their moments: whether each expert is all zero.
    zero: dict[tuple[str, bool], dict[int, bool]] = {}
    for entry in measured:
        is_moment, is_weight = entry.tensor.kind == "moment2", entry.tensor.kind in ("weight", "master")
        expert = expert_of(entry.name)
        if not entry.is_complete or not (is_weight or is_moment) or not entry.tensor.dtype.floating:
            continue
        if expert is not None and len(entry.tensor.shape) > 1:
            group, number = expert
            experts = zero.setdefault((group, is_moment), {})
            experts[number] = experts.get(number, True) and entry.statistics.is_zero
        elif is_stacked_experts(entry.name, entry.tensor.shape) and is_weight:
            experts = zero.setdefault((entry.name, False), {})
            experts.update(entry.statistics.slices)
    for (group, is_moment), experts in zero.items():
        if is_moment and all(experts.values()):
            continue  # no expert of the group was trained: frozen
        gradients = "it never got a gradient: its second moments are zero, those of others are not"
        what = gradients if is_moment else "all its matrices are zero"
        for number in sorted(number for number, is_zero in experts.items() if is_zero):
            yield found("dead-expert", f"expert {number} of {len(experts)}: {what}", tensor=group.replace("*", str(number)))
