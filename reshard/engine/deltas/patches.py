"""Applying patches: what deltas change is put on the elements of each strip that is read (index/patches.py says what a frame holds).

A frame can only be decoded from its start. Blocks are handed out in their order, so every worker decodes each frame for itself and goes
forward; a worker that goes back begins again. So memory is constant, and workers do not wait for each other.

An example: rows 2..3 of a tensor [4, 8] of bfloat16 are contiguous, bytes 32..63 of the tensor. The first 32 bytes of an xor frame are
decoded and forgotten, and the next 32 bytes are combined with those of the strip. Columns 0..3 of these rows are bytes 32..39 and 48..55:
the frame is decoded up to byte 55, and the changed bytes are put where their elements lie in the strip.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.boxes import Box
from reshard.index.index import Tensor
from reshard.index.patches import Patch
from reshard.storage.files import Files

if TYPE_CHECKING:
    Bytes = npt.NDArray[np.uint8]

# Bytes that are decoded at a time, and compressed bytes that are read at a time.
_PART, _READ = 1 << 18, 1 << 17
# Level 1 has windows of 512 KiB. A frame that needs more memory than this is refused.
_LARGEST_WINDOW = 1 << 23
# The tensors whose frames a worker keeps open: codes and scales of a quantized tensor are read by turns.
_MOST_OPEN = 4
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
    found: Checksum = xxhash.xxh3_128()
    return found


class PatchReaders:
    """Applies the patches of tensors for one worker, and keeps a few frames open."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._open: OrderedDict[int, tuple[Tensor, list[_Xor | _Overwrite]]] = OrderedDict()

    def apply(self, tensor: Tensor, box: Box, block: npt.NDArray[Any]) -> None:
        """Change the elements of a box as the patches of its tensor say.

        block: the elements, as an array of the last axes of the box; the axes before them have one element.

        Raises: CheckpointError if a frame is damaged.
        """
        assert tensor.patches is not None
        if id(tensor) not in self._open:
            # The tensor is kept, so that no other one gets its identity.
            self._open[id(tensor)] = tensor, [_opened(patch, tensor, self._files) for patch in tensor.patches.steps]
        self._open.move_to_end(id(tensor))
        _, steps = self._open[id(tensor)]
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        if not block.size:
            return
        itemsize, first, last = tensor.dtype.itemsize, *_span(box, tensor.shape)
        start, stop = first * itemsize, (last + 1) * itemsize
        for step in steps:
            if last - first + 1 == box.volume and block.flags.c_contiguous:
                step.apply(start, block.reshape(-1).view(np.uint8))
            else:
                for positions, values in step.changes(start, stop):
                    _scatter(positions, values, tensor, box, block, replaces=isinstance(step, _Overwrite))


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


def _opened(patch: Patch, tensor: Tensor, files: Files) -> _Xor | _Overwrite:
    where, nbytes = f"{tensor.name} in {patch.path}", math.prod(tensor.shape) * tensor.dtype.itemsize
    return (_Xor if patch.encoding == "xor" else _Overwrite)(patch, nbytes, files, where)


class _Xor:
    """An xor frame: as many bytes as the tensor has."""

    def __init__(self, patch: Patch, nbytes: int, files: Files, where: str) -> None:
        self._frame = _Frame(patch, files, where)
        if self._frame.size != nbytes:
            raise self._frame.refusal(f"its frame holds {self._frame.size:,} bytes, the tensor has {nbytes:,}")

    def apply(self, start: int, flat: Bytes) -> None:
        """Change consecutive bytes of the tensor, from `start` on."""
        for part in self._parts(start, start + len(flat)):
            flat[: len(part)] ^= part
            flat = flat[len(part) :]

    def changes(self, start: int, stop: int) -> Iterator[tuple[npt.NDArray[np.int64], Bytes]]:
        """The positions of changed bytes, and their differences."""
        for part in self._parts(start, stop):
            at = np.flatnonzero(part)
            yield at + start, part[at]
            start += len(part)

    def _parts(self, start: int, stop: int) -> Iterator[Bytes]:
        for at in range(start, stop, _PART):
            yield self._frame.read(at, min(_PART, stop - at))


