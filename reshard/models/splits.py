"""The part of a weight that one tensor-parallel rank holds: pure functions of the part, the number of ranks and the rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from reshard.geometry.mosaics import Mosaic
from reshard.geometry.value import value
from reshard.models.parts import Part

# Heads as a message names them, by the dimension that counts them.
_HEADS = {
    "heads": "attention heads",
    "kv_heads": "key-value heads",
    "delta_k_heads": "key heads of linear attention",
    "delta_v_heads": "value heads of linear attention",
    "ssm_heads": "state-space heads",
    "ssm_groups": "state-space groups",
    "vision_heads": "attention heads of the vision tower",
    "vision_kv_heads": "key-value heads of the vision tower",
    "qkv_ranks": "runs of rows [q; k; v], each with blocks of its own",
}


@value
class SplitRules:
    """What the split of a part depends on, besides the part and the number of ranks."""

    vocabulary_multiple: int = 1
    """The engine pads the vocabulary to a multiple of this."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Role -> the engine pads what the ranks share of such a part, so that each rank holds a multiple of this."""

    def padded_vocabulary(self, rows: int) -> int:
        """`rows` rounded up to a multiple of `vocabulary_multiple`."""
        return -(-rows // self.vocabulary_multiple) * self.vocabulary_multiple


@value
class Cut:
    """How tensor-parallel ranks share a part."""

    axis: int
    """The axis along which it is cut."""
    runs: int
    """The number of equal runs."""
    copies: int = 1
    """The number of neighbouring ranks that hold the same run."""


def cut_of(part: Part, tp: int) -> Cut | None:
    """How `tp` ranks share a part; None if each rank holds the whole part.

    With fewer KV heads than ranks, `tp_rank` holds head tp_rank // (tp / heads), as in vLLM 0.32 (QKVParallelLinear) and TensorRT-LLM. A
    part is not cut along an axis that it does not have (the bias of a row-parallel layer), nor along an axis with one scale for all of it.
    """
    axis = part.split.axis
    if axis is None or axis >= len(part.block_shape) or part.block_shape[axis] is None:
        return None
    heads = part.dimensions[part.split.heads] if part.split.copies else tp
    return Cut(axis, heads, tp // heads) if tp > heads else Cut(axis, tp)


def problem(part: Part, tp: int, rules: SplitRules) -> str | None:
    """Why a part cannot be split over `tp` ranks, with the numbers that do not divide; None if it can."""
    split = part.split
    if split.heads:
        heads = part.dimensions[split.heads]
        if split.exactly and heads != tp:
            return f"{tp} ranks cannot share its {heads} {_HEADS.get(split.heads, split.heads)}: the engine quantizes their rows again"
        if heads % tp and not (split.copies and tp % heads == 0 and (heads == 1 or not split.only_one)):
            return f"{tp} ranks do not divide its {heads} {_HEADS.get(split.heads, split.heads)}"
    cut = cut_of(part, tp)
    if cut is None or part.is_scale:
        return None
    size = _padded(part, tp, rules).shape[cut.axis] * (part.block_shape[cut.axis] or 1)
    features = "input features" if cut.axis else "output features"
    if size % cut.runs:
        return f"{tp} ranks do not divide its {size} {'rows, padding included' if split.is_padded else features}"
    block = part.blocks[cut.axis] if part.blocks and not split.exactly else 1
    if part.form and tp > 1 and size // cut.runs % block:
        return f"{size} {features} over {tp} ranks give {size // cut.runs} each, which is not a multiple of the {part.form.unit} of {block}"
    return None


def shard(part: Part, tp: int, tp_rank: int, rules: SplitRules) -> Mosaic:
    """What `tp_rank` of `tp` ranks holds of a part, padding included. `problem` must be None for the part."""
    cut, array = cut_of(part, tp), _padded(part, tp, rules)
    if part.split.on_first_rank and tp_rank:
        return Mosaic(array.shape, ())
    return array if cut is None else array.part(cut.axis, cut.runs, tp_rank // cut.copies)


def _padded(part: Part, tp: int, rules: SplitRules) -> Mosaic:
    array, cut = part.array, cut_of(part, tp)
    if part.split.is_padded:
        return array.padded(0, rules.padded_vocabulary(array.shape[0]))
    if cut and (step := rules.steps.get(part.role)):
        runs = step * cut.runs // (part.block_shape[cut.axis] or 1)
        return array.padded(cut.axis, -(-array.shape[cut.axis] // runs) * runs)
    return array
