"""Calls of the operating system that differ between platforms. reshard runs on Linux and macOS; every difference is here.

macOS has no fdatasync, no preadv before macOS 11, and allows a process 256 open files by default.
"""

from __future__ import annotations

import os
import sys

from reshard.errors import UnsupportedError

# The fallback for preadv copies the bytes once; the copy stays small.
_COPY_BYTES = 8 << 20


def check_platform() -> None:
    """Raises RequestError on Windows, which has neither pread nor pwrite nor fsync of a directory."""
    if sys.platform == "win32":
        raise UnsupportedError("Windows is not supported: reshard runs on Linux and macOS, and on Windows in WSL")


def read_at(descriptor: int, buffer: memoryview, byte_offset: int) -> int:
    """The number of bytes read from `byte_offset` of an open file into the start of `buffer`; 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], byte_offset)
    content = os.pread(descriptor, min(len(buffer), _COPY_BYTES), byte_offset)
    buffer[: len(content)] = content
    return len(content)


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


def open_files_at_once() -> int:
    """The number of files that one folder may keep open: a quarter of what the process may open, but at least 8 and at most 200."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 200 if soft == resource.RLIM_INFINITY else max(8, min(200, soft // 4))
