"""Quantizers: the codes and scales of weights, computed from their values, tile by tile.

fp8-block          bfloat16 -> FP8 in blocks of 128 x 128, the bits of llm-compressor 0.14 (model_free_ptq, FP8_BLOCK)
mxfp4              bfloat16 -> MXFP4 in groups of 32, the bits of llm-compressor 0.14 (model_free_ptq, MXFP4A16)
exact-fp8-block    any values -> FP8 in blocks of 128 x 128 with powers of two as scales, the same values or nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, F8, F32, DType

_LARGEST_FP8 = np.float32(448)
# torch.finfo(torch.bfloat16).eps, which stands in for a scale of zero.
_EPSILON = np.float32(2.0**-7)
# Columns of a tile: its float32 values stay in a processor's cache.
_COLUMNS = 2048


class NotRepresentable(Exception):
    """Why values cannot be written in the form of a recipe, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How codes and scales follow from values."""

    dtype: DType
    """The element type in which the values are taken."""
    block: tuple[int, int]
    """The elements along each axis that share a scale."""
    codes_and_scales: Callable[[Block], tuple[Block, Block]]
    """The stored words of a tile of whole blocks, and those of its scales."""

    def tiles(self, shape: tuple[int, ...], ranges: Sequence[range]) -> Iterator[Box]:
        """Boxes of whole blocks of a weight of this shape that together hold the elements of `ranges`, one range for each axis."""
        steps = self.block[0] * max(1, 128 // self.block[0]), _COLUMNS
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


def _largest(values: Block, block: tuple[int, int]) -> Block:
    """The largest magnitude of each block, in float32."""
    magnitudes = np.abs(values)
    by_rows = np.maximum.reduceat(magnitudes, np.arange(0, values.shape[0], block[0]), axis=0)
    return np.maximum.reduceat(by_rows, np.arange(0, values.shape[1], block[1]), axis=1)


def _spread(scales: Block, values: Block, block: tuple[int, int]) -> Block:
    rows, columns = np.arange(values.shape[0]) // block[0], np.arange(values.shape[1]) // block[1]
    return scales[rows][:, columns]


def _bf16(values: Block) -> Block:
    """float32 values rounded to bfloat16, as float32."""
    words = cast(np.ascontiguousarray(values).view(F32.word), F32, BF16)
    return cast(words, BF16, F32).view(np.float32)


def _fp8_block(words: Block) -> tuple[Block, Block]:
    """The scale is the largest magnitude of a block over 448; both it and the quotients are rounded to bfloat16, as torch computes them."""
    values = cast(words, BF16, F32).view(np.float32)
    scales = _bf16(_largest(values, (128, 128)) / _LARGEST_FP8)
    scales[scales == 0] = _EPSILON
    quotients = np.clip(_bf16(values / _spread(scales, values, (128, 128))), -_LARGEST_FP8, _LARGEST_FP8)
    return cast(quotients.view(F32.word), F32, F8), cast(scales.view(F32.word), F32, BF16)


def _exact_fp8_block(words: Block) -> tuple[Block, Block]:
    """The scale is the smallest power of two at which the largest magnitude of a block fits. Raises NotRepresentable."""
    values = words.view(np.float32)
    if not np.isfinite(values).all():
        raise NotRepresentable("are not all finite")
    largest = _largest(values, (128, 128)).astype(np.float64)
    _, exponents = np.frexp(largest / 448)
    exponents -= largest == np.ldexp(448.0, exponents - 1)  # 448 itself fits
    exponents[largest == 0] = 0
    scales = np.ldexp(np.float32(1), np.maximum(exponents, -126)).astype(np.float32)
    spread = _spread(scales, values, (128, 128))
    with np.errstate(all="ignore"):
        codes = cast((values / spread).view(F32.word), F32, F8)
        back = cast(codes, F8, F32).view(np.float32) * spread
    if not np.array_equal(back.view(np.uint32), values.view(np.uint32)):
        raise NotRepresentable("span more powers of two than FP8 with one scale holds")
    return codes, cast(scales.view(F32.word), F32, BF16)


def _mxfp4(words: Block) -> tuple[Block, Block]:
    """The scale is a power of two: that of the largest magnitude of a group, rounded up from 1.75 on, over four."""
    values = cast(words, BF16, F32).view(np.float32)
    largest = cast(_largest(values, (1, 32)).view(F32.word), F32, BF16).astype(np.int32)
    exponents = np.maximum(((largest + 32) >> 7) - 2, 0)
    scales = np.ldexp(np.float32(1), exponents - 127).astype(np.float32)
    with np.errstate(all="ignore"):
        quotients = np.clip(_bf16(values / _spread(scales, values, (1, 32))), -6, 6)
    # Half-way values go to the code whose last bit is zero.
    magnitudes = np.abs(quotients)
    codes = np.zeros(values.shape, np.uint8)
    for bound, is_closed in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        codes += (magnitudes >= bound) if is_closed else (magnitudes > bound)
    codes |= (quotients < 0).astype(np.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4, exponents.astype(np.uint8)


RECIPES: Mapping[str, Recipe] = {
    "fp8-block": Recipe(BF16, (128, 128), _fp8_block),
    "mxfp4": Recipe(BF16, (1, 32), _mxfp4),
    "exact-fp8-block": Recipe(F32, (128, 128), _exact_fp8_block),
}
