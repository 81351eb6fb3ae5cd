"""Reader: reads the values of a tensor, strip by strip. One kind of reader for each origin; here those that compute nothing but a cast."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from reshard.engine.transfer import Block, FileRange, Pieces, SlabPieces, Strip, Worker, strips
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.index.origin import Tensor
from reshard.plans.digests import Hash


class Reader(ABC):
    """Reads the values of a tensor in the element type `dtype`. Several workers may use it."""

    def __init__(self, tensor: Tensor, dtype: DType, base: Reader | None = None) -> None:
        """base: reads the same tensor before it is changed; None if there is no such reader, or there are several."""
        self.tensor, self.dtype, self._base = tensor, dtype, base
        self.itemsize: int = max(dtype.itemsize, base.itemsize if base else 0, *(each.itemsize for each in tensor.dtypes))
        """The bytes of its widest element."""

    def within(self, slab: Box, axis: int) -> SlabPieces:
        """What the pieces of the tensor hold of a slab. Raises CheckpointError as `Pieces.within` does."""
        return self._base.within(slab, axis) if self._base else SlabPieces(self.tensor, ())

    def ranges(self, box: Box, gap: int) -> Iterator[FileRange]:
        """The file ranges that hold the values of a box, as far as they are known before it is read. gap: as for `Pieces.ranges`."""
        return self._base.ranges(box, gap) if self._base else iter(())

    def new_hashes(self) -> list[Hash]:
        """A new hash for each of the checkpoints that a block is combined from; empty if it comes from one."""
        return []

    @abstractmethod
    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The values of a strip, as an array of lines: `out`, or an array that may be a view of the worker's buffers, which its next read
        overwrites.

        hashes: get the elements of each checkpoint that the strip is combined from.

        Raises: CheckpointError as `Worker.read` does, or if a quantized tensor is stored in groups of another order.
        """

    def whole(self, worker: Worker, box: Box) -> Block:
        """The values of a box, as a new array."""
        result, done = np.empty(box.sizes, self.dtype.word), 0
        flat = result.reshape(-1)
        for strip, (pieces,) in strips(box, self):
            volume = math.prod(strip.sizes)
            self.read(worker, pieces, strip, flat[done : done + volume].reshape(strip.sizes))
            done += volume
        return result


def put(values: Block, out: Block | None) -> Block:
    """The values, written into `out` if it is given."""
    if out is None:
        return values
    out[...] = values
    return out


OpenInput = Callable[[Tensor, DType], Reader]
"""Opens a reader of an input, in an element type."""


class StoredReader(Pieces, Reader):
    """Reads the elements that the tensor's own pieces hold. A worker changes them as deltas say."""

    def __init__(self, tensor: Tensor, *_: object) -> None:
        super().__init__(tensor)
        self.dtype = tensor.dtype

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The elements of a strip."""
        return worker.read(pieces, strip, out)
