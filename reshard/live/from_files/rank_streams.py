"""RankStreams: a Sink whose files are the staging of the ranks of running engines. Bytes are gathered into messages (stream.py).

    strip of 1 MiB -> pieces of each rank's file -> the rank's line: buffer of 8 MiB, full -> message -> the staging of every replica

Threads write at the same time. Each line has two buffers: while one is sent, the other one is filled. All buffers together take at most
MEMORY bytes, however many ranks there are.

Where ranks get only what changes, the bytes that they hold are written first, into `held`, with the same calls. They lie beside the new
ones in the buffers, and a message has the positions and values of what differs (stream.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from reshard.live.from_files.staged_rank import FilePlaces, StagedRank
from reshard.live.wire.stream import MOST_BYTES, MOST_RUNS, StreamWriter

MEMORY = 128 << 20
"""Bytes of all buffers."""
_BUFFER = 8 << 20
_BUFFERS = 2
_Row = tuple[int, int, int, int]
"""Runs as in a message: offset, length, count, stride."""


class RankStreams:
    """The streams to all ranks of an update. Call `end` when everything was written, or `give_up`."""

    def __init__(self, ranks: Iterable[tuple[StagedRank, Sequence[StreamWriter]]], *, has_held: bool = False) -> None:
        """ranks: each with the streams to all engine ranks that hold the same. has_held: whether what they hold is written, too."""
        streamed, rows = tuple(ranks), 2 if has_held else 1
        capacity = min(_BUFFER, MOST_BYTES, MEMORY // max(1, len(streamed) * _BUFFERS * rows))
        self.held = _Held() if has_held else None
        """Gets what the ranks hold, where the next bytes go."""
        self._lines = [(staged, _Line(writers, capacity, rows)) for staged, writers in streamed]
        self._files = {path: (places, line) for staged, line in self._lines for path, places in staged.files.items()}
        self._is_over = False

    @property
    def nbytes(self) -> int:
        """The bytes that were sent."""
        return sum(writer.nbytes for _, line in self._lines for writer in line.writers)

    def write(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Write bytes into a file."""
        self.write_runs(path, [byte_offset], buffer)

    def write_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        """Write runs of equal length, which follow each other in the buffer, at these byte offsets of a file."""
        if not len(buffer):
            return
        places, line = self._files[path]
        data = np.frombuffer(buffer, np.uint8).reshape(1, -1)
        if self.held is not None:
            data = np.stack([data[0], self.held.taken(path, byte_offsets[0])])
        if (offsets := _in_staging(places, byte_offsets)) is not None:
            line.add(rows_of(offsets, len(buffer) // len(byte_offsets)), data)

    def write_constants(self) -> None:
        """Write the bytes that the format prescribes."""
        for staged, _ in self._lines:
            for constant in staged.constants:
                content = memoryview(constant.expected * (constant.nbytes // len(constant.expected)))
                if self.held is not None:
                    self.held.write(constant.path, constant.byte_offset, content)
                self.write(constant.path, constant.byte_offset, content)

    def end(self) -> None:
        """Send what is left, and end the streams."""
        self._is_over = True
        for _, line in self._lines:
            line.flush()
            for writer in line.writers:
                writer.end()

    def give_up(self) -> None:
        """End the streams of an update that fails. A second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        for _, line in self._lines:
            for writer in line.writers:
                with suppress(Exception):  # the connection may be what has failed
                    writer.give_up()


class _Held:
    """A Sink: what the ranks hold in the places that a thread writes next."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}

    def write(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        self.write_runs(path, [byte_offset], buffer)

    def write_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        if len(buffer):
            self._kept[path, byte_offsets[0]] = np.frombuffer(buffer, np.uint8).copy()

    def taken(self, path: str, byte_offset: int) -> npt.NDArray[np.uint8]:
        """The bytes of the runs that begin there, which are forgotten."""
        return self._kept.pop((path, byte_offset))


class _Line:
    """What goes to one rank and its replicas. Data are arrays [1, n]: new bytes; or [2, n]: new bytes, and what the rank holds."""

    def __init__(self, writers: Sequence[StreamWriter], capacity: int, rows: int) -> None:
        self.writers = writers
        self._capacity = capacity
        self._filling, self._sending = threading.Lock(), threading.Lock()
        self._spare: SimpleQueue[npt.NDArray[np.uint8]] = SimpleQueue()
        for _ in range(_BUFFERS - 1):
            self._spare.put(np.empty((rows, capacity), np.uint8))
        self._buffer, self._used, self._rows = np.empty((rows, capacity), np.uint8), 0, list[_Row]()

    def add(self, rows: Iterable[_Row], data: npt.NDArray[np.uint8]) -> None:
        """Take bytes that go to these runs, one after the other."""
        done = 0
        for row in rows:
            for part in cut(row, self._capacity):
                nbytes = part[1] * part[2]
                self._add(part, data[:, done : done + nbytes])
                done += nbytes

    def _add(self, row: _Row, data: npt.NDArray[np.uint8]) -> None:
        with self._filling:
            nbytes = data.shape[1]
            full = self._taken() if self._used + nbytes > self._capacity or len(self._rows) == MOST_RUNS else None
            self._buffer[:, self._used : self._used + nbytes] = data
            self._used += nbytes
            self._rows.append(row)
        if full:
            self._send(*full)

    def flush(self) -> None:
        """Send what was taken."""
        with self._filling:
            full = self._taken()
        self._send(*full)

    def _taken(self) -> tuple[npt.NDArray[np.uint8], int, list[_Row]]:
        """What was filled; another buffer is filled from now on. Waits for one."""
        taken = self._buffer, self._used, self._rows
        self._buffer, self._used, self._rows = self._spare.get(), 0, []
        return taken

    def _send(self, buffer: npt.NDArray[np.uint8], used: int, rows: list[_Row]) -> None:
        try:
            with self._sending:
                for writer in self.writers:
                    writer.write(rows, *buffer[:, :used])
        finally:
            self._spare.put(buffer)


def _in_staging(places: FilePlaces, byte_offsets: Sequence[int]) -> npt.NDArray[np.int64] | None:
    """The bytes of the staging that runs of one tensor go to; None if the tensor has no place there."""
    first = places.at(byte_offsets[0])
    return None if first < 0 else np.asarray(byte_offsets, np.int64) + (first - byte_offsets[0])


def rows_of(offsets: npt.NDArray[np.int64], length: int) -> Iterator[_Row]:
    """Runs of equal length as rows: those that lie at equal distances, in ascending order and apart, share one."""
    start, count = 0, len(offsets)
    steps = np.diff(offsets)
    while start < count:
        stop = start + 1
        if stop < count and (stride := int(steps[start])) >= length:
            others = np.flatnonzero(steps[start:] != stride)
            stop = start + 1 + (int(others[0]) if len(others) else count - 1 - start)
        yield int(offsets[start]), length, stop - start, int(steps[start]) if stop - start > 1 else length
        start = stop


def cut(row: _Row, most: int) -> Iterator[_Row]:
    """A row as rows of at most `most` bytes each."""
    offset, length, count, stride = row
    if length > most:
        for start in range(offset, offset + count * stride, stride):
            yield from ((start + i, min(most, length - i), 1, length) for i in range(0, length, most))
        return
    step = max(1, most // length)
    yield from ((offset + i * stride, length, min(step, count - i), stride) for i in range(0, count, step))
