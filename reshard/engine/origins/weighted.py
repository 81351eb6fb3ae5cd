"""Summer: the values of a factor of several LoRA adapters, in float32, with the bits of PEFT (`Weighted` of index/origin.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.engine.casts import Block, cast
from reshard.engine.origins.reader import OpenInput, Reader, put
from reshard.engine.transfer import SlabPieces, Strip, Worker
from reshard.geometry.dtypes import F32, DType
from reshard.index.origin import Tensor, Weighted
from reshard.plans.digests import Hash


class Summer(Reader):
    """Reads the sum of weighted parts."""

    def __init__(self, tensor: Tensor, origin: Weighted, dtype: DType, open_input: OpenInput, *_: object) -> None:
        super().__init__(tensor, dtype)
        self._terms = [(term, open_input(term.tensor, F32)) for term in origin.terms]

    def read(self, worker: Worker, pieces: SlabPieces, strip: Strip, out: Block | None = None, hashes: Sequence[Hash] = ()) -> Block:
        """The values of a strip."""
        box = strip.box
        values, is_set = np.zeros(box.sizes, np.float32), np.zeros(box.sizes, np.bool_)
        with np.errstate(all="ignore"):
            for term, source in self._terms:
                shared = term.box.intersect(box)
                if shared is None:
                    continue
                part = source.whole(worker, shared.relative_to(term.box.offsets)).view(np.float32)
                for factor in term.factors:
                    part = part * np.float32(factor)
                at = shared.relative_to(box.offsets).index
                # The first part is not added to zero: that would lose the sign of a zero.
                values[at] = np.where(is_set[at], values[at] + part, part)
                is_set[at] = True
        return put(cast(values.view(F32.word), F32, self.dtype).reshape(strip.sizes), out)
