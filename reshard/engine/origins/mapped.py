"""Mapper: the values of optimizer state in 8 or 4 bits, table[code] * scale of the block, in float32, as bitsandbytes and torchao compute
them: one product for each element, rounded once.

An example: elements 250 to 261 of a state in blocks of 256. Elements 250 to 255 have the scale of block 0, the others that of block 1.
"""

from __future__ import annotations

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
    """Reads the values of optimizer state in 8 or 4 bits."""

    def __init__(self, tensor: Tensor, origin: Mapped, _: DType, open_input: OpenInput, *__: object) -> None:
        super().__init__(tensor, F32)
        self._origin, self._steps = origin, row_major(tensor.shape)
        self._codes, self._scales = (open_input(part, part.dtype) for part in (origin.codes, origin.scales))
        self._table = open_input(origin.table, F32) if origin.table else None
        self._two_in_byte = origin.codes.shape != tensor.shape

    def ranges(self, box: Box, gap: int) -> Iterator[FileRange]:
        """The file ranges that hold the codes of a box."""
        start, stop = self._run(box)
        yield from self._codes.ranges(_flat(start // 2, -(-stop // 2)) if self._two_in_byte else box, gap)

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The values of a strip."""
        box, block = strip.box, self._origin.block
        start, stop = self._run(box)
        places = self._places(box)
        if self._two_in_byte:
            in_bytes = self._codes.whole(worker, _flat(start // 2, -(-stop // 2)))
            codes = np.stack([in_bytes >> 4, in_bytes & 15], axis=1).reshape(-1)[places - start // 2 * 2]
        else:
            codes = self._codes.whole(worker, box)
        scales = self._scales.whole(worker, _flat(start // block, -(-stop // block))).view(np.float32)
        if self._table is None:
            values = cast(np.ascontiguousarray(codes), self._codes.dtype, F32).view(np.float32)
        else:
            values = self._table.whole(worker, Box.whole(self._table.tensor.shape)).view(np.float32)[codes]
        with np.errstate(all="ignore"):
            values = values * scales[places // block - start // block]
        return put(values.view(F32.word).reshape(strip.sizes), out)

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


def _flat(start: int, stop: int) -> Box:
    return Box((start,), (stop - start,))
