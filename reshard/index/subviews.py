"""Subviews: the boxes of canonical tensors inside the pieces of a stored tensor, as columns.

A piece of a stored tensor is an array in a file, and a subview is a box of that array: its first element has coordinates in the array, and
each of its axes follows an axis of the array with some step. So it is known without a read, although the strides of the array may not be.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from reshard.geometry.boxes import Box
from reshard.geometry.extents import Extent
from reshard.geometry.mosaics import Tile
from reshard.geometry.quantities import plural
from reshard.geometry.sections import Columns, Section
from reshard.geometry.value import value
from reshard.index.shards import PieceTable, Shards

_NO_AXIS = -1


@value(eq=False)
class Subviews:
    """Boxes of canonical tensors in the pieces of a stored tensor, one row each, in the order of the canonical tensors. n boxes with ndim
    axes, in arrays of k axes. Stored tensors that are cut alike share the columns."""

    names: tuple[str, ...]
    """[t]: the canonical tensors."""
    bounds: Columns
    """[t + 1]: the row at which the boxes of each canonical tensor start; then n."""
    pieces: Columns
    """[n]: the piece of the stored tensor in which each box lies."""
    offsets: Columns
    """[n, ndim]: where each box starts in its canonical tensor."""
    sizes: Columns
    """[n, ndim]: how long it is."""
    at: Columns
    """[n, k]: the coordinates of its first element in the array of its piece."""
    axes: Columns
    """[n, ndim]: the axis of the array that each axis of the box follows; -1 for an axis of one element that follows none."""
    steps: Columns
    """[n, ndim]: elements along that axis of the array from one element of the box to the next."""

    def __len__(self) -> int:
        return len(self.pieces)

    def __repr__(self) -> str:
        return f"Subviews({plural(len(self), 'box', 'boxes')} of {plural(len(self.names), 'tensor')})"

    def with_names(self, names: tuple[str, ...]) -> Subviews:
        """The boxes at the same places, of other canonical tensors."""
        assert len(names) == len(self.names)
        return replace(self, names=names)

    def of(self, shards: Shards) -> Iterator[tuple[str, Shards]]:
        """(name, its pieces) of each canonical tensor, where the stored tensor has these pieces. They are windows on one table."""

        def extent(i: int) -> Extent:
            outer = shards.extent(int(self.pieces[i]))
            elements = sum(at * stride for at, stride in zip(self.at[i].tolist(), outer.strides, strict=True))
            # The stride of an axis of one element is never used.
            strides = tuple(
                1 if axis == _NO_AXIS else step * outer.strides[axis]
                for axis, step in zip(self.axes[i].tolist(), self.steps[i].tolist(), strict=True)
            )
            return replace(outer, byte_offset=outer.byte_offset + elements * outer.dtype.itemsize, strides=strides)

        ranks = None if shards.ranks is None else shards.ranks[self.pieces]
        files, positions = shards.files[self.pieces], shards.positions[self.pieces]
        table = PieceTable(shards.paths, self.offsets, self.sizes, files, positions, extent, ranks=ranks)
        bounds = self.bounds.tolist()
        for name, start, stop in zip(self.names, bounds, bounds[1:], strict=False):
            yield name, Shards(table, start, stop)


class SubviewsBuilder:
    """Collects subviews as numbers; no object stays alive for a box."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        # By the number of axes of the box and of the array: the tensor and the piece of each box, then its columns.
        self._rows: dict[tuple[int, int], array[int]] = {}

    def add_tile(self, piece: int, name: str, tile: Tile, lead: Sequence[int] = ()) -> None:
        """Add a tile of a piece's array. lead: coordinates along axes before those of the tile's array.

        name: the canonical tensor, in place of that of the tile.
        """
        before = len(lead)
        axes = (_NO_AXIS if axis is None else before + axis for axis in tile.axes)
        self._add(piece, name, tile.box.offsets, tile.box.sizes, (*lead, *tile.at), axes, (1,) * len(tile.axes))

    def add_strided(self, piece: int, name: str, box: Box, at: tuple[int, ...], steps: tuple[int, ...]) -> None:
        """Add a box whose axes are those of a piece's array, with steps. at: the coordinates of its first element in the array."""
        self._add(piece, name, box.offsets, box.sizes, at, range(len(at)), steps)

    def add_section(self, piece: int, section: Section, ndim: int = 1) -> None:
        """Add a section of a piece whose array has `ndim` axes and is a flat run along the last one."""
        axes = (ndim - 1,) * len(section.strides)
        self._add(piece, section.name, section.box.offsets, section.box.sizes, (*(0,) * (ndim - 1), section.start), axes, section.strides)

    def build(self) -> SubviewsByTensor:
        """What was added."""
        names = list(self._numbers)
        return SubviewsByTensor(tuple(_sorted(names, rows, ndim, k) for (ndim, k), rows in self._rows.items()), tuple(names))

    def _add(
        self,
        piece: int,
        name: str,
        offsets: Iterable[int],
        sizes: Iterable[int],
        at: tuple[int, ...],
        axes: Iterable[int],
        steps: tuple[int, ...],
    ) -> None:
        rows = self._rows.get((len(steps), len(at)))
        if rows is None:
            rows = self._rows[len(steps), len(at)] = array("q")
        rows.extend((self._numbers.setdefault(name, len(self._numbers)), piece, *offsets, *sizes, *at, *axes, *steps))


@value(eq=False)
class SubviewsByTensor:
    """The subviews of a stored tensor; canonical tensors with different numbers of axes have columns of their own."""

    groups: tuple[Subviews, ...]
    """The columns."""
    names: tuple[str, ...]
    """The canonical tensors, in the order in which they were added."""

    def renamed(self, new: dict[str, str]) -> SubviewsByTensor:
        """The same boxes of other canonical tensors: `new` maps names."""
        groups = tuple(group.with_names(tuple(new[name] for name in group.names)) for group in self.groups)
        return SubviewsByTensor(groups, tuple(new[name] for name in self.names))

    def of(self, shards: Shards) -> Iterator[tuple[str, Shards]]:
        """(name, its pieces) of each canonical tensor, where the stored tensor has these pieces."""
        if len(self.groups) == 1:
            yield from self.groups[0].of(shards)
            return
        by_name = {name: pieces for group in self.groups for name, pieces in group.of(shards)}
        yield from ((name, by_name[name]) for name in self.names)


def _sorted(names: list[str], rows: array[int], ndim: int, k: int) -> Subviews:
    """The rows of boxes with `ndim` axes in arrays of `k` axes, sorted by canonical tensor."""
    table = np.frombuffer(rows, np.int64).reshape(-1, 2 + 4 * ndim + k)
    table = table[np.argsort(table[:, 0], kind="stable")]
    tensors = table[:, 0]
    starts = np.flatnonzero(np.concatenate([[True], tensors[1:] != tensors[:-1]]))
    cuts = np.cumsum([1, 1, ndim, ndim, k, ndim])
    _, pieces, offsets, sizes, at, axes, steps = (np.ascontiguousarray(column) for column in np.split(table, cuts, axis=1))
    bounds = np.append(starts, len(table))
    return Subviews(tuple(names[i] for i in tensors[starts].tolist()), bounds, pieces[:, 0], offsets, sizes, at, axes, steps)
