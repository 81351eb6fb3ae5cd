"""What follows if a master does not round to its weight. Optimizers that keep masters as remainders truncate instead of rounding."""

from __future__ import annotations

from dataclasses import replace

from reshard.engine.checks.masters import wrong_master
from reshard.errors import MixedSaves
from reshard.index.index import Index
from reshard.storage.files import Files

# A truncated master lies at most one representable value from the rounded one.
_TOLERANCE = 1
# Where a parameter lies in an optimizer's buffer follows from settings and order alone, so many parameters are compared.
_PER_FILE = 2000


def check_masters(files: Files, index: Index) -> Index:
    """The index. Raises CheckpointError if a master does not round to its weight."""
    if wrong := wrong_master(files, index, per_file=_PER_FILE, tolerance=_TOLERANCE):
        raise MixedSaves(
            f"its master in {wrong.master_path} is not what the weight was rounded from",
            where=f"{wrong.name} in {wrong.weight_path}",
            why="Either the optimizer's file belongs to another save, or its parameters have another order than in this version",
            do="Copy the files of one save again; or take the weights alone: move the optimizer's file away",
        )
    return index


def without_wrong_masters(files: Files, index: Index) -> Index:
    """The index; without its optimizer state and with a note if a master does not round to its weight.

    Megatron-Core 0.16 itself writes shifted values into a fully reshardable checkpoint if a buffer had several buckets (its issue 504).
    """
    wrong = wrong_master(files, index, per_file=_PER_FILE, tolerance=_TOLERANCE)
    if wrong is None:
        return index
    note = (
        f"the optimizer's state is left out: {wrong.name} in {wrong.weight_path}: its master in {wrong.master_path} is not what the weight "
        "was rounded from (Megatron-Core 0.16 shifts it if there were several buckets)"
    )
    weights = tuple(tensor for tensor in index.tensors if tensor.kind == "weight")
    return replace(index, tensors=weights, facts=replace(index.facts, notes=(*index.facts.notes, note)), param_groups=tuple)
