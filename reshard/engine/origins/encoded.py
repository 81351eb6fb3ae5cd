"""Quantizer: the codes and scales of a weight, computed tile by tile from its values. Those that need them meet the same tiles:

    codes   | block 0        | block 1        | ...       blocks end where the fingerprint wants it, tiles where the recipe does
    weight  | tile 0    | tile 1    | tile 2    | ...
    scales  | block 0                             ...

So each tile is computed once and kept for a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from reshard.engine.casts import Block
from reshard.engine.origins.reader import OpenInput, Reader, Tiles, put
from reshard.engine.origins.recipe import NotRepresentable, Recipe, exact_fp8_block, fp8_block, mxfp4, saturates
from reshard.engine.transfer import SlabPieces, Strip, Worker
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, DType
from reshard.index.origin import Encoded, Tensor
from reshard.plans.digests import Hash

RECIPES: Mapping[str, Recipe] = {
    "fp8-block": Recipe(BF16, (128, 128), fp8_block),
    "mxfp4": Recipe(BF16, (1, 32), mxfp4, saturates),
    "exact-fp8-block": Recipe(None, (128, 128), exact_fp8_block),
}


class Quantizer(Reader):
    """Computes a component of a weight that is being quantized. tiles: shared with its other component."""

    def __init__(self, tensor: Tensor, origin: Encoded, dtype: DType, open_input: OpenInput, tiles: Tiles) -> None:
        super().__init__(tensor, tensor.dtype)
        self._weight, self._component, self._name, self._tiles = origin.weight, origin.component, origin.recipe, tiles
        self._recipe, self._in_columns = RECIPES[origin.recipe], _is_in_columns(origin.weight)
        self._values = open_input(origin.weight, self._recipe.dtype or origin.weight.values_dtype)

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The elements of a strip of the component. Raises CheckpointError if the recipe cannot represent the values."""
        weight, component, box = self._weight, self._component, strip.box
        result = np.empty(box.sizes, self.dtype.word)
        experts, in_word = (1,) * (len(weight.shape) - 2), component.packing.words if component.packing else ()
        grid = experts + tuple(size or 1 for size in component.grid)
        ranges = [range(start * size, stop * size) for start, stop, size in zip(box.offsets, box.stops, grid, strict=False)]
        for tile in self._recipe.tiles(weight.shape, ranges, in_columns=self._in_columns):
            made = self._tiles.get((id(weight), tile), partial(self._computed, worker, tile), scales=component.is_scale)
            made = made.reshape(*experts, len(made), -1, *in_word)
            held = Box((*(start // size for start, size in zip(tile.offsets, grid, strict=True)), *(0 for _ in in_word)), made.shape)
            shared = held.intersect(box)
            if shared is not None:
                result[shared.relative_to(box.offsets).index] = made[shared.relative_to(held.offsets).index]
        return put(result.reshape(strip.sizes), out)

    def _computed(self, worker: Worker, tile: Box) -> tuple[Block, Block]:
        """The codes and scales of a tile."""
        words = self._values.whole(worker, tile).reshape(tile.sizes[-2:])
        try:
            codes, scales = self._recipe.quantize(words)
        except NotRepresentable as reason:
            raise CheckpointError(
                f"the values of {tile} {reason}",
                where=self._weight.name,
                why=f"The recipe {self._name} writes the same values in another form, or nothing",
                do="Dequantize the checkpoint with `dequantize=True`, and quantize the result with `quantize=`",
            ) from None
        if self._recipe.saturates(words, scales):
            self._tiles.saturated(self._weight.name, self._name)
        return codes, scales


def _is_in_columns(weight: Tensor) -> bool:
    """Whether the files hold the columns of a weight [..., out, in], so that few rows are short runs."""
    if weight.is_computed:
        return False
    strides = weight.shards.located().strides
    return bool((strides[:, -2] < strides[:, -1]).any())
