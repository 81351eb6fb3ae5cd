"""Transfer: read the elements of a block from the pieces of one tensor, and write them to the pieces of another one.

A block is transferred in strips: consecutive lines, few enough to stay in the processor's second-level cache while they are read, cast,
digested and written.

    block  = slab slab ...    (one slab, unless a single line of the block is too long for a strip)
    slab   = lines along one axis
    strip  = consecutive lines of a slab

An example: a block of [1024, 4096] bfloat16 goes from one file that holds the whole weight to those of two ranks, which hold columns
0..2047 and 2048..4095. A line has 4096 elements, 8 KiB, so that a strip of 1 MiB is 128 lines, and the block is 8 strips of one slab.

    read    one piece, dense: its 128 lines are one range of the file and of the buffer -> one call, 1 MiB
    write   rank 1: half of each line, [128, 2048], which lie one behind the other in its file (step 4 KiB) -> one run of 512 KiB; the
            buffer has gaps of 4 KiB between the lines, so they are copied into the scratch buffer first -> one call
    the other way round, from the files of the ranks: each is read as one run of 512 KiB into the scratch buffer, and copied to its columns

If a file held whole rows, of which only 2048 columns are wanted, a strip would be runs of 4 KiB that start 8 KiB apart: too far to be
read together, so `read_runs` reads them one by one.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from reshard.errors import CheckpointError, ReplicasDiffer, UnsupportedError
from reshard.geometry.boxes import BLOCK_ELEMENTS, Box, blocks, contiguous_runs
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Piece, covering_spans, is_row_major, spans
from reshard.geometry.sections import Columns
from reshard.geometry.value import value
from reshard.index.origin import STORED, Patched, Tensor
from reshard.index.shards import primary_rows, rows_meeting
from reshard.storage.files import Files

if TYPE_CHECKING:
    from reshard.engine.origins.patched import OpenPatches, PatchReaders
    from reshard.plans.digests import Hash

Block = npt.NDArray[Any]
"""The elements of a box as unsigned words, row-major."""
FileRange = tuple[str, int, int]
"""Bytes of a file: (path, start, stop)."""
# The most bytes of a strip. With 1 MiB of second-level cache, 1 MiB took the least time: a smaller strip takes more calls, and a column cut
# writes less with each.
STRIP_BYTES = 1 << 20
# Strips of transposed pieces have 16 times as many lines. These are all lines of a block, unless its elements have more than eight bytes,
# as the elements of many checkpoints together have.
_TRANSPOSED = 16
# glibc gives the memory of a freed array back to the system, and the next array costs a page fault for each 4 KiB: a fifth of the time of a
# conversion that computes values. Once an array of this size was freed, it keeps the memory of smaller ones (mallopt(3), dynamic mmap
# threshold: at most 32 MiB).
_KEPT_BY_GLIBC = 31 << 20
# Runs that start at most this many bytes apart are read together, with the bytes between them. A call takes as long as a copy of 8 KB, and
# the system reads whole pages anyway.
_CLOSE = 4096


class SlabPiece:
    """What one piece holds of a slab: the same part of consecutive lines."""

    __slots__ = ("_runs", "box", "byte_offset", "extent", "inner", "is_dense", "is_primary", "is_transposed", "itemsize", "path", "sizes",
                 "start", "step", "stop", "strides")  # fmt: skip

    def __init__(self, piece: Piece, box: Box, slab: Box, axis: int, *, is_primary: bool) -> None:
        extent, inner = piece.extent, box.relative_to(slab.offsets).index[axis + 1 :]
        self.extent, self.box, self.path, self.itemsize, self.is_primary = extent, box, extent.path, extent.dtype.itemsize, is_primary
        self.start = box.offsets[axis] - slab.offsets[axis] if box.sizes else 0
        """The first line of the slab that it holds a part of."""
        self.stop = self.start + (box.sizes[axis] if box.sizes else 1)
        """The line after the last."""
        self.byte_offset = piece.byte_offset_of(box)
        """Where its part of the first line starts in the file."""
        self.strides = extent.strides[axis:] or (0,)
        self.step = self.strides[0] * self.itemsize
        """The distance in the file from line to line, in bytes."""
        self.sizes = box.sizes[axis + 1 :]
        """The sizes of its part of a line."""
        self.inner = inner
        """Its part of a line, as a numpy index of the axes after the first."""
        lines = self.stop - self.start
        self.is_dense = self.sizes == slab.sizes[axis + 1 :] and is_row_major((lines, *self.sizes), self.strides)
        """Whether its part of consecutive lines is one range of the file and of the slab."""
        inner_strides = [stride for size, stride in zip(self.sizes, self.strides[1:], strict=True) if size > 1]
        self.is_transposed = lines > 1 and max(inner_strides, default=0) > self.strides[0]
        """Whether the file holds the lines side by side, so that few lines are short runs."""
        self._runs: dict[int, tuple[tuple[int, ...], int, npt.NDArray[np.int64]]] = {}

    def runs(self, lines: int) -> tuple[tuple[int, ...], int, npt.NDArray[np.int64]]:
        """The contiguous runs of `lines` lines: (the axes in the order of the file, bytes per run, byte offsets from the first line)."""
        if lines not in self._runs:
            order, elements, starts = contiguous_runs((lines, *self.sizes), self.strides)
            self._runs[lines] = order, elements * self.itemsize, starts * self.itemsize
        return self._runs[lines]

    def is_close(self, lines: int) -> bool:
        """Whether the runs of `lines` lines are read together."""
        _, nbytes, starts = self.runs(lines)
        return len(starts) > 1 and int(starts[-1]) + nbytes <= len(starts) * _CLOSE

    def at(self, line: int) -> int:
        """Where its part of a line of the slab starts in the file."""
        return self.byte_offset + (line - self.start) * self.step


@value
class SlabPieces:
    """What all pieces of a tensor hold of a slab."""

    tensor: Tensor
    """The tensor."""
    of_pieces: tuple[SlabPiece, ...]
    """One for each piece, primary pieces first."""
    wants_many_lines: bool = False
    """Whether few lines would be read in short runs."""
    of_inputs: tuple[SlabPieces, ...] = ()
    """What the pieces of each input hold of the slab, if the values of the tensor come from several checkpoints."""

    @property
    def is_transposed(self) -> bool:
        """Whether they are read and written fastest in long runs, which only many lines have."""
        return self.wants_many_lines or any(piece.is_transposed for piece in self.of_pieces) or any(e.is_transposed for e in self.of_inputs)


@value
class Strip:
    """Consecutive lines of a slab."""

    slab: Box
    """The slab, in the coordinates of the tensor."""
    axis: int
    """The axis whose indices are the lines."""
    start: int
    """The first line, counted from the start of the slab."""
    stop: int
    """The line after the last."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of lines, and the sizes of a line."""
        return (self.stop - self.start, *self.slab.sizes[self.axis + 1 :])

    @property
    def box(self) -> Box:
        """The strip, in the coordinates of the tensor."""
        return self.slab.narrow(self.axis, self.start, self.stop) if self.slab.sizes else self.slab


