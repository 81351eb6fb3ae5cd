"""The layout of a raw checkpoint: where each tensor lies, and the bytes between them."""

from __future__ import annotations

import json

from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content
from reshard.geometry.sections import whole
from reshard.plans.layout import Layout, PlacedTensor, Sidecar, Target, TargetFile

from . import TABLE, WEIGHTS


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The two files, and the model's config and tokenizer beside them."""
    alignment = target.options.get("alignment", 1)
    placed: list[PlacedTensor] = []
    padding: list[tuple[int, bytes]] = []
    end = 0
    for name, tensor in content.weights.items():
        start = -(-end // alignment) * alignment
        if start > end:  # the plan's proof wants an origin for every byte of the target
            padding.append((end, bytes(start - end)))
        placed.append(PlacedTensor(whole(name, target.dtype_of(tensor), tensor.shape), start))
        end = start + placed[-1].tensor.nbytes
    table = {
        item.tensor.name: {"dtype": item.tensor.dtype.name, "shape": item.tensor.shape, "byte_offset": item.byte_offset} for item in placed
    }
    sidecars = companions.sidecars(item.tensor.dtype for item in placed)
    return Layout(
        "raw",
        (TargetFile(WEIGHTS, end, tuple(padding), tuple(placed)),),
        (*sidecars, Sidecar(TABLE, json.dumps(table).encode())),
    )
