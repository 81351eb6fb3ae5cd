"""The fixed bytes of a target file: those that the plan knows and no source tensor fills, namely framing, padding and constants.

    file  =  fixed bytes (header) + bytes of tensors + fixed bytes (padding) + bytes of tensors + ...

A digest of the fixed bytes and the digests of the tensors together cover every byte of the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.index.index import Constant
    from reshard.plans.layout import TargetFile

Ranges = tuple[tuple[int, int], ...]
"""Byte ranges [start, stop) of a file, in order and disjoint."""
# Bytes are made, read and hashed in parts of at most this length.
_PART = 1 << 20


def fixed_ranges(file: TargetFile, constants: Sequence[Constant]) -> Ranges:
    """The ranges of the fixed bytes of a file. constants: those of this file."""
    ranges, end = [(constant.byte_offset, constant.byte_offset + constant.nbytes) for constant in constants], 0
    for start, stop in [*sorted((item.byte_offset, item.byte_offset + item.tensor.nbytes) for item in file.tensors), (file.nbytes,) * 2]:
        if start > end:
            ranges.append((end, start))
        end = max(end, stop)
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def parts(ranges: Ranges) -> Iterator[tuple[int, int]]:
    """The ranges in order, cut into parts of at most 1 MiB."""
    for start, stop in ranges:
        yield from ((at, min(at + _PART, stop)) for at in range(start, stop, _PART))


def planned_bytes(file: TargetFile, constants: Sequence[Constant], ranges: Ranges) -> Iterator[bytes]:
    """The fixed bytes of a file as they will be written, in parts: the literals, the constants, and zeros elsewhere."""
    known = [(offset, len(data), data) for offset, data in file.literals if data]
    known += [(constant.byte_offset, constant.nbytes, constant.expected) for constant in constants if constant.expected.strip(b"\0")]
    known.sort(key=lambda each: each[0])
    starts = [start for start, _, _ in known]
    for start, stop in parts(ranges):
        content = bytearray(stop - start)
        for at, nbytes, repeated in known[max(0, bisect_right(starts, start) - 1) :]:
            if at >= stop:
                break
            first, last = max(at, start), min(at + nbytes, stop)
            if first < last:
                phase = (first - at) % len(repeated)
                content[first - start : last - start] = (repeated * ((last - first + phase) // len(repeated) + 1))[phase:][: last - first]
        yield bytes(content)
