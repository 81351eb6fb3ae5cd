"""FileFronts: files of a store that are written at any offset, and uploaded from front to back.

    written at any offset -> waits until everything before it has come -> appended to the upload of its file

Blocks come almost in the order of the files, so that little waits. The bytes that the plan knows (headers, padding) come on their own, with
the checksums of what came before them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from reshard.geometry.value import value
from reshard.storage.checksums import FileChecksums, StoredChecksum
from reshard.storage.stores.store import CheckedUpload, Entry, Store

SMALLEST_PART = 8 << 20
# S3 allows 10,000 parts; a few are left for sizes that are not multiples.
_MOST_PARTS = 9_500
_MIB = 1 << 20


def part_bytes(nbytes: int) -> int:
    """The bytes of each part of an upload of that length: 8 MiB, or more where an object would have too many parts."""
    needed = -(-nbytes // _MOST_PARTS)
    return max(SMALLEST_PART, -(-needed // _MIB) * _MIB)


@value
class FrontFile:
    """A file to be written."""

    path: str
    """Its path in the store."""
    nbytes: int
    """Its length."""
    fixed: Callable[[], Iterator[tuple[int, bytes]]]
    """The bytes that nobody writes because they are known: (byte offset, bytes), in order."""
    checksums: Sequence[StoredChecksum] = ()
    """The checksums that are filled in among them."""


class FileFronts:
    """The files of one target. `write` and `write_runs` may be called by several threads; each byte is written once.

    Files that are not in `files` are complete already: what is written to them is dropped. at_once: the most parts of one file under way.
    """

    def __init__(self, store: Store, files: Mapping[str, FrontFile], *, at_once: int) -> None:
        self._fronts = {path: _Front(store, file, at_once, self._account) for path, file in files.items()}
        self._waiting = 0
        self._lock = threading.Lock()

    @property
    def waiting_bytes(self) -> int:
        """The bytes that wait because bytes before them have not come."""
        return self._waiting

    def write(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Write bytes into a file. Raises SystemRefusal if the store refuses them."""
        if front := self._fronts.get(path):
            front.write(byte_offset, buffer)

    def write_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        """Write runs of equal length, which follow each other in the buffer, at these byte offsets of a file. Raises as `write` does."""
        length = len(buffer) // len(byte_offsets)
        for i, byte_offset in enumerate(byte_offsets):
            self.write(path, byte_offset, buffer[i * length : (i + 1) * length])

    def complete(self, path: str) -> tuple[Entry, Sequence[int | None]]:
        """Complete a file of which every byte has been written. Returns also the values of its checksums.

        Raises: SystemRefusal if the store does not have it in full.
        """
        entry = self._fronts[path].complete()
        return entry, self._fronts.pop(path).checksums.known

    def abort(self) -> None:
        """Give up all files that are not complete. Nothing of them is left in the store."""
        for front in self._fronts.values():
            front.abort()

    def _account(self, nbytes: int) -> None:
        with self._lock:
            self._waiting += nbytes


class _Front:
    """One file that is being uploaded."""

    def __init__(self, store: Store, file: FrontFile, at_once: int, account: Callable[[int], None]) -> None:
        self._store, self._file, self._at_once, self._account = store, file, at_once, account
        self.checksums = FileChecksums(file.checksums)
        self._upload: CheckedUpload | None = None
        self._at = 0
        self._waiting: dict[int, bytes] = {}
        self._fixed = file.fixed()
        self._next_fixed = next(self._fixed, None)
        self._lock = threading.Lock()

    def write(self, byte_offset: int, buffer: memoryview) -> None:
        if not buffer:
            return
        with self._lock:
            self._append_fixed()
            # A copy, because the caller uses its buffer again, and the store may send the bytes later.
            data = bytes(buffer)
            if byte_offset != self._at:
                assert byte_offset > self._at, f"{self._file.path}: byte {byte_offset} was written twice"
                self._waiting[byte_offset] = data
                self._account(len(data))
                return
            self._append(data)
            self._append_fixed()
            while (waiting := self._waiting.pop(self._at, None)) is not None:
                self._account(-len(waiting))
                self._append(waiting)
                self._append_fixed()

    def complete(self) -> Entry:
        with self._lock:
            self._append_fixed()
            assert not self._waiting and self._at == self._file.nbytes, f"{self._file.path}: {self._at} of {self._file.nbytes} bytes came"
            return self._begun().close()

    def abort(self) -> None:
        with self._lock:
            if self._upload is not None:
                self._upload.abort()

    def _append_fixed(self) -> None:
        while self._next_fixed is not None and self._next_fixed[0] == self._at:
            self._append(self._next_fixed[1])
            self._next_fixed = next(self._fixed, None)

    def _append(self, data: bytes) -> None:
        self.checksums.add(self._at, data)
        self._begun().write(self.checksums.filled_in(self._at, data))
        self._at += len(data)

    def _begun(self) -> CheckedUpload:
        if self._upload is None:
            part = part_bytes(self._file.nbytes)
            self._upload = self._store.upload(self._file.path, self._file.nbytes, part=part, at_once=self._at_once)
        return self._upload
