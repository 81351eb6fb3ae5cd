"""Files: a read-only tree of files, on the local disk (LocalFiles), in a store (stores/) or planned in memory (VirtualFiles).

`Files` is the whole interface between reshard and a storage: list a folder, tell a size, read a range. Paths are relative to the
checkpoint, with forward slashes. A path in a checkpoint's metadata is a claim until `inside` has checked it.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeVar

from reshard.errors import CheckpointError, MissingFile, ReshardError, SystemRefusal, TruncatedFile
from reshard.storage.claims import Claims, HasClaims
from reshard.storage.decoded_ranges import DecodedRanges
from reshard.storage.system_calls import existing_path, open_files_at_once, read_at, read_runs_at, system_errors, system_refusal

if TYPE_CHECKING:
    from reshard.storage.stores.store import Store


# How many bytes are written to a file before the disk begins with them. From 1 to 8 MiB, conversions took the same time.
_FOR_THE_DISK = 4 << 20
# Errors that say what a path is. Any other error says that the system cannot look now.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


Change = Literal["", "touched", "written"]
"""How a file has changed: not at all, in its trace alone (`Files.trace`), or in its length or stamp, or it was removed."""


class Files(Protocol):
    """A read-only tree of files."""

    root: str
    """The name of the tree in messages: a directory, a URL, or an archive."""

    @property
    def is_file(self) -> bool:
        """Whether the root is one file."""

    @property
    def store(self) -> Store | None:
        """The store that the files lie in; None: they are on this machine."""

    def opened(self) -> None:
        """Take note that the metadata has been read, and only tensors are read from now on."""

    def parent(self) -> Files | None:
        """The folder that contains the root; None if there is none that could hold files of the checkpoint."""

    def list(self, folder: str = "") -> tuple[str, ...]:
        """The paths of the entries of a folder, sorted; folders end in a slash. Empty if the folder does not exist."""

    def size(self, path: str) -> int | None:
        """The file's length in bytes; None if the file does not exist."""

    def stamp(self, path: str) -> str:
        """A text that changes whenever the file is written. Later calls return the same text: `changed` looks again."""

    def trace(self, path: str) -> str:
        """A text that also changes when the file is replaced by one with its times, or its mode changes: another text may stand for the
        same bytes. Later calls return the same text. Empty if the stamp tells every change of the content."""

    def changed(self, path: str) -> Change:
        """How the file has changed since its size or stamp was first asked for."""

    def written(self, path: str) -> float | None:
        """When the file was last written, in seconds since 1970; None if the storage does not tell, or has no such file."""

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill the buffer with the file's bytes from `byte_offset` on.

        Raises: CheckpointError if the file is missing or ends before the buffer is full, SystemRefusal if the system cannot read it now.
        """

    def read_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        """Fill the buffer with runs of equal length, one after the other. Each run starts at one of the byte offsets.

        Raises: as `read_into` does.
        """

    def claims(self, path: str) -> Claims:
        """The checksums that readers of the file's container have seen so far (claims.py). Readers add to them."""

    def decoded(self, path: str, start: int, nbytes: int, codecs: tuple[str, ...], *, limit: int) -> str:
        """The path under which bytes [start, start + nbytes) of a file can be read decoded (decoded_ranges.py).

        codecs: undone from last to first. limit: the most bytes that the decoded range may have.
        """


