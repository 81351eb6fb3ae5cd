"""Several trees of files as one: a base checkpoint, and trees that lie elsewhere, such as an adapter's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.storage.files import Change, Files

if TYPE_CHECKING:
    from reshard.storage.stores.store import Store

# Between the root of a tree and a path in it. No absolute path contains it.
_BETWEEN = "/./"


class JoinedFiles:
    """`Files` of a main tree, and of others under their absolute paths.

    A path in a checkpoint's metadata is relative (`inside`), so it never leads into another tree.
    """

    def __init__(self, main: Files, others: Sequence[Files]) -> None:
        self.root = main.root
        self._main, self._others = main, {os.path.abspath(files.root): files for files in others}

    @staticmethod
    def path_in(files: Files, path: str) -> str:
        """The path in a joined tree of a file of one of the others."""
        return f"{os.path.abspath(files.root)}{_BETWEEN}{path}"

    def _find(self, path: str) -> tuple[Files, str]:
        root, separator, inner = path.partition(_BETWEEN)
        return (self._others[root], inner) if separator and root in self._others else (self._main, path)

    @property
    def is_file(self) -> bool:
        return self._main.is_file

    @property
    def store(self) -> Store | None:
        return self._main.store

    def opened(self) -> None:
        for files in (self._main, *self._others.values()):
            files.opened()

    def parent(self) -> Files | None:
        return self._main.parent()

    def list(self, folder: str = "") -> tuple[str, ...]:
        return self._main.list(folder)

    def size(self, path: str) -> int | None:
        files, inner = self._find(path)
        return files.size(inner)

    def stamp(self, path: str) -> str:
        files, inner = self._find(path)
        return files.stamp(inner)

    def trace(self, path: str) -> str:
        files, inner = self._find(path)
        return files.trace(inner)

    def changed(self, path: str) -> Change:
        files, inner = self._find(path)
        return files.changed(inner)

    def written(self, path: str) -> float | None:
        files, inner = self._find(path)
        return files.written(inner)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        files, inner = self._find(path)
        files.read_into(inner, byte_offset, buffer)

    def read_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        files, inner = self._find(path)
        files.read_runs(inner, byte_offsets, buffer)

    def decoded(self, path: str, start: int, nbytes: int, codecs: tuple[str, ...], *, limit: int) -> str:
        files, inner = self._find(path)
        if files is self._main:
            return files.decoded(inner, start, nbytes, codecs, limit=limit)
        return self.path_in(files, files.decoded(inner, start, nbytes, codecs, limit=limit))
