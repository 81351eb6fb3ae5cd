"""Reader: reads the values of a tensor, strip by strip. One kind of reader for each origin; here the one of stored elements, and the tiles
that the readers of a conversion share."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module

import numpy as np

from reshard.engine.casts import cast
from reshard.engine.transfer import Block, FileRange, Pieces, SlabPieces, Strip, Worker, strips
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.quantities import plural
from reshard.index.origin import Decoded, Encoded, Mapped, Merged, Mixed, Origin, Patched, Stored, Tensor, Weighted
from reshard.plans.digests import Hash


class Reader(ABC):
    """Reads the values of a tensor in the element type `dtype`. Several workers may use it."""

    def __init__(self, tensor: Tensor, dtype: DType, base: Reader | None = None) -> None:
        """base: reads the same tensor before it is changed; None if there is no such reader, or there are several."""
        self.tensor, self.dtype, self._base = tensor, dtype, base
        self.itemsize: int = max(dtype.itemsize, base.itemsize if base else 0, *(stored_dtype.itemsize for stored_dtype in tensor.dtypes))
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

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.dtype = tensor.dtype

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The elements of a strip."""
        return worker.read(pieces, strip, out)


# The most bytes of codes and of scales that are kept.
_MOST_CODES, _MOST_SCALES = 8 << 20, 4 << 20

TileKey = tuple[int, Box]
"""The identity of a weight's tensor, and a tile of it."""


class Tiles:
    """The tiles that were computed last, for the quantizers of a conversion. Several workers may use them."""

    def __init__(self) -> None:
        self._codes, self._scales = _Newest(_MOST_CODES), _Newest(_MOST_SCALES)
        self._under_way: set[TileKey] = set()
        self._changed = threading.Condition()
        self._saturated: dict[str, str] = {}
        self._shared: dict[tuple[int, ...], np.float32] = {}
        self._sharing = threading.Lock()

    def shared(self, weights: tuple[int, ...], compute: Callable[[], np.float32]) -> np.float32:
        """The global scale of weights, by the identities of their tensors. It is computed once; other workers wait for it."""
        with self._sharing:
            if weights not in self._shared:
                self._shared[weights] = compute()
            return self._shared[weights]

    def saturated(self, weight: str, recipe: str) -> None:
        """Remember that values of a weight are beyond the range of a recipe's form."""
        self._saturated.setdefault(weight, recipe)

    def notes(self) -> tuple[str, ...]:
        """A sentence about values that are beyond the range of their form."""
        if not self._saturated:
            return ()
        weight, recipe = min(self._saturated.items())
        count = plural(len(self._saturated), "weight")
        return (f"values of {count}, for example of {weight}, are too large for {recipe}: the largest value that it holds is written",)

    def get(self, key: TileKey, compute: Callable[[], tuple[Block, Block]], *, scales: bool) -> Block:
        """The codes of a tile, or its scales. Computes both if they are not kept; waits for another worker that is computing them."""
        newest = self._scales if scales else self._codes
        with self._changed:
            while key in self._under_way:
                self._changed.wait()
            if (kept := newest.get(key)) is not None:
                return kept
            self._under_way.add(key)
        try:
            computed = compute()
            with self._changed:
                self._codes.add(key, computed[0])
                self._scales.add(key, computed[1])
        finally:
            with self._changed:
                self._under_way.remove(key)
                self._changed.notify_all()
        return computed[scales]


class _Newest:
    """Arrays by their tile. The oldest ones make room for new ones."""

    def __init__(self, most: int) -> None:
        self._most, self._nbytes = most, 0
        self._arrays: OrderedDict[TileKey, Block] = OrderedDict()

    def get(self, key: TileKey) -> Block | None:
        return self._arrays.get(key)

    def add(self, key: TileKey, array: Block) -> None:
        if (former := self._arrays.pop(key, None)) is not None:
            self._nbytes -= former.nbytes
        self._arrays[key] = array
        self._nbytes += array.nbytes
        while self._nbytes > self._most:
            self._nbytes -= self._arrays.popitem(last=False)[1].nbytes


class CastReader(Reader):
    """Casts what another reader reads."""

    def __init__(self, source: Reader, dtype: DType) -> None:
        super().__init__(source.tensor, dtype, source)
        self._source = source

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The values of a strip in the other element type."""
        words = self._source.read(worker, pieces, strip)
        return put(cast(words, self._source.dtype, self.dtype, worker.converted(strip.sizes, self.dtype)), out)


# Origins that are computed: the file in this folder, and its reader. Most conversions need none of them, so they are imported late.
COMPUTED: Mapping[type[Origin], tuple[str, str]] = {
    Decoded: ("decoded", "Dequantizer"),
    Encoded: ("encoded", "Quantizer"),
    Mapped: ("mapped", "Mapper"),
    Merged: ("merged", "Merger"),
    Mixed: ("mixed", "Combiner"),
    Weighted: ("weighted", "Summer"),
}


def reader(tensor: Tensor, dtype: DType, tiles: Tiles | None = None) -> Reader:
    """A reader of the values of a tensor in an element type.

    tiles: where the codes and scales of a weight that is being quantized meet; None: no others need them.
    """
    made: Reader
    if type(tensor.origin) in (Stored, Patched):
        made = StoredReader(tensor)
    else:
        file, name = COMPUTED[type(tensor.origin)]
        tiles = tiles or Tiles()
        make = getattr(import_module(f"reshard.engine.origins.{file}"), name)
        made = make(tensor, tensor.origin, dtype, partial(reader, tiles=tiles), tiles)
    return made if made.dtype == dtype else CastReader(made, dtype)
