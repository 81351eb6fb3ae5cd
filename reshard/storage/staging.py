"""Staging: writing files under temporary names, and renaming them when they are complete.

Until `commit`, everything lies in the work folder `.reshard` inside the target: the files, at their full length, the journal and the lock
file. A file with its final name is always complete, whatever stops the process. The journal is removed before anything that it describes,
and the lock file last.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from reshard.errors import SystemRefusal, TargetError
from reshard.storage.files import Descriptors, Files, LocalFiles, OpenFile
from reshard.storage.lock import Lock
from reshard.storage.own_files import JOURNAL, LOCK, WORK_FOLDER, ForeignFile, open_own, own_folder
from reshard.storage.system_calls import begin_sync, sync_content, sync_folder, system_errors, system_refusal

# The most bytes of one write. For a larger write Linux takes larger pages, and a virtual machine whose host takes free memory back has to
# fetch each of them again. When such a host was busy, writes of 512 KiB took up to 1.6 times as long as those of 128 KiB, and those of
# 2 MiB five times; when it was quiet, those of 128 KiB took 1.25 times as long as those of 512 KiB. cp writes 256 KiB at a time.
_MOST_BYTES = 1 << 18
_ATTEMPTS = 25
_WEIGHTS = (".safetensors", ".pt", ".bin", ".distcp")


class Staging:
    """The files of one target directory while they are being written. Every OSError becomes a SystemRefusal."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.work = self.root / WORK_FOLDER
        self._descriptors: Descriptors | None = None
        self._lock: Lock | None = None
        self._sizes: dict[str, int] = {}

    @property
    def journal(self) -> Path:
        """The path of the journal."""
        return self.work / JOURNAL

    @contextmanager
    def locked(self, plan: str, progress: Callable[[], str]) -> Iterator[None]:
        """Inside this context, no other run writes the target. Afterwards, an empty work folder and an empty target are removed.

        plan: the identity of the plan. progress: how far the run is that has the lock, for the message to others.

        Raises: TargetError if another run has the lock.
        """
        self._lock = Lock(self.root, plan, progress)
        try:
            self._lock.acquire()
            yield
        finally:
            self.close()
            self._lock.release()
            self._remove_empty_folders()

    @contextmanager
    def shared(self, plan: str, progress: Callable[[], str], *, is_begun: Callable[[], bool], begin: Callable[[], None]) -> Iterator[None]:
        """Inside this context, only processes with the same plan write the target, and none gives files their final names.

        is_begun: whether the plan is under way or done. begin: prepares it; called when no other run can write there.

        Raises: TargetInUse if a run of another plan has the lock. What `begin` raises.
        """
        lock, attempts = Lock(self.root, plan, progress), 0
        while True:
            if not is_begun() and lock.try_acquire():
                try:
                    if not is_begun():
                        begin()
                finally:
                    self.close()
                    lock.release()
                    self._remove_empty_folders()
            lock.acquire_share()
            if is_begun():
                break
            lock.give_up()
            # Others have a share: of another plan, or for a moment, as a reader has that asks for the owner.
            attempts += 1
            if attempts > _ATTEMPTS and self.journal.exists():
                raise lock.refusal()
            time.sleep(0.02)
        try:
            yield
        finally:
            self.close()
            lock.give_up()
            if not self.journal.exists() and lock.try_acquire():  # Another process has completed the target before this one began.
                lock.release()
                self._remove_empty_folders()

    def close(self) -> None:
        """Close the staged files."""
        if self._descriptors:
            self._descriptors.close()

    def _remove_empty_folders(self) -> None:
        """Neither is empty after an interruption, and after a conversion only the work folder is."""
        with suppress(OSError):
            self.work.rmdir()
            self.root.rmdir()

    def prepare(self, sizes: dict[str, int], *, resume: bool, committing: bool = False) -> None:
        """Create every file at its full length, sparse, so that it reads as zeros. With `resume`, keep the files of an earlier run.

        sizes: the length in bytes of each file. committing: the earlier run may have given files their final names already.

        Raises: TargetError if a file of the earlier run is missing. SystemRefusal if the disk has too little free space, before any file is
        created.
        """
        self._sizes = dict(sizes)
        with system_errors("prepared", self.work):
            if resume:
                self._check_all_are_present(committing)
            else:
                self._empty_work_folder()
            if not committing:
                self._check_free_space()
            for path, size in () if resume else sizes.items():
                (self.work / path).parent.mkdir(parents=True, exist_ok=True)
                self._create(path, size)
            self._sync_folders_of(self.work, sizes)
        # Write-only: an NFS client that may read a file writes whole pages, with stale bytes of other machines on them.
        self._descriptors = Descriptors(self.work, os.O_WRONLY | os.O_NOFOLLOW)

    def write(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Write bytes into a staged file. Raises SystemRefusal if the disk is full or the file cannot be written."""
        self.write_runs(path, (byte_offset,), buffer)

    def write_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        """Write runs of equal length, which follow each other in the buffer, at these byte offsets of a file. Raises as `write` does."""
        assert self._descriptors is not None
        length = len(buffer) // len(byte_offsets)
        try:
            file, start = self._descriptors.open(path), 0
            with file.turn:
                for byte_offset in byte_offsets:
                    _write(file, byte_offset, buffer[start : start + length])
                    start += length
                written = file.wrote(min(byte_offsets), max(byte_offsets) + length, len(buffer))
            if written:
                begin_sync(file.descriptor, *written)
        except OSError as error:
            raise self._refusal(error, path) from error

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Bytes [byte_offset, byte_offset + nbytes) of a staged file, or of the file that an interrupted commit has already renamed."""
        staged = self.work / path
        try:
            with open(staged if staged.exists() else self.root / path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), nbytes, byte_offset)
        except OSError as error:
            raise self._refusal(error, path) from error

    def files(self) -> Files:
        """The staged files, and those that an interrupted commit has renamed, for a process that alone writes the target.

        An NFS client that has read a page writes the whole page, with stale bytes if other machines write it, too.
        """
        return _WrittenFiles(self.root)

    def sync(self) -> None:
        """Return when everything that was written before is on the disk. Raises as `write` does."""
        assert self._descriptors is not None
        for path in self._sizes:
            if (self.work / path).exists():
                try:
                    file = self._descriptors.open(path)
                    sync_content(file.descriptor)
                except OSError as error:
                    raise self._refusal(error, path) from error

    def add(self, path: str, content: bytes) -> None:
        """Stage a small file with this content. It is on the disk when this returns. Raises as `write` does."""
        staged = self.work / path
        try:
            staged.parent.mkdir(parents=True, exist_ok=True)
            with open(open_own(self.work, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(content)
                file.flush()
                sync_content(file.fileno())
        except OSError as error:
            raise self._refusal(error, path) from error

    def commit(self, paths: Sequence[str], *, replaces: Iterable[str] = (), again: bool = False) -> None:
        """Replace the old checkpoint: remove its files, give the staged files in `paths` their final names, and empty the work folder.

        The caller has called `sync` and has noted in the journal that the commit begins. Index, config and manifest are the first to go and
        the last to come, and nothing new appears before everything old is gone. So no reader takes a part of either, or a mixture, for a
        checkpoint.

        replaces: the files of the old checkpoint. again: an earlier run has begun this commit and was stopped.
        """
        assert self._descriptors is not None and self._lock is not None
        self._descriptors.close()
        with system_errors("completed", self.root):
            self._lock.check()
            staged = dict.fromkeys(path for path in paths if (self.work / path).exists())
            committed = {path for path in paths if path not in staged}
            for path in committed:
                if not (again and (self.root / path).exists()):
                    raise _lost(self.work / path)
            self.remove(path for path in {**dict.fromkeys(replaces), **staged} if path not in committed)
            new = sorted(staged, key=lambda path: not _holds_weights(path))
            for path in new:
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self.work / path, self.root / path)
            self._sync_folders_of(self.root, new)
            self._empty_work_folder()

    def remove(self, paths: Iterable[str]) -> None:
        """Remove those of these files that exist in the target: index, config and manifest first, then weights."""
        existing = [path for path in dict.fromkeys(paths) if os.path.lexists(self.root / path)]
        with system_errors("removed", self.root):
            for path in sorted(existing, key=_holds_weights):
                (self.root / path).unlink()
            self._sync_folders_of(self.root, existing)

    def clean(self) -> None:
        """Remove the content of the work folder."""
        with system_errors("removed", self.work):
            self._empty_work_folder()

    def abandon(self) -> None:
        """Close and remove the staged files. If this fails, they stay behind, and the error that led here is the one to report."""
        if self._descriptors:
            self._descriptors.close()
        with suppress(OSError):
            self._empty_work_folder()

    def _empty_work_folder(self) -> None:
        """Remove everything but the lock file. Without the journal nothing can be resumed, so it must go first."""
        if self.journal.exists():
            self.journal.unlink()
            sync_folder(self.work)
        with own_folder(self.root) as folder:
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    _remove_folder(entry.name, folder)
                elif entry.name != LOCK:
                    os.unlink(entry.name, dir_fd=folder)

    def _check_all_are_present(self, committing: bool) -> None:
        """Raises TargetError if a file of the earlier run is missing: the journal would claim blocks that are nowhere."""
        for path, size in self._sizes.items():
            places = (self.work, self.root) if committing else (self.work,)
            if not any(_length(place, path) == size for place in places):
                raise _lost(self.work / path)

    def _check_free_space(self) -> None:
        """Raises SystemRefusal if the disk has too little space. Staged files have their full length, but are sparse at first."""
        staged = (self.work / path for path in self._sizes)
        allocated = sum(min(file.stat().st_size, file.stat().st_blocks * 512) for file in staged if file.exists())
        check_free_space(sum(self._sizes.values()) - allocated, self.work, self.root)

    def _create(self, path: str, size: int) -> None:
        try:
            with open(open_own(self.work, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                os.truncate(file.fileno(), size)
        except OSError as error:
            raise self._refusal(error, path) from error

    @staticmethod
    def _sync_folders_of(root: Path, paths: Iterable[str]) -> None:
        """Return when the names of these files are on the disk."""
        folders = {folder for path in paths for folder in (root / path).relative_to(root).parents} | {Path()}
        for folder in sorted(folders):
            if (root / folder).is_dir():
                sync_folder(root / folder)

    def _refusal(self, error: OSError, path: str) -> SystemRefusal:
        """The error for the user when the system could not write a staged file. Finished blocks are kept."""
        kept = "Finished blocks are on the disk and in the journal"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed, free = sum(self._sizes.values()), _free_bytes(self.root)
            return SystemRefusal(
                f"the disk is full: {needed:,} bytes are needed in all, {free:,} are free now",
                where=str(self.root),
                why=kept,
                do="Free some space and run the same command with `resume=True`",
                id="no-space",
            )
        if error.errno == errno.EFBIG:
            return SystemRefusal(
                f"a file of {self._sizes.get(path, 0):,} bytes is larger than the file system, or the limit of `ulimit -f`, allows",
                where=str(self.work / path),
                do="Raise the limit, choose another disk, or write smaller files with `max_shard_size=`",
            )
        refusal = system_refusal(error, "written", self.work / path)
        return SystemRefusal(refusal.what, where=refusal.where, why=kept, do=f"{refusal.do}; `resume=True` continues")


class _WrittenFiles(LocalFiles):
    """The files of a target under their final names, wherever they lie."""

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        super().read_into(self._place(path), byte_offset, buffer)

    def read_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        super().read_runs(self._place(path), byte_offsets, buffer)

    def _place(self, path: str) -> str:
        staged = f"{WORK_FOLDER}/{path}"
        return staged if (self.folder / staged).exists() else path


def _write(file: OpenFile, byte_offset: int, buffer: memoryview) -> None:
    for start in range(0, len(buffer), _MOST_BYTES):
        part, done = buffer[start : start + _MOST_BYTES], 0
        while done < len(part):
            done += os.pwrite(file.descriptor, part[done:] if done else part, byte_offset + start + done)


def _holds_weights(path: str) -> bool:
    """Whether a file holds weights; index, config, manifest and the like do not, and without them no reader finds the weights."""
    return path.endswith(_WEIGHTS)


def _lost(staged: Path) -> TargetError:
    return TargetError(
        "the file is missing or has another length than the interrupted run gave it",
        where=str(staged),
        why="The journal lists finished blocks that it should hold, so the conversion cannot continue",
        do="Start again with `overwrite=True`",
    )


def _length(folder: Path, path: str) -> int | None:
    """The length of a regular file that is reached without a link; None if there is none."""
    try:
        with open(open_own(folder, path, os.O_RDONLY), "rb", buffering=0) as file:
            return os.fstat(file.fileno()).st_size
    except (FileNotFoundError, ForeignFile):
        return None


def check_free_space(needed: int, folder: Path, target: Path) -> None:
    """Raises SystemRefusal if the disk of a folder has fewer free bytes. target: what the message names."""
    free = _free_bytes(folder)
    if needed > free:
        raise SystemRefusal(
            f"{needed:,} bytes are needed, {free:,} are free",
            where=str(target),
            why="The disk would be full before the conversion ends; nothing was written",
            do="Free some space, or choose another disk",
            id="no-space",
        )


# shutil loads every compression module. What only reads a checkpoint imports this module for its names and does without.
def _remove_folder(name: str, folder: int) -> None:
    import shutil

    shutil.rmtree(name, dir_fd=folder)


def _free_bytes(folder: Path) -> int:
    import shutil

    return shutil.disk_usage(folder).free
