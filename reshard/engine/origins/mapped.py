"""Mapper: the values of codes in 8 or 4 bits, as bitsandbytes and torchao compute them: table[code] * scale of the block, in float32, each
operation rounded once.

An example: elements 250 to 261 of a state in blocks of 256. Elements 250 to 255 have the scale of block 0, the others that of block 1.

Source: bitsandbytes 0.50 (backends/default/ops.py, functional.int8_vectorwise_dequant).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import mul

import numpy as np
import numpy.typing as npt

from reshard.engine.casts import Block, cast
from reshard.engine.origins.reader import OpenInput, Reader, put
from reshard.engine.transfer import FileRange, SlabPieces, Strip, Worker
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import F32, DType
from reshard.index.origin import Mapped, Tensor
from reshard.plans.digests import Hash


class Mapper(Reader):
    """Reads the values of mapped codes, strip by strip."""

    def __init__(self, tensor: Tensor, origin: Mapped, _: DType, open_input: OpenInput, *__: object) -> None:
        super().__init__(tensor, F32)
        self._origin, self._steps = origin, row_major(tensor.shape)
        self._codes, self._scales = (open_input(part, part.dtype) for part in (origin.codes, origin.scales))
        self._table = open_input(origin.table, F32) if origin.table else None
        self._in_a_row = 0 if origin.codes.shape == tensor.shape else 2 * origin.codes.dtype.itemsize * math.prod(origin.codes.shape[1:])
        """The elements whose codes a row of the stored codes holds, two in a byte; 0: the codes have the shape of the tensor."""

    def ranges(self, box: Box, gap: int) -> Iterator[FileRange]:
        """The file ranges that hold the codes and the scales of a box."""
        start, stop = self._run(box)
        yield from self._codes.ranges(_rows(self._codes.tensor, start, stop, self._in_a_row) if self._in_a_row else box, gap)
        yield from self._scales.ranges(_rows(self._scales.tensor, start, stop, self._origin.block), gap)

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The values of a strip."""
        box, origin = strip.box, self._origin
        start, stop = self._run(box)
        places = None if stop - start == box.volume else self._places(box) - start
        codes = self._codes_of(worker, box, places)
        scales = self._scales.whole(worker, _rows(self._scales.tensor, start, stop, origin.block)).view(np.float32)
        first = start % origin.block
        if places is None:
            scales = np.repeat(scales, origin.block)[first : first + box.volume].reshape(box.sizes)
        else:
            scales = scales[(places + first) // origin.block]
        if self._table:
            values = self._table.whole(worker, Box.whole(self._table.tensor.shape)).view(np.float32)[codes]
        elif self._codes.dtype.floating:
            values = cast(np.ascontiguousarray(codes), self._codes.dtype, F32).view(np.float32)
        else:
            values = codes.view(np.int8).astype(np.float32)
        with np.errstate(all="ignore"):
            values = values * scales
            if origin.unit != 1:
                values *= np.float32(origin.unit)
            if origin.offset is not None:
                values += np.float32(origin.offset)
        return put(values.view(F32.word).reshape(strip.sizes), out)

    def _codes_of(self, worker: Worker, box: Box, places: npt.NDArray[np.int64] | None) -> Block:
        """The codes of a box. places: those of its elements after its first one, if others lie between them."""
        if not self._in_a_row:
            return self._codes.whole(worker, box)
        start, stop = self._run(box)
        in_bytes = self._codes.whole(worker, _rows(self._codes.tensor, start, stop, self._in_a_row)).reshape(-1).view(np.uint8)
        codes = np.stack([in_bytes >> 4, in_bytes & 15], axis=1).reshape(-1)[start % self._in_a_row :]
        return codes[: box.volume].reshape(box.sizes) if places is None else codes[places]

    def _run(self, box: Box) -> tuple[int, int]:
        """The numbers of the first element of a box, and of the one after its last, in row-major order of the tensor."""
        start = sum(map(mul, box.offsets, self._steps))
        return start, start + sum((size - 1) * step for size, step in zip(box.sizes, self._steps, strict=True)) + 1

    def _places(self, box: Box) -> npt.NDArray[np.int64]:
        """The number of each element of a box."""
        places = np.zeros((1,) * len(box.sizes), np.int64)
        for axis, (start, stop, step) in enumerate(zip(box.offsets, box.stops, self._steps, strict=True)):
            along = np.arange(start, stop, dtype=np.int64) * step
            places = places + along.reshape([-1 if at == axis else 1 for at in range(len(box.sizes))])
        return places


def _rows(tensor: Tensor, start: int, stop: int, step: int) -> Box:
    """The box of a stored tensor with the rows for the elements start..stop. step: the elements for which a row stands."""
    first, last = start // step, -(-stop // step)
    return Box((first, *(0 for _ in tensor.shape[1:])), (last - first, *tensor.shape[1:]))
