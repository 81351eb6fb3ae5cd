"""Values: the elements of a tensor in a given element type. Each box is gathered, decoded if the tensor is quantized, and cast."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from reshard.engine.casts import cast, decoded
from reshard.engine.recipes.recipe import NotRepresentable
from reshard.engine.recipes.table import RECIPES
from reshard.engine.transfer import Block, Pieces, SlabPieces, Strip, Worker, strips
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import E8M0, F32, DType
from reshard.index.index import Derivation, EncodedPart, Encoding, Tensor

# The number of elements that are decoded at once, so that their float32 values stay in a processor's cache.
_DECODED = 1 << 16

_TERMS = ("codes", "zero point")


class Values:
    """The values of a tensor in the element type `dtype`. Several workers may read it."""

    def __init__(self, tensor: Tensor, dtype: DType) -> None:
        self._tensor, self._dtype = tensor, dtype
        self._stored = [Pieces(stored) for stored in tensor.stored]
        self.itemsize = max(dtype.itemsize, *(stored.itemsize for stored in tensor.dtypes))

    def within(self, slab: Box, axis: int) -> SlabPieces:
        """What the pieces of the tensor hold of a slab. Raises CheckpointError as `Pieces.within` does."""
        if self._tensor.derivation:
            return SlabPieces(self._tensor, (), wants_many_lines=True)  # whole blocks are read at once
        if self._tensor.encoding is None:
            return self._stored[0].within(slab, axis)
        axes = self._tensor.encoding.parts[0].axes
        return SlabPieces(self._tensor, (), wants_many_lines=axes != tuple(sorted(axes)))

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None) -> Block:
        """The values of a strip, as an array of lines: `out`, or an array that may be a view of the worker's buffers, which its next read
        overwrites.

        Raises: CheckpointError as `Worker.read` does, or if a quantized tensor is stored in groups of another order.
        """
        source, encoding, derivation = self._tensor.dtype, self._tensor.encoding, self._tensor.derivation
        if derivation:
            assert source == self._dtype, "what is computed by a recipe is not cast"
            computed = self._computed(worker, derivation, strip.box).reshape(strip.sizes)
            if out is None:
                return computed
            out[...] = computed
            return out
        if encoding is None and source == self._dtype:
            return worker.read(pieces, strip, out)
        if encoding is None:
            values = cast(worker.read(pieces, strip), source, self._dtype, worker.converted(strip.sizes, self._dtype))
        else:
            values = worker.converted(strip.sizes, self._dtype)
            self._decode(worker, encoding, strip.box, values.reshape(strip.box.sizes))
        if out is None:
            return values
        out[...] = values
        return out

    def whole(self, worker: Worker, box: Box) -> Block:
        """The values of a box, as a new array."""
        result, done = np.empty(box.sizes, self._dtype.word), 0
        flat = result.reshape(-1)
        for strip, (pieces,) in strips(box, self):
            volume = math.prod(strip.sizes)
            self.read(worker, pieces, strip, flat[done : done + volume].reshape(strip.sizes))
            done += volume
        return result

    def _computed(self, worker: Worker, derivation: Derivation, box: Box) -> Block:
        """A box of a component, computed tile by tile from the weight's values."""
        recipe, component, shape = RECIPES[derivation.recipe], derivation.component, derivation.weight.shape
        values, result = Values(derivation.weight, recipe.dtype), np.empty(box.sizes, self._dtype.word)
        grid = tuple(size or 1 for size in component.grid)
        for tile in recipe.tiles(shape, [range(a * g, b * g) for a, b, g in zip(box.offsets, box.stops, grid, strict=True)]):
            try:
                made = recipe.codes_and_scales(values.whole(worker, tile))[component.is_scale]
            except NotRepresentable as reason:
                raise CheckpointError(
                    f"the values of {tile} {reason}",
                    where=derivation.weight.name,
                    why=f"The recipe {derivation.recipe} writes the same values in another form, or nothing",
                    do="Dequantize the checkpoint with --dequantize, and quantize the result with --quantize",
                ) from None
            first = [start // g for start, g in zip(tile.offsets, grid, strict=True)]
            lows = [max(a, b) for a, b in zip(first, box.offsets, strict=True)]
            highs = [min(a + n, b) for a, n, b in zip(first, made.shape, box.stops, strict=True)]
            inner = tuple(slice(low - a, high - a) for low, high, a in zip(lows, highs, first, strict=True))
            result[tuple(slice(low - a, high - a) for low, high, a in zip(lows, highs, box.offsets, strict=True))] = made[inner]
        return result

    def _decode(self, worker: Worker, encoding: Encoding, box: Box, out: Block) -> None:
        """Compute the values of a box of a quantized tensor."""
        stored = [
            (part, box_of, worker.gather(pieces, box_of).copy())
            for part, pieces in zip(encoding.parts, self._stored, strict=True)
            for box_of in (part.box_of(box),)
        ]
        for part, at, words in stored:
            if part.component.use == "group index":
                _check_order(part, encoding, at, words)
        for inner in _runs(box):
            values = {part.component.use: _values(part, at, words, inner) for part, at, words in stored if part.component.use in _TERMS}
            factors: Block = np.ones((1,) * len(box.sizes), np.float32)
            with np.errstate(all="ignore"):
                for part, at, words in stored:
                    if part.component.use == "scale":
                        factors = factors * _values(part, at, words, inner)
                    elif part.component.use == "divisor":
                        factors = factors / _values(part, at, words, inner)
            out[inner.relative_to(box.offsets).index] = decoded(values["codes"], values.get("zero point"), factors, self._dtype)


def _runs(box: Box) -> Iterator[Box]:
    """A box in parts of consecutive lines, with few elements each."""
    axis = next((axis for axis, size in enumerate(box.sizes) if size > 1), 0)
    lines = max(1, _DECODED // max(1, math.prod(box.sizes[axis + 1 :])))
    for start in range(0, box.sizes[axis], lines):
        yield box.narrow(axis, start, min(start + lines, box.sizes[axis]))


def _values(part: EncodedPart, stored_box: Box, words: Block, box: Box) -> Block:
    """The values of a component for a box of elements, in float32, as an array that numpy broadcasts to the elements.

    words: what the stored tensor holds of `stored_box`.
    """
    packing = part.component.packing
    if not part.axes:
        return component_values(part, words).reshape((1,) * len(box.sizes))
    within = part.box_of(box)
    words = words[within.relative_to(stored_box.offsets).index]
    if packing is None:
        values = component_values(part, words)
    else:
        assert part.packed_axis is not None
        values = packing.unpacked(words, part.packed_axis)
    values = values.transpose(part.axes)
    for axis, (size, step) in enumerate(zip(part.block_shape, part.grid, strict=True)):
        if size is None:
            continue
        first = box.offsets[axis] // (step or 1) * ((step or 1) // size)
        start, stop = box.offsets[axis], box.stops[axis]
        if size == 1:
            values = values[(slice(None),) * axis + (slice(start - first, stop - first),)]
        else:
            values = np.take(values, np.arange(start, stop) // size - first, axis=axis)
    return values


def component_values(part: EncodedPart, words: Block) -> Block:
    """The values of a component that is not packed, in float32. words: elements of the stored tensor."""
    dtype = E8M0 if part.component.exponents else part.tensor.dtype
    return cast(np.ascontiguousarray(words).view(dtype.word), dtype, F32).view(np.float32)


def _check_order(part: EncodedPart, encoding: Encoding, box: Box, words: Block) -> None:
    """Raises CheckpointError if input features are in other groups than the runs of neighbours."""
    size = next(size for each in encoding.parts if each.component.use == "scale" for size in each.block_shape[-1:])
    features = np.arange(box.offsets[0], box.stops[0])
    expected = features // size if size else features * 0
    if not np.array_equal(words.view(np.int32), expected):
        raise CheckpointError(
            "its input features are not in groups of neighbours (act-order)",
            where=part.tensor.name,
            why="The values would be multiplied by the scales of other groups",
            do="Quantize the model without act-order (desc_act), or load it with the library that wrote it",
        )
