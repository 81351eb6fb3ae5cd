"""Checksums of a file that is being written: CRC-32s in its framing of bytes that come later, in pieces and in any order.

header | bytes that a CRC-32 covers | descriptor | header | ... | directory
                                      ^ first place               ^ second place
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property

from reshard.geometry.value import value
from reshard.storage.crc32 import PiecesCrc32, crc32


@value
class StoredChecksum:
    """The CRC-32 of the bytes [start, stop) of a file, which is stored in the file. Until it is known, zeros lie there."""

    start: int
    """The first byte that it covers."""
    stop: int
    """The byte after the last."""
    places: tuple[int, ...]
    """Where it is stored: the byte offsets of four little-endian bytes. All lie behind the bytes that it covers."""


class FileChecksums:
    """The checksums of one file while its bytes come. `add` may be called by several threads.

    checksums: in ascending order. known: their values, as far as they are known.
    """

    def __init__(self, checksums: Sequence[StoredChecksum], known: Iterable[int | None] = ()) -> None:
        self._checksums = checksums
        self._starts = array("q", [checksum.start for checksum in checksums])
        self._pieces: dict[int, PiecesCrc32] = {}
        self.known: list[int | None] = [*known] or [None] * len(checksums)
        """The value of each checksum; None if bytes that it covers have not come."""

    def add(self, byte_offset: int, data: bytes | memoryview) -> list[int]:
        """Add bytes of the file. Returns the numbers of the checksums that are known with them. Bytes may come twice."""
        view, stop, complete = memoryview(data), byte_offset + len(data), []
        for i in range(max(0, bisect_right(self._starts, byte_offset) - 1), bisect_left(self._starts, stop)):
            checksum = self._checksums[i]
            first, last = max(checksum.start, byte_offset), min(checksum.stop, stop)
            if first < last and self.known[i] is None:
                pieces = self._pieces.setdefault(i, PiecesCrc32(checksum.stop - checksum.start))
                pieces.add(first - checksum.start, last - checksum.start, crc32(view[first - byte_offset : last - byte_offset]))
                if (crc := pieces.crc) is not None:
                    self.known[i] = crc
                    self._pieces.pop(i, None)
                    complete.append(i)
        return complete

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """Where a checksum is stored, and its number."""
        return sorted((place, i) for i, checksum in enumerate(self._checksums) for place in checksum.places)

    def stored_in(self, start: int, stop: int) -> list[int]:
        """The numbers of the checksums of which a byte is stored in bytes [start, stop) of the file."""
        places = self._places
        return sorted({i for _, i in places[bisect_left(places, (start - 3, 0)) : bisect_left(places, (stop, 0))]})

    def filled_in(self, byte_offset: int, data: bytes) -> bytes:
        """Bytes of the framing, with the checksums that are stored there, as far as they are known."""
        places, stop, content = self._places, byte_offset + len(data), None
        for j in range(bisect_left(places, (byte_offset - 3, 0)), bisect_left(places, (stop, 0))):
            place, i = places[j]
            if (crc := self.known[i]) is not None:
                content = content or bytearray(data)
                first, last = max(place, byte_offset), min(place + 4, stop)
                content[first - byte_offset : last - byte_offset] = crc.to_bytes(4, "little")[first - place : last - place]
        return data if content is None else bytes(content)
