"""Values: the elements of a tensor in a given element type. Each box is gathered, decoded if the tensor is quantized, updated by a merged
adapter or combined with other checkpoints if the plan says so, and cast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from reshard.engine.casts import cast, numpy_type
from reshard.engine.recipes.dequantizer import Dequantizer, StoredWords
from reshard.engine.recipes.quantizer import RECIPES, Quantizer, Tiles
from reshard.engine.transfer import Block, FileRange, Pieces, SlabPieces, Strip, Worker, bytes_of, strips
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import F32, DType
from reshard.geometry.low_rank import Float32, add_products, row_lengths
from reshard.index.index import Combination, LowRankUpdate, Tensor
from reshard.plans.digests import CURRENT, Hash

if TYPE_CHECKING:
    from reshard.engine.recipes.combiner import Words

# The most elements of a factor that stay in memory while a tensor is read.
_MOST_KEPT = 1 << 20


class Values:
    """The values of a tensor in the element type `dtype`. Several workers may read it.

    tiles: where the codes and scales of a weight that is being quantized meet; None: no others need them.
    """

    def __init__(self, tensor: Tensor, dtype: DType, tiles: Tiles | None = None) -> None:
        self._tensor, self._dtype = tensor, dtype
        self._stored = [Pieces(stored) for stored in tensor.stored]
        updates = () if tensor.derivation else tensor.updates
        self._products = [_Product(update) for update in updates if isinstance(update, LowRankUpdate)]
        self._combined = next((_Combined(update) for update in updates if isinstance(update, Combination)), None)
        self._dequantizer = Dequantizer(tensor.encoding) if tensor.encoding else None
        self._quantizer = None
        if derivation := tensor.derivation:
            weight = derivation.weight
            values = Values(weight, RECIPES[derivation.recipe].dtype or weight.values_dtype)
            self._quantizer = Quantizer(derivation, values.whole, tiles or Tiles())
        widest = max(dtype.itemsize, *(stored.itemsize for stored in tensor.dtypes))
        inputs = len(self._combined.inputs) if self._combined else 1
        # A strip of each input is in memory at once. Together they have the bytes of one strip, as they stay in the processor's cache; with
        # more than eight inputs those of up to four, as short strips take many calls.
        self.itemsize = widest * max(min(inputs, 8), inputs // 4)

    def within(self, slab: Box, axis: int) -> SlabPieces:
        """What the pieces of the tensor hold of a slab. Raises CheckpointError as `Pieces.within` does."""
        if self._tensor.derivation:
            return SlabPieces(self._tensor, ())
        if self._combined:
            return SlabPieces(self._tensor, (), of_inputs=self._combined.within(slab, axis))
        if self._tensor.encoding is None:
            return self._stored[0].within(slab, axis)
        axes = self._tensor.encoding.parts[0].axes
        return SlabPieces(self._tensor, (), wants_many_lines=axes != tuple(sorted(axes)))

    def ranges(self, box: Box, gap: int) -> Iterator[FileRange]:
        """The file ranges that hold the values of a box, as far as they are known before it is read. gap: as for `Pieces.ranges`."""
        if self._tensor.derivation:
            return  # the tiles that a recipe needs are known when it computes
        if self._combined:
            for values in self._combined.inputs:
                yield from values.ranges(box, gap)
            return
        parts = self._tensor.encoding.parts if self._tensor.encoding else (None,)
        for part, pieces in zip(parts, self._stored, strict=True):
            yield from pieces.ranges(part.box_of(box) if part else box, gap)

    def new_hashes(self) -> list[Hash]:
        """A new hash for each of the checkpoints that a block is combined from; empty if it comes from one."""
        return [CURRENT.new() for _ in self._combined.inputs] if self._combined else []

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The values of a strip, as an array of lines: `out`, or an array that may be a view of the worker's buffers, which its next read
        overwrites.

        hashes: get the elements of each checkpoint that the strip is combined from.

        Raises: CheckpointError as `Worker.read` does, or if a quantized tensor is stored in groups of another order.
        """
        source, encoding = self._tensor.dtype, self._tensor.encoding
        if self._quantizer:
            result = self._quantized(worker, self._quantizer, strip)
        elif self._combined:
            result = self._combined.read(worker, pieces, strip, self._dtype, hashes)
        elif self._products:
            # A copy, because the factors are read into the worker's buffers.
            values = self._values(worker, pieces, strip, F32).copy().view(np.float32).reshape(strip.box.sizes)
            self._update(worker, strip.box, values)
            result = cast(values.view(F32.word), F32, self._dtype).reshape(strip.sizes)
        elif encoding is None and source == self._dtype:
            return worker.read(pieces, strip, out)
        elif encoding and out is not None and out.flags.c_contiguous:
            self._dequantize(worker, strip.box, out.reshape(strip.box.sizes), self._dtype)
            return out
        else:
            result = self._values(worker, pieces, strip, self._dtype)
        if out is None:
            return result
        out[...] = result
        return out

    def _values(self, worker: Worker, pieces: SlabPieces, strip: Strip, dtype: DType) -> Block:
        """The values of a strip in an element type, without updates."""
        if self._tensor.encoding is None:
            return cast(worker.read(pieces, strip), self._tensor.dtype, dtype, worker.converted(strip.sizes, dtype))
        values = worker.converted(strip.sizes, dtype)
        self._dequantize(worker, strip.box, values.reshape(strip.box.sizes), dtype)
        return values

    def _quantized(self, worker: Worker, quantizer: Quantizer, strip: Strip) -> Block:
        """A strip of a component of a weight that is being quantized."""
        dtype = self._tensor.dtype
        computed = np.empty(strip.box.sizes, dtype.word)
        quantizer.compute(worker, strip.box, computed)
        return cast(computed, dtype, self._dtype).reshape(strip.sizes)

    def whole(self, worker: Worker, box: Box) -> Block:
        """The values of a box, as a new array."""
        result, done = np.empty(box.sizes, self._dtype.word), 0
        flat = result.reshape(-1)
        for strip, (pieces,) in strips(box, self):
            volume = math.prod(strip.sizes)
            self.read(worker, pieces, strip, flat[done : done + volume].reshape(strip.sizes))
            done += volume
        return result

    def _dequantize(self, worker: Worker, box: Box, out: Block, dtype: DType) -> None:
        """Compute the values of a box of a quantized tensor in an element type."""
        assert self._tensor.encoding is not None and self._dequantizer is not None
        parts = self._tensor.encoding.parts
        boxes = [part.box_of(box) for part in parts]
        words = (worker.gather(pieces, held).copy() for pieces, held in zip(self._stored, boxes, strict=True))
        self._dequantizer.dequantize(list(map(StoredWords, parts, boxes, words)), box, out, dtype)

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
            base = Values(replace(self._tensor, updates=()), F32).whole(worker, rows).view(np.float32)
            updated = base + product.of(worker, rows)
        return product.magnitude(worker, box) / row_lengths(updated)[:, None]


