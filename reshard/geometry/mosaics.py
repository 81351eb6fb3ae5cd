"""Mosaic: an array described by the boxes of canonical tensors that lie in it. It holds no elements; what a framework's code does to an
array (cut, join, stack, transpose, reshape) is done to the description.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.quantities import plural
from reshard.geometry.sections import Section, Sections, StoredTensor
from reshard.geometry.value import value


@value
class Tile:
    """A box of a canonical tensor at a place in an array."""

    name: str
    """The canonical tensor."""
    box: Box
    """The box, in the coordinates of the canonical tensor."""
    at: tuple[int, ...]
    """The array coordinates at which the box starts."""
    axes: tuple[int | None, ...]
    """For each axis of the box, the array axis along which it lies; None for an axis of one element that has no array axis."""

    def span(self, axis: int) -> tuple[int, int]:
        """Where the tile starts and stops along an axis of the array."""
        start = self.at[axis]
        return start, start + (self.box.sizes[self.axes.index(axis)] if axis in self.axes else 1)

    def cut(self, axis: int, start: int, stop: int) -> Tile | None:
        """The part of the tile inside the slice start..stop of an array axis, in the coordinates of the slice; None if they do not meet."""
        begin, end = self.span(axis)
        first, last = max(begin, start), min(end, stop)
        if first >= last:
            return None
        box = self.box
        if axis in self.axes:
            box = box.narrow(self.axes.index(axis), first - begin, last - begin)
        return Tile(self.name, box, _set(self.at, axis, first - start), self.axes)

    def moved(self, axis: int, by: int) -> Tile:
        """The tile, moved by `by` elements along an axis of the array."""
        return Tile(self.name, self.box, _set(self.at, axis, self.at[axis] + by), self.axes)

    def renumbered(self, number: Callable[[int], int], at: tuple[int, ...]) -> Tile:
        """The tile at `at` in an array where axis i has become axis number(i)."""
        return Tile(self.name, self.box, at, tuple(None if axis is None else number(axis) for axis in self.axes))


@value
class Mosaic:
    """An array of that shape, covered by tiles. Elements without a tile are padding."""

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]

    def __repr__(self) -> str:
        return f"Mosaic({list(self.shape)}, {plural(len(self.tiles), 'tile')} of {plural(len(self.names), 'tensor')})"

    @classmethod
    def of(cls, name: str, box: Box) -> Mosaic:
        """The array that is exactly one box of a canonical tensor."""
        tile = Tile(name, box, (0,) * len(box.sizes), tuple(range(len(box.sizes))))
        return cls(box.sizes, (tile,) if box.volume else ())

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical tensors that have a tile in the array, in the order of the tiles."""
        return tuple(dict.fromkeys(tile.name for tile in self.tiles))

    def renamed(self, new: Callable[[str], str]) -> Mosaic:
        """The same array, with the name of every canonical tensor replaced by new(name)."""
        return Mosaic(self.shape, tuple(Tile(new(tile.name), tile.box, tile.at, tile.axes) for tile in self.tiles))

    def is_like(self, other: Mosaic) -> bool:
        """Whether the two arrays hold the same boxes at the same places, of tensors with whatever names."""
        tiles, others = self.tiles, other.tiles
        return (self.shape, len(tiles)) == (other.shape, len(others)) and all(
            (a.box, a.at, a.axes) == (b.box, b.at, b.axes) for a, b in zip(tiles, others, strict=True)
        )

    def cut(self, axis: int, start: int, stop: int) -> Mosaic:
        """The slice start..stop along an axis."""
        tiles = (tile.cut(axis, start, stop) for tile in self.tiles)
        return Mosaic(_set(self.shape, axis, stop - start), tuple(tile for tile in tiles if tile is not None))

    def part(self, axis: int, parts: int, number: int) -> Mosaic:
        """Slice `number` of `parts` equal slices along an axis.

        Raises: ValueError if `parts` does not divide the size of the axis.
        """
        size, rest = divmod(self.shape[axis], parts)
        if rest:
            raise ValueError(f"axis {axis} of {list(self.shape)} does not divide by {parts}")
        return self if parts == 1 else self.cut(axis, number * size, (number + 1) * size)

    def with_even_first(self, axis: int, run: int) -> Mosaic:
        """In each run of `run` elements along an axis, the elements 0, 2, 4, ... before the elements 1, 3, 5, ... .

        The caller has checked that `run` is even and divides the size.
        """
        order = [start + i for start in range(0, self.shape[axis], run) for i in (*range(0, run, 2), *range(1, run, 2))]
        return joined([self.cut(axis, i, i + 1) for i in order], axis)

    def padded(self, axis: int, size: int) -> Mosaic:
        """The array with padding at the end of an axis, which then has `size` elements."""
        return Mosaic(_set(self.shape, axis, size), self.tiles)

    def transposed(self) -> Mosaic:
        """The array with its axes in reverse order."""
        last = len(self.shape) - 1
        return Mosaic(self.shape[::-1], tuple(tile.renumbered(lambda axis: last - axis, tile.at[::-1]) for tile in self.tiles))

    def item(self, number: int) -> Mosaic:
        """The array at one index of the first axis, without that axis: what `stacked` put there."""
        tiles: list[Tile] = []
        for tile in self.cut(0, number, number + 1).tiles:
            axes = tuple(None if axis in (0, None) else axis - 1 for axis in tile.axes)
            tiles.append(Tile(tile.name, tile.box, tile.at[1:], axes))
        return Mosaic(self.shape[1:], tuple(tiles))

    def flattened(self) -> Mosaic:
        """This array, which must have exactly one element, as an array of shape [1]."""
        assert math.prod(self.shape) == 1
        return Mosaic((1,), tuple(Tile(tile.name, tile.box, (0,), (None,) * len(tile.axes)) for tile in self.tiles))

    def split(self, axis: int, inner: int) -> Mosaic:
        """The array with one axis reshaped into two, [size / inner, inner]. The caller has checked that `inner` divides the size."""

        def number(old: int) -> int:
            return old + (old >= axis)

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
        """The array with an axis and the next one, [outer, inner], reshaped into one, [outer * inner]."""
        inner = self.shape[axis + 1]
        tiles: list[Tile] = []
        for tile in self.tiles:
            begin, end = tile.span(axis)
            for outer in range(begin, end):
                row = tile.cut(axis, outer, outer + 1)
                assert row is not None
                axes = tuple(None if old == axis else old for old in row.axes)
                at = (*row.at[:axis], outer * inner + row.at[axis + 1], *row.at[axis + 2 :])
                tiles.append(Tile(row.name, row.box, row.at, axes).renumbered(lambda old: old - (old > axis), at))
        return Mosaic((*self.shape[:axis], self.shape[axis] * inner, *self.shape[axis + 2 :]), tuple(tiles))

    def squeezed(self) -> Mosaic:
        """The array without its axes of one element; at least one axis stays."""
        units = [axis for axis, size in enumerate(self.shape) if size == 1]
        return self.without_axes(units if len(units) < len(self.shape) else units[1:])

    def without_axes(self, left_out: Collection[int]) -> Mosaic:
        """The array without these axes, which have one element each."""
        kept = [axis for axis in range(len(self.shape)) if axis not in left_out]
        tiles = (
            Tile(
                tile.name,
                tile.box,
                tuple(tile.at[axis] for axis in kept),
                tuple(kept.index(axis) if axis in kept else None for axis in tile.axes),
            )
            for tile in self.tiles
        )
        return Mosaic(tuple(self.shape[axis] for axis in kept), tuple(tiles))

    def sections(self, strides: tuple[int, ...] | None = None) -> Sections:
        """Every tile as a section of the array, stored with these strides, in elements; None: row-major."""
        steps = row_major(self.shape) if strides is None else strides

        def section(tile: Tile) -> Section:
            start = sum(at * step for at, step in zip(tile.at, steps, strict=True))
            # The stride of an axis of one element is never used.
            return Section(tile.name, tile.box, start, tuple(1 if axis is None else steps[axis] for axis in tile.axes))

        return Sections.of(map(section, self.tiles))

    def stored(self, name: str, dtype: DType, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """The array as a stored tensor called `name`. shape: another shape with the same number of elements; None: that of the array."""
        assert shape is None or math.prod(shape) == math.prod(self.shape)
        return StoredTensor(name, dtype, self.shape if shape is None else shape, self.sections())


def joined(parts: Sequence[Mosaic], axis: int = 0) -> Mosaic:
    """The arrays concatenated along an axis.

    Raises: CheckpointError if the arrays differ in another axis.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    tiles: list[Tile] = []
    end = 0
    for part in parts:
        if _set(part.shape, axis, 0) != _set(first.shape, axis, 0):
            raise CheckpointError(f"arrays of {list(first.shape)} and {list(part.shape)} cannot be concatenated along axis {axis}")
        tiles.extend(tile.moved(axis, end) for tile in part.tiles)
        end += part.shape[axis]
    return Mosaic(_set(first.shape, axis, end), tuple(tiles))


def stacked(parts: Iterable[Mosaic]) -> Mosaic:
    """The arrays stacked along a new first axis.

    Raises: CheckpointError if the arrays differ in shape.
    """
    arrays = list(parts)
    tiles: list[Tile] = []
    for number, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise CheckpointError(f"arrays of {list(arrays[0].shape)} and {list(array.shape)} cannot be stacked")
        tiles.extend(tile.renumbered(lambda axis: axis + 1, (number, *tile.at)) for tile in array.tiles)
    return Mosaic((len(arrays), *arrays[0].shape), tuple(tiles))


def _set(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
