"""What every kind of watch does with steps: choose the newest, check what was written, tell events, run the command of the user."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from reshard.engine.events import event
from reshard.engine.pool import Effort
from reshard.errors import DifferenceFound, RequestError
from reshard.geometry.documents import document
from reshard.geometry.value import value
from reshard.opening.keywords import PathLike
from reshard.opening.run_folders import Step
from reshard.verbs.verify import verify_written


@value
class WatchEvent:
    """Something that a watch has done."""

    event: str
    """"waiting", "converted", "delta", "full", "linked", "latest", "pushed", "ran", "removed", "finished" or "failed"."""
    step: int
    """The step."""
    source: str
    """Its checkpoint."""
    target: str
    """The folder that it is converted to, or the servers that it is pushed to."""
    detail: str
    """What happened, in words."""
    time: float
    """When, in seconds since 1970."""

    def to_json(self) -> dict[str, Any]:
        """The event as plain values with stable keys."""
        return document(self)


def happened(name: str, step: Step, target: str, detail: str) -> WatchEvent:
    """An event of now, which is logged."""
    happening = WatchEvent(name, step.order, step.path, target, detail, round(time.time(), 3))
    event(f"watch-{name}", f"step {step.order}: {name}: {detail}", step=step.order, source=step.path, target=happening.target)
    return happening


def among_newest(steps: Sequence[Step], keep: int | None) -> list[Step]:
    """The steps that are not older than the newest `keep` complete ones, in their order; all of them without a number."""
    newest = sorted({step.order for step in steps if step.complete})[-keep:] if keep else []
    return [step for step in steps if not newest or step.order >= newest[0]]


def check_written(place: PathLike) -> None:
    """Raises DifferenceFound, with the first difference, unless a folder or URL holds what was written there."""
    difference = verify_written(place, Effort())
    if not difference.equal:
        first = difference.differences[0]
        raise DifferenceFound(first.detail, where=f"{place}/{first.name}")


def run_command(command: str, step: Step, source: str, target: str) -> str:
    """Run a command. Raises RequestError if it fails."""
    about = {"RESHARD_STEP": str(step.order), "RESHARD_SOURCE": source, "RESHARD_TARGET": target}
    # What it prints goes to stderr: stdout is the watch's own.
    code = subprocess.run(command, shell=True, env={**os.environ, **about}, stdout=2, stdin=subprocess.DEVNULL).returncode
    if code:
        raise RequestError(f"the command of `then=` ended with exit code {code}", where=target, do="It is run again later")
    return f"{command!r} ended with exit code 0"
