"""Quantizer: the codes and scales of a weight, computed tile by tile from its values. Those that need them meet the same tiles:

    codes   | block 0        | block 1        | ...       blocks end where the fingerprint wants it, tiles where the recipe does
    weight  | tile 0    | tile 1    | tile 2    | ...
    scales  | block 0                             ...

So each tile is computed once and kept for a while. A recipe with a global scale reads all weights that share it before, once, for the
largest magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from reshard.engine.casts import Block
from reshard.engine.origins import microscaled
from reshard.engine.origins.reader import OpenInput, Reader, Tiles, put
from reshard.engine.origins.recipe import NotRepresentable, Recipe, exact_fp8_block, fp8_block, fp8_channel, magnitudes_of
from reshard.engine.transfer import SlabPieces, Strip, Worker
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import F32, DType
from reshard.index.origin import Encoded, Tensor
from reshard.plans.digests import Hash

RECIPES: Mapping[str, Recipe] = {
    "fp8-block": Recipe((128, 128), fp8_block),
    "fp8-channel": Recipe((1, None), fp8_channel),
    "exact-fp8-block": Recipe((128, 128), exact_fp8_block),
    **microscaled.RECIPES,
}


class Quantizer(Reader):
    """Computes a component of a weight that is being quantized. tiles: shared with its other components."""

    def __init__(self, tensor: Tensor, origin: Encoded, dtype: DType, open_input: OpenInput, tiles: Tiles) -> None:
        super().__init__(tensor, tensor.dtype)
        self._origin, self._weight, self._component, self._tiles = origin, origin.weight, origin.component, tiles
        self._recipe, self._in_columns = RECIPES[origin.recipe], _is_in_columns(origin.weight)
        self._values = open_input(origin.weight, origin.dtype)
        self._sharing = [open_input(weight, origin.dtype) for weight in origin.sharing]

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The elements of a strip of the component. Raises CheckpointError if the recipe cannot represent the values."""
        weight, component, box = self._weight, self._component, strip.box
        if component.is_single:
            return put(np.array(self._shared(worker), np.float32).reshape(strip.sizes).view(F32.word), out)
        result = np.empty(box.sizes, self.dtype.word)
        experts, in_word = (1,) * (len(weight.shape) - 2), component.packing.words if component.packing else ()
        grid = experts + tuple(size or 1 for size in component.grid)
        ranges = [range(start * size, stop * size) for start, stop, size in zip(box.offsets, box.stops, grid, strict=False)]
        for tile in self._recipe.tiles(weight.shape, ranges, in_columns=self._in_columns):
            made = self._tiles.get((id(weight), tile), partial(self._computed, worker, tile), scales=component.is_scale)
            made = made.reshape(*experts, len(made), -1, *in_word)
            held = Box((*(start // size for start, size in zip(tile.offsets, grid, strict=True)), *(0 for _ in in_word)), made.shape)
            met = held.intersect(box)
            if met is not None:
                result[met.relative_to(box.offsets).index] = made[met.relative_to(held.offsets).index]
        return put(result.reshape(strip.sizes), out)

    def _computed(self, worker: Worker, tile: Box) -> tuple[Block, Block]:
        """The codes and scales of a tile."""
        words, dtype, shared = self._values.whole(worker, tile).reshape(tile.sizes[-2:]), self._origin.dtype, self._shared(worker)
        try:
            codes, scales = self._recipe.quantize(words, dtype, shared)
        except NotRepresentable as reason:
            raise self._not_representable(self._weight, tile, reason) from None
        if self._recipe.saturates(words, scales, dtype):
            self._tiles.saturated(self._weight.name, self._origin.recipe)
        return codes, scales

    def _shared(self, worker: Worker) -> np.float32 | None:
        """The global scale of the weights that share one; None for recipes without one."""
        if self._recipe.shared is None:
            return None
        return self._tiles.shared(tuple(map(id, self._origin.sharing)), partial(self._computed_shared, worker, self._recipe.shared))

    def _computed_shared(self, worker: Worker, shared: Callable[[Block, DType], np.float32]) -> np.float32:
        largest = np.zeros(1, self._origin.dtype.word)
        for weight, values in zip(self._origin.sharing, self._sharing, strict=True):
            for tile in self._recipe.tiles(weight.shape, [range(size) for size in weight.shape], in_columns=_is_in_columns(weight)):
                magnitudes = magnitudes_of(values.whole(worker, tile))
                largest = np.maximum(largest, magnitudes.max(initial=0))
                try:
                    scale = shared(largest, self._origin.dtype)
                except NotRepresentable as reason:
                    raise self._not_representable(weight, tile, reason) from None
        return scale

    def _not_representable(self, weight: Tensor, tile: Box, reason: NotRepresentable) -> CheckpointError:
        name = self._origin.recipe
        is_exact = name.startswith("exact-")
        return CheckpointError(
            f"the values of {tile} {reason}",
            where=weight.name,
            why=f"The recipe {name} writes the same values in another form, or nothing"
            if is_exact
            else f"The scales of {name} would follow from them, and other values would become zero",
            do="Dequantize the checkpoint with `dequantize=True`, and quantize the result with `quantize=`"
            if is_exact
            else "`reshard doctor` names all such weights; convert an earlier step",
        )


def _is_in_columns(weight: Tensor) -> bool:
    """Whether the files hold the columns of a weight [..., out, in], so that few rows are short runs."""
    if weight.is_computed:
        return False
    strides = weight.shards.located().strides
    return bool((strides[:, -2] < strides[:, -1]).any())
