"""Values: the elements of a tensor in a given element type. Each box is gathered, multiplied by its scales if it has any, updated by a
merged adapter if there is one, and cast."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from reshard.engine.casts import cast, scaled
from reshard.engine.transfer import Block, FileRange, Pieces, SlabPieces, Strip, Worker
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import F32, DType
from reshard.geometry.low_rank import Float32, add_products, row_lengths
from reshard.index.index import Scaling, Tensor, Update

# The most elements of a factor that stay in memory while a tensor is read.
_MOST_KEPT = 1 << 20


class Values:
    """The values of a tensor in the element type `dtype`. Several workers may read it."""

    def __init__(self, tensor: Tensor, dtype: DType) -> None:
        self._tensor, self._dtype, self._pieces = tensor, dtype, Pieces(tensor)
        self._scales = Pieces(tensor.scaling.scales) if tensor.scaling else None
        self._products = [_Product(update) for update in tensor.updates]
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
        if self._products:
            # A copy, because the factors are read into the worker's buffers.
            values = self._stored(worker, pieces, strip, F32).copy().view(np.float32).reshape(strip.box.sizes)
            self._update(worker, strip.box, values)
            result = cast(values.view(F32.word), F32, self._dtype).reshape(strip.sizes)
        elif self._scales is None and self._tensor.dtype == self._dtype:
            return worker.read(pieces, strip, out)
        else:
            result = self._stored(worker, pieces, strip, self._dtype)
        if out is None:
            return result
        out[...] = result
        return out

    def _stored(self, worker: Worker, pieces: SlabPieces, strip: Strip, dtype: DType) -> Block:
        """The stored values of a strip, without updates."""
        source, scaling = self._tensor.dtype, self._tensor.scaling
        if self._scales is None or scaling is None:
            return cast(worker.read(pieces, strip), source, dtype, worker.converted(strip.sizes, dtype))
        box = strip.box
        scales_box = scaling.box_of(box)
        scales = cast(worker.gather(self._scales, scales_box), scaling.scales.dtype, F32).copy()
        factors = _factors(scales.view(np.float32), scaling, scales_box, box)
        return scaled(worker.read(pieces, strip).reshape(box.sizes), source, factors, dtype).reshape(strip.sizes)

    def _update(self, worker: Worker, box: Box, values: Float32) -> None:
        """Apply the updates to the values of a box."""
        with np.errstate(all="ignore"):
            for product in self._products:
                shared = product.update.box.intersect(box)
                if shared is None:
                    continue
                part = values[shared.relative_to(box.offsets).index]
                matrix = part.reshape(1, -1) if part.ndim == 1 else part[(0,) * (part.ndim - 2)]
                matrix += product.of(worker, shared)
                if product.update.magnitude is not None:
                    matrix *= self._dora_factors(worker, product, shared, matrix)
            if self._dtype == F32:
                values[np.isnan(values)] = np.nan

    def _dora_factors(self, worker: Worker, product: _Product, box: Box, updated: Float32) -> Float32:
        """The factor of each row of a box with DoRA: its magnitude by the length of the whole row. updated: the values of the box."""
        rows = Box((box.offsets[0], 0), (box.sizes[0], self._tensor.shape[1]))
        if rows != box:
            stored = cast(worker.gather(self._pieces, rows), self._tensor.dtype, F32).copy().view(np.float32)
            updated = stored + product.of(worker, rows)
        return product.magnitude(worker, box) / row_lengths(updated)[:, None]


class _Product:
    """The product of an update. A small factor of the columns is read once."""

    def __init__(self, update: Update) -> None:
        self.update = update
        self._rows = Pieces(update.rows) if update.rows else None
        self._columns = Pieces(update.columns)
        self._magnitude = Pieces(update.magnitude) if update.magnitude else None
        self._kept: Float32 | None = None

    def of(self, worker: Worker, box: Box) -> Float32:
        """The update of a box, which lies in that of the update: an array of two axes."""
        local = box.relative_to(self.update.box.offsets)
        rank = self.update.columns.shape[0]
        (first, height), (left, width) = [(0, 1), *zip(local.offsets, local.sizes, strict=True)][-2:]
        delta = np.zeros((height, width), np.float32)
        rows = None if self._rows is None else _gathered(worker, self._rows, Box((first, 0), (height, rank)))
        if self.update.columns.elements <= _MOST_KEPT:
            if self._kept is None:
                self._kept = _gathered(worker, self._columns, Box.whole(self.update.columns.shape))
            add_products(delta, rows, self._kept[:, left : left + width])
        else:
            step = max(1, _MOST_KEPT // width)
            for start in range(0, rank, step):
                columns = _gathered(worker, self._columns, Box((start, left), (min(step, rank - start), width)))
                add_products(delta, None if rows is None else rows[:, start : start + step], columns)
        delta *= np.float32(self.update.scale)
        return delta

    def magnitude(self, worker: Worker, box: Box) -> Float32:
        """The magnitude of each row of a box, as an array of one column."""
        assert self._magnitude is not None
        local = box.relative_to(self.update.box.offsets)
        return _gathered(worker, self._magnitude, Box(local.offsets[:1], local.sizes[:1]))[:, None]


def _gathered(worker: Worker, pieces: Pieces, box: Box) -> Float32:
    """The elements of a box of a factor in float32, in memory of their own."""
    dtype = pieces.tensor.dtype
    if box.volume > _MOST_KEPT and box.sizes[0] > 1:
        half = box.sizes[0] // 2
        halves = (_gathered(worker, pieces, box.narrow(0, start, stop)) for start, stop in ((0, half), (half, box.sizes[0])))
        return np.concatenate(list(halves))
    return cast(worker.gather(pieces, box), dtype, F32).copy().view(np.float32)


def _factors(scales: Block, scaling: Scaling, scales_box: Box, box: Box) -> Block:
    """The scales of a box of elements, as an array that numpy broadcasts to the elements."""
    if scales.ndim != len(box.sizes):
        return scales.reshape((1,) * len(box.sizes))
    for axis, step in enumerate(scaling.block_shape):
        if step is not None and step > 1:
            indices = np.arange(box.offsets[axis], box.stops[axis]) // step - scales_box.offsets[axis]
            scales = np.take(scales, indices, axis=axis)
    return scales
