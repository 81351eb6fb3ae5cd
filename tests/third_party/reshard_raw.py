"""raw: a format of a third party. All tensors lie in one file, and a JSON file says where.

weights.raw     the elements of each tensor in row-major order, each tensor at a multiple of `--alignment` bytes
weights.json    {name: {"dtype": "BF16", "shape": [rows, columns], "byte_offset": 0}, ...}
"""

from __future__ import annotations

import json
import math

from reshard.adapter.format import Format, Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.model_files import ModelFiles
from reshard.adapter.option import Option
from reshard.canonical.content import Content
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import from_safetensors
from reshard.geometry.extents import Extent, Piece
from reshard.geometry.stored import whole
from reshard.index.index import Index, RunFacts, Tensor
from reshard.index.shards import Shards
from reshard.plans.layout import Layout, Placed, Sidecar, TargetFile
from reshard.plans.target import Target
from reshard.storage.files import Files, read_whole

WEIGHTS, TABLE = "weights.raw", "weights.json"


class Raw(Format):
    name = "raw"
    summary = "one file of elements and a JSON table"
    owns = (WEIGHTS, TABLE)
    options = (Option("alignment", "number", "Start each tensor at a multiple of N bytes."),)

    def detect(self, files: Files) -> str | None:
        return f"{WEIGHTS} and {TABLE}" if {WEIGHTS, TABLE} <= set(files.list()) else None

    def read(self, files: Files, hints: Hints) -> Index:
        table = json.loads(read_whole(files, TABLE, limit=1 << 26))
        size = files.size(WEIGHTS) or 0
        builder = IndexBuilder(self.name, files)
        builder.add_files([WEIGHTS])
        for name, entry in table.items():
            dtype, shape, start = from_safetensors(entry["dtype"], where=name), tuple(entry["shape"]), entry["byte_offset"]
            end = start + math.prod(shape) * dtype.itemsize
            if end > size:
                raise CheckpointError(f"it ends at byte {end:,}, {WEIGHTS} has {size:,}", where=name, do="Copy the file again")
            piece = Piece(Box.whole(shape), Extent(WEIGHTS, start, row_major(shape), dtype))
            builder.add_tensor(Tensor(name, dtype, shape, "weight", Shards.of([piece])))
        return builder.build(RunFacts("somebody's program", config=hints.config))

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        alignment = target.options.get("alignment", 1)
        placed, padding, end = [], [], 0
        for name, tensor in content.weights.items():
            start = -(-end // alignment) * alignment
            if start > end:  # every byte of a target has a stated origin
                padding.append((end, bytes(start - end)))
            placed.append(Placed(whole(name, target.dtype_of(tensor), tensor.shape), start))
            end = start + placed[-1].tensor.nbytes
        table = {
            item.tensor.name: {"dtype": item.tensor.dtype.name, "shape": item.tensor.shape, "byte_offset": item.byte_offset}
            for item in placed
        }
        sidecars = companions.sidecars(item.tensor.dtype for item in placed)
        return Layout(
            self.name,
            (TargetFile(WEIGHTS, end, tuple(padding), tuple(placed)),),
            (*sidecars, Sidecar(TABLE, json.dumps(table).encode())),
        )


FORMAT = Raw()
