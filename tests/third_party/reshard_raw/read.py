"""The index of a raw checkpoint, from weights.json alone."""

from __future__ import annotations

import json
import math

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import from_safetensors
from reshard.geometry.extents import Extent, Piece
from reshard.index.index import Index, RunFacts, Tensor
from reshard.index.shards import Shards
from reshard.storage.files import Files, read_whole

from . import TABLE, WEIGHTS


def read(files: Files, hints: Hints) -> Index:
    """The index. Raises CheckpointError if a tensor ends after the end of the file."""
    table = json.loads(read_whole(files, TABLE, limit=1 << 26))
    size = files.size(WEIGHTS) or 0
    builder = IndexBuilder("raw", files)
    builder.add_files([WEIGHTS])
    for name, entry in table.items():
        dtype, shape, start = from_safetensors(entry["dtype"], where=name), tuple(entry["shape"]), entry["byte_offset"]
        end = start + math.prod(shape) * dtype.itemsize
        if end > size:
            raise CheckpointError(f"the tensor ends at byte {end:,}, {WEIGHTS} has {size:,}", where=name, do="Copy the file again")
        piece = Piece(Box.whole(shape), Extent(WEIGHTS, start, row_major(shape), dtype))
        builder.add_tensor(Tensor(name, dtype, shape, "weight", Shards.of([piece])))
    return builder.build(RunFacts("a program of a third party", config=hints.config))
