"""Experts that do nothing: their matrices are zero, or those of their moments are while other experts' are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.health.findings import Finding, found
from reshard.health.roles import expert_of, is_stacked_experts
from reshard.health.values import Measured
from reshard.index.index import Kind


def dead_experts(measured: Sequence[Measured]) -> Iterator[Finding]:
    """Experts whose matrices, or whose moments, are all zero."""
    zero: dict[tuple[str, str], dict[int, bool]] = {}
    for entry in measured:
        kind: Kind = "weight" if entry.tensor.kind == "master" else entry.tensor.kind
        expert = expert_of(entry.name)
        if not entry.is_complete or kind not in ("weight", "moment2") or not entry.tensor.dtype.floating:
            continue
        if expert is not None and len(entry.tensor.shape) > 1:
            group, number = expert
            experts = zero.setdefault((group, kind), {})
            experts[number] = experts.get(number, True) and entry.statistics.is_zero
        elif is_stacked_experts(entry.name, entry.tensor.shape) and kind == "weight":
            experts = zero.setdefault((entry.name, kind), {})
            experts.update(entry.statistics.slices)
    for (group, kind), experts in zero.items():
        if all(experts.values()) and kind == "moment2":
            continue  # no expert of the group was trained: frozen
        what = (
            "all its matrices are zero"
            if kind == "weight"
            else "it never got a gradient: its second moments are zero, those of others are not"
        )
        for number in sorted(number for number, is_zero in experts.items() if is_zero):
            yield found("dead-expert", f"expert {number} of {len(experts)}: {what}", tensor=group.replace("*", str(number)))
