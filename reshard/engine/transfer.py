"""Transfer: gather a block from its source pieces, and scatter it to its target pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.errors import CheckpointError, ReplicasDiffer
from reshard.geometry.boxes import BLOCK_ELEMENTS, Box
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Piece, dense_runs, is_row_major, span_elements, spans
from reshard.index.index import Tensor
from reshard.index.join import rows_meeting
from reshard.index.shards import primary_rows
from reshard.storage.files import Files

Block = npt.NDArray[Any]
"""The elements of a box as unsigned words, row-major."""
Write = Callable[[str, int, memoryview], None]
"""Writes bytes to (path, byte offset)."""
WriteRuns = Callable[[str, Sequence[int], memoryview], None]
"""Writes runs of equal length, which follow each other in the buffer, to (path, byte offsets)."""
# A run of at least this many bytes is read on its own. Shorter runs are read together with the bytes between them.
_LONG = 512


class Pieces:
    """The pieces of a tensor, prepared for finding those that share elements with a box."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        shards = tensor.shards
        self._offsets, self._stops = shards.offsets, shards.offsets + shards.sizes
        self._primary = primary_rows(shards)

    def meeting(self, box: Box) -> Iterator[tuple[Piece, Box, bool]]:
        """Each piece that shares elements with the box, the box that they share, and whether the piece is primary; primary pieces first."""
        shards = self.tensor.shards
        rows = np.zeros(1, np.int64) if len(shards) == 1 else rows_meeting(self._offsets, self._stops, box)
        if len(rows) > 1:
            rows = np.concatenate([rows[self._primary[rows]], rows[~self._primary[rows]]])
        for row in rows.tolist():
            piece = shards.piece(row)
            shared = piece.box.intersect(box)
            if shared is not None:
                yield piece, shared, bool(self._primary[row])


class Worker:
    """The buffers of one thread: two blocks of `itemsize` bytes per element. Reads from `files`; writes with `write` and `write_runs`."""

    def __init__(self, files: Files, itemsize: int, write: Write | None = None, write_runs: WriteRuns | None = None) -> None:
        self._files, self._write, self._write_runs = files, write, write_runs
        self._block = np.empty(BLOCK_ELEMENTS * itemsize, np.uint8)
        self._scratch = np.empty(BLOCK_ELEMENTS * itemsize, np.uint8)

    def gather(self, pieces: Pieces, box: Box) -> Block:
        """The elements of a box. The array is a view of this worker's buffer and is overwritten by the next gather.

        Raises: CheckpointError if a replica differs from the primary piece, naming both files and the element; or if a file cannot be read.
        """
        tensor = pieces.tensor
        block = _array(self._block, box.sizes, tensor.dtype)
        filled_from: list[tuple[Box, str]] = []
        for piece, shared, primary in pieces.meeting(box):
            if piece.extent.dtype != tensor.dtype:
                raise CheckpointError(
                    f"{piece.box} is stored as {piece.extent.dtype}, but the tensor is {tensor.dtype}",
                    where=f"{tensor.name} in {piece.extent.path}",
                )
            part = block[shared.relative_to(box.offsets).index]
            if primary:
                self._fill(part, piece, shared)
                filled_from.append((shared, piece.extent.path))
            else:
                self._compare(part, piece, shared, tensor.name, filled_from)
        return block

    def scatter(self, block: Block, pieces: Pieces, box: Box) -> int:
        """Write the elements of a block to every piece that shares some of them; returns the number of bytes written.

        Raises: RequestError if the disk is full.
        """
        assert self._write is not None and self._write_runs is not None
        written = 0
        for piece, shared, _ in pieces.meeting(box):
            part = block[shared.relative_to(box.offsets).index]
            path = piece.extent.path
            if part.flags.c_contiguous and is_row_major(shared.sizes, piece.extent.strides):
                self._write(path, piece.byte_offset_of(shared), bytes_of(part))
            else:
                runs = dense_runs(piece, shared)
                ordered = part.transpose(runs.order)
                _array(self._scratch, ordered.shape, piece.extent.dtype)[...] = ordered
                self._write_runs(path, runs.byte_offsets.tolist(), self._scratch.data[: part.nbytes])
            written += part.nbytes
        return written

    def _fill(self, part: Block, piece: Piece, shared: Box) -> None:
        if part.flags.c_contiguous and is_row_major(shared.sizes, piece.extent.strides):
            self._files.read_into(piece.extent.path, piece.byte_offset_of(shared), bytes_of(part))
            return
        for box, staged in self._staged(piece, shared):
            part[box.relative_to(shared.offsets).index] = staged

    def _compare(self, part: Block, piece: Piece, shared: Box, name: str, filled_from: list[tuple[Box, str]]) -> None:
        for box, staged in self._staged(piece, shared):
            expected = part[box.relative_to(shared.offsets).index]
            if not np.array_equal(expected, staged):
                at = np.argwhere(np.asarray(expected != staged))[0] if box.sizes else np.zeros(0, np.int64)
                element = tuple(int(i) + start for i, start in zip(at, box.offsets, strict=True))
                first = next((path for filled, path in filled_from if filled.contains(Box(element, (1,) * len(element)))), "another file")
                raise ReplicasDiffer(
                    f"two copies of {shared} disagree, first at element {list(element)}: {first} and {piece.extent.path}",
                    where=name,
                    why="Ranks that should hold the same values hold different ones, or a file is from another save; "
                    "nothing tells which of the two is right",
                    do="Find out which file is wrong and replace it",
                )

    def _staged(self, piece: Piece, shared: Box) -> Iterator[tuple[Box, Block]]:
        """The shared box in parts, as (box, its elements). Each part is read into the scratch buffer, and the elements are a view of it.

        Long runs are read one by one. Short runs that lie close together are read in one range with the bytes between them.
        """
        runs, itemsize = dense_runs(piece, shared), piece.extent.dtype.itemsize
        wasted = span_elements(shared.sizes, piece.extent.strides) - shared.volume
        if runs.elements * itemsize >= _LONG or wasted > shared.volume:
            sizes = tuple(shared.sizes[axis] for axis in runs.order)
            self._files.read_runs(piece.extent.path, runs.byte_offsets.tolist(), self._scratch.data[: shared.volume * itemsize])
            back = tuple(runs.order.index(axis) for axis in range(len(sizes)))
            yield shared, _array(self._scratch, sizes, piece.extent.dtype).transpose(back)
            return
        for span in spans(piece, shared, self._scratch.nbytes, dense=False):
            self._files.read_into(piece.extent.path, span.byte_offset, self._scratch.data[: span.nbytes])
            yield span.box, _array(self._scratch, span.box.sizes, piece.extent.dtype, span.strides)


def bytes_of(part: Block) -> memoryview:
    """The bytes of a row-major array. They share its memory."""
    return part.reshape(-1).view(np.uint8).data


def _array(buffer: npt.NDArray[np.uint8], sizes: tuple[int, ...], dtype: DType, strides: tuple[int, ...] | None = None) -> Block:
    """An array over the start of a buffer. strides: in elements; None: row-major."""
    in_bytes = None if strides is None else tuple(stride * dtype.itemsize for stride in strides)
    array: Block = np.ndarray(sizes, dtype.word, buffer.data, 0, in_bytes)
    return array
