"""Shards: the pieces of one tensor as columns of numbers. A Piece object is made only on demand.

A thousand ranks times a thousand tensors are a few tables of a million rows. The shards of a tensor are a window on such a table, so a
tensor costs a few words, however many pieces it has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Extent, Piece
from reshard.geometry.quantities import plural
from reshard.geometry.sections import Columns
from reshard.geometry.value import value


@value(slots=False, eq=False)
class PieceTable:
    """Pieces of one or more tensors with the same number of axes as columns, one row per stored box."""

    paths: tuple[str, ...]
    """The files that `files` numbers."""
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
    each box of a tensor is primary."""
    ranks: Columns | None = None
    """[n]: the rank that held each row during training; None if the files do not say."""

    @cached_property
    def elements_before(self) -> list[int]:
        """[n + 1]: the number of elements in the rows before each row."""
        return [0, *np.cumsum(self.sizes.prod(axis=1)).tolist()]

    def __len__(self) -> int:
        return len(self.files)

    def __repr__(self) -> str:
        return f"PieceTable({plural(len(self), 'piece')} in {plural(len(self.paths), 'file')})"


@value(eq=False)
class Located:
    """Where each row of a PieceTable lies, if that is known without a read: the `extent` of the table."""

    paths: tuple[str, ...]
    """The paths of the table."""
    files: npt.NDArray[np.integer[Any]]
    """[n]: the file of each row."""
    byte_offsets: Columns
    """[n]: where each row starts in its file."""
    strides: Columns
    """[n, ndim]: the distance between neighbours along each axis, in elements."""
    dtype: DType | npt.NDArray[np.object_]
    """The stored element type: of all rows, or [n] of each row."""

    def __call__(self, row: int) -> Extent:
        dtype = self.dtype if isinstance(self.dtype, DType) else self.dtype[row]
        return Extent(self.paths[self.files[row]], int(self.byte_offsets[row]), tuple(self.strides[row].tolist()), dtype)


