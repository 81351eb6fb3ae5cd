"""Outputs: the folder in which a watch writes one checkpoint for each step, on the disk or in a store.

OUT/100/, OUT/200/      one output each
OUT/latest              the newest: a symbolic link; in a store, an object that holds the name of its folder
OUT/reshard.watch.jsonl what is finished: a line for every step, so that a restart does not begin again

    {"source": "RUN/iter_0000100", "written": 1763800000.0, "bytes": 5, "step": 100, "target": "OUT/100"}

Lines are only added. The last one may be torn by a kill: that step is then done again, which changes nothing in an output that is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, Protocol

from reshard.geometry.value import value
from reshard.opening.run_folders import Step
from reshard.storage.own_files import json_object
from reshard.storage.system_calls import absolute_place

LATEST = "latest"
RECORD = "reshard.watch.jsonl"
MOST_OF_RECORD = 64 << 20
"""The most bytes of a record: 300 bytes for each of 200,000 steps."""
# Two paths, and four numbers.
_LONGEST_LINE = 1 << 16


class Outputs(Protocol):
    """The folder of a watch's outputs. An output is named by the name of its folder."""

    def place(self, name: str) -> str:
        """The path or URL of an output, or of another file there."""

    def prepare(self, finished: Iterable[str]) -> None:
        """Create the folder, and remove what a kill has left of removals. finished: the outputs that the record names."""

    def names(self) -> set[str]:
        """The folders that are there."""

    def link_unchanged(self, name: str, earlier: str) -> tuple[int, int]:
        """Store the files of an output that are equal, byte by byte, to those of an earlier one only once. Returns how many files and bytes
        that saves. Raises UnsupportedError where the storage has no links."""

    def move_latest(self, name: str) -> bool:
        """Let `latest` name an output; whether it did not yet. At no moment it names nothing.

        Raises: TargetError if something else has its place.
        """

    def remove(self, name: str) -> bool:
        """Remove an output if reshard wrote it; whether there was one."""

    def read_record(self) -> bytes:
        """The record; empty if there is none. Raises TargetError if it is not one of reshard."""

    def append_record(self, line: bytes) -> None:
        """Add a line to the record; it is stored when this returns."""


@value
class Finished:
    """One step that is finished."""

    number: int
    """The step."""
    name: str
    """The name of the folder that was written."""


class WatchRecord:
    """The record in one folder of outputs."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs, content = outputs, outputs.read_record()
        self._lines: list[dict[str, Any]] = []
        self._is_torn = bool(content) and not content.endswith(b"\n")
        for line in content.split(b"\n"):
            if (entry := _entry(line)) is not None:
                self._lines.append(entry)

    def is_finished(self, step: Step) -> bool:
        """Whether this save of the step is finished. A step that was saved again is not."""
        save = absolute_place(step.path), step.written, step.nbytes
        return any((line["source"], line["written"], line["bytes"]) == save for line in self._lines)

    def finished(self) -> list[Finished]:
        """The finished steps, by number. Of several lines about one target the last one counts."""
        by_target = {line["target"]: Finished(line["step"], os.path.basename(line["target"])) for line in self._lines}
        return sorted(by_target.values(), key=lambda line: line.number)

    def add(self, step: Step, name: str) -> None:
        """Add a finished step and the name of its output; it is stored when this returns."""
        source, target = absolute_place(step.path), absolute_place(self._outputs.place(name))
        entry = {"source": source, "written": step.written, "bytes": step.nbytes, "step": step.number, "target": target}
        self._outputs.append_record((b"\n" if self._is_torn else b"") + json.dumps(entry).encode() + b"\n")
        self._is_torn = False
        self._lines.append(entry)


def _entry(line: bytes) -> dict[str, Any] | None:
    """A line's values; None if it is torn or is of another kind."""
    entry = json_object(line) if len(line) <= _LONGEST_LINE else {}
    is_entry = (
        entry.keys() >= {"source", "written", "bytes", "step", "target"}
        and isinstance(entry["step"], int)
        and isinstance(entry["source"], str)
        and isinstance(entry["target"], str)
    )
    return entry if is_entry else None
