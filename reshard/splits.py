"""Which part of a weight a tensor-parallel rank holds: pure functions of shape, split, tp and rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.boxes import Box
from reshard.roles import Column, Heads, Replicate, Row, Split, Vocabulary


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A rank's part: the global box it holds (None: nothing but padding) and its local shape, trailing padding rows included."""

    box: Box | None
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SplitRules:
    """What a split needs to know beside the tensor: the model's dimensions, and to which multiple an engine pads the vocabulary."""

    dimensions: Mapping[str, int]
    vocabulary_multiple: int = 1

    def padded_vocabulary(self, rows: int) -> int:
        return -(-rows // self.vocabulary_multiple) * self.vocabulary_multiple


def problem(split: Split, shape: tuple[int, ...], tp: int, rules: SplitRules) -> str | None:
    """Why a tensor cannot be split over `tp` ranks; None if it can. The reason names the numbers that do not divide."""
    match split:
        case Column() if shape[0] % tp:
            return f"{tp} ranks do not divide its {shape[0]} output features"
        case Row() if len(shape) > 1 and shape[1] % tp:
            return f"{tp} ranks do not divide its {shape[1]} input features"
        case Vocabulary() if rules.padded_vocabulary(shape[0]) % tp:
            return f"{tp} ranks do not divide its {rules.padded_vocabulary(shape[0])} rows, padding included"
        case Heads(count, copies):
            heads = rules.dimensions[count]
            if heads % tp and not (copies and tp % heads == 0):
                return f"{tp} ranks do not divide its {heads} {'key-value' if copies else 'attention'} heads"
    return None


def local_part(split: Split, shape: tuple[int, ...], tp: int, tp_rank: int, rules: SplitRules) -> LocalPart:
    """The part of a tensor of global `shape` that `tp_rank` of `tp` holds. `problem` has been asked before.

    With fewer KV heads than ranks, rank r holds head r // (tp / heads) (vLLM 0.32 QKVParallelLinear, TensorRT-LLM alike).
    """
    whole = Box.whole(shape)
    match split:
        case Column():
            box = whole.split(0, tp)[tp_rank]
        case Row() if len(shape) > 1:
            box = whole.split(1, tp)[tp_rank]
        case Vocabulary():
            rows = rules.padded_vocabulary(shape[0]) // tp
            start, stop = min(tp_rank * rows, shape[0]), min((tp_rank + 1) * rows, shape[0])
            return LocalPart(whole.narrow(0, start, stop) if stop > start else None, (rows, *shape[1:]))
        case Heads(count, _):
            heads = rules.dimensions[count]
            box = whole.split(0, min(tp, heads))[tp_rank // max(1, tp // heads)]
        case Replicate() | Row():
            box = whole
    return LocalPart(box, box.sizes)
