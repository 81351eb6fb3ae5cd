"""Which part of a weight a tensor-parallel rank holds: pure functions of the part, the number of ranks and the rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.geometry.mosaics import Mosaic
from reshard.models.model import Part
from reshard.models.roles import Column, Heads, Replicate, Row, Vocabulary


@dataclass(frozen=True, slots=True)
class SplitRules:
    """What a split needs to know beside the tensor: the model's dimensions, and to which multiple an engine pads the vocabulary."""

    dimensions: Mapping[str, int]
    vocabulary_multiple: int = 1

    def padded_vocabulary(self, rows: int) -> int:
        return -(-rows // self.vocabulary_multiple) * self.vocabulary_multiple


@dataclass(frozen=True, slots=True)
class Cut:
    """Ranks share a part in so many equal runs along an axis; each run is held by `copies` neighbouring ranks."""

    axis: int
    runs: int
    copies: int = 1


def cut_of(part: Part, tp: int, rules: SplitRules) -> Cut | None:
    """How `tp` ranks share a part; None if all hold all of it.

    With fewer KV heads than ranks, rank r holds head r // (tp / heads) (vLLM 0.32 QKVParallelLinear, TensorRT-LLM alike). An axis that the
    part has not (a bias of a row-parallel layer), or along which one element stands for all (a scale), is not cut.
    """
    match part.split:
        case Replicate():
            return None
        case Row():
            cut = Cut(1, tp)
        case Heads(count, copies):
            heads = rules.dimensions[count]
            cut = Cut(0, heads, tp // heads) if copies and tp > heads else Cut(0, tp)
        case Column() | Vocabulary():
            cut = Cut(0, tp)
    return cut if cut.axis < len(part.block_shape) and part.block_shape[cut.axis] is not None else None


def problem(part: Part, tp: int, rules: SplitRules) -> str | None:
    """Why a part cannot be split over `tp` ranks; None if it can. The reason names the numbers that do not divide."""
    if isinstance(part.split, Heads):
        heads = rules.dimensions[part.split.count]
        if heads % tp and not (part.split.copies and tp % heads == 0):
            return f"{tp} ranks do not divide its {heads} {'key-value' if part.split.copies else 'attention'} heads"
    cut = cut_of(part, tp, rules)
    if cut is None or part.scale:
        return None
    size = _padded(part, rules).shape[cut.axis]
    if size % cut.runs:
        what = "rows, padding included" if isinstance(part.split, Vocabulary) else "input features" if cut.axis else "output features"
        return f"{tp} ranks do not divide its {size} {what}"
    block = part.blocks[cut.axis] if part.blocks else None
    if block and tp > 1 and size // cut.runs % block:
        what = "input" if cut.axis else "output"
        return f"of its {size} {what} features each of {tp} ranks has {size // cut.runs}, no whole blocks of {block}"
    return None


def shard(part: Part, tp: int, tp_rank: int, rules: SplitRules) -> Mosaic:
    """What `tp_rank` of `tp` holds of a part, trailing padding rows included. `problem` has been asked before."""
    cut, array = cut_of(part, tp, rules), _padded(part, rules)
    return array if cut is None else array.part(cut.axis, cut.runs, tp_rank // cut.copies)


def _padded(part: Part, rules: SplitRules) -> Mosaic:
    if isinstance(part.split, Vocabulary):
        return part.array.padded(0, rules.padded_vocabulary(part.array.shape[0]))
    return part.array
