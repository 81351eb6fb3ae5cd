"""The verb `plan`: what a conversion would do, proven, before anything is written."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from reshard.containers.gc_pause import gc_paused
from reshard.engine.events import details, event
from reshard.errors import RequestError
from reshard.geometry.quantities import plural
from reshard.plans.plan import Order, Plan
from reshard.plans.summary import drops
from reshard.requests.checkpoint import Checkpoint, opened
from reshard.requests.planning import plan_conversion
from reshard.requests.request import ConversionRequest, ModelOptions, PathLike, PlanOptions, checked_keywords

# The keywords whose files belong to an order, besides the model's folder.
_ATTACHED = ("architecture", "stored_layout", "layout", "adapter_config")
_OF_THE_SOURCE = ModelOptions.__annotations__.keys()


@gc_paused()
@checked_keywords
def plan(source: Checkpoint | PathLike, *, to: str, **options: Unpack[PlanOptions]) -> Plan:
    """The proven plan of a conversion to the format `to`. Nothing is written, no weight is read.

    An option of one format, such as Megatron's `vp`, is a further keyword; `reshard formats` lists them.

    Raises: RequestError if the model or the parallel sizes do not allow it, CheckpointError if the source does not hold the whole model.
    """
    about_source = {name: value for name, value in options.items() if name in _OF_THE_SOURCE}
    about_target = {name: value for name, value in options.items() if name not in _OF_THE_SOURCE}
    request, checkpoint = ConversionRequest.of(to, about_target), opened(source, **about_source)  # type: ignore[arg-type]
    began = time.monotonic()
    found = plan_conversion(checkpoint, request, request.opened_adapter(opened))
    _log_planned(found, time.monotonic() - began)
    return replace(found, order=_order_of(checkpoint, {"to": to, **about_target}))


def _order_of(source: Checkpoint, asked: Mapping[str, Any]) -> Order:
    """The order of a plan. asked: the keywords of `plan` without those of `open`."""
    opened = {key: value for key, value in source.options.items() if value is not None}
    if source.architecture:
        opened["architecture"] = source.architecture.declared_in or source.architecture.model_type
    given = {key: value for key, value in asked.items() if value is not None}

    def attached() -> dict[str, bytes]:
        model = source.model_files.contents() if "model" in opened else {}
        files = ((key, os.fspath(value)) for key, value in {**opened, **given}.items() if key in _ATTACHED)
        return {
            **{f"model/{name}": content for name, content in model.items()},
            **{f"{key}/{os.path.basename(path)}": Path(path).read_bytes() for key, path in files if os.path.isfile(path)},
        }

    return Order(source.files.root, opened, given, attached)


def check_whole(plan: Plan) -> None:
    """Raises RequestError if the plan is of one rank alone, which is only looked at."""
    if plan.target.only_rank:
        raise RequestError(f"this is a plan of {dict(plan.target.only_rank)} alone", do="Plan without `only` what is to be written")


def _log_planned(plan: Plan, seconds: float) -> None:
    layout, casts = plan.layout, sum(route.is_cast for route in plan.routes)
    nbytes = sum(file.nbytes for file in layout.files)
    event(
        "planned",
        f"planned and proved {plan.source.format} -> {layout.format} for {layout.parallel}: {plural(len(plan.routes), 'tensor')} into "
        f"{plural(len(layout.files), 'file')}, {nbytes:,} bytes, {casts} cast, {len(plan.drops)} left out, in {seconds:.2f} s",
        source_format=plan.source.format,
        format=layout.format,
        parallel={axis: getattr(layout.parallel, axis) for axis in ("tp", "pp", "ep", "dp")},
        tensors=len(plan.routes),
        files=len(layout.files),
        bytes=nbytes,
        cast=casts,
        dropped=len(plan.drops),
        seconds=round(seconds, 3),
    )
    details(
        "dropped", lambda: ((f"leaves out {plural(group.tensors, group.kind)}: {group.reason}", group.to_json()) for group in drops(plan))
    )
    details("note", lambda: ((f"note: {note}", {"note": note}) for note in layout.notes))