class Shards:
    """The pieces of one tensor: all rows of a table, or rows start..stop of it."""

    __slots__ = ("start", "stop", "table")

    def __init__(self, table: PieceTable, start: int = 0, stop: int | None = None) -> None:
        self.table = table
        """The columns."""
        self.start = start
        """The first row of the table that is a piece of the tensor."""
        self.stop = len(table) if stop is None else stop
        """The row after the last."""

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Shards:
        """The columns of existing pieces."""
        rows = tuple(pieces)
        ndim = len(rows[0].box.sizes) if rows else 0
        paths = tuple(dict.fromkeys(piece.extent.path for piece in rows))
        numbers = {path: i for i, path in enumerate(paths)}
        table = PieceTable(
            paths=paths,
            offsets=np.array([piece.box.offsets for piece in rows], np.int64).reshape(len(rows), ndim),
            sizes=np.array([piece.box.sizes for piece in rows], np.int64).reshape(len(rows), ndim),
            files=np.array([numbers[piece.extent.path] for piece in rows], np.int64),
            positions=np.array([piece.extent.byte_offset for piece in rows], np.int64),
            extent=tuple(piece.extent for piece in rows).__getitem__,
        )
        return cls(table)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that `files` numbers. A window on a table of many tensors has those of all tensors; see `holders`."""
        return self.table.paths

    @property
    def holders(self) -> tuple[str, ...]:
        """The files that hold the pieces, in the order in which they are numbered."""
        return tuple(self.paths[number] for number in dict.fromkeys(sorted(self.files.tolist())))

    @property
    def offsets(self) -> Columns:
        """[n, ndim]: where each box starts, in elements of the whole tensor."""
        return self.table.offsets[self.start : self.stop]

    @property
    def sizes(self) -> Columns:
        """[n, ndim]: how long each box is."""
        return self.table.sizes[self.start : self.stop]

    @property
    def files(self) -> npt.NDArray[np.integer[Any]]:
        """[n]: the file of each row, as an index into `paths`."""
        return self.table.files[self.start : self.stop]

    @property
    def positions(self) -> Columns:
        """[n]: a byte offset near the data of each row, known without a read."""
        return self.table.positions[self.start : self.stop]

    @property
    def elements(self) -> int:
        """The number of elements in all pieces, replicas included."""
        before = self.table.elements_before
        return before[self.stop] - before[self.start]

    @property
    def primary(self) -> npt.NDArray[np.bool_] | None:
        """[n]: whether each row counts for coverage; None: the first row of each box is primary."""
        return None if self.table.primary is None else self.table.primary[self.start : self.stop]

    @property
    def ranks(self) -> Columns | None:
        """[n]: the rank that held each row during training; None if the files do not say."""
        return None if self.table.ranks is None else self.table.ranks[self.start : self.stop]

    def __len__(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        return f"Shards({plural(len(self), 'piece')} in {plural(len(self.holders), 'file')})"

    def box(self, i: int) -> Box:
        """The box of row i."""
        row = self._row(i)
        return Box(tuple(self.table.offsets[row].tolist()), tuple(self.table.sizes[row].tolist()))

    def path(self, i: int) -> str:
        """The file of row i. Reads nothing."""
        return self.paths[int(self.table.files[self._row(i)])]

    def extent(self, i: int) -> Extent:
        """Where exactly row i lies. May read a small header."""
        return self.table.extent(self._row(i))

    def located(self) -> Located:
        """Where exactly all rows lie, as columns. May read a small header per row."""
        paths, rows, extent = self.table.paths, slice(self.start, self.stop), self.table.extent
        if isinstance(extent, Located):
            dtype = extent.dtype if isinstance(extent.dtype, DType) else extent.dtype[rows]
            return Located(extent.paths, extent.files[rows], extent.byte_offsets[rows], extent.strides[rows], dtype)
        numbers = {path: i for i, path in enumerate(paths)}
        extents = [extent(row) for row in range(self.start, self.stop)]
        files = np.array([numbers.setdefault(piece.path, len(numbers)) for piece in extents], np.int64)
        dtypes = np.empty(len(extents), np.object_)
        dtypes[:] = [piece.dtype for piece in extents]
        strides = np.array([piece.strides for piece in extents], np.int64).reshape(self.sizes.shape)
        return Located(tuple(numbers), files, np.array([piece.byte_offset for piece in extents], np.int64), strides, dtypes)

    def piece(self, i: int) -> Piece:
        """The piece of row i. May read a small header."""
        return Piece(self.box(i), self.extent(i))

    def replaced(self, **columns: Any) -> Shards:
        """These pieces with other columns, named as in PieceTable."""
        own = {name: getattr(self, name) for name in ("paths", "offsets", "sizes", "files", "positions", "extent", "primary", "ranks")}
        return Shards(PieceTable(**{**own, **columns}))

    def taken(self, rows: npt.NDArray[np.integer[Any]], **columns: Any) -> Shards:
        """The pieces of these rows, with other columns, named as in PieceTable."""
        own: dict[str, Any] = {
            name: None if column is None else column[rows]
            for name, column in (
                ("offsets", self.offsets),
                ("sizes", self.sizes),
                ("files", self.files),
                ("positions", self.positions),
                ("primary", self.primary),
                ("ranks", self.ranks),
            )
        }
        return Shards(PieceTable(**{"paths": self.paths, "extent": lambda i: self.extent(int(rows[i])), **own, **columns}))

    def without_replicas(self) -> Shards:
        """The primary pieces alone."""
        primary = primary_rows(self)
        if primary.all():
            return self.replaced(primary=primary)
        rows = np.flatnonzero(primary)
        return self.taken(rows, primary=primary[rows])

    def with_copies(self, others: Sequence[Shards]) -> Shards:
        """These pieces and, as replicas, the pieces of other tensors that hold the same values."""
        if not others:
            return self
        copies = [other.replaced(primary=np.zeros(len(other), np.bool_)) for other in others]
        return concatenated([self.replaced(primary=primary_rows(self)), *copies])

    def moved(self, inner: Box, offsets: tuple[int, ...]) -> Shards:
        """These pieces clipped to the box `inner`, as pieces of another tensor in which that box starts at `offsets`."""
        part = self.strided(inner.offsets, [(size, axis, 1) for axis, size in enumerate(inner.sizes)])
        return part.replaced(offsets=part.offsets + np.array(offsets, np.int64))

    def strided(self, at: Sequence[int], axes: Sequence[tuple[int, int, int]]) -> Shards:
        """These pieces as pieces of a strided part of their tensor.

        at: the coordinates of its first element. axes: of each axis of the part (its size, the axis of the tensor that it follows, the step
        along it). Elements 1, 3, 5 of a vector are at (1,) with the axis (3, 0, 2); of a piece 2..5 it holds 3 and 5, which start at 1.
        """
        stored = [axis for _, axis, _ in axes]
        sizes, steps = (np.array([axis[i] for axis in axes], np.int64) for i in (0, 2))
        begin = (self.offsets - np.array(at, np.int64))[:, stored]
        first = np.maximum(-(-begin // steps), 0)
        stop = np.minimum(-(-(begin + self.sizes[:, stored]) // steps), sizes)
        rows = np.flatnonzero((stop > first).all(axis=1))
        before = (first * steps - begin)[rows]

        def extent(i: int) -> Extent:
            outer = self.extent(int(rows[i]))
            strides = [outer.strides[axis] for axis in stored]
            elements = sum(skipped * stride for skipped, stride in zip(before[i].tolist(), strides, strict=True))
            strides = [step * stride for (_, _, step), stride in zip(axes, strides, strict=True)]
            return replace(outer, byte_offset=outer.byte_offset + elements * outer.dtype.itemsize, strides=tuple(strides))

        return self.taken(rows, offsets=first[rows], sizes=(stop - first)[rows], extent=extent)

    def _row(self, i: int) -> int:
        """The row of the table that is row i of the tensor. Raises: IndexError."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return self.start + i


