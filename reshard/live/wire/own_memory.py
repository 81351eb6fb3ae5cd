"""Files in the memory of the host by which processes of one user and one host hand each other bytes: slots of a transport, a secret.

A file is reshard-<16 hex digits> in one folder that is not named by anybody. A peer tells the digits, never a path. What is opened must be
a regular file of this user alone, with one name and the expected size: no link is followed, a FIFO does not hang, nothing is cut.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from reshard.errors import RequestError, printable

_FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_PRIVATE = 0o600


def made(nbytes: int) -> tuple[str, int]:
    """The number of a new file of so many bytes, and its descriptor."""
    number = secrets.token_hex(8)
    descriptor = os.open(_path(number), _FLAGS | os.O_CREAT | os.O_EXCL, _PRIVATE)
    os.truncate(descriptor, nbytes)
    return number, descriptor


def opened(number: str, nbytes: int) -> int:
    """The descriptor of the file that another process has made.

    Raises: RequestError if there is none of this size that belongs to this user alone.
    """
    try:
        descriptor = os.open(_path(number), _FLAGS | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise _refused(number, getattr(error, "strerror", "") or "no number of such a file") from None
    about = os.fstat(descriptor)
    is_own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & ~_PRIVATE
    if not (is_own and about.st_nlink == 1 and about.st_size == nbytes):
        os.close(descriptor)
        raise _refused(number, f"it is not a file of {nbytes:,} bytes that belongs to this user alone")
    return descriptor


def removed(number: str) -> None:
    """Take the name of a file away; who has opened it keeps it."""
    with suppress(FileNotFoundError):
        _path(number).unlink()


def _path(number: str) -> Path:
    """Raises ValueError for what is not the number of a file."""
    if not re.fullmatch("[0-9a-f]{16}", number):
        raise ValueError(number)
    return _FOLDER / f"reshard-{number}"


def _refused(number: str, why: str) -> RequestError:
    return RequestError(
        f"memory that {os.uname().nodename} should share is not there: {why}",
        where=f"reshard-{printable(number)[:40]}",
        do="Run trainer and engine as one user, on one host, in one container; or use transport gloo or nccl, and RESHARD_LIVE_TOKEN",
    )
