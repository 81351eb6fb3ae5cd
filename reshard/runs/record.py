"""What a watch has done, beside its outputs: a line for every step that is finished, so that a restart does not begin again.

    OUT/reshard.watch.jsonl    {"source": "RUN/iter_0000100", "written": 1763800000.0, "bytes": 5, "step": 100, "target": "OUT/100"}

Lines are only added. The last one may be torn by a kill: that step is then done again, which changes nothing in an output that is there.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.runs.steps import Step
from reshard.storage.system_calls import system_errors

NAME = "reshard.watch.jsonl"


@dataclass(frozen=True, slots=True)
class Finished:
    """One step that is finished."""

    number: int
    """The step."""
    target: str
    """The folder that was written."""


class WatchRecord:
    """The record in one folder of outputs."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._lines: list[dict[str, Any]] = []
        with system_errors("read", self._path):
            content = self._path.read_bytes() if self._path.exists() else b""
        self._is_torn = bool(content) and not content.endswith(b"\n")
        for line in content.split(b"\n"):
            if (entry := _entry(line)) is not None:
                self._lines.append(entry)

    def is_finished(self, step: Step) -> bool:
        """Whether this save of the step is finished. A step that was saved again is not."""
        return any(
            (each["source"], each["written"], each["bytes"]) == (os.path.abspath(step.path), step.written, step.nbytes)
            for each in self._lines
        )

    def finished(self) -> list[Finished]:
        """The finished steps, by number. Of several lines about one target the last one counts."""
        by_target = {each["target"]: Finished(each["step"], each["target"]) for each in self._lines}
        return sorted(by_target.values(), key=lambda each: each.number)

    def add(self, step: Step, target: Path) -> None:
        """Add a finished step; it is on the disk when this returns."""
        source = os.path.abspath(step.path)
        entry = {"source": source, "written": step.written, "bytes": step.nbytes, "step": step.number, "target": str(target.absolute())}
        with system_errors("written", self._path), self._path.open("ab") as file:
            file.write((b"\n" if self._is_torn else b"") + json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._is_torn = False
        self._lines.append(entry)


def _entry(line: bytes) -> dict[str, Any] | None:
    """A line's values; None if it is torn or is of another kind."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_entry = (
        isinstance(entry, dict)
        and entry.keys() >= {"source", "written", "bytes", "step", "target"}
        and isinstance(entry["step"], int)
        and isinstance(entry["source"], str)
        and isinstance(entry["target"], str)
    )
    return entry if is_entry else None
