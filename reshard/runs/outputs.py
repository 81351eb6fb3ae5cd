"""Outputs: the folder in which a watch writes one checkpoint for each step, on the disk or in a store.

OUT/100/, OUT/200/      one output each
OUT/latest              the newest: a symbolic link; in a store, an object that holds the name of its folder
OUT/reshard.watch.jsonl what is finished (record.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

LATEST = "latest"
RECORD = "reshard.watch.jsonl"
MOST_OF_RECORD = 64 << 20
"""The most bytes of a record: 300 bytes for each of 200,000 steps."""


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
