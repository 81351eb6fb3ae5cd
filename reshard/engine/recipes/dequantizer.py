"""Dequantizer: the values of quantized elements from the stored words of their codes, scales and zero points.

Where codes are stored in bytes, and few scales or scales of one byte belong to them, each pair of a scale and a code byte has an entry in a
table. One lookup for each byte then replaces the unpacking, the product and the cast of each element. The same function computes the tables
and the values that no table holds, so that the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from reshard.engine.casts import Block, cast, decoded
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import E8M0, F32, DType
from reshard.geometry.light_dataclass import dataclass
from reshard.index.index import EncodedPart, Encoding
from reshard.models.quantized import BlockShape

# The number of elements that are computed at once.
_AT_ONCE = 1 << 18
# The most scales of several bytes for which a table is made.
_MOST_SCALES = 256
_BYTES = np.arange(256, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class StoredWords:
    """What a component holds of a block of elements."""

    part: EncodedPart
    """The component."""
    box: Box
    """The box of its stored tensor."""
    words: Block
    """The elements of that box."""

    def of(self, box: Box) -> Block:
        """The stored words for a smaller box of elements."""
        return self.words[self.part.box_of(box).relative_to(self.box.offsets).index]


class Dequantizer:
    """Computes the values of one quantized tensor, box by box. Several workers may use it."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._is_in_bytes = _is_in_bytes(encoding)
        self._scales = [i for i, part in enumerate(encoding.parts) if part.component.use in ("scale", "divisor") and part.axes]
        """Which parts have several values for the tensor."""
        self._tables: dict[DType, Block] = {}

    def dequantize(self, stored: Sequence[StoredWords], box: Box, out: Block, dtype: DType) -> None:
        """Write the values of a box into `out`, as words of an element type. stored: what each part of the encoding holds of the box.

        Raises: CheckpointError if the tensor is stored in groups of another order.
        """
        for each in stored:
            if each.part.component.use == "group index":
                _check_order(each, self._encoding)
        for inner in _runs(box, stored[0].part.axes):
            found = self._looked_up(stored, inner, dtype) if self._is_in_bytes and len(self._scales) < 2 else None
            out[inner.relative_to(box.offsets).index] = _computed(stored, inner, dtype) if found is None else found

    def _looked_up(self, stored: Sequence[StoredWords], box: Box, dtype: DType) -> Block | None:
        """The words of a box through a table; None if it has too many scales for one, or begins or ends inside of a byte."""
        codes, scales = stored[0], stored[self._scales[0]] if self._scales else None
        packing, axes = codes.part.component.packing, codes.part.axes
        of_byte = 8 // packing.bits if packing else 1
        packed = axes.index(len(axes) - 1)
        blocks = scales.part.block_shape if scales else (None,) * len(axes)
        if any(size % of_byte for size in (box.offsets[packed], box.sizes[packed], blocks[packed] or 0)):
            return None
        index = _bytes_of(codes, box, packed, of_byte).astype(np.intp)
        words = scales.of(box) if scales else _BYTES[:1]
        if scales is None or words.itemsize == 1:
            if dtype not in self._tables:
                self._tables[dtype] = _table(stored, scales, _BYTES if scales else words, dtype)
            table, numbers = self._tables[dtype], words.view(np.uint8).astype(np.intp)
        elif words.size <= _MOST_SCALES:
            table = _table(stored, scales, np.ascontiguousarray(words).reshape(-1), dtype)
            numbers = np.arange(words.size, dtype=np.intp).reshape(words.shape)
        else:
            return None
        if scales:
            in_bytes = Box(*(tuple(n // of_byte if i == packed else n for i, n in enumerate(of)) for of in (box.offsets, box.sizes)))
            byte_blocks = tuple(n // of_byte if n and i == packed else n for i, n in enumerate(blocks))
            numbers = _spread(_in_axes(scales.part, numbers) << 8, byte_blocks, byte_blocks, in_bytes)
            index |= numbers.transpose([axes.index(axis) for axis in range(len(axes))])
        return np.take(table, index).view(dtype.word).transpose(axes)


def _is_in_bytes(encoding: Encoding) -> bool:
    """Whether each byte of the codes tells the values of some elements, but for their scales."""
    codes = encoding.parts[0]
    if any(part.component.use == "zero point" for part in encoding.parts):
        return False
    packing = codes.component.packing
    return codes.tensor.dtype.itemsize == 1 if packing is None else packing.in_order and codes.packed_axis == len(codes.axes) - 1


def _table(stored: Sequence[StoredWords], scales: StoredWords | None, words: Block, dtype: DType) -> Block:
    """For each of these words of the part `scales`, the values of each code byte as one element. Without that part, for the codes alone."""
    part, packing = stored[0].part, stored[0].part.component.packing
    codes = packing.values_of_bytes if packing else component_values(part, _BYTES)[:, None]

    def values(each: StoredWords) -> Block:
        return component_values(each.part, words if each is scales else each.words).reshape(-1, 1, 1)

    found = decoded(codes[None], None, _factors(stored, values, 3), dtype)
    table: Block = found.reshape(-1, codes.shape[1]).view(f"<u{codes.shape[1] * dtype.itemsize}")[:, 0]
    return table


def _bytes_of(codes: StoredWords, box: Box, packed: int, of_byte: int) -> Block:
    """The bytes of the codes of a box, in the order of the stored axes. packed: the axis of the box along which they are packed."""
    words, start, packing = codes.of(box), 0, codes.part.component.packing
    if packing:
        words = words.reshape(*words.shape[:-2], -1) if packing.words else words
        start = box.offsets[packed] % packing.count // of_byte
    found = np.ascontiguousarray(words).view(np.uint8)
    return found[..., start : start + box.sizes[packed] // of_byte]


def _computed(stored: Sequence[StoredWords], box: Box, dtype: DType) -> Block:
    """The words of a box, computed for each element."""
    terms = {each.part.component.use: _values(each, box) for each in stored if each.part.component.use in ("codes", "zero point")}
    factors = _factors(stored, lambda each: _values(each, box), len(box.sizes))
    return decoded(terms["codes"], terms.get("zero point"), factors, dtype)


def _factors(stored: Sequence[StoredWords], values: Callable[[StoredWords], Block], axes: int) -> Block:
    """The product of all scales, over all divisors. values: those of a part, as an array of so many axes."""
    factors: Block = np.ones((1,) * axes, np.float32)
    with np.errstate(all="ignore"):
        for each in stored:
            if each.part.component.use == "scale":
                factors = factors * values(each)
            elif each.part.component.use == "divisor":
                factors = factors / values(each)
    return factors


def _values(stored: StoredWords, box: Box) -> Block:
    """The values of a component for a box of elements, in float32, as an array that numpy broadcasts to the elements."""
    part, packing = stored.part, stored.part.component.packing
    if not part.axes:
        return component_values(part, stored.words).reshape((1,) * len(box.sizes))
    words = stored.of(box)
    if packing is None:
        values = component_values(part, words)
    else:
        assert part.packed_axis is not None
        values = packing.unpacked(words, part.packed_axis)
    return _spread(_in_axes(part, values), part.block_shape, part.grid, box)


def _in_axes(part: EncodedPart, values: Block) -> Block:
    """Values of a component in the order of the axes of the quantized tensor."""
    if part.component.is_vector:
        sizes = zip(part.block_shape, part.axes, strict=True)
        return values.reshape([1 if size is None else values.shape[axis] for size, axis in sizes])
    return values.transpose(part.axes)


def _spread(values: Block, block_shape: BlockShape, grid: BlockShape, box: Box) -> Block:
    """The values of blocks as an array that numpy broadcasts to the elements of a box.

    values: those of all stored elements that hold some of the box. grid: elements per stored element along each axis.
    """
    for axis, (size, step) in enumerate(zip(block_shape, grid, strict=True)):
        if size is None:
            continue
        along: tuple[slice, ...] = (slice(None),) * axis
        first = box.offsets[axis] // (step or 1) * ((step or 1) // size)
        start, stop = box.offsets[axis] - first * size, box.stops[axis] - first * size
        low, high = start // size, -(-stop // size)
        values = values[*along, low:high]
        if size > 1 and high > low + 1:  # a single value is broadcast
            values = np.repeat(values, size, axis=axis)[*along, start - low * size : stop - low * size]
    return values


def _runs(box: Box, axes: tuple[int, ...]) -> Iterator[Box]:
    """A box in parts of few elements: consecutive lines in the order of the file. axes: for each axis of the box, the stored one."""
    axis = next((axis for axis in sorted(range(len(axes)), key=axes.__getitem__) if box.sizes[axis] > 1), 0)
    lines = max(1, _AT_ONCE * box.sizes[axis] // max(1, box.volume))
    for start in range(0, box.sizes[axis], lines):
        yield box.narrow(axis, start, min(start + lines, box.sizes[axis]))


def component_values(part: EncodedPart, words: Block) -> Block:
    """The values of a component that is not packed, in float32. words: elements of the stored tensor."""
    dtype = E8M0 if part.component.exponents else part.tensor.dtype
    return cast(np.ascontiguousarray(words).view(dtype.word), dtype, F32).view(np.float32)


def _check_order(stored: StoredWords, encoding: Encoding) -> None:
    """Raises CheckpointError if input features are in other groups than the runs of neighbours."""
    box = stored.box
    size = next(size for each in encoding.parts if each.component.use == "scale" for size in each.block_shape[-1:])
    features = np.arange(box.offsets[0], box.stops[0])
    expected = features // size if size else features * 0
    if not np.array_equal(stored.words.view(np.int32), expected):
        raise CheckpointError(
            "its input features are not in groups of neighbours (act-order)",
            where=stored.part.tensor.name,
            why="The values would be multiplied by the scales of other groups",
            do="Quantize the model without act-order (desc_act), or load it with the library that wrote it",
        )
