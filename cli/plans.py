"""How a plan is shown: by `reshard plan`, by `convert --dry-run`, and after a conversion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.geometry.quantities import plural

from .tables import nbytes_text, show, table

if TYPE_CHECKING:
    from reshard.plans.plan import Plan
    from reshard.plans.summary import DropSummary


def plan_document(plan: Plan, *, full: bool) -> dict[str, Any]:
    """The plan with stable keys, and what each rank holds. full: each tensor, too."""
    from dataclasses import asdict

    from reshard.plans import summary

    document = plan.to_json(tensors=full)
    tensors = {name: document.pop(name) for name in ("tensors", "dropped", "tasks") if full}
    if full:
        tensors["dropped_tensors"] = tensors.pop("dropped")
    dropped = [group.to_json() for group in summary.drops(plan)]
    return {**document, "dropped": dropped, "ranks": [asdict(rank) for rank in summary.ranks(plan)], **tensors}


def show_plan(plan: Plan) -> None:
    """What would be written, for whom, and what is cast, filled or dropped on the way."""
    from reshard.plans import summary

    totals = plan.totals()
    sizes = f"{plural(totals.tensors, 'tensor')} into {plural(totals.files, 'file')}"
    show(f"{plan.source.format} -> {plan.layout.format} for {plan.layout.parallel}: {sizes}")
    show()
    rows = [
        (
            " ".join(f"{name} {number}" for name, number in rank.ranks.items()) or "-",
            rank.files[0] + (f" (+{len(rank.files) - 1})" if len(rank.files) > 1 else ""),
            nbytes_text(rank.nbytes),
            rank.tensors,
            _range(rank.layers),
            _range(rank.query_heads),
            _range(rank.kv_heads),
            _range(rank.vocabulary),
            rank.padding_rows,
        )
        for rank in summary.ranks(plan)
    ]
    show(table(rows, ("rank", "file", "bytes", "tensors", "layers", "query heads", "KV heads", "vocabulary", "padding rows")))
    show()
    show(
        f"  read      {nbytes_text(totals.read)}"
        + (f", and {nbytes_text(totals.compared)} of replicas to compare" if totals.compared else "")
    )
    show(
        f"  write     {nbytes_text(totals.written)}: {nbytes_text(totals.copied)} copied, {nbytes_text(totals.filled)} filled, "
        f"{nbytes_text(totals.framing)} of framing"
    )
    for source, target, number in summary.casts(plan):
        show(f"  cast      {plural(number, 'tensor')} from {source} to {target}")
    show_drops(plan)
    if plan.layout.sidecars:
        show(f"  copy      unchanged: {', '.join(sidecar.path for sidecar in plan.layout.sidecars)}")
    for note in plan.layout.notes:
        show(f"  note      {note}")
    show("  checked   every output byte has exactly one source; every source tensor is used or listed as skipped")


def show_drops(plan: Plan) -> None:
    """What is left out: one line for each reason."""
    from reshard.plans import summary

    by_reason: dict[str, list[DropSummary]] = {}
    for group in summary.drops(plan):
        by_reason.setdefault(group.reason, []).append(group)
    for reason, groups in by_reason.items():
        counts = ", ".join(f"{group.tensors} {group.kind}" for group in groups)
        show(f"  skip      {counts}, {nbytes_text(sum(group.nbytes for group in groups))}: {reason}; for example {groups[0].example}")


def _range(pair: tuple[int, int] | None) -> str:
    if pair is None:
        return "-"
    return str(pair[0]) if pair[1] - pair[0] == 1 else f"{pair[0]}..{pair[1] - 1}"
