"""Mosaic: an array, described by which box of which canonical tensor lies where in it. No element is there; what a framework's code does to
an array (cut, join, stack, transpose, view with other axes) is done to the description.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.stored import Section, StoredTensor


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of canonical tensor `name`, and the array coordinates `at` which it starts.

    axes: for each of the box's axes the array's axis that it runs along; None where the box is one element wide.
    """

    name: str
    box: Box
    at: tuple[int, ...]
    axes: tuple[int | None, ...]

    def span(self, axis: int) -> tuple[int, int]:
        """Where the tile starts and stops along an axis of the array."""
        start = self.at[axis]
        return start, start + (self.box.sizes[self.axes.index(axis)] if axis in self.axes else 1)

    def cut(self, axis: int, start: int, stop: int) -> Tile | None:
        """What of the tile lies at start..stop of an axis, in the coordinates of the array that starts there."""
        begin, end = self.span(axis)
        first, last = max(begin, start), min(end, stop)
        if first >= last:
            return None
        box = self.box
        if axis in self.axes:
            box = box.narrow(self.axes.index(axis), first - begin, last - begin)
        return Tile(self.name, box, _set(self.at, axis, first - start), self.axes)

    def moved(self, axis: int, by: int) -> Tile:
        return Tile(self.name, self.box, _set(self.at, axis, self.at[axis] + by), self.axes)

    def renumbered(self, number: Callable[[int], int], at: tuple[int, ...]) -> Tile:
        """The tile in an array in which axis i is axis number(i)."""
        return Tile(self.name, self.box, at, tuple(None if axis is None else number(axis) for axis in self.axes))


@dataclass(frozen=True, slots=True)
class Mosaic:
    """An array of that shape; elements under no tile are padding."""

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]

    @classmethod
    def of(cls, name: str, box: Box) -> Mosaic:
        """A box of a canonical tensor as it is."""
        tile = Tile(name, box, (0,) * len(box.sizes), tuple(range(len(box.sizes))))
        return cls(box.sizes, (tile,) if box.volume else ())

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical tensors of which it holds something, in the order in which they lie."""
        return tuple(dict.fromkeys(tile.name for tile in self.tiles))

    def renamed(self, new: Callable[[str], str]) -> Mosaic:
        """The same array of tensors that have other names."""
        return Mosaic(self.shape, tuple(Tile(new(tile.name), tile.box, tile.at, tile.axes) for tile in self.tiles))

    def cut(self, axis: int, start: int, stop: int) -> Mosaic:
        """The slice start..stop along an axis."""
        found = (tile.cut(axis, start, stop) for tile in self.tiles)
        return Mosaic(_set(self.shape, axis, stop - start), tuple(tile for tile in found if tile is not None))

    def part(self, axis: int, parts: int, number: int) -> Mosaic:
        """One of so many equal slices along an axis.

        Raises: ValueError if the axis does not divide.
        """
        size, rest = divmod(self.shape[axis], parts)
        if rest:
            raise ValueError(f"axis {axis} of {list(self.shape)} does not divide by {parts}")
        return self if parts == 1 else self.cut(axis, number * size, (number + 1) * size)

    def padded(self, axis: int, size: int) -> Mosaic:
        """The array made longer along an axis, by padding."""
        return Mosaic(_set(self.shape, axis, size), self.tiles)

    def transposed(self) -> Mosaic:
        """The array with its axes in reverse order."""
        last = len(self.shape) - 1
        return Mosaic(self.shape[::-1], tuple(tile.renumbered(lambda axis: last - axis, tile.at[::-1]) for tile in self.tiles))

    def flattened(self) -> Mosaic:
        """An array of one element, whatever its axes, as one of one axis."""
        assert math.prod(self.shape) == 1
        return Mosaic((1,), tuple(Tile(tile.name, tile.box, (0,), (None,) * len(tile.axes)) for tile in self.tiles))

    def split(self, axis: int, inner: int) -> Mosaic:
        """The array with one axis as two, of which the second is `inner` long."""

        def number(each: int) -> int:
            return each + (each >= axis)

        tiles: list[Tile] = []
        for tile in self.tiles:
            begin, end = tile.span(axis)
            for outer in range(begin // inner, -(-end // inner)):
                row = tile.cut(axis, outer * inner, (outer + 1) * inner)
                if row is not None:
                    tiles.append(row.renumbered(number, (*row.at[:axis], outer, row.at[axis], *row.at[axis + 1 :])))
        shape = (*self.shape[:axis], self.shape[axis] // inner, inner, *self.shape[axis + 1 :])
        return Mosaic(shape, tuple(tiles))

    def merged(self, axis: int) -> Mosaic:
        """The array with an axis and the next one as one, row after row."""
        inner = self.shape[axis + 1]
        tiles: list[Tile] = []
        for tile in self.tiles:
            begin, end = tile.span(axis)
            for outer in range(begin, end):
                row = tile.cut(axis, outer, outer + 1)
                assert row is not None
                axes = tuple(None if each == axis else each for each in row.axes)
                at = (*row.at[:axis], outer * inner + row.at[axis + 1], *row.at[axis + 2 :])
                tiles.append(Tile(row.name, row.box, row.at, axes).renumbered(lambda each: each - (each > axis), at))
        return Mosaic((*self.shape[:axis], self.shape[axis] * inner, *self.shape[axis + 2 :]), tuple(tiles))

    def sections(self, strides: tuple[int, ...] | None = None) -> Iterator[Section]:
        """Every tile as a section of an array with these strides, by default in row-major order."""
        steps = row_major(self.shape) if strides is None else strides
        for tile in self.tiles:
            start = sum(at * step for at, step in zip(tile.at, steps, strict=True))
            # An axis of one element goes nowhere, whatever its stride.
            yield Section(tile.name, tile.box, start, tuple(1 if axis is None else steps[axis] for axis in tile.axes))

    def stored(self, name: str, dtype: DType, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """The array as a stored tensor, under another shape if one is given."""
        assert shape is None or math.prod(shape) == math.prod(self.shape)
        return StoredTensor(name, dtype, self.shape if shape is None else shape, tuple(self.sections()))


def joined(parts: Sequence[Mosaic], axis: int = 0) -> Mosaic:
    """The arrays one after the other along an axis.

    Raises: CheckpointError if their other axes differ.
    """
    first = parts[0]
    tiles: list[Tile] = []
    end = 0
    for part in parts:
        if _set(part.shape, axis, 0) != _set(first.shape, axis, 0):
            raise CheckpointError(f"arrays of {list(first.shape)} and {list(part.shape)} do not join along axis {axis}")
        tiles.extend(tile.moved(axis, end) for tile in part.tiles)
        end += part.shape[axis]
    return Mosaic(_set(first.shape, axis, end), tuple(tiles))


def stacked(parts: Iterable[Mosaic]) -> Mosaic:
    """The arrays, which have one shape, along a new first axis."""
    held = list(parts)
    tiles: list[Tile] = []
    for number, part in enumerate(held):
        if part.shape != held[0].shape:
            raise CheckpointError(f"arrays of {list(held[0].shape)} and {list(part.shape)} do not stack")
        tiles.extend(tile.renumbered(lambda axis: axis + 1, (number, *tile.at)) for tile in part.tiles)
    return Mosaic((len(held), *held[0].shape), tuple(tiles))


def _set(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