class HasPieces(Protocol):
    """What strips are read from or written to."""

    itemsize: int
    """The bytes of its widest element."""

    def within(self, slab: Box, axis: int) -> SlabPieces:
        """What its pieces hold of a slab."""


def strips(box: Box, *sides: HasPieces) -> Iterator[tuple[Strip, list[SlabPieces]]]:
    """The strips of a block in row-major order, each with what the pieces of all sides hold of its slab."""
    elements = max(1, STRIP_BYTES // max(side.itemsize for side in sides))
    for slab, axis in slabs(box, elements):
        slab_pieces = [side.within(slab, axis) for side in sides]
        lines = slab.sizes[axis] if slab.sizes else 1
        together = elements * (_TRANSPOSED if any(pieces.is_transposed for pieces in slab_pieces) else 1)
        step = max(1, together // math.prod(slab.sizes[axis + 1 :]))
        for start in range(0, lines, step):
            yield Strip(slab, axis, start, min(start + step, lines)), slab_pieces


def slabs(box: Box, elements: int) -> Iterator[tuple[Box, int]]:
    """The parts of a block, in row-major order, whose lines have at most `elements` elements: each part and the axis of its lines."""
    sizes = box.sizes
    axis = next((axis for axis in range(len(sizes)) if math.prod(sizes[axis + 1 :]) <= elements), 0)
    for outer in product(*map(range, sizes[:axis])):
        offsets = tuple(start + index for start, index in zip(box.offsets, outer, strict=False))
        yield Box(offsets + box.offsets[axis:], (1,) * axis + sizes[axis:]), axis


class Pieces:
    """The pieces of a tensor, prepared for finding those that share elements with a box. rows: only these pieces; None: all.

    Raises: UnsupportedError for a part of a tensor that a delta changes as a whole.
    """

    def __init__(self, tensor: Tensor, rows: Columns | None = None) -> None:
        if isinstance(tensor.origin, Patched) and tensor.origin.shape != tensor.shape:
            raise UnsupportedError(
                f"a part {list(tensor.shape)} of a tensor {list(tensor.origin.shape)} is wanted, which a delta changes as a whole",
                where=tensor.name,
                do="Write the result of the delta with `reshard apply --to hf` first, then work on that",
            )
        self.tensor, self.itemsize = tensor, tensor.dtype.itemsize
        shards = tensor.shards
        self._rows = rows
        chosen = slice(None) if rows is None else rows
        self._offsets, self._stops = shards.offsets[chosen], (shards.offsets + shards.sizes)[chosen]
        self._primary = primary_rows(shards)

    def meeting(self, box: Box) -> Iterator[tuple[Piece, Box, bool]]:
        """Each piece that shares elements with the box, the box that they share, and whether the piece is primary; primary pieces first."""
        shards = self.tensor.shards
        rows = np.zeros(1, np.int64) if len(shards) == 1 else rows_meeting(self._offsets, self._stops, box)
        if self._rows is not None:
            rows = self._rows[rows]
        if len(rows) > 1:
            rows = np.concatenate([rows[self._primary[rows]], rows[~self._primary[rows]]])
        for row in rows.tolist():
            piece = shards.piece(row)
            shared = piece.box.intersect(box)
            if shared is not None:
                yield piece, shared, bool(self._primary[row])

    def ranges(self, box: Box, gap: int) -> Iterator[FileRange]:
        """The file ranges that hold a box, with the bytes between its runs where these are at most `gap` bytes."""
        for piece, shared, _ in self.meeting(box):
            itemsize, start = piece.extent.dtype.itemsize, piece.byte_offset_of(shared)
            for offset, elements in covering_spans(shared.sizes, piece.extent.strides, gap // itemsize):
                yield piece.extent.path, start + offset * itemsize, start + (offset + elements) * itemsize

    def within(self, slab: Box, axis: int) -> SlabPieces:
        """What the pieces hold of a slab. Raises CheckpointError if a piece has another element type than the tensor."""
        slab_pieces = []
        for piece, shared, is_primary in self.meeting(slab):
            # A header tells the element type; that the elements are the values of a function follows from the format.
            if piece.extent.dtype != self.tensor.dtype and piece.extent.dtype.of(self.tensor.dtype.function) != self.tensor.dtype:
                raise CheckpointError(
                    f"{piece.box} is stored as {piece.extent.dtype}, but the tensor is {self.tensor.dtype}",
                    where=f"{self.tensor.name} in {piece.extent.path}",
                )
            slab_pieces.append(SlabPiece(piece, shared, slab, axis, is_primary=is_primary))
        return SlabPieces(self.tensor, tuple(slab_pieces))


class Sink(Protocol):
    """Where blocks are written: staged files at offsets (Staging), or uploads that are fed from front to back (FileFronts)."""

    def write(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Write bytes into a file."""

    def write_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        """Write runs of equal length, which follow each other in the buffer, at these byte offsets of a file."""


class SharedPatches:
    """The frames of deltas that the workers of a run decode together, opened for the first tensor that a delta changes."""

    def __init__(self, files: Files, workers: int) -> None:
        self._files, self._workers, self._lock = files, workers, threading.Lock()
        self._opened: OpenPatches | None = None

    def opened(self) -> OpenPatches:
        """The frames. Most checkpoints have none, and their conversion loads nothing of deltas."""
        from reshard.engine.origins.patched import OpenPatches

        with self._lock:
            self._opened = self._opened or OpenPatches(self._files, self._workers)
            return self._opened


class Worker:
    """The buffers of one thread. Reads from `files`; writes into `sink`.

    Each buffer has room for a block of `itemsize` bytes per element.

    shared: the frames of deltas on these files, which it decodes together with other workers.
    """

    def __init__(self, files: Files, itemsize: int, sink: Sink | None = None, shared: SharedPatches | None = None) -> None:
        np.empty(_KEPT_BY_GLIBC, np.uint8)
        self._files, self._sink, self._shared = files, sink, shared
        self._patches: PatchReaders | None = None
        self._block, self._scratch, self._converted = (_room(BLOCK_ELEMENTS * itemsize) for _ in range(3))

    def converted(self, sizes: tuple[int, ...], dtype: DType) -> Block:
        """An array for elements that were cast. It is overwritten by the next cast of this worker."""
        return _array(self._converted, sizes, dtype)

    def read(self, slab_pieces: SlabPieces, strip: Strip, out: Block | None = None) -> Block:
        """The elements of a strip, as an array of lines: `out`, or a view of this worker's buffer, which its next read overwrites.

        Raises: CheckpointError if a replica differs from the primary piece, naming both files and the element; if a file cannot be read;
        or if the deltas that change the tensor do not give what their checksum says.
        """
        block = _array(self._block, strip.sizes, slab_pieces.tensor.dtype) if out is None else out
        for piece in slab_pieces.of_pieces:
            first, last = max(strip.start, piece.start), min(strip.stop, piece.stop)
            if first >= last:
                continue
            part = block[first - strip.start : last - strip.start]
            if not piece.is_primary:
                self._compare(part[:, *piece.inner], piece, first, last, slab_pieces)
            elif piece.is_dense and part.flags.c_contiguous:
                self._files.read_into(piece.path, piece.at(first), bytes_of(part))
            else:
                self._read(part[:, *piece.inner], piece, first, last)
        if isinstance(patched := slab_pieces.tensor.origin, Patched):
            self._patch(slab_pieces.tensor, patched, strip.box, block)
        return block

    def _patch(self, tensor: Tensor, patched: Patched, box: Box, block: Block) -> None:
        """Change elements that were read as deltas say. The first reader compares the whole tensor with its checksum."""
        from reshard.engine.origins.patched import PatchReaders

        with patched.checked.lock:
            if not patched.checked.done:
                _check_patched(self._files, tensor, patched)
                patched.checked.done = True
        self._patches = self._patches or PatchReaders(self._files, None if self._shared is None else self._shared.opened())
        self._patches.apply(tensor, box, block)

    def gather(self, pieces: Pieces, box: Box) -> Block:
        """The elements of a whole block. The array is a view of this worker's buffer and is overwritten by the next read.

        Raises: as `read` does.
        """
        block, done = _array(self._block, box.sizes, pieces.tensor.dtype), 0
        flat = block.reshape(-1)
        for strip, (slab_pieces,) in strips(box, pieces):
            volume = math.prod(strip.sizes)
            self.read(slab_pieces, strip, flat[done : done + volume].reshape(strip.sizes))
            done += volume
        return block

    def digest(self, pieces: Pieces, box: Box, running: Hash) -> bytes:
        """The digest of the elements of a block. running: a new hash. Raises: as `read` does."""
        for strip, (slab_pieces,) in strips(box, pieces):
            running.update(bytes_of(self.read(slab_pieces, strip)))
        return running.digest()

    def write(self, block: Block, slab_pieces: SlabPieces, strip: Strip) -> None:
        """Write the elements of a strip to every piece that has some of them. Raises SystemRefusal, for example if the disk is full."""
        assert self._sink is not None
        lines = block.reshape(strip.sizes)
        for piece in slab_pieces.of_pieces:
            first, last = max(strip.start, piece.start), min(strip.stop, piece.stop)
            if first >= last:
                continue
            part = lines[first - strip.start : last - strip.start]
            if piece.is_dense:
                self._sink.write(piece.path, piece.at(first), bytes_of(part))
                continue
            order, _, starts = piece.runs(last - first)
            part = part[:, *piece.inner].transpose(order)
            if not part.flags.c_contiguous:
                staged = _array(self._scratch, part.shape, slab_pieces.tensor.dtype)
                staged[...] = part
                part = staged
            self._sink.write_runs(piece.path, (starts + piece.at(first)).tolist(), bytes_of(part))

    def _read(self, part: Block, piece: SlabPiece, first: int, last: int) -> None:
        """Fill a view of a block with what a piece holds of some lines."""
        order, _, starts = piece.runs(last - first)
        if not piece.is_close(last - first) and (ordered := part.transpose(order)).flags.c_contiguous:
            self._files.read_runs(piece.path, (starts + piece.at(first)).tolist(), bytes_of(ordered))
            return
        for box, staged in self._staged(piece, first, last):
            part[box.index] = staged

    def _compare(self, part: Block, piece: SlabPiece, first: int, last: int, slab_pieces: SlabPieces) -> None:
        """Compare a view of a block with what a piece holds of some lines, which is a replica."""
        for box, staged in self._staged(piece, first, last):
            expected = part[box.index]
            if not np.array_equal(expected, staged):
                at = np.argwhere(np.asarray(expected != staged))[0] + box.offsets
                raise _replicas_differ(piece, first, at.tolist(), slab_pieces)

    def _staged(self, piece: SlabPiece, first: int, last: int) -> Iterator[tuple[Box, Block]]:
        """What a piece holds of some lines, in parts, as (box, its elements). Each part is read into the scratch buffer, and the elements
        are a view of it. A box counts from line `first` and the start of the piece's part of a line.

        Runs that lie close together are read in one range with the bytes between them, others one by one.
        """
        (order, _, starts), dtype = piece.runs(last - first), piece.extent.dtype
        box = Box.whole(sizes := (last - first, *piece.sizes))
        if not piece.is_close(last - first):
            self._files.read_runs(piece.path, (starts + piece.at(first)).tolist(), self._scratch.data[: box.volume * dtype.itemsize])
            staged = _array(self._scratch, tuple(sizes[axis] for axis in order), dtype)
            yield box, staged.transpose(tuple(order.index(axis) for axis in range(len(sizes))))
            return
        extent = replace(piece.extent, byte_offset=piece.at(first), strides=piece.strides)
        for span in spans(Piece(box, extent), box, self._scratch.nbytes, _CLOSE):
            self._files.read_into(piece.path, span.byte_offset, self._scratch.data[: span.nbytes])
            yield span.box, _array(self._scratch, span.box.sizes, dtype, span.strides)


def _check_patched(files: Files, tensor: Tensor, patched: Patched) -> None:
    """Raises CheckpointError unless the values that deltas give a tensor have the checksum that the last one tells."""
    last = patched.steps[-1]
    if _checksum(files, replace(tensor, origin=patched.compared_later()), last.checksum_format) == last.checksum:
        return
    if _checksum(files, replace(tensor, origin=STORED), last.checksum_format) == last.checksum:
        raise CheckpointError(
            "the base has the new values of the delta already",
            where=f"{tensor.name} in {last.path}",
            why="An xor delta is applied once",
            do="Leave the delta out",
        )
    raise CheckpointError(
        "the delta makes values that do not have its checksum",
        where=f"{tensor.name} in {last.path}",
        why="The base is not the one that the delta was made of, deltas are missing or in another order, or a file is damaged",
        do="Give the base that `reshard inspect DELTA` names, then its deltas in the order of their versions",
    )


def _checksum(files: Files, tensor: Tensor, algorithm: str) -> str:
    """The checksum of all bytes of a tensor."""
    from reshard.engine.origins.patched import new_checksum

    worker, pieces, running = Worker(files, tensor.dtype.itemsize), Pieces(tensor), new_checksum(algorithm)
    for block in blocks(tensor.shape):
        for strip, (slab_pieces,) in strips(block, pieces):
            running.update(bytes_of(worker.read(slab_pieces, strip)))
    return running.hexdigest()


def _replicas_differ(piece: SlabPiece, first: int, at: list[int], slab_pieces: SlabPieces) -> ReplicasDiffer:
    """The error for a replica. at: the element, counted from line `first` of the slab and the start of the piece's part of a line."""
    start, axis = piece.box.offsets, len(piece.box.sizes) - len(piece.sizes) - 1
    element = list(start)
    if element:
        element[axis:] = [a + b for a, b in zip(element[axis:], at, strict=True)]
        element[axis] += first - piece.start
    place = Box(tuple(element), (1,) * len(element))
    filled = (other.path for other in slab_pieces.of_pieces if other.is_primary and other.box.contains(place))
    tensor = slab_pieces.tensor
    if tensor.also_named is not None:
        return ReplicasDiffer(
            f"it and {tensor.also_named} disagree, first at element {element}",
            where=tensor.name,
            why="The config ties the two (tie_word_embeddings: true), so they must be one tensor, and the checkpoint stores two",
            do="If each was trained by itself, set tie_word_embeddings to false in the config; if not, find out which of them is wrong",
        )
    return ReplicasDiffer(
        f"two copies of {piece.box} disagree, first at element {element}: {next(filled, 'another file')} and {piece.path}",
        where=tensor.name,
        why="Ranks that should hold the same values hold different ones, or a file is from another save; nothing tells which of the two "
        "is right",
        do="Find out which file is wrong and replace it",
    )


def bytes_of(part: Block) -> memoryview:
    """The bytes of a row-major array. They share its memory."""
    return part.reshape(-1).view(np.uint8).data


def _room(nbytes: int) -> npt.NDArray[np.uint8]:
    """A buffer. The system provides memory for each page when it is first used. (numpy would take pages of an earlier array, all of which
    are in memory already.)

    Raises: MemoryError.
    """
    try:
        return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    except OSError as error:
        raise MemoryError(str(error)) from None


def _array(buffer: npt.NDArray[np.uint8], sizes: tuple[int, ...], dtype: DType, strides: tuple[int, ...] | None = None) -> Block:
    """An array over the start of a buffer. strides: in elements; None: row-major."""
    in_bytes = None if strides is None else tuple(stride * dtype.itemsize for stride in strides)
    array: Block = np.ndarray(sizes, dtype.word, buffer.data, 0, in_bytes)
    return array
