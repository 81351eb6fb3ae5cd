"""Calls of the operating system: what differs between platforms, and what an error of the system means to the user.

reshard runs on Linux and macOS. macOS has no fdatasync, no preadv before macOS 11, and allows a process 256 open files by default.
Paths as users give them are local ones, or URLs of stores. Where only a local path serves, a message says how to copy the files.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from reshard.errors import RequestError, SystemRefusal, UnsupportedError, nearest
from reshard.secrets import public

_ADVICE = {
    errno.EACCES: "Check the permissions of the file and of its directory",
    errno.EPERM: "Check the permissions of the file and of its directory",
    errno.EROFS: "Choose a directory on a file system that is mounted for writing",
    errno.EEXIST: "Choose another path, or remove the file or the broken link that has this name",
    errno.ENOTDIR: "Choose another path: a part of this one is a file",
    errno.ENAMETOOLONG: "Choose a shorter path",
    errno.ELOOP: "Choose another path: symbolic links in this one lead in a circle",
    errno.ENOSPC: "Free some space or inodes, or choose another disk",
    errno.EDQUOT: "Free some space, or ask for a larger quota",
    errno.EMFILE: "Allow this process more open files, for example with `ulimit -n 1024`",
    errno.ENFILE: "Wait until other programs have closed files",
}

_SYNC_FILE_RANGE_WRITE = 2
# The fallback for preadv copies the bytes once; the copy stays small.
_COPY_BYTES = 8 << 20


def check_platform() -> None:
    """Raises RequestError on Windows, which has neither pread nor pwrite nor fsync of a directory."""
    if sys.platform == "win32":
        raise UnsupportedError("Windows is not supported: reshard runs on Linux and macOS, and on Windows in WSL")


@contextmanager
def system_errors(action: str, where: str | os.PathLike[str]) -> Iterator[None]:
    """Inside this context, an OSError becomes a SystemRefusal: `where` cannot be {action}, and why."""
    try:
        yield
    except OSError as error:
        raise system_refusal(error, action, where) from error


def system_refusal(error: OSError, action: str, where: str | os.PathLike[str]) -> SystemRefusal:
    """The error for the user when the system refuses a call. action: what cannot be done, as a participle."""
    path = os.fspath(error.filename if isinstance(error.filename, str | os.PathLike) else where)
    if action == "created" and error.errno == errno.ENOENT and os.path.isdir(parent := os.path.dirname(os.path.abspath(path))):
        # What the system says of a virtual file system, such as that of /proc.
        return SystemRefusal(f"cannot be created: {parent} takes no new files", where=str(path), do="Choose a directory on a disk")
    return SystemRefusal(
        f"cannot be {action}: {error.strerror or error}",
        where=str(path),
        do=_ADVICE.get(error.errno or 0, "Check the disk or the network mount, then try again"),
    )


def memory_refusal(error: Exception) -> SystemRefusal | None:
    """The error for the user when the system gives no more memory; None for any other error.

    A thread that cannot start lacks memory for its stack, and a library that cannot be mapped lacks it for its code. Python has no types
    for these two errors.
    """
    if not isinstance(error, MemoryError) and not any(words in str(error) for words in ("start new thread", "failed to map segment")):
        return None
    return SystemRefusal(
        f"the system gives reshard no more memory ({(str(error).splitlines() or ['MemoryError'])[-1]})",
        why="A limit is too low (ulimit -v, that of a container or a job), or the machine has no more",
        do="Raise the limit, or use less with `workers=1` and a smaller `memory=`, where the command has them",
        id="no-memory",
    )


def sync_folder(folder: Path) -> None:
    """Return when the names of the files in a folder are on the disk. File systems that cannot sync a folder are trusted."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def read_at(descriptor: int, buffer: memoryview, byte_offset: int) -> int:
    """The number of bytes read from `byte_offset` of an open file into the start of `buffer`; 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], byte_offset)
    content = os.pread(descriptor, min(len(buffer), _COPY_BYTES), byte_offset)
    buffer[: len(content)] = content
    return len(content)


def read_runs_at(descriptor: int, byte_offsets: Sequence[int], buffer: memoryview) -> int:
    """Fill `buffer` with runs of equal length, which start at these byte offsets of an open file. Returns the number of runs before the
    first one that a single call did not fill, for example at the end of the file."""
    if not hasattr(os, "preadv"):
        return 0
    # Runs may be as short as a kilobyte, so that every operation here counts.
    read, length, start = os.preadv, len(buffer) // len(byte_offsets), 0
    for byte_offset in byte_offsets:
        stop = start + length
        if read(descriptor, (buffer[start:stop],), byte_offset) < length:
            break
        start = stop
    return start // length


def sync_content(descriptor: int) -> None:
    """Return when the content of an open file is on the disk."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
        return
    import fcntl

    # fsync on macOS leaves the bytes in the cache of the drive; F_FULLFSYNC writes them out (man 2 fsync, man 2 fcntl). Network file
    # systems refuse it.
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        try:
            fcntl.fcntl(descriptor, full_sync)
        except OSError:
            pass
        else:
            return
    os.fsync(descriptor)


