"""Writing bytes: files grow under a temporary name and get their own when they are whole.

Everything lies in a work folder inside the target, `.reshard`, until `commit`: preallocated files, and the journal. Nothing
under a final name is ever partly written, whatever stops the process.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from reshard.errors import RequestError
from reshard.storage.files import Descriptors
from reshard.storage.system_calls import sync_content

WORK_FOLDER = ".reshard"


class Staging:
    """The files of one target directory, on their way."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.work = self.root / WORK_FOLDER
        self._descriptors: Descriptors | None = None
        self._sizes: dict[str, int] = {}

    @property
    def journal(self) -> Path:
        return self.work / "journal.jsonl"

    def prepare(self, sizes: dict[str, int], *, resume: bool) -> None:
        """Make every file at its full length, reading as zeros; with `resume`, keep what an earlier run has written.

        Raises: RequestError if the disk has no room, before anything is written.
        """
        self._sizes = dict(sizes)
        if not resume and self.work.exists():
            shutil.rmtree(self.work)
        present = {path: self._present(path) for path in sizes}
        needed = sum(size - _allocated(present[path], size) for path, size in sizes.items())
        existing = next(folder for folder in (self.root, *self.root.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise RequestError(
                f"{needed:,} bytes are needed, {free:,} are free",
                where=str(self.root),
                why="The disk would be full before the end; nothing was written",
                do="Free some space, or choose another disk",
            )
        self.work.mkdir(parents=True, exist_ok=True)
        self._descriptors = Descriptors(self.work, os.O_RDWR)
        for path, size in sizes.items():
            if present[path] is None:
                self._create(path, size)

    def write(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Put bytes into a file that is not yet committed. Raises RequestError if the disk is full."""
        assert self._descriptors is not None
        try:
            with self._descriptors.borrow(path) as descriptor:
                done = 0
                while done < len(buffer):
                    done += os.pwrite(descriptor, buffer[done:], byte_offset + done)
        except OSError as error:
            raise self._told(error) from error

    def write_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        """Put runs of equal length, which follow each other in the buffer, at these bytes of a file. Raises as `write` does."""
        assert self._descriptors is not None
        length = len(buffer) // len(byte_offsets)
        try:
            with self._descriptors.borrow(path) as descriptor:
                for i, byte_offset in enumerate(byte_offsets):
                    run, done = buffer[i * length : (i + 1) * length], 0
                    while done < length:
                        done += os.pwrite(descriptor, run[done:] if done else run, byte_offset + done)
        except OSError as error:
            raise self._told(error) from error

    def sync(self) -> None:
        """Return when all that was written so far is on the disk."""
        assert self._descriptors is not None
        for path in self._sizes:
            if (self.work / path).exists():
                try:
                    with self._descriptors.borrow(path) as descriptor:
                        sync_content(descriptor)
                except OSError as error:
                    raise self._told(error) from error

    def add(self, path: str, content: bytes) -> None:
        """A small file beside the weights, on the disk when this returns."""
        place = self.work / path
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            place.write_bytes(content)
            _sync(place)
        except OSError as error:
            raise self._told(error) from error

    def commit(self, paths: Iterable[str], *, replaces: Iterable[str] = ()) -> None:
        """Give the files their final names, in that order, after removing those that they replace; then remove the work folder."""
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
        """Remove all traces of an unfinished write."""
        if self._descriptors:
            self._descriptors.close()
        shutil.rmtree(self.work, ignore_errors=True)
        if self.root.exists() and not any(self.root.iterdir()):
            self.root.rmdir()

    def _present(self, path: str) -> Path | None:
        """The file as an earlier run has left it, unfinished or committed; only a journal says that it is ours."""
        places = (self.work / path, self.root / path)
        whole = (place for place in places if place.exists() and place.stat().st_size == self._sizes[path])
        return next(whole, None) if self.journal.exists() else None

    def _create(self, path: str, size: int) -> None:
        place = self.work / path
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(place, "wb") as file:
                os.truncate(file.fileno(), size)
        except OSError as error:
            raise self._told(error) from error

    def _told(self, error: OSError) -> RequestError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            needed, free = sum(self._sizes.values()), shutil.disk_usage(self.root).free
            return RequestError(
                f"the disk is full: {needed:,} bytes are needed in all, {free:,} are free now",
                where=str(self.root),
                why="What was finished is kept and noted",
                do="Free some space and run the same command with --resume",
            )
        return RequestError(f"cannot be written: {error.strerror}", where=str(error.filename or self.root))


def _allocated(place: Path | None, size: int) -> int:
    """How many of a file's bytes have their place on the disk already: it was made at full length, but sparse."""
    return min(size, place.stat().st_blocks * 512) if place else 0


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
