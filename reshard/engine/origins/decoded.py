"""Dequantizer: the values of quantized elements from the stored words of their codes, scales and zero points.

Where codes are stored in bytes, and few scales or scales of one byte belong to them, each pair of a scale and a code byte has an entry in a
table. One lookup for each byte then replaces the unpacking, the product and the cast of each element. The same function computes the tables
and the values that no table holds, so that the bits are the same.

An example: FP8 codes of [256, 256], one float32 scale for each block of 128 x 128. Rows 0 to 127 have two scales, 0.5 and 2.0:

    table     512 entries: value of code byte b times 0.5 at b, times 2.0 at 256 + b
    places    [[0, 256]] -> spread over 128 bytes each: 0 in columns 0 to 127, 256 in columns 128 to 255
    codes     0x38 (1.0) in columns 5 and 200 -> entries 0x038 and 0x138 -> values 0.5 and 2.0

So each of the 32,768 elements costs one OR and one lookup. With MXFP4, a byte holds two codes, and a scale is one byte for 32 elements: one
table of 256 x 256 entries, of two values each, serves all blocks, and the place of a scale is its own byte. The scale 0x80 (2.0) and the
codes 0x21 (0.5 in the low four bits, then 1.0) have the entry 0x8021: the values 1.0 and 2.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from threading import get_ident

import numpy as np

from reshard.engine.casts import Block, cast, decoded, decoded_affine
from reshard.engine.origins.reader import OpenInput, Reader, put
from reshard.engine.transfer import FileRange, SlabPieces, Strip, Worker
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import F32, DType, from_safetensors
from reshard.geometry.value import value
from reshard.index.origin import Decoded, EncodedPart, Tensor
from reshard.models.stored_forms import BlockShape
from reshard.plans.digests import Hash

# The elements or bytes of codes that are computed at once, so that all intermediate results stay in a processor's cache.
_AT_ONCE = 1 << 17
# The fewest bytes of codes with the same scale for which a table of 256 values is made.
_LONG = 1024
_BYTES = np.arange(256, dtype=np.uint8)


@value
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


class Dequantizer(Reader):
    """Reads the values of a quantized tensor, box by box."""

    def __init__(self, tensor: Tensor, origin: Decoded, dtype: DType, open_input: OpenInput, *_: object) -> None:
        super().__init__(tensor, dtype)
        self._origin, self._stored = origin, [open_input(part.tensor, part.tensor.dtype) for part in origin.parts]
        scales = [i for i, part in enumerate(origin.parts) if part.component.use in ("scale", "divisor") and part.axes]
        self._has_tables = _is_in_bytes(origin) and len(scales) < 2
        self._scales = scales[0] if scales else None
        """Which part has several values for the tensor."""
        self._last: dict[int, tuple[tuple[bytes, DType], Block]] = {}
        """For each thread, the table that it made last, with its scales and the element type of its values."""

    def within(self, slab: Box, axis: int) -> SlabPieces:
        """Whether the codes of a slab are read fastest in many lines."""
        axes = self._origin.parts[0].axes
        return SlabPieces(self.tensor, (), wants_many_lines=axes != tuple(sorted(axes)))

    def ranges(self, box: Box, gap: int) -> Iterator[FileRange]:
        """The file ranges that hold the codes and scales of a box."""
        for part, source in zip(self._origin.parts, self._stored, strict=True):
            yield from source.ranges(part.box_of(box), gap)

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The values of a strip: computed in `out`, if it is row-major."""
        if out is None or not out.flags.c_contiguous:
            return put(self.read(worker, pieces, strip, worker.converted(strip.sizes, self.dtype)), out)
        self._dequantize(worker, strip.box, out.reshape(strip.box.sizes))
        return out

    def _dequantize(self, worker: Worker, box: Box, out: Block) -> None:
        """Write the values of a box into `out`. Raises CheckpointError if the tensor is stored in groups of another order."""
        boxes = [part.box_of(box) for part in self._origin.parts]
        words = (source.whole(worker, inner) for source, inner in zip(self._stored, boxes, strict=True))
        stored, dtype = list(map(StoredWords, self._origin.parts, boxes, words)), self.dtype
        for stored_words in stored:
            if stored_words.part.component.use == "group index":
                _check_order(stored_words, self._origin)
        scales = None if self._scales is None else stored[self._scales]
        codes = _codes_in_bytes(stored[0], scales, box) if self._has_tables else None
        if codes is None:
            for inner in _runs(box):
                out[inner.relative_to(box.offsets).index] = _computed(stored, inner, dtype)
            return
        target = out.transpose(codes.order)
        for index, rows in codes.runs():
            table, numbers = self._table(stored, scales, codes.scales_of(index, rows), dtype)
            entries = codes.bytes_of[index][rows].astype(np.uint16)
            entries |= codes.spread(numbers)
            values = target[index][rows]
            if values.strides[-1] == values.itemsize:
                np.take(table, entries, out=values.view(table.dtype), mode="clip")  # every entry is there; "clip" saves the check
            else:
                values[...] = np.take(table, entries, mode="clip").view(values.dtype)

    def _table(self, stored: Sequence[StoredWords], scales: StoredWords | None, words: Block, dtype: DType) -> tuple[Block, Block]:
        """A table of values, and the place in it of the 256 values of each scale. words: the scales, as an array of two axes."""
        if words.itemsize == 1:
            places, wanted = words.view(np.uint8).astype(np.uint16), _BYTES if scales else _BYTES[:1]
        else:
            places, wanted = np.arange(words.size, dtype=np.uint16).reshape(words.shape), np.ascontiguousarray(words).reshape(-1)
        places <<= np.uint16(8)
        key, last = (wanted.tobytes(), dtype), self._last.get(get_ident())
        if last is None or last[0] != key:
            self._last[get_ident()] = last = key, _table(stored, scales, wanted, dtype)
        return last[1], places


