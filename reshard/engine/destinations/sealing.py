"""Sealing: the checksums in the framing of staged files, such as the CRC-32 of each storage in a zip of torch.save.

    strips of blocks -> Sealing -> staged files, at any offset
                           └> CRC-32 of the strip -> of the storage, once all its strips have come -> the places where it is stored

The checksum of a storage is written before its last block is noted in the journal. So a storage whose blocks are all in the journal of one
process has its checksum. The process that completes the target computes what is missing from the staged bytes: of storages that several
processes have written, that an interrupted run has begun, or that were written in short runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from reshard.engine.pool import run_jobs
from reshard.geometry.quantities import grouped
from reshard.index.index import Constant
from reshard.plans.layout import TargetFile
from reshard.plans.plan import Plan
from reshard.storage.checksums import FileChecksums, StoredChecksum
from reshard.storage.crc32 import crc32
from reshard.storage.files import read_range
from reshard.storage.staging import Staging

# To take the checksum of a shorter run and to join it with its neighbours costs more than to read its bytes once more at the end.
_SHORTEST_RUN = 1 << 12
_STEP = 1 << 20


class Sealing:
    """The staged files of a plan as a sink, which keeps account of their checksums."""

    def __init__(self, plan: Plan, staging: Staging) -> None:
        self._plan, self._staging, self._lock = plan, staging, threading.Lock()
        self._files = {file.path: file for file in plan.layout.files if file.checksums}
        self._constants = grouped(plan.target_index.constants if self._files else (), attrgetter("path"))
        self._open: dict[str, FileChecksums] = {}

    def write(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Write bytes into a staged file, and checksums that are known with them. Raises SystemRefusal as `Staging.write` does."""
        self._staging.write(path, byte_offset, buffer)
        if path in self._files:
            self._add(path, byte_offset, buffer)

    def write_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        """Write runs of equal length, which follow each other in the buffer, at these byte offsets of a file. Raises as `write` does."""
        self._staging.write_runs(path, byte_offsets, buffer)
        length = len(buffer) // len(byte_offsets)
        if path in self._files and (length >= _SHORTEST_RUN or len(byte_offsets) == 1):
            for i, byte_offset in enumerate(byte_offsets):
                self._add(path, byte_offset, buffer[i * length : (i + 1) * length])

    def _add(self, path: str, byte_offset: int, data: memoryview | bytes) -> None:
        checksums = self._of(path)
        for i in checksums.add(byte_offset, data):
            self._write(self._files[path].checksums[i], path, checksums.known[i] or 0)

    def _write(self, checksum: StoredChecksum, path: str, crc: int) -> None:
        for place in checksum.places:
            self._staging.write(path, place, memoryview(crc.to_bytes(4, "little")))

    def _of(self, path: str) -> FileChecksums:
        """The checksums of a file, begun with the bytes that the plan knows."""
        with self._lock:
            if path in self._open:
                return self._open[path]
            self._open[path] = checksums = FileChecksums(self._files[path].checksums)
            known = [i for constant in self._constants.get(path, ()) for part in _parts(constant) for i in checksums.add(*part)]
        for i in known:
            self._write(self._files[path].checksums[i], path, checksums.known[i] or 0)
        return checksums

    def complete(self, workers: int, *, trusts: bool) -> None:
        """Compute the checksums that are missing from the staged bytes. trusts: take those that other processes have stored."""

        def make_worker() -> Callable[[tuple[str, int]], None]:
            files, buffer = self._staging.files(), memoryview(bytearray(_STEP))

            def perform(job: tuple[str, int]) -> None:
                (path, i), checksum, crc = job, self._files[job[0]].checksums[job[1]], 0
                stored = {int.from_bytes(read_range(files, path, place, 4), "little") for place in checksum.places}
                if trusts and len(stored) == 1 and 0 not in stored:
                    (crc,) = stored
                else:
                    for start in range(checksum.start, checksum.stop, _STEP):
                        part = buffer[: min(_STEP, checksum.stop - start)]
                        files.read_into(path, start, part)
                        crc = crc32(part, crc)
                self._open[path].known[i] = crc
                if stored != {crc}:  # what is committed already cannot be written
                    self._write(checksum, path, crc)

            return perform

        missing = ((path, i) for path in self._files for i, crc in enumerate(self._of(path).known) if crc is None)
        for _ in run_jobs(missing, make_worker, workers):
            pass

    def sealed(self) -> Iterator[TargetFile]:
        """The files of the plan with their checksums, as far as they are known."""
        return (file.sealed(self._of(file.path).known) if file.checksums else file for file in self._plan.layout.files)


def _parts(constant: Constant) -> Iterator[tuple[int, bytes]]:
    """The bytes of a constant in parts of about 1 MiB, as (byte offset, bytes)."""
    repeated = constant.expected * max(1, _STEP // len(constant.expected))
    for start in range(0, constant.nbytes, len(repeated)):
        yield constant.byte_offset + start, repeated[: constant.nbytes - start]
