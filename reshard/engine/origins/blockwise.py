"""BlockReader: the values of weights that bitsandbytes packed, which are one run of codes, whatever their shape.

    weight [out, in]        codes: elements 2i and 2i + 1 in the high and the low four bits of byte i; a table has the value of each code
    absmax [n / 64]         the factor of 64 elements that follow each other: float32, or again a code of one byte:
                            nested_quant_map[code] * nested_absmax[block / 256] + offset

    INT8 (LLM.int8): int8 [out, in], and SCB [out], 127 times the factor of a row

Products are computed in float32, in the order of bitsandbytes 0.50 (backends/default/ops.py, functional.int8_vectorwise_dequant), and
rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.engine.origins.reader import OpenInput, Reader, put
from reshard.engine.transfer import FileRange, SlabPieces, Strip, Worker
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import F32, DType
from reshard.index.origin import Blockwise, Tensor
from reshard.plans.digests import Hash

_OF_127 = np.float32(7.874015718698502e-3)


class BlockReader(Reader):
    """Reads the values of a weight, rows by rows."""

    def __init__(self, tensor: Tensor, origin: Blockwise, dtype: DType, open_input: OpenInput, *_: object) -> None:
        super().__init__(tensor, dtype)
        self._origin, self._stored = origin, [open_input(part.tensor, part.tensor.dtype) for part in origin.parts]
        self._width = math.prod(tensor.shape[1:])

    def ranges(self, box: Box, gap: int) -> Iterator[FileRange]:
        """The file ranges that hold the codes and the factors of the rows of a box."""
        for source, inner in zip(self._stored, self._boxes(box), strict=True):
            yield from source.ranges(inner, gap)

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The values of a strip."""
        rows = strip.box.offsets[0], strip.box.sizes[0]
        stored = (source.whole(worker, box) for source, box in zip(self._stored, self._boxes(strip.box), strict=True))
        values = (self._by_block if self._origin.block else _by_row)([*stored], *rows)
        whole = Box((rows[0], *(0 for _ in self.tensor.shape[1:])), (rows[1], *self.tensor.shape[1:]))
        chosen = np.ascontiguousarray(values.reshape(whole.sizes)[strip.box.relative_to(whole.offsets).index])
        words = cast(chosen.view(F32.word), F32, self.dtype)
        return put(words.reshape(strip.sizes), out if out is None else out.reshape(strip.sizes))

    def _boxes(self, box: Box) -> Iterator[Box]:
        """The box of each stored tensor that is read for the rows of a box: tables are read whole."""
        start, stop = (row * self._width for row in (box.offsets[0], box.stops[0]))
        codes, factors, *tables = (part.tensor for part in self._origin.parts)
        if not self._origin.block:
            yield Box((box.offsets[0], 0), (box.sizes[0], codes.shape[1]))
            yield Box((box.offsets[0],), (box.sizes[0],))
            return
        of_word = 2 * codes.dtype.itemsize
        for tensor, step in ((codes, of_word), (factors, self._origin.block)):
            first, last = start // step, -(-stop // step)
            yield Box((first, *(0 for _ in tensor.shape[1:])), (last - first, *tensor.shape[1:]))
        yield from (Box.whole(tensor.shape) for tensor in tables)

    def _by_block(self, stored: list[Block], row: int, rows: int) -> Block:
        """The values of rows of 4-bit codes, in float32."""
        origin, start, count = self._origin, row * self._width, rows * self._width
        words, factors, table, *nested = (np.ascontiguousarray(block).reshape(-1) for block in stored)
        in_bytes = words.view(np.uint8)
        codes = np.empty(2 * len(in_bytes), np.uint8)
        codes[::2], codes[1::2] = in_bytes >> 4, in_bytes & 15
        skipped = start % (2 * words.itemsize)
        if nested:
            absmax, values = (block.view(np.float32) for block in nested)
            blocks = np.arange(start // origin.block, start // origin.block + len(factors)) // origin.nested
            scales = values[factors.view(np.uint8)] * absmax[blocks] + np.float32(origin.offset)
        else:
            scales = factors.view(np.float32)
        first = start % origin.block
        spread = np.repeat(scales, origin.block)[first : first + count]
        product: Block = table.view(np.float32)[codes[skipped : skipped + count]] * spread
        return product


def _by_row(stored: list[Block], row: int, rows: int) -> Block:
    """The values of rows of int8, in float32."""
    codes, factors = stored
    product: Block = codes.view(np.int8).astype(np.float32) * factors.view(np.float32).reshape(-1, 1) * _OF_127
    return product
