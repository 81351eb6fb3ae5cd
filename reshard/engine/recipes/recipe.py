"""Recipe: how the codes and scales of a weight follow from its values, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, F32, DType
from reshard.geometry.light_dataclass import dataclass

# Columns that are read at once, because short runs take many calls; and that are computed at once, so that their float32 values stay in a
# processor's cache.
_READ, _COMPUTED = 16384, 2048


class NotRepresentable(Exception):
    """Why values cannot be written in the form of a recipe, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How codes and scales follow from values."""

    dtype: DType
    """The element type in which the values are taken."""
    block: tuple[int, int]
    """The elements along each axis that share a scale."""
    codes: Callable[[Block], Block]
    """The stored words of a tile of whole blocks."""
    scales: Callable[[Block], Block]
    """The stored words of its scales."""

    def bands(self, shape: tuple[int, ...], ranges: Sequence[range]) -> Iterator[Box]:
        """Boxes of whole blocks of a weight of this shape, each read at once, that together hold the elements of `ranges`, one per axis."""
        starts, stops = zip(
            *((each.start // step * step, min(each.stop, size)) for each, step, size in zip(ranges, self.block, shape, strict=True)),
            strict=True,
        )
        ends = [min(_up(stop, step), size) for stop, step, size in zip(stops, self.block, shape, strict=True)]
        return _grid(Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True))), (self._rows, _READ))

    def tiles(self, band: Box) -> Iterator[Box]:
        """The boxes of whole blocks of a band that are computed at once."""
        return _grid(band, (self._rows, _COMPUTED))

    @property
    def _rows(self) -> int:
        return self.block[0] * max(1, 128 // self.block[0])


def _grid(box: Box, steps: tuple[int, int]) -> Iterator[Box]:
    """A box of two axes in boxes of at most `steps` elements along each axis."""
    for row in range(box.offsets[0], box.stops[0], steps[0]):
        for column in range(box.offsets[1], box.stops[1], steps[1]):
            yield Box((row, column), (min(steps[0], box.stops[0] - row), min(steps[1], box.stops[1] - column)))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def largest_of_blocks(magnitudes: Block, block: tuple[int, int]) -> Block:
    """The largest element of each block."""
    by_rows = magnitudes
    if block[0] > 1:  # reduceat along the first axis takes 50 times as long
        by_rows = np.stack([magnitudes[row : row + block[0]].max(axis=0) for row in range(0, len(magnitudes), block[0])])
    return np.maximum.reduceat(by_rows, np.arange(0, magnitudes.shape[1], block[1]), axis=1)


def spread(scales: Block, shape: tuple[int, ...], block: tuple[int, int]) -> Block:
    """The scales of blocks as an array that numpy broadcasts to the elements."""
    by_column = np.repeat(scales, block[1], axis=1)[:, : shape[1]]
    return by_column if block[0] == 1 or len(scales) == 1 else np.repeat(by_column, block[0], axis=0)[: shape[0]]


def rounded_to_bfloat16(values: Block) -> Block:
    """float32 values rounded to bfloat16, as float32."""
    words = cast(np.ascontiguousarray(values).view(F32.word), F32, BF16)
    return cast(words, BF16, F32).view(np.float32)