def begin_sync(descriptor: int, start: int, stop: int) -> None:
    """Have the system begin to write bytes [start, stop) of an open file to the disk (man 2 sync_file_range), where it has such a call.

    What comes of it is not asked: only `sync_content` tells whether the bytes are on the disk, and raises the error if they are not.
    """
    if call := _sync_file_range():
        call(descriptor, start, stop - start, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The function of the C library; None on macOS, which has none."""
    import ctypes

    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


def open_files_at_once() -> int:
    """The number of files that one folder may keep open: a quarter of what the process may open, but at least 8 and at most 200."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 200 if soft == resource.RLIM_INFINITY else max(8, min(200, soft // 4))


@contextmanager
def gc_paused() -> Iterator[None]:
    """A context in which the garbage collector is off: it would scan all new objects again and again without finding garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Start of a URL -> a command that copies what lies there into the folder {name}.
_COPIES = {
    "s3://": "aws s3 cp --recursive {url} {name}",
    "gs://": "mkdir {name} && gcloud storage cp --recursive '{url}/*' {name}",
    "hf://": "hf download {path} --local-dir {name}",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w-]*(\.[\w-]+)*/[A-Za-z0-9][\w.-]*")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the URL of a store, such as s3://bucket/checkpoint."""
    scheme, colon, _ = os.fspath(path).partition("://")
    return bool(colon) and "/" not in scheme and scheme != "file"


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path, after a check that it is a local one. Raises UnsupportedError, with a command that copies it, for a URL."""
    text = os.fspath(path)
    scheme, colon, rest = text.partition("://")
    if not colon or "/" in scheme:
        return Path(path)
    if scheme == "file":
        raise UnsupportedError("file:// URLs are not supported", where=text, do=f"Give the path /{rest.partition('/')[2]}")
    name = rest.rstrip("/").rpartition("/")[2] or "checkpoint"
    copy = _COPIES.get(scheme + colon)
    command = "`" + copy.format(url=text.rstrip("/"), path=rest.rstrip("/"), name=name) + "`" if copy else "the tool of that storage"
    raise UnsupportedError(
        f"{scheme}:// paths are not supported here", where=text, do=f"Use a local directory: copy with {command}, or mount the storage"
    )


def absolute_place(path: str | os.PathLike[str]) -> str:
    """The absolute path, without a slash at its end; a URL without credentials."""
    return public(os.fspath(path)).rstrip("/") if is_url(path) else os.path.abspath(path)


def existing_path(path: str | os.PathLike[str]) -> Path:
    """The local path of a file or directory. Raises RequestError, with the nearest name, if it does not exist."""
    place = local_path(path)
    if not place.exists():
        raise RequestError(f"there is no file or directory {str(path)!r}", do=_instead_of(place), id="not-found")
    return place


def _instead_of(path: Path) -> str | None:
    """What to do about a path that does not exist."""
    text = str(path)
    for at in (at for at, letter in enumerate(text) if letter == "+" and os.path.exists(text[:at])):
        return f"{text[:at]} is there, and {text[at + 1 :]} is not"
    if path.parent.is_dir():
        near = nearest(path.name, [entry.name for entry in path.parent.iterdir()])
        return f"Did you mean {path.parent / near}?" if near else None
    if _HUB_ID.fullmatch(str(path)):
        return (
            f"If this is a model of the Hugging Face Hub: `hf download {path} --local-dir {path.name}`, then give the directory {path.name}"
        )
    return None
