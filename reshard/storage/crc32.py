"""CRC-32 of a whole from the CRC-32 of its pieces, in whatever order and by however many threads they are read or written.

The CRC-32 of zip files (IEEE 802.3, zlib) of A followed by B is crc(A) * x^(8 * len(B)) + crc(B), in polynomials over GF(2) modulo P.
Bit 31 of a number is the coefficient of x^0, bit 0 that of x^31, so 0x80000000 is 1 and 0x40000000 is x. Addition is XOR.

An example: x * x^31 = x^32 = P without its x^32 = 0xEDB88320, since bit 0 (x^31) is shifted out. And of crc(b"a") = 0xE8B7BE43 and
crc(b"b") = 0x71BEEFF9, the shift x^8 = 0x00800000 makes 0xE8B7BE43 * x^8 = 0xEF3DA794, and 0xEF3DA794 ^ 0x71BEEFF9 = 0x9E83486D =
crc(b"ab").

Source: zlib 1.3 crc32.c, `multmodp`, `x2nmodp`, `crc32_combine64`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from functools import cache, lru_cache

try:  # where there is a wheel: 10 GB/s of a processor where zlib 1.2.13 does 2.5 to 4
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

_POLYNOMIAL, _ONE = 0xEDB88320, 0x80000000


def combine(crc_a: int, crc_b: int, nbytes_b: int) -> int:
    """The CRC-32 of A followed by B, where B has `nbytes_b` bytes."""
    return _product(_shift(nbytes_b), crc_a) ^ crc_b


def _product(a: int, b: int) -> int:
    """a * b modulo P."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@cache
def _square(i: int) -> int:
    """x^(8 * 2^i): the shift by 2^i bytes."""
    return 0x00800000 if i == 0 else _product(_square(i - 1), _square(i - 1))


@lru_cache(maxsize=1024)
def _shift(nbytes: int) -> int:
    """x^(8 * nbytes). Most pieces of a file have one of few lengths, so that few are computed."""
    shift = _ONE
    for i in range(nbytes.bit_length()):
        if nbytes >> i & 1:
            shift = _product(_square(i), shift)
    return shift


class PiecesCrc32:
    """The CRC-32 of the bytes [0, nbytes) from those of its pieces [start, stop). Pieces come in any order, from several threads.

    Neighbours are joined at once: memory is that of the gaps between pieces.
    """

    __slots__ = ("_crcs", "_lock", "_starts", "_stops", "nbytes", "seen")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.seen = 0
        """The bytes of all pieces."""
        self._lock = threading.Lock()
        # Disjoint runs in ascending order, no two of them adjacent.
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._crcs: list[int] = []

    def lacks(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that no piece covers yet."""
        with self._lock:
            gaps = []
            for i in range(bisect_right(self._stops, start), bisect_left(self._starts, stop)):
                if start < self._starts[i]:
                    gaps.append((start, self._starts[i]))
                start = self._stops[i]
            return [*gaps, (start, stop)] if start < stop else gaps

    def add(self, start: int, stop: int, crc: int) -> None:
        """Add the CRC-32 of a piece. A piece that overlaps earlier ones is ignored: `lacks` tells what can be added."""
        with self._lock:
            i = bisect_left(self._starts, start)
            if start >= stop or (i and self._stops[i - 1] > start) or (i < len(self._starts) and self._starts[i] < stop):
                return
            self.seen += stop - start
            first, last = i, i
            if i < len(self._starts) and self._starts[i] == stop:
                stop, crc, last = self._stops[i], combine(crc, self._crcs[i], self._stops[i] - stop), i + 1
            if i and self._stops[i - 1] == start:
                start, crc, first = self._starts[i - 1], combine(self._crcs[i - 1], crc, stop - start), i - 1
            self._starts[first:last], self._stops[first:last], self._crcs[first:last] = [start], [stop], [crc]

    @property
    def runs(self) -> int:
        """The number of runs of neighbouring pieces."""
        return len(self._starts)

    @property
    def crc(self) -> int | None:
        """The CRC-32 of all bytes; None while pieces are missing."""
        with self._lock:
            if not self.nbytes:
                return 0
            return self._crcs[0] if self._starts[:1] == [0] and self._stops[0] == self.nbytes else None
