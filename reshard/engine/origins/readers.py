"""Readers: which reader reads the values of a tensor, by its origin. Inputs are read by readers of their own, so origins nest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from reshard.engine.casts import cast
from reshard.engine.origins.decoded import Dequantizer
from reshard.engine.origins.encoded import Quantizer, Tiles
from reshard.engine.origins.merged import Merger
from reshard.engine.origins.reader import Reader, StoredReader, put
from reshard.engine.transfer import Block, SlabPieces, Strip, Worker
from reshard.geometry.dtypes import DType
from reshard.index.origin import Decoded, Encoded, Merged, Mixed, Origin, Patched, Stored, Tensor
from reshard.plans.digests import Hash


class CastReader(Reader):
    """Casts what another reader reads."""

    def __init__(self, source: Reader, dtype: DType) -> None:
        super().__init__(source.tensor, dtype, source)
        self._source = source

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The values of a strip in the other element type."""
        words = self._source.read(worker, pieces, strip)
        return put(cast(words, self._source.dtype, self.dtype, worker.converted(strip.sizes, self.dtype)), out)


def _combiner(*given: Any) -> Reader:
    from reshard.engine.origins.mixed import Combiner  # most tensors come from one checkpoint

    return Combiner(*given)


READERS: Mapping[type[Origin], Callable[..., Reader]] = {
    Stored: StoredReader,
    Patched: StoredReader,
    Decoded: Dequantizer,
    Encoded: Quantizer,
    Merged: Merger,
    Mixed: _combiner,
}
"""By the type of an origin, what makes its reader: of the tensor, the origin, an element type, `OpenInput` and `Tiles`."""


def reader(tensor: Tensor, dtype: DType, tiles: Tiles | None = None) -> Reader:
    """A reader of the values of a tensor in an element type.

    tiles: where the codes and scales of a weight that is being quantized meet; None: no others need them.
    """
    tiles = tiles or Tiles()
    made = READERS[type(tensor.origin)](tensor, tensor.origin, dtype, partial(reader, tiles=tiles), tiles)
    return made if made.dtype == dtype else CastReader(made, dtype)
