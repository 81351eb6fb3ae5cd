"""Values: the elements of a tensor in a given element type. Each box is gathered, multiplied by its scales if it has any, and cast."""

from __future__ import annotations

import numpy as np

from reshard.engine.casts import cast, scaled
from reshard.engine.transfer import Block, Pieces, Worker
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import F32, DType
from reshard.index.index import Scaling, Tensor


class Values:
    """The values of a tensor in the element type `dtype`. Several workers may read it."""

    def __init__(self, tensor: Tensor, dtype: DType) -> None:
        self._tensor, self._dtype, self._pieces = tensor, dtype, Pieces(tensor)
        self._scales = Pieces(tensor.scaling.scales) if tensor.scaling else None

    def read(self, worker: Worker, box: Box) -> Block:
        """The values of a box. The array may be a view of the worker's buffer, which its next read overwrites.

        Raises: CheckpointError as `Worker.gather` does.
        """
        source, scaling = self._tensor.dtype, self._tensor.scaling
        if self._scales is None or scaling is None:
            return cast(worker.gather(self._pieces, box), source, self._dtype)
        scales_box = scaling.box_of(box)
        scales = cast(worker.gather(self._scales, scales_box), scaling.scales.dtype, F32).copy()
        factors = _factors(scales.view(np.float32), scaling, scales_box, box)
        return scaled(worker.gather(self._pieces, box), source, factors, self._dtype)


def _factors(scales: Block, scaling: Scaling, scales_box: Box, box: Box) -> Block:
    """The scales of a box of elements, as an array that numpy broadcasts to the elements."""
    if scales.ndim != len(box.sizes):
        return scales.reshape((1,) * len(box.sizes))
    for axis, step in enumerate(scaling.block_shape):
        if step is not None and step > 1:
            indices = np.arange(box.offsets[axis], box.stops[axis]) // step - scales_box.offsets[axis]
            scales = np.take(scales, indices, axis=axis)
    return scales
