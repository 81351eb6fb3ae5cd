"""The verb `plan`: what a conversion would do, proven, before anything is written."""

from __future__ import annotations

from typing import Unpack

from reshard.plans.plan import Plan
from reshard.verbs.checkpoint import Checkpoint, opened
from reshard.verbs.planning import plan_conversion
from reshard.verbs.request import ConversionRequest, ModelOptions, PathLike, PlanOptions

_OF_THE_SOURCE = ModelOptions.__annotations__.keys()


def plan(source: Checkpoint | PathLike, *, to: str, **options: Unpack[PlanOptions]) -> Plan:
    """The proven plan of a conversion to the format `to`. Nothing is written, no weight is read.

    An option of one format, such as Megatron's `vp`, is a further keyword; `reshard formats` lists them.

    Raises: RequestError if the model or the parallel sizes do not allow it, CheckpointError if the source does not hold the whole model.
    """
    about_source = {name: value for name, value in options.items() if name in _OF_THE_SOURCE}
    about_target = {name: value for name, value in options.items() if name not in _OF_THE_SOURCE}
    return plan_conversion(opened(source, **about_source), ConversionRequest.of(to, about_target))  # type: ignore[arg-type]
