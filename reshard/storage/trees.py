"""Trees made of other trees: one folder of a tree, and several trees as one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from reshard.storage.claims import Claims
from reshard.storage.files import Change, Files
from reshard.storage.system_calls import is_url

if TYPE_CHECKING:
    from reshard.storage.stores.store import Store

# Between the root of a tree and a path in it. No absolute path contains it.
_BETWEEN = "/./"


def root_of(files: Files) -> str:
    """Where files lie, whatever the working directory is: an absolute path or a URL."""
    return files.root if files.store else os.path.abspath(files.root)


def trees_of(files: Files) -> tuple[Files, ...]:
    """The trees that files lie in: the tree itself, or those that it joins."""
    return files.trees if isinstance(files, JoinedFiles) else (files,)


def numbered(files: Files, path: str) -> str:
    """A path of a joined tree that has the number of the tree in place of its root, so that it is the same wherever the tree lies."""
    roots = [root_of(tree) for tree in trees_of(files)]
    root, separator, inner = path.partition(_BETWEEN)
    return f"{roots.index(root, 1)}{_BETWEEN}{inner}" if separator and root in roots[1:] else path


def root_in(path: str) -> str:
    """The root of the tree that a path of a joined tree lies in; empty for the first tree."""
    return path.rpartition(_BETWEEN)[0]


def tree_at(trees: Sequence[Files], path: str) -> tuple[Files, str]:
    """The tree of a path that `numbered` has made, and the path there."""
    number, separator, inner = path.partition(_BETWEEN)
    is_number = separator and number.isdecimal() and 0 < int(number) < len(trees)
    return (trees[int(number)], inner) if is_number else (trees[0], path)


class FilesElsewhere:
    """`Files` that lie in other trees, under other paths; where nothing else is said, in one, under their paths there."""

    root: str
    _main: Files

    def _find(self, path: str) -> tuple[Files, str]:
        """The tree of a file, and its path there."""
        return self._main, path

    def _path(self, files: Files, path: str) -> str:
        """The path here of a file of one of the trees."""
        return path

    @property
    def is_file(self) -> bool:
        return self._main.is_file

    @property
    def store(self) -> Store | None:
        return self._main.store

    def opened(self) -> None:
        self._main.opened()

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

    def claims(self, path: str) -> Claims:
        files, inner = self._find(path)
        return files.claims(inner)

    def decoded(self, path: str, start: int, nbytes: int, codecs: tuple[str, ...], *, limit: int) -> str:
        files, inner = self._find(path)
        return self._path(files, files.decoded(inner, start, nbytes, codecs, limit=limit))


class FolderFiles(FilesElsewhere):
    """`Files` of one folder of another tree, such as a step of a run. In a store they need no further listing."""

    is_file = False

    def __init__(self, files: Files, folder: str) -> None:
        self._main, self._prefix = files, folder.rstrip("/") + "/"
        self.root = f"{files.root.rstrip('/')}/{folder.rstrip('/')}"

    def parent(self) -> Files:
        above = self._prefix.rstrip("/").rpartition("/")[0]
        return FolderFiles(self._main, above) if above else self._main

    def list(self, folder: str = "") -> tuple[str, ...]:
        return tuple(path.removeprefix(self._prefix) for path in self._main.list(self._prefix + folder))

    def _find(self, path: str) -> tuple[Files, str]:
        return self._main, self._prefix + path

    def _path(self, files: Files, path: str) -> str:
        return path.removeprefix(self._prefix)


class JoinedFiles(FilesElsewhere):
    """`Files` of a main tree, and of others under their absolute paths: a base checkpoint, and an adapter or further checkpoints elsewhere.

    A path in a checkpoint's metadata is relative (`inside`), so it never leads into another tree. Of trees that are joined themselves the
    parts are joined, so a path names one root at most: [BASE, BASE+DELTA] is BASE, BASE and DELTA.
    """

    def __init__(self, main: Files, others: Sequence[Files]) -> None:
        self.root = main.root
        self.trees: tuple[Files, ...] = tuple(tree for files in (main, *others) for tree in trees_of(files))
        """The trees, the main one first."""
        self._main, self._others = self.trees[0], {root_of(tree): tree for tree in self.trees[1:]}

    @staticmethod
    def path_in(files: Files, path: str) -> str:
        """The path in a joined tree of a file of one of the others."""
        names_root = isinstance(files, JoinedFiles) and path.partition(_BETWEEN)[0] in files._others
        return path if names_root else f"{root_of(files)}{_BETWEEN}{path}"

    def opened(self) -> None:
        for files in (self._main, *self._others.values()):
            files.opened()

    def _find(self, path: str) -> tuple[Files, str]:
        root, separator, inner = path.partition(_BETWEEN)
        return (self._others[root], inner) if separator and root in self._others else (self._main, path)

    def _path(self, files: Files, path: str) -> str:
        return path if files is self._main else self.path_in(files, path)


def chain_of(path: str | os.PathLike[str], deltas: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ()) -> tuple[str, ...]:
    """The base and the deltas that `BASE+DELTA+DELTA` names, and further deltas. A path that exists is not taken apart."""
    given = [deltas] if isinstance(deltas, str | os.PathLike) else list(deltas)
    return (*_parts(os.fspath(path)), *(os.fspath(delta) for delta in given))


def _parts(text: str) -> tuple[str, ...]:
    """The paths and URLs between which there is a `+`. A `+` in a name stays, where nothing lies under what is before it or after it."""
    if "+" not in text or os.path.exists(text):
        return (text,)
    for at in (at for at, letter in enumerate(text) if letter == "+"):
        left, right = text[:at], text[at + 1 :]
        begins = (right[:end] for end in (*(end for end, letter in enumerate(right) if letter == "+"), len(right)))
        if (is_url(left) or os.path.exists(left)) and (is_url(right) or any(map(os.path.exists, begins))):
            return (left, *_parts(right))
    return (text,)
