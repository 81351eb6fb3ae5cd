"""Watched files: those of a source, which tell when a file that was read has changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from reshard.errors import CheckpointError
from reshard.storage.files import Files
from reshard.storage.trees import FilesElsewhere

# A store compares each object that is read with the one that was listed. Those that cannot are asked so often, in seconds.
_PAUSE = 10.0


class WatchedFiles(FilesElsewhere):
    """`Files` that remember what each thread has read."""

    def __init__(self, files: Files) -> None:
        self._main, self.root = files, files.root
        self._read = threading.local()
        self._asked: dict[str, float] = {}
        self._changed = ""

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill the buffer, and remember the file."""
        self._paths().add(path)
        self._main.read_into(path, byte_offset, buffer)

    def read_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        """Fill the buffer with runs, and remember the file."""
        self._paths().add(path)
        self._main.read_runs(path, byte_offsets, buffer)

    def check_read(self) -> None:
        """Raises CheckpointError if a file that this thread has read since the last call was written since its metadata was read, or if
        another one was. From then on every call does: what was read before and after would be of two checkpoints."""
        paths = self._paths()
        for path in paths:
            if not self._changed and self._is_due(path) and self._main.changed(path):
                self._changed = path
        paths.clear()
        if self._changed:
            raise CheckpointError(
                "the file was written, replaced or touched after the checkpoint was opened",
                where=self._changed,
                why="A part of what is read would be from before and a part from after, so nothing more is read",
                do="Wait until the checkpoint has been saved, then open it again",
                id="source-mixed",
            )

    def _is_due(self, path: str) -> bool:
        if self.store is None:
            return True
        now = time.monotonic()
        if now - self._asked.get(path, -_PAUSE) < _PAUSE:
            return False
        self._asked[path] = now
        return True

    def _paths(self) -> set[str]:
        paths: set[str] = self._read.__dict__.setdefault("paths", set())
        return paths