class _Overwrite:
    """An overwrite frame: positions in ascending order, and the bytes at them. Each is read by a decoder of its own."""

    def __init__(self, patch: Patch, nbytes: int, files: Files, where: str) -> None:
        self._positions, self._values = _Frame(patch, files, where), _Frame(patch, files, where)
        size = self._positions.size
        self._count = int(self._positions.read(0, 4).view(_POSITION)[0]) if size >= 4 else -1
        if size != 4 + 5 * self._count or self._count > nbytes:
            raise self._positions.refusal(f"its frame has {size:,} bytes and the count {self._count:,}; the tensor has {nbytes:,} bytes")
        self._nbytes = nbytes
        self._restart()

    def _restart(self) -> None:
        self._next, self._before, self._held = 0, -1, np.empty(0, np.int64)

    def apply(self, start: int, flat: Bytes) -> None:
        """Change consecutive bytes of the tensor, from `start` on."""
        for positions, values in self.changes(start, start + len(flat)):
            flat[positions - start] = values

    def changes(self, start: int, stop: int) -> Iterator[tuple[npt.NDArray[np.int64], Bytes]]:
        """The positions of changed bytes, and their new values."""
        if start <= self._before:
            self._restart()
        while True:
            taken = self._held[: np.searchsorted(self._held, stop)]
            first = self._next - len(self._held)
            wanted = int(np.searchsorted(taken, start))
            if wanted < len(taken):
                yield taken[wanted:], self._values.read(4 + 4 * self._count + first + wanted, len(taken) - wanted)
            if len(taken):
                self._before, self._held = int(taken[-1]), self._held[len(taken) :]
            if len(self._held) or self._next == self._count:
                return
            self._held = self._read()

    def _read(self) -> npt.NDArray[np.int64]:
        """The next positions. Raises CheckpointError if they do not ascend, or lie beyond the end of the tensor."""
        count = min(_PART // 4, self._count - self._next)
        found = self._positions.read(4 + 4 * self._next, 4 * count).view(_POSITION).astype(np.int64)
        if (np.diff(found, prepend=self._before) <= 0).any() or found[-1] >= self._nbytes:
            raise self._positions.refusal(f"its positions do not ascend, or lie beyond the {self._nbytes:,} bytes of the tensor")
        self._next += count
        return found


class _Frame:
    """The decoded bytes of a zstd frame. Bytes that were passed are decoded again from the start."""

    def __init__(self, patch: Patch, files: Files, where: str) -> None:
        import zstandard

        self._patch, self._files, self._where, self._error = patch, files, where, zstandard.ZstdError
        # No frame header is longer.
        head = bytearray(min(18, patch.nbytes))
        files.read_into(patch.path, patch.byte_offset, memoryview(head))
        try:
            found = zstandard.get_frame_parameters(bytes(head))
        except zstandard.ZstdError as error:
            raise self.refusal(f"it is no zstd frame ({error})") from None
        if found.content_size == zstandard.CONTENTSIZE_UNKNOWN or found.window_size > _LARGEST_WINDOW:
            raise self.refusal(f"its zstd frame does not tell its size, or has a window of {found.window_size:,} bytes")
        self.size = int(found.content_size)
        """The number of decoded bytes."""
        self._open: Callable[[Any], Any] = lambda source: zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(
            source, read_size=_READ
        )
        self._stream: Any = None
        self._at = 0
        self._buffer = np.empty(_PART, np.uint8)

    def read(self, start: int, nbytes: int) -> Bytes:
        """Decoded bytes, at most 256 KiB. The next read overwrites them. Raises CheckpointError if the frame is damaged."""
        try:
            if self._stream is None or start < self._at:
                self._stream, self._at = self._open(_Stored(self._patch, self._files)), 0
            while self._at < start:
                self._fill(min(_PART, start - self._at))
            self._fill(nbytes)
            if self._at == self.size and self._stream.read(1):  # It also compares the checksum at the end of the frame.
                raise self.refusal(f"its zstd frame is longer than the {self.size:,} bytes that it tells")
        except self._error as error:
            raise self.refusal(f"its zstd frame cannot be decoded: {error}") from None
        return self._buffer[:nbytes]

    def _fill(self, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            count = self._stream.readinto(self._buffer[done:nbytes].data)
            if not count:
                raise self.refusal(f"its zstd frame ends after {self._at + done:,} of {self.size:,} bytes")
            done += count
        self._at += nbytes

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
