"""The index of a raw checkpoint, from weights.json alone. The table is a claim: each line is checked against the length of weights.raw."""

from __future__ import annotations

import math
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import from_safetensors
from reshard.geometry.extents import Extent, Piece
from reshard.index.index import Index, RunFacts, Tensor
from reshard.index.shards import Shards
from reshard.storage.files import Files, missing, read_whole
from reshard.storage.json_input import parsed

from . import TABLE, WEIGHTS


def read(files: Files, hints: Hints) -> Index:
    """The index. Raises CheckpointError if the table is none, or does not fit the file of weights."""
    tensors = [read_entry(name, entry) for name, entry in read_table(files).items()]
    check_length(files, [piece for tensor in tensors for piece in tensor.pieces()])
    builder = IndexBuilder("raw", files)
    builder.add_files([WEIGHTS])
    for tensor in tensors:
        builder.add_tensor(tensor)
    return builder.build(RunFacts("a program of a third party", config=hints.config))


def read_table(files: Files) -> dict[str, Any]:
    """Name -> what the table says of the tensor."""
    try:
        table = parsed(read_whole(files, TABLE, limit=1 << 26))
    except ValueError as error:
        raise CheckpointError(f"it is not JSON: {error}", where=TABLE, do="Copy the file again") from None
    if not isinstance(table, dict):
        raise CheckpointError("it holds no table of tensors", where=TABLE, do="Copy the file again")
    return table


def read_entry(name: str, entry: Any) -> Tensor:
    """The tensor of a line of the table."""
    match entry:
        case {"dtype": str(word), "shape": [*sizes], "byte_offset": int(start)} if all(
            isinstance(size, int) and size >= 0 for size in sizes
        ):
            dtype, box = from_safetensors(word, where=name), Box.whole(tuple(sizes))
            piece = Piece(box, Extent(WEIGHTS, start, row_major(box.sizes), dtype))
            return Tensor(name, dtype, box.sizes, "weight", Shards.of([piece]))
    raise CheckpointError(f"{TABLE} has {str(entry)[:100]}, where dtype, shape and byte_offset are expected", where=name)


def check_length(files: Files, pieces: list[Piece]) -> None:
    """Raises CheckpointError if two tensors share bytes, or the last one does not end where the file ends."""
    end, size = 0, files.size(WEIGHTS)
    if size is None:
        raise missing(files, WEIGHTS)
    for piece in sorted(pieces, key=lambda piece: piece.extent.byte_offset):
        if piece.extent.byte_offset < end:
            raise CheckpointError(f"two tensors of {TABLE} share the bytes before {end:,}", where=WEIGHTS)
        end = piece.extent.byte_offset + math.prod(piece.box.sizes) * piece.extent.dtype.itemsize
    if end != size:
        raise CheckpointError(f"{WEIGHTS} has {size:,} bytes, {TABLE} says {end:,}", where=WEIGHTS, do="Copy the file again")
