"""FolderFiles: the files of one folder of a tree, such as a step of a run. In a store they need no further listing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.storage.files import Change, Files

if TYPE_CHECKING:
    from reshard.storage.stores.store import Store


class FolderFiles:
    """`Files` of a folder of another tree."""

    is_file = False

    def __init__(self, files: Files, folder: str) -> None:
        self._files, self._prefix = files, folder.rstrip("/") + "/"
        self.root = f"{files.root.rstrip('/')}/{folder.rstrip('/')}"

    @property
    def store(self) -> Store | None:
        return self._files.store

    def opened(self) -> None:
        self._files.opened()

    def parent(self) -> Files:
        above = self._prefix.rstrip("/").rpartition("/")[0]
        return FolderFiles(self._files, above) if above else self._files

    def list(self, folder: str = "") -> tuple[str, ...]:
        return tuple(path.removeprefix(self._prefix) for path in self._files.list(self._prefix + folder))

    def size(self, path: str) -> int | None:
        return self._files.size(self._prefix + path)

    def stamp(self, path: str) -> str:
        return self._files.stamp(self._prefix + path)

    def trace(self, path: str) -> str:
        return self._files.trace(self._prefix + path)

    def changed(self, path: str) -> Change:
        return self._files.changed(self._prefix + path)

    def written(self, path: str) -> float | None:
        return self._files.written(self._prefix + path)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        self._files.read_into(self._prefix + path, byte_offset, buffer)

    def read_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        self._files.read_runs(self._prefix + path, byte_offsets, buffer)

    def decoded(self, path: str, start: int, nbytes: int, codecs: tuple[str, ...], *, limit: int) -> str:
        return self._files.decoded(self._prefix + path, start, nbytes, codecs, limit=limit).removeprefix(self._prefix)
