"""Experts that do nothing: their matrices are zero, or those of their moments are while other experts' are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.health.findings import Finding, found
from reshard.health.values import Measured
from reshard.index.name_parts import expert_of, is_stacked_experts


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
