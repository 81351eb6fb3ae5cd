"""Recipe: how the codes and scales of a weight follow from its values, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np

from reshard.engine.casts import Block, numpy_type
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, DType
from reshard.geometry.value import value

# The most columns of a tile, because short runs take many calls, and about how many elements it has. Fewer would stay in a processor's
# cache, but Python's threads would wait for each other more often, before each operation of numpy.
_WIDEST, _ELEMENTS = 4096, 1 << 19
# The rows and columns of a tile where the files hold columns.
_IN_COLUMNS = (2048, 256)
_QUIET_NAN = 0x7FC0


class NotRepresentable(Exception):
    """Why values cannot be written in the form of a recipe, as the end of a sentence."""


@value
class Recipe:
    """How codes and scales follow from values."""

    dtype: DType | None
    """The element type in which the values are taken; None: one that holds each of them exactly."""
    block: tuple[int, int]
    """The elements along each axis that share a scale."""
    quantize: Callable[[Block], tuple[Block, Block]]
    """The stored words of the codes and of the scales of whole blocks, [out, in]."""
    saturates: Callable[[Block, Block], bool] = lambda words, scales: False
    """Whether values of these words were too large for the form, so that its largest value stands for them. scales: those made of them."""

    def tiles(self, shape: tuple[int, ...], ranges: Sequence[range], *, in_columns: bool = False) -> Iterator[Box]:
        """The boxes of whole blocks of a weight [out, in] or [experts, out, in], each read at once, that hold the elements of `ranges`.

        ranges: one for each axis. in_columns: whether the elements of a column lie side by side, not those of a row.
        """
        if in_columns:
            rows, columns = _IN_COLUMNS
        else:
            columns = min(shape[-1], _WIDEST)
            rows = -(-_ELEMENTS // columns)
        steps = (*(1,) * (len(shape) - 2), _up(rows, self.block[0]), _up(columns, self.block[1]))
        axes = (range(each.start // step * step, min(each.stop, size), step) for each, step, size in zip(ranges, steps, shape, strict=True))
        for offsets in product(*axes):
            yield Box(offsets, tuple(min(step, size - start) for step, start, size in zip(steps, offsets, shape, strict=True)))


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


def bfloat16_of(values: Block) -> Block:
    """float32 values rounded to bfloat16, as words. For the few scales of a tile a call less counts more than for its values (`cast`)."""
    words: Block = values.astype(numpy_type(BF16)).view(BF16.word)
    words[np.isnan(values)] = _QUIET_NAN
    return words


def float32_of(words: Block) -> Block:
    """bfloat16 words as float32 values."""
    return words.view(numpy_type(BF16)).astype(np.float32)
