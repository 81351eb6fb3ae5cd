"""Reading: one walk through sources that takes longer than a moment. It sees the bytes that are read, and asks two questions about them:
does each storage that was read whole have the CRC-32 that its file tells, and was a file written meanwhile?

    pieces of a storage, in any order, from several threads -> PiecesCrc32 -> whole: compared at once, and forgotten

Bytes that are read twice count once. Transposed tensors are read in many short runs: their CRC-32 would take longer than their bytes. So
runs are only counted, and when there are as many bytes as the storage has, it is read once more from front to back. Where almost
all of a storage was read, the rest, such as the padding of a vocabulary or of a flat buffer, is read at the end.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from reshard.containers.zip_directory import Range, member_name, wrong_crc32
from reshard.errors import CheckpointError, some
from reshard.index.index import Index, Tensor
from reshard.plans.plan import Plan
from reshard.storage.claims import Claim, Claims, SourceChecks
from reshard.storage.crc32 import PiecesCrc32, crc32
from reshard.storage.files import Files
from reshard.storage.trees import JoinedFiles

# Gaps of a storage, or runs of one call, beyond which pieces are only counted.
_MOST_PIECES = 64
# What is lacking of a storage is read at the end if it is at most this part of the storage, or a page, which the system reads anyway.
_LACKING, _PAGE = 1 / 8, 4096
_STEP = 1 << 20


class Reading:
    """What a verb or a process reads. checks: compare storages with their CRC-32."""

    def __init__(self, *, checks: bool = True) -> None:
        self._is_checking = checks
        self._seen: dict[int, _SeenFiles] = {}

    def of(self, files: Files, tensors: Callable[[], Iterable[Tensor]]) -> Files:
        """The files, seen by this reading: reading them raises WrongChecksum. tensors: those that are read, for messages."""
        return self._seen.setdefault(id(files), _SeenFiles(files, tensors)) if self._is_checking else files

    def of_plan(self, plan: Plan) -> Files:
        """The source of a plan, seen by this reading."""
        return self.of(plan.source_files, lambda: (route.source for route in plan.routes))

    @property
    def checks(self) -> SourceChecks:
        """What was checked so far."""
        files = [file for seen in self._seen.values() for file in seen.by_path.values()]
        without = sum(file.without if file.claims else 1 for file in files)
        return SourceChecks(sum(file.checked for file in files), sum(len(file.open) for file in files), without)

    def complete(self) -> None:
        """Read what is lacking of storages that were read except for a small part. Raises WrongChecksum."""
        for seen in self._seen.values():
            for path, file in list(seen.by_path.items()):
                for storage in list(file.open.values()):
                    if storage.lacking <= max(_PAGE, _LACKING * storage.pieces.nbytes):
                        seen.fill(file, path, storage)

    def see_again(self, plan: Plan, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Read what an earlier run has copied: of each storage of which it copied a part, the ranges (path, start, stop) of that part.
        The rest of the storage will be copied now, and then it is whole. Raises WrongChecksum."""
        files, parts = self.of_plan(plan), dict[tuple[str, Claim], list[tuple[int, int]]]()
        for path, start, stop in ranges if self._is_checking else ():
            for claim in files.claims(path).meeting(start, stop):
                parts.setdefault((path, claim), []).append((max(start, claim.start), min(stop, claim.stop)))
        for (path, claim), of_storage in parts.items():
            if sum(last - first for first, last in of_storage) < claim.stop - claim.start:
                for first, last in of_storage:
                    for at, buffer in _buffers(first, last):
                        files.read_into(path, at, buffer)

    @staticmethod
    def check_unchanged(files: Files, index: Index, is_same: Callable[[], bool] = lambda: True, *, verb: str = "read") -> None:
        """Raises CheckpointError if a file was written after its metadata was read.

        is_same: reads again what a file holds that was replaced, renamed or linked, or whose mode changed: it may be the same.
        """
        changes = {files.changed(file.path): file.path for file in index.files}
        if "written" not in changes and "touched" in changes and not is_same():
            changes["written"] = changes["touched"]
        if "written" in changes:
            raise CheckpointError(
                f"the file was written while it was {verb}",
                where=changes["written"],
                why="A part of the result would be from before and a part from after, so nothing was kept",
                do="Wait until the checkpoint has been saved, then run the same command again",
            )


class _Storage:
    """A storage of which a part was read."""

    def __init__(self, claim: Claim) -> None:
        self.claim, self.pieces, self.counted, self.lock = claim, PiecesCrc32(claim.stop - claim.start), 0, threading.Lock()

    @property
    def lacking(self) -> int:
        """The bytes that were not read, or more: runs that were read twice count twice."""
        return self.pieces.nbytes - self.pieces.seen - self.counted