@value
class _CodesInBytes:
    """The codes of a box. Each byte and its scale determine the values of some elements.

    The axes are those of the stored codes: rows, and bytes in each row; before them, those of a stack.
    """

    order: tuple[int, ...]
    """The axes of the tensor in this order."""
    bytes_of: Block
    """The codes."""
    scales: Block
    """The stored words of their scales: one for each block along each axis, or for all of an axis."""
    first: int
    """The number of the first row in the tensor."""
    height: int
    """Rows with the same scales; 0: all."""
    width: int
    """Bytes of a row with the same scale; 0: all."""
    skipped: int
    """Bytes of the first block that are not in the box."""

    def runs(self) -> Iterator[tuple[tuple[int, ...], slice]]:
        """Rows that are looked up at once: their index in the stack, and which they are. They have scales of their own or the same ones."""
        *stack, rows, length = self.bytes_of.shape
        step = max(1, _AT_ONCE // max(1, length))
        for index in np.ndindex(*stack):
            start = 0
            while start < rows:
                border = (start + self.first) // self.height * self.height + self.height - self.first if self.height > 1 else rows
                stop = min(start + step, border, rows)
                yield index, slice(start, stop)
                start = stop

    def scales_of(self, index: tuple[int, ...], rows: slice) -> Block:
        """The scales of some rows, as an array of two axes."""
        scales: Block = self.scales[tuple(position % size for position, size in zip(index, self.scales.shape, strict=False))]
        if self.height == 1:
            return scales[rows]
        row = (rows.start + self.first) // self.height - self.first // self.height if self.height else 0
        return scales[row : row + 1]

    def spread(self, of_scales: Block) -> Block:
        """Values for scales, as an array that numpy broadcasts to the bytes of the rows."""
        if not self.width:
            return of_scales
        return np.repeat(of_scales, self.width, axis=1)[:, self.skipped : self.skipped + self.bytes_of.shape[-1]]


def _codes_in_bytes(codes: StoredWords, scales: StoredWords | None, box: Box) -> _CodesInBytes | None:
    """The codes of a box for tables; None if tables would not be faster, or the box begins or ends inside of a byte."""
    packing, axes = codes.part.component.packing, codes.part.axes
    of_byte, order = 8 // packing.bits if packing else 1, tuple(axes.index(axis) for axis in range(len(axes)))
    *_, row, packed = order
    blocks = scales.part.block_shape if scales else (None,) * len(axes)
    if any(size % of_byte for size in (box.offsets[packed], box.sizes[packed], blocks[packed] or 0)):
        return None
    height, width = blocks[row] or 0, (blocks[packed] or 0) // of_byte
    words = _in_axes(scales.part, scales.of(box)).transpose(order) if scales else np.zeros((1,) * len(axes), np.uint8)
    in_bytes = _bytes_of(codes, box, packed, of_byte)
    # A scale of one byte has its values in a table for all scales.
    if words.itemsize > 1 and (words.shape[-1] > 256 or (height == 1 and in_bytes.shape[-1] < _LONG * words.shape[-1])):
        return None
    skipped = box.offsets[packed] // of_byte % width if width else 0
    return _CodesInBytes(order, in_bytes, words, box.offsets[row], height, width, skipped)


def _is_in_bytes(encoding: Decoded) -> bool:
    """Whether each byte of the codes tells the values of some elements, before they are multiplied by their scales."""
    codes = encoding.parts[0]
    if any(part.component.use in ("zero point", "bias") for part in encoding.parts):
        return False
    packing = codes.component.packing
    return codes.tensor.dtype.itemsize == 1 if packing is None else packing.in_order and codes.packed_axis == len(codes.axes) - 1


def _table(stored: Sequence[StoredWords], scales: StoredWords | None, words: Block, dtype: DType) -> Block:
    """For each of these words of the part `scales`, the values of each code byte as one element. Without that part, for the codes alone."""
    part, packing = stored[0].part, stored[0].part.component.packing
    codes = packing.values_of_bytes if packing else _values_of_bytes(part.tensor.dtype)

    def values(stored_words: StoredWords) -> Block:
        return component_values(stored_words.part, words if stored_words is scales else stored_words.words).reshape(-1, 1, 1)

    decoded_codes = decoded(codes[None], None, _factors(stored, values, 3), dtype)
    table: Block = decoded_codes.reshape(-1, codes.shape[1]).view(f"<u{codes.shape[1] * dtype.itemsize}")[:, 0]
    return table


@cache
def _values_of_bytes(dtype: DType) -> Block:
    """[256, 1]: the value that each byte stands for, in float32."""
    return cast(_BYTES, dtype, F32).view(np.float32)[:, None]


def _bytes_of(codes: StoredWords, box: Box, packed: int, of_byte: int) -> Block:
    """The bytes of the codes of a box, in the order of the stored axes. packed: the axis of the box along which they are packed."""
    words, start, packing = codes.of(box), 0, codes.part.component.packing
    if packing:
        words = words.reshape(*words.shape[:-2], -1) if packing.words else words
        start = box.offsets[packed] % packing.count // of_byte
    in_bytes = np.ascontiguousarray(words).view(np.uint8)
    return in_bytes[..., start : start + box.sizes[packed] // of_byte]


def _computed(stored: Sequence[StoredWords], box: Box, dtype: DType) -> Block:
    """The words of a box, computed for each element."""
    used = ("codes", "zero point", "bias")
    terms = {term.part.component.use: _values(term, box) for term in stored if term.part.component.use in used}
    factors = _factors(stored, lambda term: _values(term, box), len(box.sizes))
    if "bias" in terms:
        rounded = next(term.part.tensor.dtype for term in stored if term.part.component.use == "bias")
        return decoded_affine(terms["codes"], factors, terms["bias"], rounded, dtype)
    return decoded(terms["codes"], terms.get("zero point"), factors, dtype)


def _factors(stored: Sequence[StoredWords], values: Callable[[StoredWords], Block], axes: int) -> Block:
    """The product of all scales, over all divisors. values: those of a part, as an array of so many axes."""
    factors: Block = np.ones((1,) * axes, np.float32)
    with np.errstate(all="ignore"):
        for term in stored:
            if term.part.component.use == "scale":
                factors = factors * values(term)
            elif term.part.component.use == "divisor":
                factors = factors / values(term)
    return factors


def _values(stored: StoredWords, box: Box) -> Block:
    """The values of a component for a box of elements, in float32, as an array that numpy broadcasts to the elements."""
    part, packing = stored.part, stored.part.component.packing
    if not part.axes:
        return component_values(part, stored.words).reshape((1,) * len(box.sizes))
    words = stored.of(box)
    if packing is None:
        values = _in_axes(part, component_values(part, words))
    else:
        assert part.packed_axis is not None
        if packing.words or not packing.places:  # their values are unpacked where they lie
            values = _in_axes(part, packing.unpacked(words, part.packed_axis))
        else:  # words are fewer than the values in them, so the words are brought into the order of the axes
            values = packing.unpacked(np.ascontiguousarray(words.transpose(part.axes)), part.axes.index(part.packed_axis))
    return spread(values, part.block_shape, part.grid, box)


def _in_axes(part: EncodedPart, values: Block) -> Block:
    """Values of a component in the order of the axes of the quantized tensor."""
    if part.component.is_vector:
        sizes = zip(part.block_shape, part.axes, strict=True)
        return values.reshape([1 if size is None else values.shape[axis] for size, axis in sizes])
    if part.component.unit_axes:
        return values[..., 0, :, 0]
    return values.transpose(part.axes)


def spread(values: Block, block_shape: BlockShape, grid: BlockShape, box: Box) -> Block:
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


def _runs(box: Box) -> Iterator[Box]:
    """A box in parts of few elements: consecutive lines."""
    axis = next((axis for axis, size in enumerate(box.sizes) if size > 1), 0)
    lines = max(1, _AT_ONCE * box.sizes[axis] // max(1, box.volume))
    for start in range(0, box.sizes[axis], lines):
        yield box.narrow(axis, start, min(start + lines, box.sizes[axis]))


def component_values(part: EncodedPart, words: Block) -> Block:
    """The values of a component that is not packed, in float32. words: elements of the stored tensor."""
    named = part.component.read_as
    dtype = from_safetensors(named, where=part.tensor.name) if named else part.tensor.dtype
    return cast(np.ascontiguousarray(words).view(dtype.word), dtype, F32).view(np.float32)


def _check_order(stored: StoredWords, encoding: Decoded) -> None:
    """Raises CheckpointError if input features are in other groups than the runs of neighbours."""
    box = stored.box
    size = next(size for part in encoding.parts if part.component.use == "scale" for size in part.block_shape[-1:])
    features = np.arange(box.offsets[0], box.stops[0])
    expected = features // size if size else features * 0
    if not np.array_equal(stored.words.view(np.int32), expected):
        raise CheckpointError(
            "its input features are not in groups of neighbours (act-order)",
            where=stored.part.tensor.name,
            why="The values would be multiplied by the scales of other groups",
            do="Quantize the model without act-order (desc_act), or load it with the library that wrote it",
        )
