"""Output files: files that the user names for results beside a conversion, such as a page, a plan, metrics, or the log.

    a new name, a regular file              written beside it under another name, and renamed when it is complete; the log appends to it
    a character device, a FIFO              opened at once, as `> FILE` of a shell does, and written into
    /dev/stdout, /dev/stderr, /dev/fd/N     that open file
    a link, a directory, a disk, a socket   refused

A rename would replace a device of the machine, or a link, by a file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from reshard.errors import RequestError
from reshard.storage.system_calls import system_errors

_OPEN_FILE = re.compile(r"/dev/(?:(?P<stream>stdout|stderr)|fd/(?P<number>\d{1,9}))")
_REFUSED = {
    stat.S_IFLNK: "it is a symbolic link, which could lead anywhere",
    stat.S_IFDIR: "it is a directory",
    stat.S_IFBLK: "it is a disk",
    stat.S_IFSOCK: "it is a socket",
}


class OutputFile(os.PathLike[str]):
    """One output file. What can be known before the work is checked when it is made.

    option: the option of the command line that names it, for messages. append: keep what a regular file holds.

    Raises: RequestError if the path is a link, a directory, a disk or a socket, or its directory does not exist; SystemRefusal if the
    system does not allow to write there.
    """

    def __init__(self, path: str | os.PathLike[str], *, option: str = "", append: bool = False) -> None:
        self.path, self._name = os.fspath(path), f"{option} {os.fspath(path)}".strip()
        with system_errors("written", self.path):
            self._descriptor = self._opened(append)
            if self._descriptor is None:
                self._partial().unlink()

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.path

    @staticmethod
    def at(path: str | os.PathLike[str]) -> OutputFile:
        """The output file at a path; `path` itself if it is one."""
        return path if isinstance(path, OutputFile) else OutputFile(path)

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        """The file, once, to be written from front to back. Afterwards it is complete; after an error, nothing has its name.

        Raises: SystemRefusal if the disk is full or the file cannot be written.
        """
        with system_errors("written", self.path):
            if self._descriptor is not None:
                with open(self._descriptor, "wb") as file:
                    yield file
                return
            partial = self._partial()
            try:
                with partial.open("wb") as file:
                    yield file
                if not self._is_replaceable():
                    raise RequestError("a device or FIFO has appeared there meanwhile", where=self._name, do="Choose another path")
                os.replace(partial, self.path)
            finally:
                with suppress(OSError):
                    partial.unlink(missing_ok=True)

    def lines(self) -> IO[str]:
        """The stream of a file that is appended to."""
        assert self._descriptor is not None
        return open(self._descriptor, "w", encoding="utf-8")

    def write(self, content: bytes) -> int:
        """Write the whole content; returns its length. Raises: as `writing` does."""
        with self.writing() as file:
            return file.write(content)

    def _opened(self, append: bool) -> int | None:
        """A descriptor of what is written into as it is; None for a file that is replaced."""
        if match := _OPEN_FILE.fullmatch(self.path):
            return os.dup({"stdout": 1, "stderr": 2}[match["stream"]] if match["stream"] else int(match["number"]))
        if self._is_replaceable() and not append:
            return None
        kept = os.O_APPEND | os.O_CREAT if append else 0
        return os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC | kept, 0o666)

    def _is_replaceable(self) -> bool:
        """Whether it is a regular file, or does not exist yet; False for a device or FIFO. Raises RequestError for anything else."""
        try:
            kind = stat.S_IFMT(os.lstat(self.path).st_mode)
        except FileNotFoundError:
            folder = Path(self.path).parent
            if not folder.is_dir():
                raise RequestError(
                    f"the directory of {self._name} does not exist", do=f"Create it: mkdir -p {folder}", id="not-found"
                ) from None
            return True
        if kind in _REFUSED:
            raise RequestError(_REFUSED[kind], where=self._name, do="Give the path of a file")
        return kind == stat.S_IFREG

    def _partial(self) -> Path:
        """A new empty file beside it. Unlike a file of `tempfile`, others may read it; node_exporter, which reads *.prom, does not."""
        partial = Path(self.path).with_name(f".reshard-{os.urandom(6).hex()}")
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        return partial
