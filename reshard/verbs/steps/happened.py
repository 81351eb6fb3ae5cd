"""What a watch has done, and the command of the user that it runs after each step."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

from reshard.engine.events import event
from reshard.errors import RequestError
from reshard.geometry.documents import document
from reshard.geometry.value import value
from reshard.requests.run_folders import Step


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
    found = WatchEvent(name, step.order, step.path, target, detail, round(time.time(), 3))
    event(f"watch-{name}", f"step {step.order}: {name}: {detail}", step=step.order, source=step.path, target=found.target)
    return found


def run_command(command: str, step: Step, source: str, target: str) -> str:
    """Run a command. Raises RequestError if it fails."""
    about = {"RESHARD_STEP": str(step.order), "RESHARD_SOURCE": source, "RESHARD_TARGET": target}
    # What it prints goes to stderr: stdout is the watch's own.
    code = subprocess.run(command, shell=True, env={**os.environ, **about}, stdout=2, stdin=subprocess.DEVNULL).returncode
    if code:
        raise RequestError(f"the command of `then=` ended with exit code {code}", where=target, do="It is run again later")
    return f"{command!r} ended with exit code 0"
