"""Own files: what reshard keeps for itself beside its results: the work folder with the lock file and the journals, the record of a watch.

    TARGET/.reshard/lock             lock.py
    TARGET/.reshard/journal.jsonl    engine/destinations/journal.py; its first line begins {"identity": digest of the plan
    OUT/reshard.watch.jsonl          runs/outputs.py

Whoever may write the folder around them may put something else there: a link, a FIFO, a device, another program's folder, a file without
end. So these files are opened here alone: no link below the folder is followed, nothing but a regular file is opened and nobody is waited
for, and what is read has a limit. A work folder is written and emptied only if it is reshard's.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from reshard.errors import TargetError

WORK_FOLDER = ".reshard"
JOURNAL = "journal.jsonl"
LOCK = "lock"


def cache_root() -> str:
    """The folder of the cache that the environment names: $RESHARD_CACHE, else $XDG_CACHE_HOME/reshard, else ~/.cache/reshard."""
    if root := os.environ.get("RESHARD_CACHE"):
        return root
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "reshard")


_OWNER_KEYS = frozenset({"pid", "host", "started"})
"""What the lock file of every version says of the run that holds the lock."""

# A line of a journal has 85 bytes for each block that was finished in a second or less, and its header lists files that are replaced.
_LONGEST_LINE = 16 << 20
# 256 MiB are the journal of 3 million blocks, or 24 TB.
_MOST_BYTES = 256 << 20
MOST_OF_LOCK = 1 << 16
_JOURNAL_BEGINS = b'{"identity":"'
# What the system says of a link, a FIFO without a reader, a device without a driver, a directory and a path through something else.
_FOREIGN = (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.ENOTDIR)


class ForeignFile(TargetError):
    """Something that is not reshard's lies where reshard keeps a file or folder of its own."""


def foreign(path: str | os.PathLike[str], what: str) -> ForeignFile:
    """The error for something at this path that is not reshard's. what: a sentence about it."""
    return ForeignFile(
        what,
        where=os.fspath(path),
        why="reshard keeps a file of its own under this name, and reads, changes or removes nothing else",
        do="Move it away if it is yours, or remove it; then run again",
    )


@contextmanager
def own_folder(root: str | os.PathLike[str], folders: str = WORK_FOLDER) -> Iterator[int]:
    """A descriptor of a folder below `root`, which is closed afterwards. folders: its path; none of them may be a link.

    Raises: FileNotFoundError if it does not exist, ForeignFile if it is something else.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(root, flags)
    try:
        for name in filter(None, folders.split("/")):
            try:
                inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                if error.errno in _FOREIGN:
                    raise foreign(Path(root, folders), "it is a link or a file, and not a folder of reshard") from None
                raise
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def open_own(root: str | os.PathLike[str], path: str, flags: int) -> int:
    """A descriptor of one of reshard's own files: `path`, relative to the folder `root`. A new file gets the usual permissions.

    Raises: OSError, such as FileNotFoundError; ForeignFile if a link leads there, or something else than a regular file lies there.
    """
    folders, _, name = path.rpartition("/")
    with own_folder(root, folders) as folder:
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno in _FOREIGN:
                raise foreign(Path(root, path), "it is not a regular file") from None
            raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise foreign(Path(root, path), "it is not a regular file")
    return descriptor


def read_own(root: str | os.PathLike[str], path: str, *, limit: int) -> bytes:
    """The content of one of reshard's own files. Raises: as `open_own` does; ForeignFile if it has more than `limit` bytes."""
    with open(open_own(root, path, os.O_RDONLY), "rb", buffering=0) as file:
        _check_length(file.fileno(), Path(root, path), limit)
        return file.read(limit)


def own_lines(root: str | os.PathLike[str], path: str) -> Iterator[bytes]:
    """The complete lines of one of reshard's own files, one at a time. Raises: as `read_own` does."""
    with open(open_own(root, path, os.O_RDONLY), "rb") as file:
        _check_length(file.fileno(), Path(root, path), _MOST_BYTES)
        while (line := file.readline(_LONGEST_LINE)).endswith(b"\n"):
            yield line
        if len(line) == _LONGEST_LINE:
            raise foreign(Path(root, path), f"it has a line of more than {_LONGEST_LINE:,} bytes, which reshard does not write")


def _check_length(descriptor: int, path: Path, limit: int) -> None:
    if (size := os.fstat(descriptor).st_size) > limit:
        raise foreign(path, f"it has {size:,} bytes, more than the limit of {limit:,} for a file of this kind")


def json_object(text: bytes) -> dict[str, Any]:
    """The JSON object in a text; empty if it holds something else, or was cut short."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def owner(root: str | os.PathLike[str]) -> dict[str, Any]:
    """What the lock file of a target says about the run that has the lock, or had it; empty if there is no lock file of reshard."""
    with suppress(OSError, ForeignFile):
        return _owner(root)
    return {}


def _owner(root: str | os.PathLike[str]) -> dict[str, Any]:
    record = json_object(read_own(root, f"{WORK_FOLDER}/{LOCK}", limit=MOST_OF_LOCK))
    return record if record.keys() >= _OWNER_KEYS else {}


def check_is_own(root: str | os.PathLike[str]) -> None:
    """Raises ForeignFile if the work folder of a target was not made by reshard. There may be none; runs may end meanwhile."""
    with suppress(FileNotFoundError), own_folder(root) as folder:
        names = set(os.listdir(folder))
        if not is_known(root, names) and not (LOCK in names and _owner(root)):
            raise foreign(Path(root, WORK_FOLDER), "it holds neither a lock file nor a journal of reshard")


def is_known(root: str | os.PathLike[str], names: set[str]) -> bool:
    """Whether a work folder with these entries is reshard's, whatever its lock file says of its owner.

    It is empty, or holds an empty lock file alone, as a run that begins makes it; or it holds a journal, or the beginning of one.

    Raises: OSError; ForeignFile if the journal is no regular file.
    """
    if JOURNAL in names:
        with open(open_own(root, f"{WORK_FOLDER}/{JOURNAL}", os.O_RDONLY), "rb") as file:
            line = file.readline(_LONGEST_LINE)
        if line.endswith(b"\n"):
            return is_digest(json_object(line).get("identity"))
        return line[: len(_JOURNAL_BEGINS)] == _JOURNAL_BEGINS[: len(line)]
    locks = {name for name in names if name == LOCK or name.startswith(f"{LOCK}-")}
    return locks == names and all(os.lstat(Path(root, WORK_FOLDER, name)).st_size == 0 for name in locks)


def is_digest(text: object) -> bool:
    """Whether a value is a digest of reshard, in hexadecimal digits."""
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")