class Relocation:
    """Pieces whose files get other paths, such as those in a tree that joins several. Tensors that share a table go on sharing it."""

    def __init__(self, path_of: Callable[[str], str]) -> None:
        """path_of: the new path of a file."""
        self._path_of = path_of
        self._tables: dict[int, tuple[PieceTable, PieceTable]] = {}

    def of(self, shards: Shards) -> Shards:
        """The same pieces in the files of the new paths."""
        old = shards.table
        if id(old) not in self._tables:
            self._tables[id(old)] = old, replace(old, paths=self._paths(old.paths), extent=self._extent(old.extent))
        return Shards(self._tables[id(old)][1], shards.start, shards.stop)

    def _paths(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(self._path_of, paths))

    def _extent(self, extent: Callable[[int], Extent]) -> Callable[[int], Extent]:
        if isinstance(extent, Located):
            return replace(extent, paths=self._paths(extent.paths))

        def relocated(row: int) -> Extent:
            stored = extent(row)
            return replace(stored, path=self._path_of(stored.path))

        return relocated


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
    table = PieceTable(
        paths=paths,
        offsets=np.concatenate([part.offsets for part in parts]),
        sizes=np.concatenate([part.sizes for part in parts]),
        files=np.concatenate([np.array([numbers[path] for path in part.paths], np.int64)[part.files] for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
        extent=extent,
        primary=np.concatenate([primary_rows(part) for part in parts]) if has_primary else None,
        ranks=np.concatenate(ranks) if len(ranks) == len(parts) else None,
    )
    return Shards(table)


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


def rows_meeting(offsets: Columns, stops: Columns, box: Box) -> npt.NDArray[np.int64]:
    """The rows whose boxes share an element with `box`, in order. offsets, stops: [n, ndim], the boxes of the rows."""
    starts_before = (offsets < np.array(box.stops, np.int64)).all(axis=1)
    ends_after = (stops > np.array(box.offsets, np.int64)).all(axis=1)
    rows = np.flatnonzero(starts_before & ends_after & (stops > offsets).all(axis=1))
    return rows.astype(np.int64, copy=False)


def meetings(left: Shards, right: Shards) -> Iterator[tuple[int, int, Box]]:
    """Every pair (row of left, row of right) whose boxes share elements, with the box that they share, in the order of the left rows."""
    stops = right.offsets + right.sizes
    for i in range(len(left)):
        box = left.box(i)
        for j in rows_meeting(right.offsets, stops, box).tolist():
            shared = box.intersect(right.box(j))
            assert shared is not None
            yield i, j, shared
