"""Applying patches: what deltas change is put on the elements of each strip that is read (index/deltas.py says what a frame holds).

A frame can only be decoded from its start. All workers of a run share one decoder of each frame: who needs bytes behind those that are
decoded goes on decoding, and keeps for the others what lies between, of as many blocks as there are workers. A worker that needs bytes
which are gone decodes the frame once more for itself. The differences of several xor deltas in a row are one difference. So memory is
constant, whatever the length of the chain, and workers do not wait until others are done.

An example: rows 2..3 of a tensor [4, 8] of bfloat16 are contiguous, bytes 32..63 of the tensor. The first 32 bytes of an xor frame are
decoded and kept, and the next 32 bytes are combined with those of the strip. Columns 0..3 of these rows are bytes 32..39 and 48..55:
the frame is decoded up to byte 55, and the changed bytes are put where their elements lie in the strip.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.boxes import BLOCK_ELEMENTS, Box
from reshard.geometry.value import value
from reshard.index.deltas import Patch
from reshard.index.origin import Patched, Tensor
from reshard.storage.files import Files

if TYPE_CHECKING:
    Bytes = npt.NDArray[np.uint8]

# The most bytes that are decoded at a time, and compressed bytes that are read at a time.
_PART, _READ = 1 << 20, 1 << 17
# Level 1 has windows of 512 KiB. A frame that needs more memory than this is refused.
_LARGEST_WINDOW = 1 << 23
# The tensors whose frames stay open, for each worker: codes and scales of a quantized tensor are read by turns.
_MOST_OPEN = 4
# The most decoded bytes of a tensor that are kept for other workers.
_MOST_KEPT = 1 << 26
_POSITION = np.dtype("<u4")


class Checksum(Protocol):
    """A running checksum."""

    def update(self, data: Any, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The checksum of all bytes so far, in hexadecimal digits."""


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any) -> None:
        import zlib

        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_checksum(algorithm: str) -> Checksum:
    """A checksum of that algorithm: blake3, xxh3-128 or adler32. Raises UnsupportedError if its package is not installed."""
    if algorithm == "adler32":
        return _Adler32()
    if algorithm == "blake3":
        from blake3 import blake3

        return blake3()
    try:
        import xxhash
    except ImportError:
        raise UnsupportedError(
            "the checksums of this delta are xxh3-128, and the package xxhash is not installed", do="pip install 'reshard[delta]'"
        ) from None
    checksum: Checksum = xxhash.xxh3_128()
    return checksum


