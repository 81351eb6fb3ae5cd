"""How a plan is shown: by `reshard plan`, by `convert --dry-run`, and after a conversion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from reshard.geometry.quantities import plural

from .tables import nbytes_text, show, show_table

if TYPE_CHECKING:
    from reshard.canonical.content import Drop
    from reshard.engine.destinations.forecast import StoreForecast
    from reshard.health.findings import Finding
    from reshard.plans.layout import LeftFile
    from reshard.plans.plan import Plan


def plan_document(plan: Plan, *, full: bool, target: str | None = None) -> dict[str, Any]:
    """The plan with stable keys, and what each rank holds. full: include each tensor. target: where it would be written."""
    from dataclasses import asdict

    from reshard.health.model_files import missing_in_target
    from reshard.plans import summary

    document = plan.to_json(tensors=full)
    tensors = {name: document.pop(name) for name in ("tensors", "dropped", "tasks", "left_files") if full}
    if full:
        tensors["dropped_tensors"] = tensors.pop("dropped")
    dropped = [group.to_json() for group in summary.drops(plan)]
    if stores := store_forecasts(plan, target):
        document["stores"] = [each.to_json() for each in stores]
    findings = [finding.to_json() for finding in missing_in_target(plan)]
    return {**document, "dropped": dropped, "findings": findings, "ranks": [asdict(rank) for rank in summary.ranks(plan)], **tensors}


def store_forecasts(plan: Plan, target: str | None) -> list[StoreForecast]:
    """What the conversion will ask of stores; empty if source and target are local."""
    from reshard.storage.system_calls import is_url

    url = target if target is not None and is_url(target) else None
    if url is None and plan.source_files.store is None:
        return []
    from reshard.engine.destinations.forecast import forecast

    return forecast(plan, url)


def show_plan(plan: Plan, target: str | None = None) -> None:
    """What would be written, for whom, and what is cast, filled or dropped on the way."""
    from reshard.health.model_files import missing_in_target
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
    headings = ("rank", "file", "bytes", "tensors", "layers", "query heads", "KV heads", "vocabulary", "padding rows")
    show_table(rows, headings, optional=(8, 3, 7, 4))
    show()
    show(
        f"  read      {nbytes_text(totals.read)}"
        + (f", and {nbytes_text(totals.compared)} of replicas to compare" if totals.compared else "")
    )
    show(
        f"  write     {nbytes_text(totals.written)}: {nbytes_text(totals.copied)} copied, {nbytes_text(totals.filled)} filled, "
        f"{nbytes_text(totals.framing)} of framing"
    )
    for each in store_forecasts(plan, target):
        if each.read:
            show(f"  store     {each.url}: about {plural(each.reads, 'request')} to read {nbytes_text(each.read)}")
        if each.written:
            show(f"  store     {each.url}: about {plural(each.writes, 'request')} to write {nbytes_text(each.written)}")
    show_casts(plan)
    show_drops(plan.drops)
    show_left(plan.layout.left)
    show_findings(missing_in_target(plan))
    if plan.layout.sidecars:
        show(f"  copy      unchanged: {', '.join(sidecar.path for sidecar in plan.layout.sidecars)}")
    for note in plan.layout.notes:
        show(f"  note      {note}")
    show("  checked   every output byte has exactly one source; every source tensor is used or listed as skipped")


def show_casts(plan: Plan) -> None:
    """One line for each pair of element types."""
    from reshard.plans import summary

    for cast_from, cast_to, number in summary.casts(plan):
        show(f"  cast      {plural(number, 'tensor')} from {cast_from} to {cast_to}")


def show_findings(findings: Iterable[Finding]) -> None:
    """One line for each thing that the target's engines will miss."""
    for finding in findings:
        show(f"  missing   {finding.detail}; {finding.do[0].lower()}{finding.do[1:]}")


def show_drops(drops: Iterable[Drop]) -> None:
    """One line for each reason to leave out tensors."""
    by_reason: dict[str, list[Drop]] = {}
    for drop in drops:
        by_reason.setdefault(drop.reason, []).append(drop)
    for reason, same in by_reason.items():
        counts = ", ".join(f"{number} {kind}" for kind, number in Counter(drop.kind for drop in same).items())
        example = same[0].name if same[0].kind in _NAMED_ALONE else f"{same[0].kind} of {same[0].name}"
        show(f"  skip      {counts}, {nbytes_text(sum(drop.nbytes for drop in same))}: {reason}; for example {example}")


def show_left(files: Collection[LeftFile]) -> None:
    """One line that counts what lies beside the source's weights and is not carried."""
    if files:
        from reshard.plans.layout import left_by_kind

        counts = (plural(number, kind.replace("-", " ")) for kind, number in left_by_kind(files).items())
        show(f"  left      {plural(len(files), 'file')}: {', '.join(counts)}; --json --full names each")


def _range(pair: tuple[int, int] | None) -> str:
    if pair is None:
        return "-"
    return str(pair[0]) if pair[1] - pair[0] == 1 else f"{pair[0]}..{pair[1] - 1}"


# Kinds of tensors whose names are not those of weights that they belong to.
_NAMED_ALONE = frozenset({"weight", "buffer", "adapter", "other", "state", "unknown"})
