"""The verb `convert_part`: convert one part of a plan; any number of processes and machines share the work."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Unpack

from reshard.engine.parts.part import PartConversion, check_nothing_is_missing
from reshard.engine.parts.shared import SharedConversion
from reshard.engine.record import Provenance
from reshard.engine.run import Conversion
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.plans.bands import PartNumber, tasks_of_part
from reshard.plans.plan import Plan
from reshard.requests.request import Effort, EffortOptions, PathLike, checked_keywords
from reshard.storage.local_path import is_url
from reshard.verbs.convert import (
    Existing,
    Result,
    existing_target,
    local_conversion,
    result_of,
    shared_conversion,
    target_folder,
)
from reshard.verbs.plan import check_whole

if TYPE_CHECKING:
    from reshard.engine.stores.conversion import StoreConversion

_NO_LIMITS = Effort()
_NO_PROVENANCE = Provenance()


@value
class PartResult:
    """What one part of a conversion has done, and the result if the target is complete."""

    path: str
    """The target directory."""
    part: PartNumber
    """The part."""
    tasks: int
    """The number of its tasks."""
    nbytes: int
    """The bytes of the target that its tasks make, without replicas."""
    resumed_bytes: int
    """The bytes of those that were there already."""
    seconds: float
    """How long it took."""
    result: Result | None
    """The result of the conversion, if the target is complete; None if tasks of other parts are missing or another process completes it."""

    @property
    def complete(self) -> bool:
        """Whether the target is complete."""
        return self.result is not None

    def to_json(self) -> dict[str, Any]:
        """The result as plain values with stable keys."""
        return {
            "path": self.path,
            "part": str(self.part),
            "tasks": self.tasks,
            "bytes": self.nbytes,
            "resumed_bytes": self.resumed_bytes,
            "seconds": round(self.seconds, 3),
            "complete": self.complete,
            "result": self.result.to_json() if self.result else None,
        }

    def __str__(self) -> str:
        state = f"complete, fingerprint {self.result.fingerprint.root}" if self.result else "not complete yet"
        return f"{self.path}: part {self.part}, {plural(self.tasks, 'task')}, {self.nbytes:,} bytes in {self.seconds:.1f} s; {state}"


@checked_keywords
def convert_part(
    plan: Plan,
    target: PathLike,
    part: PartNumber | str,
    *,
    overwrite: bool = False,
    if_changed: bool = False,
    checksums: bool = False,
    **options: Unpack[EffortOptions],
) -> PartResult:
    """Convert one part of a plan, such as "3/8"; the process that finds all parts done completes the target.

    All parts need the same plan, and a store or a file system that they share. A part may be killed, run again or run twice, and the next
    run may have another number of parts: what is finished is not converted again.

    Raises: as `convert` does.
    """
    effort, began = Effort(**options), time.monotonic()
    existing = existing_target(resume=False, overwrite=overwrite, if_changed=if_changed)
    running = part_conversion(
        plan, target, PartNumber.parse(part) if isinstance(part, str) else part, existing, effort, Provenance(checksums=checksums)
    )
    for done in running.run():
        effort.report(done.nbytes)
    return part_result(running, target, part, time.monotonic() - began)


def part_conversion(
    plan: Plan,
    target: PathLike,
    part: PartNumber,
    existing: Existing = "refuse",
    effort: Effort = _NO_LIMITS,
    provenance: Provenance = _NO_PROVENANCE,
) -> SharedConversion:
    """A part that has not begun, for callers that run it block by block."""
    if is_url(target):
        from reshard.verbs.into_store import part_into_store

        check_whole(plan)
        return part_into_store(plan, os.fspath(target), part, existing, effort, provenance)
    return shared_conversion(PartConversion, plan, target, tasks_of_part(plan.bands(), part), existing, effort, provenance)


def part_result(running: SharedConversion, target: PathLike, part: PartNumber | str, seconds: float) -> PartResult:
    """The result of a part that has run to its end."""
    result = result_of(running, target, seconds) if running.completed else None
    number = PartNumber.parse(part) if isinstance(part, str) else part
    return PartResult(os.fspath(target), number, len(running.tasks), running.total, running.resumed_bytes, seconds, result)


def finishing(
    plan: Plan, target: PathLike, effort: Effort = _NO_LIMITS, provenance: Provenance = _NO_PROVENANCE
) -> Conversion | StoreConversion:
    """The conversion that completes a target whose tasks are all done.

    Raises: TargetError, naming what is missing, if some are not.
    """
    if is_url(target):
        from reshard.verbs.into_store import finishing_in_store

        return finishing_in_store(plan, os.fspath(target), effort, provenance)
    check_nothing_is_missing(plan, target_folder(target))
    return local_conversion(plan, target, existing="resume", effort=effort, provenance=provenance)
