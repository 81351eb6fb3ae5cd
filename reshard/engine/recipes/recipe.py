"""Recipe: how the codes and scales of a weight follow from its values, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, F32, DType
from reshard.geometry.values import dataclass

# Columns of a tile: its float32 values stay in a processor's cache.
COLUMNS = 2048


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

    def tiles(self, shape: tuple[int, ...], ranges: Sequence[range]) -> Iterator[Box]:
        """Boxes of whole blocks of a weight of this shape that together hold the elements of `ranges`, one range for each axis."""
        steps = self.block[0] * max(1, 128 // self.block[0]), COLUMNS
        starts, stops = zip(
            *((each.start // step * step, min(each.stop, size)) for each, step, size in zip(ranges, self.block, shape, strict=True)),
            strict=True,
        )
        ends = [min(_up(stop, step), size) for stop, step, size in zip(stops, self.block, shape, strict=True)]
        for row in range(starts[0], ends[0], steps[0]):
            for column in range(starts[1], ends[1], steps[1]):
                yield Box((row, column), (min(steps[0], ends[0] - row), min(steps[1], ends[1] - column)))


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
