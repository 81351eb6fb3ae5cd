"""Recipe: how the codes and scales of a weight follow from its values, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, F32, DType
from reshard.geometry.light_dataclass import dataclass

# The fewest rows that are read and computed at once.
# The most columns that are read, because short runs take many calls, and that are computed, so that their values stay in a processor's
# cache.
_LEAST, _READ, _COMPUTED = 128, 16384, 2048
# The columns and rows that are read at once where the files hold columns.
_COLUMNS, _ROWS = 512, 4096


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

    def bands(self, shape: tuple[int, ...], ranges: Sequence[range], *, in_columns: bool = False) -> Iterator[Box]:
        """Boxes of whole blocks of a weight [out, in] or [experts, out, in], each read at once, that hold the elements of `ranges`.

        ranges: one for each axis. in_columns: whether the elements of a column lie side by side, not those of a row.
        """
        block = (1,) * (len(shape) - 2) + self.block
        starts = tuple(each.start // step * step for each, step in zip(ranges, block, strict=True))
        stops = (min(_up(each.stop, step), size) for each, step, size in zip(ranges, block, shape, strict=True))
        box = Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))
        return _grid(box, (_up(_ROWS, self.block[0]), _up(_COLUMNS, self.block[1])) if in_columns else (_up(_LEAST, self.block[0]), _READ))

    def tiles(self, band: Box) -> Iterator[Box]:
        """The boxes of whole blocks of a band that are computed at once."""
        columns = min(band.sizes[-1], _COMPUTED)
        return _grid(band, (_up(_LEAST * _COMPUTED // columns, self.block[0]), columns))


def _grid(box: Box, steps: tuple[int, int]) -> Iterator[Box]:
    """A box in boxes of at most `steps` elements along its last two axes, and of one along the others."""
    all_steps = (1,) * (len(box.sizes) - 2) + steps
    axes = (range(start, stop, step) for start, stop, step in zip(box.offsets, box.stops, all_steps, strict=True))
    for offsets in product(*axes):
        sizes = (min(step, stop - start) for step, start, stop in zip(all_steps, offsets, box.stops, strict=True))
        yield Box(offsets, tuple(sizes))


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
