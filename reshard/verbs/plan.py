"""The verb `plan`: what a conversion would do, proven, before anything is written; and plans in files, for other machines."""

from __future__ import annotations

import os
from typing import Any, Unpack

from reshard.errors import RequestError
from reshard.plans.plan import Plan
from reshard.requests.checkpoint import Checkpoint
from reshard.requests.keywords import ModelOptions, PathLike, PlanOptions, checked_keywords, take
from reshard.requests.opening import opened
from reshard.requests.order import PlanFile, planned
from reshard.requests.request import ConversionRequest
from reshard.storage.files import LocalFiles, read_whole
from reshard.storage.output_file import OutputFile
from reshard.storage.system_calls import gc_paused

_MOST_BYTES = 1 << 30


@gc_paused()
@checked_keywords
def plan(source: Checkpoint | PathLike, *, to: str, **options: Unpack[PlanOptions]) -> Plan:
    """The proven plan of a conversion to the format `to`. Nothing is written, no weight is read.

    An option of one format, such as Megatron's `vp`, is a further keyword; `reshard formats` lists them.

    Raises: RequestError if the model or the parallel sizes do not allow it, CheckpointError if the source does not hold the whole model.
    """
    given: dict[str, Any] = dict(options)
    about_source = take(given, ModelOptions)
    request, checkpoint = ConversionRequest.of(to, given), opened(source, **about_source)
    return planned(checkpoint, request, {"to": to, **given})


def check_whole(plan: Plan) -> None:
    """Raises RequestError if the plan is of one rank alone, which is only looked at."""
    if plan.target.only_rank:
        raise RequestError(f"this is a plan of {dict(plan.target.only_rank)} alone", do="Plan without `only` what is to be written")


def save_plan(plan: Plan, path: PathLike) -> int:
    """Write a plan to the file `path`, so that other processes can run it; returns the file's length in bytes.

    Raises: UnsupportedError if an option names another checkpoint, SystemRefusal if the file cannot be written.
    """
    check_whole(plan)
    return OutputFile.at(path).write(PlanFile.of(plan).content)


def load_plan(path: PathLike, source: PathLike) -> Plan:
    """The plan in a file, for `convert` and `convert_part`: made and proven again from the source, which must be the planned one.

    Raises: RequestError if there is no plan file, CheckpointError if it is damaged, or the source has changed since it was planned. What
    `plan` raises.
    """
    files = LocalFiles(path)
    if not files.is_file:
        raise RequestError(
            "a plan file is expected, this is a directory", where=files.root, do="Give the file that `plan_out=` has written"
        )
    return PlanFile(read_whole(files, files.list()[0], limit=_MOST_BYTES), os.fspath(path)).planned(os.fspath(source))
