"""Shards: the pieces of one tensor as columns of numbers. A Piece object is made only on demand.

A thousand ranks times a thousand tensors are then a thousand small arrays. Tensors that are cut in the same way share their arrays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.geometry.boxes import Box
from reshard.geometry.extents import Extent, Piece
from reshard.geometry.mosaics import Tile
from reshard.geometry.quantities import plural
from reshard.geometry.stored import Section

Columns = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """The pieces of one tensor as columns, one row per stored box."""

    paths: tuple[str, ...]
    """The files that hold the pieces."""
    offsets: Columns
    """[n, ndim]: where each box starts, in elements of the whole tensor."""
    sizes: Columns
    """[n, ndim]: how long each box is."""
    files: npt.NDArray[np.integer[Any]]
    """[n]: the file of each row, as an index into `paths`."""
    positions: Columns
    """[n]: a byte offset near the data of each row, known without a read. Reads of a file are ordered by it."""
    extent: Callable[[int], Extent]
    """extent(i) is where exactly row i lies. The call may read a small header."""
    primary: npt.NDArray[np.bool_] | None = None
    """[n]: whether each row counts for coverage. The other rows are replicas and are compared with the primary ones. None: the first row of
    each box is primary."""
    ranks: Columns | None = None
    """[n]: the rank that held each row during training; None if the files do not say."""

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Shards:
        """The columns of existing pieces."""
        rows = tuple(pieces)
        ndim = len(rows[0].box.sizes) if rows else 0
        paths = tuple(dict.fromkeys(piece.extent.path for piece in rows))
        numbers = {path: i for i, path in enumerate(paths)}
        return cls(
            paths=paths,
            offsets=np.array([piece.box.offsets for piece in rows], np.int64).reshape(len(rows), ndim),
            sizes=np.array([piece.box.sizes for piece in rows], np.int64).reshape(len(rows), ndim),
            files=np.array([numbers[piece.extent.path] for piece in rows], np.int64),
            positions=np.array([piece.extent.byte_offset for piece in rows], np.int64),
            extent=tuple(piece.extent for piece in rows).__getitem__,
        )

    def __len__(self) -> int:
        return len(self.files)

    def __repr__(self) -> str:
        return f"Shards({plural(len(self), 'piece')} in {plural(len(self.paths), 'file')})"

    def box(self, i: int) -> Box:
        """The box of row i."""
        return Box(tuple(self.offsets[i].tolist()), tuple(self.sizes[i].tolist()))

    def path(self, i: int) -> str:
        """The file of row i. Reads nothing."""
        return self.paths[int(self.files[i])]

    def piece(self, i: int) -> Piece:
        """The piece of row i. May read a small header."""
        return Piece(self.box(i), self.extent(i))

    def with_copies(self, others: Sequence[Shards]) -> Shards:
        """These pieces and, as replicas, the pieces of other tensors that hold the same values."""
        if not others:
            return self
        copies = [replace(other, primary=np.zeros(len(other), np.bool_)) for other in others]
        return concatenated([replace(self, primary=primary_rows(self)), *copies])

    def moved(self, inner: Box, offsets: tuple[int, ...]) -> Shards:
        """These pieces clipped to the box `inner`, as pieces of another tensor in which that box starts at `offsets`."""
        start, by = np.array(inner.offsets, np.int64), np.array(offsets, np.int64) - np.array(inner.offsets, np.int64)
        first = np.maximum(self.offsets, start)
        sizes = np.minimum(self.offsets + self.sizes, start + np.array(inner.sizes, np.int64)) - first
        rows = np.flatnonzero((sizes > 0).all(axis=1))
        steps = (first - self.offsets)[rows]

        def extent(i: int) -> Extent:
            outer = self.extent(int(rows[i]))
            elements = sum(step * stride for step, stride in zip(steps[i].tolist(), outer.strides, strict=True))
            return replace(outer, byte_offset=outer.byte_offset + elements * outer.dtype.itemsize)

        return replace(
            self,
            offsets=(first + by)[rows],
            sizes=sizes[rows],
            files=self.files[rows],
            positions=self.positions[rows],
            extent=extent,
            primary=None if self.primary is None else self.primary[rows],
            ranks=None if self.ranks is None else self.ranks[rows],
        )


def concatenated(parts: Sequence[Shards]) -> Shards:
    """The pieces of all parts, which belong to one tensor."""
    if len(parts) == 1:
        return parts[0]
    paths = tuple(dict.fromkeys(path for part in parts for path in part.paths))
    numbers = {path: i for i, path in enumerate(paths)}
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part))

    def extent(i: int) -> Extent:
        part = bisect_right(starts, i) - 1
        return parts[part].extent(i - starts[part])

    ranks = [part.ranks for part in parts if part.ranks is not None]
    has_primary = any(part.primary is not None for part in parts)
    return Shards(
        paths=paths,
        offsets=np.concatenate([part.offsets for part in parts]),
        sizes=np.concatenate([part.sizes for part in parts]),
        files=np.concatenate([np.array([numbers[path] for path in part.paths], np.int64)[part.files] for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
        extent=extent,
        primary=np.concatenate([primary_rows(part) for part in parts]) if has_primary else None,
        ranks=np.concatenate(ranks) if len(ranks) == len(parts) else None,
    )


def primary_rows(shards: Shards) -> npt.NDArray[np.bool_]:
    """[n]: for each row, whether it is primary. The other rows are replicas."""
    if shards.primary is not None:
        return shards.primary
    if len(shards) < 2:
        return np.ones(len(shards), np.bool_)
    _, first = np.unique(np.concatenate([shards.offsets, shards.sizes], axis=1), axis=0, return_index=True)
    primary = np.zeros(len(shards), np.bool_)
    primary[first] = True
    return primary


def subviews_of_flat(shards: Shards, rows: Sequence[tuple[int, Section]]) -> Shards:
    """The pieces of a canonical tensor inside the rows of `shards`, where each row is a flat run along its last axis.

    rows: (row of `shards`, the section of that row that holds a box of the canonical tensor).
    """

    def extent(i: int) -> Extent:
        row, section = rows[i]
        flat = shards.extent(row)
        step = flat.strides[-1]
        return _within(flat, section.start * step, tuple(stride * step for stride in section.strides))

    return _of_boxes(shards, [row for row, _ in rows], [section.box for _, section in rows], extent)


def subviews(shards: Shards, rows: Sequence[tuple[int, Tile]]) -> Shards:
    """The pieces of a canonical tensor inside the rows of `shards`, where each row is an array.

    rows: (row of `shards`, the tile of that row's array that holds a box of the canonical tensor).
    """

    def extent(i: int) -> Extent:
        row, tile = rows[i]
        array = shards.extent(row)
        elements = sum(at * stride for at, stride in zip(tile.at, array.strides, strict=True))
        # The stride of an axis of one element is never used.
        return _within(array, elements, tuple(1 if axis is None else array.strides[axis] for axis in tile.axes))

    return _of_boxes(shards, [row for row, _ in rows], [tile.box for _, tile in rows], extent)


def _within(outer: Extent, elements: int, strides: tuple[int, ...]) -> Extent:
    """The extent that starts `elements` after the start of `outer`, with its own strides."""
    return replace(outer, byte_offset=outer.byte_offset + elements * outer.dtype.itemsize, strides=strides)


def _of_boxes(shards: Shards, rows: Sequence[int], boxes: Sequence[Box], extent: Callable[[int], Extent]) -> Shards:
    """Pieces with these boxes, each inside a row of `shards`."""
    numbers, ndim = np.array(rows, np.int64), len(boxes[0].sizes) if boxes else 0
    return Shards(
        shards.paths,
        np.array([box.offsets for box in boxes], np.int64).reshape(len(boxes), ndim),
        np.array([box.sizes for box in boxes], np.int64).reshape(len(boxes), ndim),
        shards.files[numbers],
        shards.positions[numbers],
        extent,
        ranks=None if shards.ranks is None else shards.ranks[numbers],
    )
