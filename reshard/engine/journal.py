"""The journal: which blocks of a conversion are on the disk, with their digests, so that a stopped one can go on.

JSON lines. The first names the plan, and which files of an older checkpoint the result will replace; each other lists
blocks as [route, block, digest]. A line is written only after the bytes that it
speaks for have been synced, and a torn last line counts for nothing.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from reshard.errors import RequestError
from reshard.storage.staging import Staging

# Short, so that the disk works while blocks are still being copied: with 5 s the last sync alone took a third of the time of a
# 2 GB conversion. A sync that takes longer than this simply delays the next one.
SECONDS_BETWEEN_SYNCS = 0.25

BlockKey = tuple[int, int]


class Journal:
    """Appends what is finished, every second or so, from a thread of its own."""

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
        """Note a block whose bytes have been written. Raises what the last sync raised."""
        if self._error:
            raise self._error
        with self._lock:
            self._pending.append((*key, digest.hex()))

    def abandon(self) -> None:
        """Stop without noting what is pending."""
        self._stop.set()
        self._thread.join()
        self._file.close()

    def close(self) -> None:
        """Note all that is pending and stop; safe to call twice."""
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
    """Whether there is a journal with its first line. A run that was stopped before it wrote that line has noted no work."""
    return path.exists() and "\n" in path.read_text()


def read_journal(path: Path, identity: str) -> dict[BlockKey, bytes]:
    """The blocks that an earlier run of the same plan has finished, with their digests.

    Raises: RequestError if the journal belongs to another plan.
    """
    done: dict[BlockKey, bytes] = {}
    lines = path.read_text().split("\n")[:-1]
    records = [_record(line) for line in lines]
    if not records or records[0].get("identity") != identity:
        raise RequestError(
            "the interrupted conversion here was another one: other options, another version of reshard, or the source has changed since",
            where=str(path.parent.parent),
            why="Going on would mix the two",
            do="Repeat the options of that run, or start anew with --overwrite",
        )
    for record in records:
        for route, block, digest in record.get("blocks", ()):
            done[int(route), int(block)] = bytes.fromhex(digest)
    return done


def replaced_files(path: Path) -> tuple[str, ...]:
    """The files that the interrupted conversion was allowed to replace."""
    return tuple(str(name) for name in _record(path.read_text().split("\n")[0]).get("replaces", ()))


def _record(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
