"""Sealing: the checksums in the framing of staged files, such as the CRC-32 of each storage in a zip of torch.save.

    strips of blocks -> Sealing -> staged files, at any offset
                           └> CRC-32 of the strip -> of the storage, once all its strips have come -> the places where it is stored

The checksum of a storage is written before its last block is noted in the journal. So a storage whose blocks are all in the journal of one
process has its checksum. The process that completes the target computes what is missing from the staged bytes: of storages that several
processes have written, that an interrupted run has begun, that were written in short runs, or that hold fill, which the plan knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from reshard.engine.pool import run_jobs
from reshard.plans.layout import TargetFile
from reshard.plans.plan import Plan
from reshard.storage.checksums import FileChecksums
from reshard.storage.crc32 import crc32
from reshard.storage.files import read_range
from reshard.storage.staging import Staging

# To take the checksum of a shorter run and to join it with its neighbours costs more than to read its bytes once more at the end.
_SHORTEST_RUN = 1 << 12
_STEP = 1 << 20


class Sealing:
    """The staged files of a plan as a sink, which keeps account of their checksums."""

    def __init__(self, plan: Plan, staging: Staging) -> None:
        self._plan, self._staging = plan, staging
        self._files = {file.path: file for file in plan.layout.files if file.checksums}
        self._open: dict[str, FileChecksums] = {}

    def write(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Write bytes into a staged file, and checksums that are known with them. Raises SystemRefusal as `Staging.write` does."""
        self.write_runs(path, (byte_offset,), buffer)

    def write_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        """Write runs of equal length, which follow each other in the buffer, at these byte offsets of a file. Raises as `write` does."""
        self._staging.write_runs(path, byte_offsets, buffer)
        length = len(buffer) // len(byte_offsets)
        if path in self._files and (length >= _SHORTEST_RUN or len(byte_offsets) == 1):
            for i, byte_offset in enumerate(byte_offsets):
                for number in self._of(path).add(byte_offset, buffer[i * length : (i + 1) * length]):
                    self._store(path, number)

    def _of(self, path: str) -> FileChecksums:
        """The checksums of a file."""
        if path not in self._open:
            self._open.setdefault(path, FileChecksums(self._files[path].checksums))
        return self._open[path]

    def _store(self, path: str, number: int) -> None:
        """Write a checksum that is known."""
        for place in self._files[path].checksums[number].places:
            self._staging.write(path, place, memoryview((self._open[path].known[number] or 0).to_bytes(4, "little")))

    def complete(self, workers: int, *, trusts: bool) -> None:
        """Compute the checksums that are missing from the staged bytes. trusts: take those that other processes have stored."""

        def make_worker() -> Callable[[tuple[str, int]], None]:
            files, buffer = self._staging.files(), memoryview(bytearray(_STEP))

            def perform(job: tuple[str, int]) -> None:
                path, number = job
                checksum, crc = self._files[path].checksums[number], 0
                stored = {int.from_bytes(read_range(files, path, place, 4), "little") for place in checksum.places}
                if trusts and len(stored) == 1 and 0 not in stored:
                    (crc,) = stored
                else:
                    for start in range(checksum.start, checksum.stop, _STEP):
                        part = buffer[: min(_STEP, checksum.stop - start)]
                        files.read_into(path, start, part)
                        crc = crc32(part, crc)
                self._open[path].known[number] = crc
                if stored != {crc}:  # what is committed already cannot be written
                    self._store(path, number)

            return perform

        missing = ((path, number) for path in self._files for number, crc in enumerate(self._of(path).known) if crc is None)
        for _ in run_jobs(missing, make_worker, workers if self._files else 0):
            pass

    def sealed(self) -> Iterator[TargetFile]:
        """The files of the plan with their checksums, as far as they are known."""
        return (file.sealed(self._of(file.path).known) if file.checksums else file for file in self._plan.layout.files)