class _Product:
    """The product of an update. A small factor of the columns is read once."""

    def __init__(self, update: LowRankUpdate) -> None:
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


class _Combined:
    """The values of a tensor that come from several checkpoints."""

    def __init__(self, combination: Combination) -> None:
        from reshard.engine.recipes import combiner  # most tensors come from one checkpoint

        self._combination, self._combiner = combination, combiner
        self.inputs = [Values(each.tensor, each.tensor.values_dtype) for each in combination.inputs]
        """The values of each input."""
        is_slerp = combination.rule == "slerp"
        self._turn = combiner.Turn(combination.inputs[0].tensor.shape, combination.weights[1]) if is_slerp else None

    def within(self, slab: Box, axis: int) -> tuple[SlabPieces, ...]:
        """What the pieces of each input hold of a slab."""
        return tuple(values.within(slab, axis) for values in self.inputs)

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, dtype: DType, hashes: Sequence[Hash]) -> Block:
        """The values of a strip in an element type. hashes: get the elements of each input.

        Raises: CheckpointError for a NaN or infinity in an input, and if inputs that must be equal are not.
        """
        if self._combination.rule == "equal":
            return self._equal(worker, pieces, strip, dtype, hashes)
        if self._turn and self._combination.weights[1] in (0, 1):
            # An end of the arc is the input, bit for bit: a sum would lose the sign of a zero.
            values, end = self.inputs, int(self._combination.weights[1])
            return cast(values[end].read(worker, pieces.of_inputs[end], strip), self._combination.inputs[end].tensor.values_dtype, dtype)
        coefficients = self._turn.coefficients(lambda box: self._flat(worker, box)) if self._turn else self._combination.weights
        inputs = self._words(worker, pieces, strip, hashes)
        result, is_finite = self._combiner.combine(self._combination, coefficients, inputs, dtype)
        if not is_finite:  # an input has such an element, or the sum is too large
            for each, words in zip(self._combination.inputs, inputs, strict=True):
                self._combiner.check_finite(words, each, strip.box)
        return result.reshape(strip.sizes)

    def _words(self, worker: Worker, pieces: SlabPieces, strip: Strip, hashes: Sequence[Hash]) -> Words:
        """The elements of a strip of each input."""
        types = [each.tensor.values_dtype for each in self._combination.inputs]
        is_one_type = {*types} == {types[0]}
        found = np.empty((len(types), *strip.sizes), types[0].word) if is_one_type else [np.empty(strip.sizes, each.word) for each in types]
        for values, of_input, words in zip(self.inputs, pieces.of_inputs, found, strict=True):
            values.read(worker, of_input, strip, words)
        for running, words in zip(hashes, found, strict=False):
            running.update(bytes_of(words))
        return found

    def _equal(self, worker: Worker, pieces: SlabPieces, strip: Strip, dtype: DType, hashes: Sequence[Hash]) -> Block:
        first, *others = self._words(worker, pieces, strip, hashes)
        for number, words in enumerate(others, 1):
            self._combiner.check_equal(first, words, self._combination, number, strip.box)
        return cast(first, self._combination.inputs[0].tensor.dtype, dtype)

    def _flat(self, worker: Worker, box: Box) -> tuple[Block, Block]:
        """The elements of a box of the first two inputs, as numbers in row-major order."""
        first, second = (
            values.whole(worker, box).reshape(-1).view(numpy_type(each.tensor.values_dtype))
            for values, each in zip(self.inputs, self._combination.inputs, strict=True)
        )
        return first, second


def _gathered(worker: Worker, pieces: Pieces, box: Box) -> Float32:
    """The elements of a box of a factor in float32, in memory of their own."""
    dtype = pieces.tensor.dtype
    if box.volume > _MOST_KEPT and box.sizes[0] > 1:
        half = box.sizes[0] // 2
        halves = (_gathered(worker, pieces, box.narrow(0, start, stop)) for start, stop in ((0, half), (half, box.sizes[0])))
        return np.concatenate(list(halves))
    return cast(worker.gather(pieces, box), dtype, F32).copy().view(np.float32)
