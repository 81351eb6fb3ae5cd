"""Values: the elements of a tensor in a given element type. Each box is gathered, multiplied by its scales if it has any, and cast."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from reshard.engine.casts import cast, scaled
from reshard.engine.transfer import Block, FileRange, Pieces, SlabPieces, Strip, Worker
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import F32, DType
from reshard.index.index import Scaling, Tensor


class Values:
    """The values of a tensor in the element type `dtype`. Several workers may read it."""

    def __init__(self, tensor: Tensor, dtype: DType) -> None:
        self._tensor, self._dtype, self._pieces = tensor, dtype, Pieces(tensor)
        self._scales = Pieces(tensor.scaling.scales) if tensor.scaling else None
        self.itemsize = max(dtype.itemsize, *(stored.itemsize for stored in tensor.dtypes))

    def within(self, slab: Box, axis: int) -> SlabPieces:
        """What the pieces of the tensor hold of a slab. Raises CheckpointError as `Pieces.within` does."""
        return self._pieces.within(slab, axis)

    def ranges(self, box: Box, gap: int) -> Iterator[FileRange]:
        """The file ranges that hold the values of a box. gap: as for `Pieces.ranges`."""
        yield from self._pieces.ranges(box, gap)
        if self._scales is not None and self._tensor.scaling is not None:
            yield from self._scales.ranges(self._tensor.scaling.box_of(box), gap)

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None) -> Block:
        """The values of a strip, as an array of lines: `out`, or an array that may be a view of the worker's buffers, which its next read
        overwrites.

        Raises: CheckpointError as `Worker.read` does.
        """
        source, scaling = self._tensor.dtype, self._tensor.scaling
        if self._scales is None and source == self._dtype:
            return worker.read(pieces, strip, out)
        if self._scales is None or scaling is None:
            values = cast(worker.read(pieces, strip), source, self._dtype, worker.converted(strip.sizes, self._dtype))
        else:
            box = strip.box
            scales_box = scaling.box_of(box)
            scales = cast(worker.gather(self._scales, scales_box), scaling.scales.dtype, F32).copy()
            factors = _factors(scales.view(np.float32), scaling, scales_box, box)
            values = scaled(worker.read(pieces, strip).reshape(box.sizes), source, factors, self._dtype).reshape(strip.sizes)
        if out is None:
            return values
        out[...] = values
        return out


def _factors(scales: Block, scaling: Scaling, scales_box: Box, box: Box) -> Block:
    """The scales of a box of elements, as an array that numpy broadcasts to the elements."""
    if scales.ndim != len(box.sizes):
        return scales.reshape((1,) * len(box.sizes))
    for axis, step in enumerate(scaling.block_shape):
        if step is not None and step > 1:
            indices = np.arange(box.offsets[axis], box.stops[axis]) // step - scales_box.offsets[axis]
            scales = np.take(scales, indices, axis=axis)
    return scales
