"""Staging: writing files under temporary names, and renaming them when they are complete.

Until `commit`, everything lies in the work folder `.reshard` inside the target: the files, at their full length, and the journal. A file
with its final name is always complete, whatever stops the process.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from reshard.errors import RequestError, SystemRefusal
from reshard.storage.files import Descriptors
from reshard.storage.system_calls import sync_content

WORK_FOLDER = ".reshard"


class Staging:
    """The files of one target directory while they are being written."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.work = self.root / WORK_FOLDER
        self._descriptors: Descriptors | None = None
        self._sizes: dict[str, int] = {}

    @property
    def journal(self) -> Path:
        """The path of the journal."""
        return self.work / "journal.jsonl"

    def prepare(self, sizes: dict[str, int], *, resume: bool) -> None:
        """Create every file at its full length, sparse, so that it reads as zeros. With `resume`, keep the files of an earlier run.

        sizes: the length in bytes of each file.

        Raises: RequestError if the disk has too little free space, before anything is written.
        """
        self._sizes = dict(sizes)
        if not resume and self.work.exists():
            shutil.rmtree(self.work)
        present = {path: self._present(path) for path in sizes}
        needed = sum(size - _allocated(present[path], size) for path, size in sizes.items())
        existing = next(folder for folder in (self.root, *self.root.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise SystemRefusal(
                f"{needed:,} bytes are needed, {free:,} are free",
                where=str(self.root),
                why="The disk would be full before the conversion ends; nothing was written",
                do="Free some space, or choose another disk",
                id="no-space",
            )
        self.work.mkdir(parents=True, exist_ok=True)
        self._descriptors = Descriptors(self.work, os.O_RDWR)
        for path, size in sizes.items():
            if present[path] is None:
                self._create(path, size)

    def write(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Write bytes into a staged file. Raises RequestError if the disk is full or the file cannot be written."""
        assert self._descriptors is not None
        try:
            with self._descriptors.borrow(path) as descriptor:
                done = 0
                while done < len(buffer):
                    done += os.pwrite(descriptor, buffer[done:], byte_offset + done)
        except OSError as error:
            raise self._refusal(error) from error

    def write_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        """Write runs of equal length, which follow each other in the buffer, at these byte offsets of a file. Raises as `write` does."""
        assert self._descriptors is not None
        length = len(buffer) // len(byte_offsets)
        try:
            with self._descriptors.borrow(path) as descriptor:
                for i, byte_offset in enumerate(byte_offsets):
                    run, done = buffer[i * length : (i + 1) * length], 0
                    while done < length:
                        done += os.pwrite(descriptor, run[done:] if done else run, byte_offset + done)
        except OSError as error:
            raise self._refusal(error) from error

    def sync(self) -> None:
        """Return when everything that was written before is on the disk. Raises as `write` does."""
        assert self._descriptors is not None
        for path in self._sizes:
            if (self.work / path).exists():
                try:
                    with self._descriptors.borrow(path) as descriptor:
                        sync_content(descriptor)
                except OSError as error:
                    raise self._refusal(error) from error

    def add(self, path: str, content: bytes) -> None:
        """Stage a small file with this content. It is on the disk when this returns. Raises as `write` does."""
        staged = self.work / path
        staged.parent.mkdir(parents=True, exist_ok=True)
        try:
            staged.write_bytes(content)
            _sync(staged)
        except OSError as error:
            raise self._refusal(error) from error

    def commit(self, paths: Iterable[str], *, replaces: Iterable[str] = ()) -> None:
        """Remove the files in `replaces`, give the files in `paths` their final names, in that order, and remove the work folder.

        The caller has called `sync`.
        """
        assert self._descriptors is not None
        self._descriptors.close()
        for path in replaces:
            (self.root / path).unlink(missing_ok=True)
        for path in paths:
            if (self.work / path).exists():
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self.work / path, self.root / path)
        _sync(self.root)
        self.clean()

    def clean(self) -> None:
        """Remove the work folder."""
        shutil.rmtree(self.work, ignore_errors=True)
        _sync(self.root)

    def abandon(self) -> None:
        """Close and remove the staged files and the work folder, and the target directory if it is then empty."""
        if self._descriptors:
            self._descriptors.close()
        shutil.rmtree(self.work, ignore_errors=True)
        if self.root.exists() and not any(self.root.iterdir()):
            self.root.rmdir()

    def _present(self, path: str) -> Path | None:
        """The file that an earlier run left, staged or committed; None if there is none. Without a journal there was no earlier run."""
        candidates = (self.work / path, self.root / path)
        full_length = (file for file in candidates if file.exists() and file.stat().st_size == self._sizes[path])
        return next(full_length, None) if self.journal.exists() else None

    def _create(self, path: str, size: int) -> None:
        staged = self.work / path
        staged.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(staged, "wb") as file:
                os.truncate(file.fileno(), size)
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> RequestError:
        """The error for the user when the system could not write."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            needed, free = sum(self._sizes.values()), shutil.disk_usage(self.root).free
            return SystemRefusal(
                f"the disk is full: {needed:,} bytes are needed in all, {free:,} are free now",
                where=str(self.root),
                why="Finished blocks are on the disk and in the journal",
                do="Free some space and run the same command with --resume",
                id="no-space",
            )
        return SystemRefusal(f"cannot be written: {error.strerror}", where=str(error.filename or self.root))


def _allocated(file: Path | None, size: int) -> int:
    """The bytes of a file for which the disk has allocated space: staged files have their full length, but are sparse at first."""
    return min(size, file.stat().st_blocks * 512) if file else 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
