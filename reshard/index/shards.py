"""Shards: the pieces of one tensor as columns of numbers; objects are made when someone asks for one.

A thousand ranks times a thousand tensors are then a thousand small arrays; tensors that are cut alike share theirs.
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
from reshard.geometry.stored import Section

Columns = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """The pieces of one tensor as columns: one row per stored box.

    offsets, sizes: [n, ndim], in elements of the whole tensor. files: [n], indexes into `paths`. positions: [n], a byte
    offset in that file near the data, to walk files in order. `extent(i)` says exactly where row i lies; it may read
    a few bytes of framing to know. primary: [n], whether a row counts for coverage; the others are replicas, to be
    compared with it. None: the first row of each box is primary. ranks: [n], the rank that held each row while training; None
    where the files do not tell.
    """

    paths: tuple[str, ...]
    offsets: Columns
    sizes: Columns
    files: npt.NDArray[np.integer[Any]]
    positions: Columns
    extent: Callable[[int], Extent]
    primary: npt.NDArray[np.bool_] | None = None
    ranks: Columns | None = None

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Shards:
        """The columns of pieces that exist already."""
        found = tuple(pieces)
        ndim = len(found[0].box.sizes) if found else 0
        paths = tuple(dict.fromkeys(piece.extent.path for piece in found))
        numbers = {path: i for i, path in enumerate(paths)}
        return cls(
            paths=paths,
            offsets=np.array([piece.box.offsets for piece in found], np.int64).reshape(len(found), ndim),
            sizes=np.array([piece.box.sizes for piece in found], np.int64).reshape(len(found), ndim),
            files=np.array([numbers[piece.extent.path] for piece in found], np.int64),
            positions=np.array([piece.extent.byte_offset for piece in found], np.int64),
            extent=tuple(piece.extent for piece in found).__getitem__,
        )

    def __len__(self) -> int:
        return len(self.files)

    def box(self, i: int) -> Box:
        return Box(tuple(self.offsets[i].tolist()), tuple(self.sizes[i].tolist()))

    def path(self, i: int) -> str:
        """The file that row i lies in; reads nothing."""
        return self.paths[int(self.files[i])]

    def piece(self, i: int) -> Piece:
        return Piece(self.box(i), self.extent(i))

    def with_copies(self, others: Sequence[Shards]) -> Shards:
        """These pieces, and those of other tensors that hold the same values, as replicas whatever their boxes."""
        if not others:
            return self
        copies = [replace(other, primary=np.zeros(len(other), np.bool_)) for other in others]
        return concatenated([replace(self, primary=primary_rows(self)), *copies])

    def moved(self, inner: Box, offsets: tuple[int, ...]) -> Shards:
        """What of these pieces lies in the box `inner`, as pieces of a tensor in which that box starts at `offsets`."""
        start, by = np.array(inner.offsets, np.int64), np.array(offsets, np.int64) - np.array(inner.offsets, np.int64)
        first = np.maximum(self.offsets, start)
        sizes = np.minimum(self.offsets + self.sizes, start + np.array(inner.sizes, np.int64)) - first
        rows = np.flatnonzero((sizes > 0).all(axis=1))
        steps = (first - self.offsets)[rows]

        def extent(i: int) -> Extent:
            known = self.extent(int(rows[i]))
            elements = sum(step * stride for step, stride in zip(steps[i].tolist(), known.strides, strict=True))
            return replace(known, byte_offset=known.byte_offset + elements * known.dtype.itemsize)

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
    """The pieces of all parts, which are of one tensor."""
    if len(parts) == 1:
        return parts[0]
    paths = tuple(dict.fromkeys(path for part in parts for path in part.paths))
    numbers = {path: i for i, path in enumerate(paths)}
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part))

    def extent(i: int) -> Extent:
        which = bisect_right(starts, i) - 1
        return parts[which].extent(i - starts[which])

    ranks = [part.ranks for part in parts if part.ranks is not None]
    marked = any(part.primary is not None for part in parts)
    return Shards(
        paths=paths,
        offsets=np.concatenate([part.offsets for part in parts]),
        sizes=np.concatenate([part.sizes for part in parts]),
        files=np.concatenate([np.array([numbers[path] for path in part.paths], np.int64)[part.files] for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
        extent=extent,
        primary=np.concatenate([primary_rows(part) for part in parts]) if marked else None,
        ranks=np.concatenate(ranks) if len(ranks) == len(parts) else None,
    )


def primary_rows(shards: Shards) -> npt.NDArray[np.bool_]:
    """[n]: for each row whether it is the first of its box; the others are replicas of that first one."""
    if shards.primary is not None:
        return shards.primary
    if len(shards) < 2:
        return np.ones(len(shards), np.bool_)
    _, first = np.unique(np.concatenate([shards.offsets, shards.sizes], axis=1), axis=0, return_index=True)
    primary = np.zeros(len(shards), np.bool_)
    primary[first] = True
    return primary


def subviews_of_flat(shards: Shards, rows: Sequence[tuple[int, Section]]) -> Shards:
    """The pieces of a canonical tensor that lie in stored ones, each of which is a run along its last axis: (row of `shards`, section)."""

    def extent(i: int) -> Extent:
        row, section = rows[i]
        known = shards.extent(row)
        step = known.strides[-1]
        return _within(known, section.start * step, tuple(stride * step for stride in section.strides))

    return _of_boxes(shards, [row for row, _ in rows], [section.box for _, section in rows], extent)


def subviews(shards: Shards, rows: Sequence[tuple[int, Tile]]) -> Shards:
    """The pieces of a canonical tensor that lie in stored ones: (row of `shards`, where in that row's array the piece lies)."""

    def extent(i: int) -> Extent:
        row, tile = rows[i]
        known = shards.extent(row)
        elements = sum(at * stride for at, stride in zip(tile.at, known.strides, strict=True))
        # An axis of one element goes nowhere, whatever its stride.
        return _within(known, elements, tuple(1 if axis is None else known.strides[axis] for axis in tile.axes))

    return _of_boxes(shards, [row for row, _ in rows], [tile.box for _, tile in rows], extent)


def _within(known: Extent, elements: int, strides: tuple[int, ...]) -> Extent:
    return replace(known, byte_offset=known.byte_offset + elements * known.dtype.itemsize, strides=strides)


def _of_boxes(shards: Shards, rows: Sequence[int], boxes: Sequence[Box], extent: Callable[[int], Extent]) -> Shards:
    """Pieces with these boxes in those rows of other pieces."""
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