class OpenPatches:
    """The frames of tensors, with their decoders. workers: how many share them; 1: what a worker has passed is not kept."""

    def __init__(self, files: Files, workers: int = 1) -> None:
        self._files, self._workers, self._lock = files, workers, threading.Lock()
        self._open: OrderedDict[int, tuple[Tensor, list[_Step]]] = OrderedDict()

    def steps(self, tensor: Tensor) -> list[_Step]:
        """What the deltas change in a tensor, the oldest first; xor deltas in a row are one step. Raises CheckpointError if a frame is
        damaged."""
        with self._lock:
            if id(tensor) not in self._open:
                frames = list(_frames_of(tensor, self._files))
                window = min(self._workers * BLOCK_ELEMENTS * tensor.dtype.itemsize, _MOST_KEPT // len(frames)) if self._workers > 1 else 0
                # The tensor is kept, so that no other one gets its identity.
                self._open[id(tensor)] = tensor, [_Step(frame, window) for frame in frames]
            self._open.move_to_end(id(tensor))
            _, steps = self._open[id(tensor)]
            if len(self._open) > _MOST_OPEN * self._workers:
                self._open.popitem(last=False)
            return steps

    def close(self, tensor: Tensor) -> None:
        """Forget the frames of a tensor: they are decoded from their starts again."""
        with self._lock:
            self._open.pop(id(tensor), None)


class PatchReaders:
    """Applies the patches of tensors for one worker. shared: the frames that it decodes together with others."""

    def __init__(self, files: Files, shared: OpenPatches | None) -> None:
        self._shared, self._own = shared, OpenPatches(files)

    def apply(self, tensor: Tensor, box: Box, block: npt.NDArray[Any]) -> None:
        """Change the elements of a box as the patches of its tensor say.

        block: the elements, as an array of the last axes of the box; the axes before them have one element.

        Raises: CheckpointError if a frame is damaged.
        """
        if not block.size:
            return
        itemsize, first, last = tensor.dtype.itemsize, *_span(box, tensor.shape)
        start, stop = first * itemsize, (last + 1) * itemsize
        flat = block.reshape(-1).view(np.uint8) if last - first + 1 == box.volume and block.flags.c_contiguous else None
        for number in range(len((self._shared or self._own).steps(tensor))):
            at = start
            while at < stop:
                part = self._part(tensor, number, at, stop)
                if flat is not None:
                    part.put(flat, start)
                else:
                    _scatter(*part.changes(), tensor, box, block, replaces=part.positions is not None)
                at = part.stop

    def _part(self, tensor: Tensor, number: int, start: int, stop: int) -> _Part:
        """What the step of that number changes from byte `start` of a tensor on, before byte `stop`."""
        part = self._shared.steps(tensor)[number].take(start, stop) if self._shared else None
        if part is None and (part := self._own.steps(tensor)[number].take(start, stop)) is None:
            self._own.close(tensor)
            part = self._own.steps(tensor)[number].take(start, stop)
            assert part is not None
        return part


def _span(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """The row-major numbers of the first and the last element of a box."""
    if not shape:
        return 0, 0
    first, last = (int(np.ravel_multi_index(at, shape)) for at in (box.offsets, [stop - 1 for stop in box.stops]))
    return first, last


def _scatter(positions: npt.NDArray[np.int64], values: Bytes, tensor: Tensor, box: Box, block: npt.NDArray[Any], *, replaces: bool) -> None:
    """Change those bytes of a tensor that lie in a box. positions: in the bytes of the whole tensor."""
    elements, in_element = np.divmod(positions, tensor.dtype.itemsize)
    at = [axis - start for axis, start in zip(np.unravel_index(elements, tensor.shape), box.offsets, strict=True)]
    inside = np.logical_and.reduce([(axis >= 0) & (axis < size) for axis, size in zip(at, box.sizes, strict=True)])
    by_byte = block[..., None].view(np.uint8)
    index = (*(axis[inside] for axis in at[len(at) - block.ndim :]), in_element[inside])
    by_byte[index] = values[inside] if replaces else by_byte[index] ^ values[inside]


@value(eq=False)
class _Part:
    """What a delta says of consecutive bytes of a tensor."""

    start: int
    """The first byte."""
    stop: int
    """The byte after the last."""
    values: Bytes
    """Without positions, the differences of all bytes; else the new bytes at these."""
    positions: npt.NDArray[np.int64] | None = None
    """The positions of changed bytes in the tensor, ascending."""

    def cut(self, at: int) -> tuple[_Part, _Part]:
        """The part before a byte that lies inside it, and the part from that byte on."""
        count = at - self.start if self.positions is None else int(np.searchsorted(self.positions, at))
        left, right = (None, None) if self.positions is None else (self.positions[:count], self.positions[count:])
        return _Part(self.start, at, self.values[:count], left), _Part(at, self.stop, self.values[count:], right)

    def put(self, flat: Bytes, start: int) -> None:
        """Change consecutive bytes of the tensor, of which the first is byte `start`."""
        if self.positions is None:
            flat[self.start - start : self.stop - start] ^= self.values
        else:
            flat[self.positions - start] = self.values

    def changes(self) -> tuple[npt.NDArray[np.int64], Bytes]:
        """The positions of changed bytes, and their differences or new values."""
        if self.positions is not None:
            return self.positions, self.values
        at = np.flatnonzero(self.values)
        return at + self.start, self.values[at]


class _Step:
    """What one delta, or xor deltas in a row, change in a tensor. Several workers may take parts. window: how many bytes behind the decoded
    ones are kept."""

    def __init__(self, frame: _Xor | _Overwrite, window: int) -> None:
        self._frame: _Xor | _Overwrite | None = frame
        self._window, self._lock = window, threading.Lock()
        self._decoded, self._kept = 0, list[_Part]()

    def take(self, start: int, stop: int) -> _Part | None:
        """What changes from byte `start` on, up to byte `stop` or a byte before it; None if that was passed. Each byte is taken once.

        Raises: CheckpointError if the frame is damaged.
        """
        with self._lock:
            part = next((part for part in self._kept if part.start <= start < part.stop), None)
            if part is not None:
                self._kept.remove(part)
            elif start < self._decoded:
                return None
            while part is None or part.stop <= start:
                assert self._frame
                part = self._frame.next(start if self._decoded < start else stop)
                self._decoded = part.stop
                if self._decoded == self._frame.nbytes:
                    self._frame = None  # each of its decoders has a megabyte
                if part.stop <= start:
                    self._keep(part)
            if part.start < start:
                before, part = part.cut(start)
                self._keep(before)
            if part.stop > stop:
                part, after = part.cut(stop)
                self._keep(after)
            return part

    def _keep(self, part: _Part) -> None:
        """Keep a part, and forget those that lie too far behind."""
        self._kept = [kept for kept in (*self._kept, part) if kept.stop > self._decoded - max(self._window, 1)]


def _frames_of(tensor: Tensor, files: Files) -> Iterator[_Xor | _Overwrite]:
    """The frames of the deltas that change a tensor, the oldest first."""
    assert isinstance(tensor.origin, Patched)
    nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    for encoding, patches in groupby(tensor.origin.steps, lambda patch: patch.encoding):
        if encoding == "xor":
            yield _Xor([_Frame(patch, tensor, files) for patch in patches], nbytes)
        else:
            yield from (_Overwrite(_Frame(patch, tensor, files), _Frame(patch, tensor, files), nbytes) for patch in patches)


class _Xor:
    """The xor frames of deltas in a row, each of as many bytes as the tensor has."""

    def __init__(self, frames: Sequence[_Frame], nbytes: int) -> None:
        self.nbytes, self._frames, self._at = nbytes, frames, 0
        for frame in frames:
            if frame.size != nbytes:
                raise frame.refusal(f"its frame holds {frame.size:,} bytes, the tensor has {nbytes:,}")

    def next(self, stop: int) -> _Part:
        """What the frames together say of the next bytes of the tensor, at most up to byte `stop`."""
        start, self._at = self._at, min(self._at + _PART, stop)
        first, *others = self._frames
        values = first.read(self._at - start)
        for frame in others:
            values ^= frame.read(self._at - start)
        return _Part(start, self._at, values)


class _Overwrite:
    """An overwrite frame: positions in ascending order, and the bytes at them. Each is read by a decoder of its own."""

    def __init__(self, positions: _Frame, values: _Frame, nbytes: int) -> None:
        self._positions, self._values = positions, values
        size = self._positions.size
        count = int(self._positions.read(4).view(_POSITION)[0]) if size >= 4 else -1
        if size != 4 + 5 * count or count > nbytes:
            raise self._positions.refusal(f"its frame has {size:,} bytes and the count {count:,}; the tensor has {nbytes:,} bytes")
        self.nbytes, self._left, self._stop, self._skip = nbytes, count, 0, 4 + 4 * count

    def next(self, _: int) -> _Part:
        """What the frame says of the next bytes of the tensor, as far as its next positions reach. Raises CheckpointError if its positions
        do not ascend, or lie beyond the end of the tensor."""
        start, count = self._stop, min(_PART // 16, self._left)
        positions = self._positions.read(4 * count).view(_POSITION).astype(np.int64)
        ascends = not count or (positions[0] >= start and positions[-1] < self.nbytes and bool((positions[1:] > positions[:-1]).all()))
        if not ascends:
            raise self._positions.refusal(f"its positions do not ascend, or lie beyond the {self.nbytes:,} bytes of the tensor")
        self._left -= count
        self._stop = int(positions[-1]) + 1 if self._left else self.nbytes
        while self._values.at < self._skip:
            self._values.read(min(_PART, self._skip - self._values.at))
        return _Part(start, self._stop, self._values.read(count), positions)


class _Frame:
    """The decoded bytes of a zstd frame, from its start to its end."""

    def __init__(self, patch: Patch, tensor: Tensor, files: Files) -> None:
        import zstandard

        self._where, self._error = f"{tensor.name} in {patch.path}", zstandard.ZstdError
        # No frame header is longer.
        head = bytearray(min(18, patch.nbytes))
        files.read_into(patch.path, patch.byte_offset, memoryview(head))
        try:
            parameters = zstandard.get_frame_parameters(bytes(head))
        except zstandard.ZstdError as error:
            raise self.refusal(f"it is no zstd frame ({error})") from None
        if parameters.content_size == zstandard.CONTENTSIZE_UNKNOWN or parameters.window_size > _LARGEST_WINDOW:
            raise self.refusal(f"its zstd frame does not tell its size, or has a window of {parameters.window_size:,} bytes")
        self.size = int(parameters.content_size)
        """The number of decoded bytes."""
        self.at = 0
        """How many of them were read."""
        decompressor: Any = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        self._stream = decompressor.stream_reader(_Stored(patch, files), read_size=_READ)

    def read(self, nbytes: int) -> Bytes:
        """The next decoded bytes. Raises CheckpointError if the frame is damaged."""
        buffer, done = np.empty(nbytes, np.uint8), 0
        try:
            while done < nbytes:
                count = self._stream.readinto(buffer[done:].data)
                if not count:
                    raise self.refusal(f"its zstd frame ends after {self.at + done:,} of {self.size:,} bytes")
                done += count
            self.at += nbytes
            if self.at == self.size and self._stream.read(1):  # It also compares the checksum at the end of the frame.
                raise self.refusal(f"its zstd frame is longer than the {self.size:,} bytes that it tells")
        except self._error as error:
            raise self.refusal(f"its zstd frame cannot be decoded: {error}") from None
        return buffer

    def refusal(self, what: str) -> CheckpointError:
        """The error for this frame."""
        return CheckpointError(what, where=self._where, why="The delta is damaged, so nothing of it can be used", do="Get the delta again")


class _Stored:
    """The bytes of a frame as a stream."""

    def __init__(self, patch: Patch, files: Files) -> None:
        self._patch, self._files, self._at = patch, files, 0

    def read(self, nbytes: int) -> bytes:
        """The next bytes."""
        part = bytearray(min(nbytes, self._patch.nbytes - self._at))
        if part:
            self._files.read_into(self._patch.path, self._patch.byte_offset + self._at, memoryview(part))
        self._at += len(part)
        return bytes(part)
