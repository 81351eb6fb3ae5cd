"""The values of a tensor, box by box, in the element type that is wanted: gathered, multiplied with scales if it has some, cast."""

from __future__ import annotations

import numpy as np

from reshard.engine.casts import cast, scaled
from reshard.engine.transfer import Block, Pieces, Worker
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import F32, DType
from reshard.index.index import Scaling, Tensor


class Values:
    """A tensor as one worker after the other reads it."""

    def __init__(self, tensor: Tensor, dtype: DType) -> None:
        self._tensor, self._dtype, self._pieces = tensor, dtype, Pieces(tensor)
        self._scales = Pieces(tensor.scaling.scales) if tensor.scaling else None

    def read(self, worker: Worker, box: Box) -> Block:
        """The box's elements as words, row-major. The array may be the worker's, good until it reads again."""
        source, scaling = self._tensor.dtype, self._tensor.scaling
        if self._scales is None or scaling is None:
            return cast(worker.gather(self._pieces, box), source, self._dtype)
        held = scaling.box_of(box)
        scales = cast(worker.gather(self._scales, held), scaling.scales.dtype, F32).copy()
        factors = _spread(scales.view(np.float32), scaling, held, box)
        return scaled(worker.gather(self._pieces, box), source, factors, self._dtype)


def _spread(scales: Block, scaling: Scaling, held: Box, box: Box) -> Block:
    """One scale per element, or arrays that numpy spreads over the elements."""
    if scales.ndim != len(box.sizes):
        return scales.reshape((1,) * len(box.sizes))
    for axis, step in enumerate(scaling.block_shape):
        if step is not None and step > 1:
            places = np.arange(box.offsets[axis], box.stops[axis]) // step - held.offsets[axis]
            scales = np.take(scales, places, axis=axis)
    return scales
