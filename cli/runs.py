"""The checkpoints of a run, as a table and as a JSON document."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from reshard.geometry.documents import document
from reshard.geometry.quantities import plural

from .json_output import show_json
from .tables import nbytes_text, show, table

if TYPE_CHECKING:
    from reshard.runs.steps import Step


def show_run(run: str, steps: list[Step], *, as_json: bool) -> None:
    """The checkpoints of a run, one row each."""
    if as_json:
        show_json({"path": run, "steps": [run_step(step) for step in steps]})
        return
    done = sum(step.complete for step in steps)
    newest = max((step for step in steps if step.complete), key=lambda step: step.number, default=None)
    show(f"{run}: {plural(len(steps), 'checkpoint')} of {plural(len({step.number for step in steps}), 'step')}, {done:,} complete")
    show()
    rows = [
        (
            step.number,
            step.path[len(run) :].strip("/"),
            step.format or "-",
            nbytes_text(step.nbytes),
            "-" if step.age is None else age_text(step.age),
            "complete" if step.complete else "unfinished",
            step.completeness.reason,
        )
        for step in steps
    ]
    show(*table(rows, ("step", "folder", "format", "bytes", "age", "", "because")))
    if newest is not None:
        show()
        show(f"  next  reshard inspect {shlex.quote(newest.path)}")


def run_step(step: Step) -> dict[str, Any]:
    """A checkpoint of a run with stable keys."""
    return document(step, age_seconds=None if step.age is None else round(step.age, 1))


def age_text(seconds: float) -> str:
    """A time as people say it: 40 s, 12 min, 3 h, 5 days."""
    for most, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
