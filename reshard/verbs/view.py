"""The verb `view`: what one rank of a target holds, as a mapping of names to tensors that are read when asked for."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.engine.views import View
from reshard.errors import RequestError
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import PlanOptions
from reshard.requests.planning import plan_conversion
from reshard.requests.request import ConversionRequest


def view(source: Checkpoint, to: str, only: Mapping[str, int], options: PlanOptions) -> View:
    """What the rank `only` of the format `to` holds: the work of `Checkpoint.view`."""
    request = ConversionRequest.of(to, {**options, "only": only})
    plan = plan_conversion(source, request, request.adapters_for(source))
    files = [file for file in plan.layout.files if plan.target.wants(file.ranks)]
    if not files:
        missing = ", ".join(f"{axis} rank {number}" for axis, number in only.items() if number)
        raise RequestError(f"the target has no {missing or 'rank 0'}", why=f"It is laid out for {plan.layout.parallel}")
    stored = {item.tensor.name: item.tensor for file in files for item in file.tensors}
    return View(stored, plan.content.tensors, source.files)