class _SeenFile:
    """What was read of a file."""

    def __init__(self, claims: Claims) -> None:
        self.claims, self.checked, self.without = claims, 0, 0
        self.lock = threading.Lock()
        self.open: dict[int, _Storage] = {}
        self._done = array("q")  # the starts of storages that need no more bytes, ascending

    def is_done(self, claim: Claim) -> bool:
        at = bisect_left(self._done, claim.start)
        return at < len(self._done) and self._done[at] == claim.start

    def end(self, claim: Claim, *, checked: bool) -> None:
        with self.lock:
            if not self.is_done(claim):
                self._done.insert(bisect_left(self._done, claim.start), claim.start)
                self.checked, self.without = self.checked + checked, self.without + (not checked)
                self.open.pop(claim.start, None)

    def storage(self, claim: Claim) -> _Storage | None:
        """The storage, if it has a CRC-32 and needs more bytes."""
        if not claim.crc32:
            self.end(claim, checked=False)
        with self.lock:
            return None if self.is_done(claim) else self.open.setdefault(claim.start, self.open.get(claim.start) or _Storage(claim))


class _SeenFiles(JoinedFiles):
    """`Files` whose bytes are compared with the checksums that their readers claim."""

    def __init__(self, files: Files, tensors: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__(files, ())
        # The files are kept, so that no others get their identity.
        self._unseen, self._tensors = files, tensors
        self.by_path: dict[str, _SeenFile] = {}
        """The files of which something was read."""

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        super().read_into(path, byte_offset, buffer)
        if file := self._claimed(path):
            self._see(file, path, byte_offset, buffer)

    def read_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        super().read_runs(path, byte_offsets, buffer)
        if not (file := self._claimed(path)):
            return
        length = len(buffer) // len(byte_offsets)
        claims = file.claims.meeting(min(byte_offsets), max(byte_offsets) + length) if len(byte_offsets) > _MOST_PIECES else []
        if len(claims) == 1:
            self._count(file, path, claims[0], len(buffer))
            return
        for i, byte_offset in enumerate(byte_offsets):
            self._see(file, path, byte_offset, buffer[i * length : (i + 1) * length])

    def _claimed(self, path: str) -> _SeenFile | None:
        """What was read of a file that tells checksums; None for another file."""
        file = self.by_path.get(path) or self.by_path.setdefault(path, _SeenFile(self.claims(path)))
        return file if file.claims else None

    def _see(self, file: _SeenFile, path: str, byte_offset: int, data: memoryview) -> None:
        """Take note of bytes that were read."""
        for claim in file.claims.meeting(byte_offset, byte_offset + len(data)):
            start, stop = max(claim.start, byte_offset), min(claim.stop, byte_offset + len(data))
            if not (storage := file.storage(claim)):
                continue
            if storage.pieces.runs > _MOST_PIECES:
                self._count(file, path, claim, stop - start)
                continue
            # Another thread may add bytes meanwhile.
            while gaps := storage.pieces.lacks(start - claim.start, stop - claim.start):
                for first, last in gaps:
                    shift = claim.start - byte_offset
                    storage.pieces.add(first, last, crc32(data[first + shift : last + shift]))
            if storage.lacking <= 0:
                self.fill(file, path, storage)

    def _count(self, file: _SeenFile, path: str, claim: Claim, nbytes: int) -> None:
        """Take note that so many bytes of a storage were read, in runs."""
        if storage := file.storage(claim):
            with storage.lock:
                storage.counted += nbytes
            if storage.lacking <= 0:
                self.fill(file, path, storage)

    def fill(self, file: _SeenFile, path: str, storage: _Storage) -> None:
        """Read what is lacking of a storage, and compare it."""
        with storage.lock:
            if file.is_done(storage.claim):
                return
            for start, stop in storage.pieces.lacks(0, storage.pieces.nbytes):
                for at, buffer in _buffers(start, stop):
                    super().read_into(path, storage.claim.start + at, buffer)
                    storage.pieces.add(at, at + len(buffer), crc32(buffer))
            claim, crc = storage.claim, storage.pieces.crc
            assert crc is not None
            if crc != claim.crc32:
                member = member_name(Range(self._unseen, path, claim.header))
                users = sorted({*self._users(path, claim, file.claims)})
                have = "has its" if len(users) == 1 else "have their"
                why = f"{some(users)} {have} values there, so they would be wrong" if users else None
                raise wrong_crc32(path.replace("\0", " bytes "), member, crc, claim.crc32, why)
            file.end(claim, checked=True)

    def _users(self, path: str, claim: Claim, claims: Claims) -> Iterator[str]:
        """The tensors of which an element lies in a storage."""
        first = claims.stop_before(claim.start)
        for tensor in self._tensors():
            for stored in tensor.leaves:
                shards = stored.shards
                numbers = [number for number, name in enumerate(shards.paths) if path == name or path.startswith(f"{name}\0")]
                for row in range(len(shards)):
                    is_near = shards.files[row] in numbers and ("\0" in path or first <= shards.positions[row] < claim.stop)
                    if is_near and (extent := shards.piece(row).extent).path == path and claim.start <= extent.byte_offset < claim.stop:
                        yield tensor.name
                        break


def _buffers(start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
    """Buffers for the bytes [start, stop), each with where it begins."""
    for at in range(start, stop, _STEP):
        yield at, memoryview(bytearray(min(_STEP, stop - at)))
