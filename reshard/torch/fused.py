"""A trainer's weights under other names than the published ones: experts in one tensor, as transformers 5 has them, or fused projections.

    mlp.experts.gate_up_proj   [experts, 2 * width, hidden]   of the trainer
        experts.0.gate_proj [width, hidden] | experts.0.up_proj | experts.1.gate_proj | ...      the published weights inside

The trainer's state dict is described as a checkpoint, whose names are read as those of any other. So what fuses what is said once, in the
declarations of the models.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping

from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Extent, Piece
from reshard.geometry.sections import Section, Sections, StoredTensor
from reshard.index.index import Index, RunFacts, StoredFile, Tensor
from reshard.index.shards import Shards
from reshard.live.memory.index import format_of_framework
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.steps import classify
from reshard.storage.files import VirtualFiles

_FILE = "state dict"


def fused_tensors(source: Checkpoint, shapes: Mapping[str, tuple[tuple[int, ...], DType]]) -> dict[str, StoredTensor]:
    """What each tensor of a trainer holds of the published weights. source: gives the model. shapes: shape and element type by name.

    Raises: as `Checkpoint.named` does, for names that cannot be read as those of the model.
    """
    starts: dict[int, str] = {}
    tensors, end = [], 0
    for name, (shape, dtype) in shapes.items():
        piece = Piece(Box.whole(shape), Extent(_FILE, end, row_major(shape), dtype))
        tensors.append(Tensor(name, dtype, shape, "weight", Shards.of([piece])))
        starts[end] = name
        end += max(1, math.prod(shape)) * dtype.itemsize
    files = VirtualFiles("the state dict of a trainer")
    files.add(_FILE, end, [])
    format = format_of_framework("torch").name
    index = Index(format, tuple(tensors), (StoredFile(_FILE, end),), RunFacts(config=source.model_files.config))
    described = Checkpoint(files.root, files, index, source.model_files, "asked for", architecture=source.architecture)
    sections: dict[str, list[Section]] = {}
    for tensor in classify(described).named().tensors:
        for piece in () if tensor.is_computed else tensor.pieces():
            begin = [*starts][bisect_right([*starts], piece.extent.byte_offset) - 1]
            start = (piece.extent.byte_offset - begin) // tensor.dtype.itemsize
            sections.setdefault(starts[begin], []).append(Section(tensor.name, piece.box, start, piece.extent.strides))
    return {name: StoredTensor(name, shapes[name][1], shapes[name][0], Sections.of(parts)) for name, parts in sections.items()}
