"""Plan files: a plan is made once and run by many machines."""

from __future__ import annotations

import os

from reshard.engine.record import request_digest
from reshard.plans.plan import Plan
from reshard.plans.plan_file.read import read_plan
from reshard.plans.plan_file.write import write_plan
from reshard.storage.tar import open_tree
from reshard.verbs.convert import check_whole
from reshard.verbs.request import PathLike


def save_plan(plan: Plan, path: PathLike) -> int:
    """Write a plan to the file `path`, so that other processes can run it without planning; returns the file's length in bytes.

    Raises: SystemRefusal if the file cannot be written.
    """
    check_whole(plan)
    return write_plan(plan, path, request=request_digest(plan))


def load_plan(path: PathLike, source: PathLike) -> Plan:
    """The plan in a file, for `convert` and `convert_part`. The source must be the planned one: same lengths and times of its files.

    Raises: CheckpointError if the plan file is damaged, or the source has changed since it was planned.
    """
    return read_plan(path, open_tree(os.fspath(source)))
