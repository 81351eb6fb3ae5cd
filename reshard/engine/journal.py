"""The journal: the blocks of a conversion that are on the disk, with their digests, so that an interrupted conversion can be resumed.

    {"identity": digest of the plan, "replaces": [files of an older checkpoint that the result replaces], "version": 1}
    {"blocks": [[route, block, digest], ...]}
    ...

A line is written only after the bytes of its blocks have been synced. An incomplete last line is ignored.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from reshard.errors import TargetError
from reshard.storage.staging import Staging

# Short, so that the disk writes while blocks are still being copied: with 5 s, the last sync alone took a third of the time of a 2 GB
# conversion. A sync that takes longer delays the next one.
SECONDS_BETWEEN_SYNCS = 0.25

BlockKey = tuple[int, int]
"""(index of the route in the plan, index of the block in the tensor)."""


class Journal:
    """Appends finished blocks to the journal file, several times a second, in a thread of its own."""

    def __init__(self, staging: Staging, identity: str, replaces: tuple[str, ...], *, resumed: bool) -> None:
        self._staging = staging
        self.replaces = replaced_files(staging.journal) if resumed else replaces
        self._pending: list[tuple[int, int, str]] = []
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._error: BaseException | None = None
        self._file = open(staging.journal, "a" if resumed else "w")  # noqa: SIM115  (closed by `close`)
        if not resumed:
            self._append({"identity": identity, "replaces": list(replaces), "version": 1})
        self._thread = threading.Thread(target=self._tick, name="reshard-journal", daemon=True)
        self._thread.start()

    def add(self, key: BlockKey, digest: bytes) -> None:
        """Add a block whose bytes have been written. Raises the error of the last sync, if it failed."""
        if self._error:
            raise self._error
        with self._lock:
            self._pending.append((*key, digest.hex()))

    def abandon(self) -> None:
        """Stop without writing the pending blocks."""
        self._stop.set()
        self._thread.join()
        self._file.close()

    def close(self) -> None:
        """Write the pending blocks and stop. May be called twice. Raises RequestError if the disk is full."""
        self._stop.set()
        self._thread.join()
        if not self._file.closed:
            try:
                self._flush()
            finally:
                self._file.close()

    def _tick(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN_SYNCS):
            try:
                self._flush()
            except BaseException as error:
                self._error = error
                return

    def _flush(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        if pending:
            self._staging.sync()
            self._append({"blocks": pending})

    def _append(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def names_a_plan(path: Path) -> bool:
    """Whether a journal exists and its first line, which names the plan, is complete. Without that line, no block is recorded."""
    return path.exists() and "\n" in path.read_text()


def read_journal(path: Path, identity: str) -> dict[BlockKey, bytes]:
    """The digests of the blocks that an earlier run of the same plan has finished.

    Raises: RequestError if the journal belongs to another plan.
    """
    finished: dict[BlockKey, bytes] = {}
    lines = path.read_text().split("\n")[:-1]
    records = [_record(line) for line in lines]
    if not records or records[0].get("identity") != identity:
        raise TargetError(
            "the interrupted conversion in this directory had other options or another version of reshard, or its source has changed since",
            where=str(path.parent.parent),
            why="Resuming would mix two conversions",
            do="Repeat the options of that run, or start again with --overwrite",
            id="target-in-use",
        )
    for record in records:
        for route, block, digest in record.get("blocks", ()):
            finished[int(route), int(block)] = bytes.fromhex(digest)
    return finished


def replaced_files(path: Path) -> tuple[str, ...]:
    """The files that the interrupted conversion was allowed to replace."""
    return tuple(str(name) for name in _record(path.read_text().split("\n")[0]).get("replaces", ()))


def _record(line: str) -> dict[str, Any]:
    """The JSON object of a line; empty if the line is incomplete."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