def read_each_run(files: Files, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
    """`Files.read_runs`, as one `Files.read_into` per run."""
    length = len(buffer) // len(byte_offsets)
    for i, byte_offset in enumerate(byte_offsets):
        files.read_into(path, byte_offset, buffer[i * length : (i + 1) * length])


def inside(path: str, *, where: str) -> str:
    """`path` unchanged, after a check that it stays inside the checkpoint.

    A path in a checkpoint's metadata must not contain `..`, a backslash or NUL, or start with / or a drive letter. Symbolic links are
    followed: the cache of the Hugging Face hub consists of them.

    Raises: CheckpointError for a path that leaves the checkpoint.
    """
    parts = path.replace("\\", "/").split("/")
    if not path or path.startswith("/") or "\\" in path or ".." in parts or "\0" in path or ":" in parts[0]:
        raise CheckpointError(
            f"the metadata names the file {path!r}, which is outside of the checkpoint's directory",
            where=where,
            why="A checkpoint must not refer to files elsewhere, so nothing was read",
            do="Get the checkpoint again from a source you trust",
        )
    return path


def read_range(files: Files, path: str, byte_offset: int, nbytes: int) -> bytes:
    """Bytes [byte_offset, byte_offset + nbytes) of a file. Raises CheckpointError if the file is shorter."""
    buffer = bytearray(nbytes)
    files.read_into(path, byte_offset, memoryview(buffer))
    return bytes(buffer)


def read_whole(files: Files, path: str, *, limit: int) -> bytes:
    """The content of a small file. Raises CheckpointError if the file is missing or larger than `limit` bytes."""
    size = files.size(path)
    if size is None:
        raise missing(files, path)
    if size > limit:
        raise CheckpointError(f"the file has {size:,} bytes, more than the limit of {limit:,} for a file of this kind", where=path)
    return read_range(files, path, 0, size)


def leads_elsewhere(folder: str, path: str) -> bool:
    """Whether a link on the way to a file below a local folder leads out of it, and not to the blobs of a cache of the Hugging Face hub."""
    root, place = (os.path.realpath(location) for location in (folder, os.path.join(folder, path)))
    allowed = [root]
    if os.path.basename(os.path.dirname(root)) == "snapshots":  # models--org--name/snapshots/revision, blobs beside snapshots
        allowed.append(os.path.join(os.path.dirname(os.path.dirname(root)), "blobs"))
    return not any(place.startswith(f"{folder.rstrip(os.sep)}{os.sep}") for folder in allowed)


def files_below(files: Files, folder: str, depth: int) -> Iterator[str]:
    """The paths of the files in a folder, and in folders in it down to that depth."""
    for path in files.list(folder):
        if not path.endswith("/"):
            yield path
        elif depth:
            yield from files_below(files, path, depth - 1)


def missing(files: Files, path: str) -> MissingFile:
    """The error for a file that does not exist."""
    return MissingFile(f"the file is not there (looked in {files.root})", where=path, do="Copy it from where the checkpoint was written")


def cut_short(path: str, start: int, stop: int, nbytes: int) -> TruncatedFile:
    """The error for a file of `nbytes` bytes that should hold bytes [start, stop)."""
    return TruncatedFile(
        f"bytes {start:,}..{stop:,} are needed, the file ends at {nbytes:,}",
        where=path,
        why="The file was cut short, or is still being written",
        do="Copy the file again",
    )


def entries_of(paths: Iterable[str], folder: str) -> tuple[str, ...]:
    """The entries of a folder as `Files.list` gives them. paths: those of all files, or at least of those in the folder."""
    prefix = folder.rstrip("/") + "/" if folder else ""
    names = {path[len(prefix) :].partition("/")[:2] for path in paths if path.startswith(prefix) and path != prefix}
    return tuple(sorted(prefix + name + slash for name, slash in names))


class OpenFile:
    """An open file, which is closed when nobody refers to it any more."""

    __slots__ = ("_nbytes", "_start", "_stop", "descriptor", "turn")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.turn = threading.Lock()
        """Held while a thread writes. The system lets one thread at a time write to a file, and the others would wait in a busy loop."""
        self._nbytes, self._start, self._stop = 0, 0, 0

    def wrote(self, start: int, stop: int, nbytes: int) -> tuple[int, int] | None:
        """Take note that `nbytes` bytes of the range [start, stop) were written. The caller has the turn.

        Returns the range that the disk should begin with, (start, stop), once enough bytes were written since the last one; else None.
        """
        self._start, self._stop = (min(self._start, start), max(self._stop, stop)) if self._nbytes else (start, stop)
        self._nbytes += nbytes
        if self._nbytes < _FOR_THE_DISK:
            return None
        self._nbytes = 0
        return self._start, self._stop

    def __del__(self) -> None:
        os.close(self.descriptor)


class Descriptors:
    """The open files of one folder, at most `open_files_at_once()` and those that are in use. Threads may share it."""

    def __init__(self, folder: Path, flags: int) -> None:
        self._folder, self._flags, self._most = folder, flags | os.O_CLOEXEC, open_files_at_once()
        self._lock = threading.Lock()
        self._open: dict[str, OpenFile] = {}

    def open(self, path: str) -> OpenFile:
        """The open file. It stays open as long as the caller refers to it. Raises OSError if the file cannot be opened."""
        # No lock while the file is there already: each strip asks for its files.
        return self._open.get(path) or self._opened(path)

    def close(self) -> None:
        """Close all files that are not in use."""
        with self._lock:
            self._open.clear()

    def _opened(self, path: str) -> OpenFile:
        with self._lock:
            if path not in self._open:
                while len(self._open) >= self._most:
                    del self._open[next(iter(self._open))]
                self._open[path] = OpenFile(_open_regular(self._folder / path, self._flags))
            return self._open[path]


def _open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file. A FIFO, socket or device raises OSError and never blocks."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


class LocalFiles(HasClaims):
    """`Files` of a local directory, or of one local file. Raises RequestError if the path does not exist."""

    store = None

    def __init__(self, root: str | os.PathLike[str]) -> None:
        with system_errors("read", Path(root)):
            path = existing_path(root)
            is_folder = path.is_dir()
        self.root = str(root)
        self.folder = path if is_folder else path.parent
        self._only_file = None if is_folder else path.name
        self._descriptors = Descriptors(self.folder, os.O_RDONLY)
        self._decoded = DecodedRanges(self.read_into)
        self._stamps: dict[str, _Stamp] = {}

    @property
    def is_file(self) -> bool:
        """Whether the root is one file."""
        return self._only_file is not None

    def opened(self) -> None:
        return None

    def parent(self) -> LocalFiles | None:
        """The directory that contains the root, as the user would write it; None for the root of the file system."""
        root = self.root or "."
        folder = os.path.normpath(os.path.join(root, ".."))
        return None if os.path.samefile(folder, root) else LocalFiles(folder)

    def list(self, folder: str = "") -> tuple[str, ...]:
        if self._only_file is not None:
            return (self._only_file,) if not folder else ()
        prefix = folder.rstrip("/") + "/" if folder else ""
        try:
            with os.scandir(self.folder / folder) as entries:
                return tuple(sorted(prefix + entry.name + ("/" if _is_folder(entry) else "") for entry in entries))
        except OSError as error:
            if error.errno in _NO_FILE:
                return ()
            raise system_refusal(error, "listed", self.folder / folder) from error

    def decoded(self, path: str, start: int, nbytes: int, codecs: tuple[str, ...], *, limit: int) -> str:
        return self._decoded.add(path, start, nbytes, codecs, limit=limit)

    def size(self, path: str) -> int | None:
        if path in self._decoded:
            return self._decoded.size(path)
        status = self._status(path)
        if status is None or stat.S_ISDIR(status.st_mode):
            return None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(
                "it is a FIFO, a socket or a device, where a file is expected",
                where=path,
                why="Reading it could wait forever",
                do="Replace it by the file",
            )
        self._stamps.setdefault(path, _stamp(status))
        return status.st_size

    def stamp(self, path: str) -> str:
        self.size(path)
        if path not in self._stamps:
            raise missing(self, path)
        return str(self._stamps[path].written)

    def trace(self, path: str) -> str:
        self.stamp(path)
        return "{0.inode} {0.touched}".format(self._stamps[path])

    def changed(self, path: str) -> Change:
        if path not in self._stamps:
            return ""
        first, status = self._stamps[path], self._status(path)
        now = _stamp(status) if status else None
        if now is None or (now.written, now.nbytes) != (first.written, first.nbytes):
            return "written"
        if now == first:
            return ""
        self._descriptors.close()  # From now on the file is read that is there now.
        return "touched"

    def written(self, path: str) -> float | None:
        status = self._status(path)
        return None if status is None else status.st_mtime

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        if path in self._decoded:
            self._decoded.read_into(path, byte_offset, buffer)
            return
        try:
            file = self._descriptors.open(path)
            self._fill(file.descriptor, path, byte_offset, buffer)
        except OSError as error:
            raise self._unreadable(error, path) from error

    def read_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        if path in self._decoded:
            read_each_run(self, path, byte_offsets, buffer)
            return
        length = len(buffer) // len(byte_offsets)
        try:
            file = self._descriptors.open(path)
            for i in range(read_runs_at(file.descriptor, byte_offsets, buffer), len(byte_offsets)):
                self._fill(file.descriptor, path, byte_offsets[i], buffer[i * length : (i + 1) * length])
        except OSError as error:
            raise self._unreadable(error, path) from error

    def _status(self, path: str) -> os.stat_result | None:
        """The status of a file; None if there is no such file."""
        try:
            return os.stat(self.folder / path)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
                raise CheckpointError(f"cannot be read: {error.strerror}", where=path[:1000], do="Copy the file again") from None
            if error.errno in _NO_FILE:
                return None
            raise system_refusal(error, "read", self.folder / path) from error

    def _unreadable(self, error: OSError, path: str) -> ReshardError:
        """The error for the user when a file cannot be read. A disk or network that does not answer says nothing about the checkpoint."""
        if error.errno in _NO_FILE:
            return missing(self, path)
        if error.errno == errno.EISDIR:
            return CheckpointError("a file was expected, this is a directory", where=path)
        refusal = system_refusal(error, "read", path)
        return SystemRefusal(refusal.what, where=path, do=f"{refusal.do}; an interrupted conversion continues with `resume=True`")

    @staticmethod
    def _fill(descriptor: int, path: str, byte_offset: int, buffer: memoryview) -> None:
        done = read_at(descriptor, buffer, byte_offset)
        while done < len(buffer):
            count = read_at(descriptor, buffer[done:], byte_offset + done)
            if not count:
                raise cut_short(path, byte_offset, byte_offset + len(buffer), os.fstat(descriptor).st_size)
            done += count


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a directory, or a link to one. A link that leads in a circle, or to what nobody may see, is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


class _Stamp(NamedTuple):
    """What the system says of a file. Times in nanoseconds."""

    nbytes: int
    written: int
    touched: int
    inode: int


def _stamp(status: os.stat_result) -> _Stamp:
    return _Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


class VirtualFiles(HasClaims):
    """`Files` that are planned. Their sizes are known, and some of their bytes, such as headers; weights have no bytes yet."""

    is_file, store = False, None

    def __init__(self, root: str) -> None:
        self.root = root
        self._sizes: dict[str, int] = {}
        self._literals: dict[str, list[tuple[int, bytes]]] = {}

    def opened(self) -> None:
        return None

    def parent(self) -> None:
        return None

    def add(self, path: str, nbytes: int, literals: Sequence[tuple[int, bytes]]) -> None:
        """Add a file of that length. literals: the bytes that are known, as (byte offset, bytes)."""
        self._sizes[path] = nbytes
        self._literals[path] = sorted(literals)

    def list(self, folder: str = "") -> tuple[str, ...]:
        return entries_of(self._sizes, folder)

    def size(self, path: str) -> int | None:
        return self._sizes.get(path)

    def stamp(self, path: str) -> str:
        return "planned"

    def trace(self, path: str) -> str:
        return ""

    def changed(self, path: str) -> Change:
        return ""

    def written(self, path: str) -> None:
        return None

    def decoded(self, path: str, start: int, nbytes: int, codecs: tuple[str, ...], *, limit: int) -> str:
        raise CheckpointError(f"the planned file is read with {', '.join(codecs)}, but planned files are not encoded", where=path)

    def read_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        read_each_run(self, path, byte_offsets, buffer)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill the buffer with the known bytes of the range; unknown bytes become 0xA5.

        Raises: CheckpointError if the range leaves the file, or none of its bytes are known.
        """
        end, any_known = byte_offset + len(buffer), False
        if byte_offset < 0 or end > self._sizes[path]:
            raise CheckpointError(f"bytes {byte_offset:,}..{end:,} are needed, {self._sizes[path]:,} are planned", where=path)
        buffer[:] = b"\xa5" * len(buffer)
        literals = self._literals.get(path, [])
        for start, data in literals[max(0, bisect_right(literals, byte_offset, key=lambda literal: literal[0]) - 1) :]:
            if start >= end:
                break
            first, last = max(start, byte_offset), min(start + len(data), end)
            if first < last:
                buffer[first - byte_offset : last - byte_offset] = data[first - start : last - start]
                any_known = True
        if not any_known and buffer:
            raise CheckpointError(f"bytes {byte_offset:,}..{end:,} are planned, but not written yet", where=path)


Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(files: Files, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """What `work` returns for each item, in order. `work` reads from `files`; in a store, where each read takes tens of milliseconds, it
    runs in as many threads as there may be requests."""
    if files.store is None:
        yield from map(work, items)
        return
    from concurrent.futures import ThreadPoolExecutor

    from reshard.storage.stores.store import REQUESTS_AT_ONCE

    threads = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="reshard-read")
    try:
        yield from threads.map(work, items)
    finally:
        threads.shutdown(cancel_futures=True)
