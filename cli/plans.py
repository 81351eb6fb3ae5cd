"""How a plan is shown: by `reshard plan`, and with --dry-run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .replies import Reply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.engine.destinations.forecast import StoreForecast
    from reshard.plans.plan import Plan


def plan_reply(plan: Plan, *, full: bool, target: str | None = None, copies: Mapping[str, int] | None = None) -> Reply:
    """A plan. full: its document includes each tensor. target: where it would be written. copies: the files of a pipeline that would be
    copied beside the component, with their bytes."""
    from reshard.pages.plans import copies_section, plan_sections

    make, sections = partial(plan_document, plan, full=full, target=target), plan_sections(plan, _store_forecasts(plan, target))
    if copies is None:
        return Reply(make, sections)
    copied = [{"path": path, "bytes": nbytes} for path, nbytes in copies.items()]
    return Reply(lambda: {**make(), "copied_files": copied}, (*sections, copies_section(copies)))


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
    if stores := _store_forecasts(plan, target):
        document["stores"] = [store.to_json() for store in stores]
    findings = [finding.to_json() for finding in missing_in_target(plan)]
    return {**document, "dropped": dropped, "findings": findings, "ranks": [asdict(rank) for rank in summary.ranks(plan)], **tensors}


def _store_forecasts(plan: Plan, target: str | None) -> list[StoreForecast]:
    """What the conversion will ask of stores; empty if source and target are local."""
    from reshard.storage.system_calls import is_url

    url = target if target is not None and is_url(target) else None
    if url is None and plan.source_files.store is None:
        return []
    from reshard.engine.destinations.forecast import forecast

    return forecast(plan, url)
