"""Claims: the checksums that a file tells of ranges of its own bytes, as a zip does of its members. A reader of the container adds them,
and who reads the bytes compares (engine/checks/reading.py)."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import NamedTuple

from reshard.geometry.quantities import plural
from reshard.geometry.value import value

Listing = tuple["array[int]", "array[int]", "array[int]"]
"""[n] each: the byte offset of a storage's header in the file, ascending; the length of the storage in bytes; its CRC-32."""


@value
class SourceChecks:
    """How many storages of a source were compared with their CRC-32. A storage is the memory of one or more tensors in a file."""

    JSON = "checked partial none"

    checked: int = 0
    """Storages that were read whole and have their CRC-32."""
    partial: int = 0
    """Storages with a CRC-32 of which only a part was read."""
    none: int = 0
    """Storages without a CRC-32. A file that has no CRC-32 at all counts once."""

    def __add__(self, other: SourceChecks) -> SourceChecks:
        return SourceChecks(self.checked + other.checked, self.partial + other.partial, self.none + other.none)

    def notes(self) -> tuple[str, ...]:
        """A sentence for the user, if a storage with a CRC-32 was not compared with it."""
        if not self.partial:
            return ()
        known = self.checked + self.partial
        return (f"{self.checked:,} of {known:,} storages checked: {self.partial:,} were read in part, and a CRC-32 tells of whole ones",)


@value
class FileDigests:
    """How many files of a source were read whole and compared with their recorded digests."""

    verified: int = 0
    """Files that have their digest."""
    without_digest: int = 0
    """Files with tensors of which no digest is recorded."""

    def notes(self) -> tuple[str, ...]:
        """A sentence, if any file was looked at."""
        if not self.verified and not self.without_digest:
            return ()
        verb = "has the digest that was" if self.verified == 1 else "have the digests that were"
        return (f"{plural(self.verified, 'file')} of the source {verb} recorded; of {self.without_digest} with tensors none is recorded",)


class Claim(NamedTuple):
    """Bytes [start, stop) of a file, and their CRC-32; 0 if the file tells none. header: where the local header before them starts."""

    start: int
    stop: int
    crc32: int
    header: int


class Claims:
    """The storages of one file, as columns in ascending order. Threads may share it."""

    __slots__ = ("_crcs", "_headers", "_listing", "_lock", "_starts", "_stops")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A stop of -1: the listing of the container tells it.
        self._starts, self._stops, self._crcs, self._headers = array("q"), array("q"), array("I"), array("q")
        self._listing: Callable[[], Listing] | Listing | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, header: int, known: tuple[int, int] | Callable[[], Listing]) -> None:
        """Add the storage whose bytes begin at `start`. known: its length and CRC-32, or what lists them when they are asked for."""
        with self._lock:
            i = bisect_left(self._starts, start)
            if i < len(self._starts) and self._starts[i] == start:
                return
            if callable(known):
                self._listing = self._listing or known
            stop, crc = (-1, 0) if callable(known) else (start + known[0], known[1])
            for column, number in ((self._starts, start), (self._stops, stop), (self._crcs, crc), (self._headers, header)):
                column.insert(i, number)

    def meeting(self, start: int, stop: int) -> list[Claim]:
        """The storages that share bytes with [start, stop)."""
        with self._lock:
            claims = []
            for i in range(max(0, bisect_right(self._starts, start) - 1), bisect_left(self._starts, stop)):
                if self._stops[i] < 0:
                    self._look_up(i)
                if self._stops[i] > start:
                    claims.append(Claim(self._starts[i], self._stops[i], self._crcs[i], self._headers[i]))
            return claims

    def stop_before(self, start: int) -> int:
        """Where the storage before the one that begins at `start` ends; 0 if there is none."""
        with self._lock:
            i = bisect_left(self._starts, start)
            return max(0, self._stops[i - 1]) if i else 0

    def _look_up(self, i: int) -> None:
        if callable(self._listing):
            self._listing = self._listing()
        assert self._listing is not None
        headers, lengths, crcs = self._listing
        row = bisect_left(headers, self._headers[i])
        if row < len(headers) and headers[row] == self._headers[i]:
            self._stops[i], self._crcs[i] = self._starts[i] + lengths[row], crcs[row]
        else:
            self._stops[i] = self._starts[i]  # it is not listed, and nothing is claimed


class HasClaims:
    """Files that keep what their readers claim."""

    def claims(self, path: str) -> Claims:
        """What was claimed of a file so far. Readers add to it."""
        known: dict[str, Claims] = self.__dict__.setdefault("_claims", {})
        return known[path] if path in known else known.setdefault(path, Claims())
