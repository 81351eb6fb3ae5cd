"""The lock of a target: at most one run writes a directory, or the parts of one plan, each with a share of the lock.

The lock file lies in the work folder and names the process that holds it:

    {"pid": 4711, "host": "node7", "started": "2026-11-22 14:02:11 UTC", "plan": identity of its plan}

The lock is flock on that file: the system releases it when the process ends, however it ends. Where a file system has no locks (some
network mounts), the owner creates the file exclusively and touches it every few seconds. A file that was not touched for
SECONDS_UNTIL_STALE belongs to a run that has died. Shares need flock.

The work folder disappears when a run ends, so flock may succeed on a file that is no longer in the folder. Who takes the lock therefore
compares the file with the path, and who removes the folder removes the lock file last.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from reshard.errors import SystemRefusal, TargetError, TargetInUse
from reshard.storage.own_files import LOCK, MOST_OF_LOCK, WORK_FOLDER, ForeignFile, check_is_own, is_known, open_own, owner
from reshard.storage.system_calls import system_errors

SECONDS_BETWEEN_BEATS = 10.0
SECONDS_UNTIL_STALE = 180.0
# A run that ends removes its folder, and a reader that asks for the owner holds the lock for a moment. Both are over soon.
_SECONDS_OF_PATIENCE = 0.5
# Whoever has just taken the lock writes into it who it is. On a busy machine that takes longer than the patience above.
_SECONDS_UNTIL_NAMED = 10.0
_HAS_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class Lock:
    """The right to write the target `root`. plan: the identity of the plan. progress: how far the owner is, for messages to other runs."""

    def __init__(self, root: Path, plan: str, progress: Callable[[], str]) -> None:
        self._root, self._path, self._progress = root, root / WORK_FOLDER / LOCK, progress
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._record = {"pid": os.getpid(), "host": platform.node(), "started": started, "plan": plan}
        self._descriptor = -1
        self._ended, self._heartbeat = threading.Event(), threading.Thread(target=self._beat, name="reshard-lock", daemon=True)

    def acquire(self) -> None:
        """Take the lock; creates the work folder. Raises TargetError, naming the owner, if another run has it."""
        patience_ends = time.monotonic() + _SECONDS_OF_PATIENCE
        with system_errors("created", self._path.parent):
            while not self._try(final := time.monotonic() > patience_ends):
                if final:
                    raise self.refusal()
                time.sleep(0.02)
            self._write_record()

    def acquire_share(self) -> None:
        """Take a share of the lock; creates the work folder. Waits as long as another run of the same plan has the whole lock.

        Raises: TargetError, naming the owner, if a run of another plan has the lock. SystemRefusal if the file system has no flock.
        """
        began = time.monotonic()
        with system_errors("created", self._path.parent):
            while not self._try(final := time.monotonic() > began + _SECONDS_OF_PATIENCE, fcntl.LOCK_SH):
                plan = owner(self._root).get("plan") if final else None
                if plan == self._record["plan"]:
                    began = time.monotonic()  # Its folder disappears when it ends, which needs patience again.
                elif plan or time.monotonic() > began + _SECONDS_UNTIL_NAMED:
                    raise self.refusal()
                time.sleep(0.02)
            self._write_record()

    def try_acquire(self) -> bool:
        """Take the lock if nobody has it or a share of it; returns whether it was taken."""
        with system_errors("created", self._path.parent):
            if obtained := self._try(final=False):
                self._write_record()
            return obtained

    def refusal(self) -> TargetInUse:
        """The error for a run that may not write here, because another one does."""
        record = owner(self._root)
        process = f": process {record['pid']} on {record['host']}, started {record['started']}" if record else ""
        same_plan = record.get("plan") == self._record["plan"]
        return TargetInUse(
            f"another reshard is writing here{process}{self._progress()}",
            where=str(self._root),
            why="Two runs at once would mix their files; nothing was changed",
            do="Wait until it has ended, or choose another directory"
            + ("; several processes share the work of one plan with `part=`" if same_plan else ""),
        )

    def check(self) -> None:
        """Raises TargetError if the lock file was removed or replaced: then another run may have begun."""
        if not _is_at(self._descriptor, self._path):
            raise TargetError(
                "the lock file was removed or replaced while this run was writing",
                where=str(self._path),
                why="Another run may have begun to write here, so no file got its final name",
                do="Make sure that no other run writes here, then start again with `overwrite=True`",
            )

    def give_up(self) -> None:
        """Give up the lock or the share, and leave the lock file to the others."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def release(self) -> None:
        """Give up the lock, and remove the lock file, unless it alone tells that the work folder is reshard's."""
        if self._descriptor < 0:
            return
        self._ended.set()
        if self._heartbeat.is_alive():
            self._heartbeat.join()
        try:
            with suppress(OSError, ForeignFile):  # A lock file without an owner does no harm.
                if _is_at(self._descriptor, self._path) and is_known(self._root, {*os.listdir(self._path.parent)} - {LOCK}):
                    os.unlink(self._path)
            with suppress(OSError):  # A process that was forked from this one may have the file open.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_record(self) -> None:
        record = json.dumps(self._record).encode()
        # Others may read it now: at no moment it is empty, or followed by the end of a longer one. Nobody reads a file beyond the limit.
        os.pwrite(self._descriptor, record.ljust(min(os.fstat(self._descriptor).st_size, MOST_OF_LOCK)), 0)
        os.ftruncate(self._descriptor, len(record))

    def _try(self, final: bool, kind: int = fcntl.LOCK_EX) -> bool:
        """Whether the lock was obtained. final: raise errors that another run may have caused by removing the folder just now."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            check_is_own(self._root)
            descriptor, created = _open(self._root)
        except (FileNotFoundError, FileExistsError):
            if final:
                raise
            return False
        obtained = False
        try:
            obtained = self._obtain(descriptor, created, kind)
        finally:
            if obtained:
                self._descriptor = descriptor
            else:
                os.close(descriptor)
        return obtained

    def _obtain(self, descriptor: int, created: bool, kind: int) -> bool:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _HAS_NO_LOCKS:
                raise
            if kind == fcntl.LOCK_SH:
                raise SystemRefusal(
                    "its file system has no file locks (flock), which the parts of a conversion share",
                    where=str(self._root),
                    do="Mount it with locks (Lustre: -o flock), or convert with one process",
                ) from None
            if created:
                self._heartbeat.start()
            elif _is_stale(descriptor, self._path.parent):
                _remove(descriptor, self._path)  # The next attempt creates it.
            return created
        return _is_at(descriptor, self._path)

    def _beat(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_BEATS):
            with suppress(OSError):  # `check` tells if the file has gone.
                os.utime(self._descriptor)


def is_locked(root: Path) -> bool:
    """Whether a run holds the lock of a target, or a share of it."""
    try:
        descriptor = open_own(root, f"{WORK_FOLDER}/{LOCK}", os.O_RDONLY)
    except (OSError, ForeignFile):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _ask_for_all(descriptor)
    except BlockingIOError:
        return True
    except OSError:
        return time.time() - os.fstat(descriptor).st_mtime < SECONDS_UNTIL_STALE
    finally:
        os.close(descriptor)
    return False


def _ask_for_all(descriptor: int) -> None:
    """Take the whole lock, which shows whether others have a share. Raises BlockingIOError if they have."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EBADF:  # NFS gives the whole lock only to those who may write the file.
            raise


def _open(root: Path) -> tuple[int, bool]:
    """A descriptor of the lock file, and whether this call created it."""
    path = f"{WORK_FOLDER}/{LOCK}"
    try:
        return open_own(root, path, os.O_RDWR | os.O_CREAT | os.O_EXCL), True
    except FileExistsError:
        return open_own(root, path, os.O_RDWR), False


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at that path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _is_stale(descriptor: int, folder: Path) -> bool:
    """Whether the owner has not touched the file for long, by the clock of the file server, which dates a new file."""
    import tempfile

    with tempfile.TemporaryFile(dir=folder) as new:
        return os.fstat(new.fileno()).st_mtime - os.fstat(descriptor).st_mtime > SECONDS_UNTIL_STALE


def _remove(descriptor: int, path: Path) -> None:
    """Remove a stale lock file. Several runs may try at once: one succeeds, and a lock file that is new by now is put back."""
    aside = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        os.rename(path, aside)
        if not _is_at(descriptor, aside):
            with suppress(FileExistsError):
                os.link(aside, path)
        os.unlink(aside)
