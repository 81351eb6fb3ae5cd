"""Activations that a layer saves for its backward pass, in bytes of one microbatch on one rank: 2 per activation, 1 per dropout mask.

With s tokens per sequence, b sequences, hidden size h, a heads and t tensor-parallel ranks, one layer saves

    everything                        s b h (10 + 24/t + 5 a s / (h t))      34 + 5 a s / h for t = 1
    ... with sequence parallelism     s b h (34/t + 5 a s / (h t))
    selective recomputation           the same without the attention scores, 5 a s / (h t); FlashAttention saves as much
    full recomputation                2 s b h, the layer's input; 2 s b h / t with sequence parallelism

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), equations 1 to 6 and
table 2. They describe a GPT: as many KV heads as heads, an MLP of width 4 h without a gate, dropout. `itemised` counts in the same way,
tensor by tensor, with a model's own widths. For a GPT the two are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Literal

from reshard.errors import check_word
from reshard.geometry.value import value
from reshard.models.model import Model
from reshard.models.parts import Part
from reshard.models.roles import ROLES

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@value
class Batch:
    """One microbatch, and what decides which of its activations a rank saves."""

    JSON = "seq_len micro_batch=sequences recompute sequence_parallel"

    seq_len: int
    """Tokens per sequence."""
    sequences: int = 1
    """Number of sequences."""
    tp: int = 1
    """Tensor-parallel size."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also split the activations between the linear layers."""
    recompute: Recompute = "none"
    """Which activations are computed again in the backward pass, instead of being saved."""
    scores: bool = True
    """Whether the attention kernel saves the attention scores; FlashAttention does not."""

    def __post_init__(self) -> None:
        check_word("`recompute=`", self.recompute, RECOMPUTE)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.seq_len * self.sequences

    @property
    def sequence_ranks(self) -> int:
        """The number of ranks that split the activations between the linear layers: tp with sequence parallelism, else 1."""
        return self.tp if self.sequence_parallel else 1


@value
class SavedActivations:
    """The activations that one layer saves, in bytes per token."""

    whole: int
    """Activations between the linear layers; only sequence parallelism splits them."""
    divided: int
    """Activations inside the parallel regions; tensor-parallel ranks split them."""
    scores: int
    """Attention scores, in bytes per pair of query and key token; tensor-parallel ranks split them."""
    layer_input: int
    """The layer's input, all that full recomputation saves."""

    def nbytes(self, batch: Batch, recompute: Recompute | None = None) -> int:
        """Bytes of one microbatch on one rank, rounded up. recompute: used instead of the batch's own."""
        recompute = recompute or batch.recompute
        if recompute == "full":
            return math.ceil(Fraction(batch.tokens * self.layer_input, batch.sequence_ranks))
        scores = self.scores * batch.seq_len if recompute == "none" and batch.scores else 0
        return math.ceil(batch.tokens * (Fraction(self.whole, batch.sequence_ranks) + Fraction(self.divided + scores, batch.tp)))


def published(model: Model) -> SavedActivations:
    """The paper's formula, which is the same for every layer of a model."""
    hidden, heads = model.dimensions["hidden"], model.dimensions["heads"]
    return SavedActivations(whole=10 * hidden, divided=24 * hidden, scores=5 * heads, layer_input=2 * hidden)


def itemised(model: Model, layer: Iterable[Part]) -> SavedActivations:
    """The paper's count with the widths of one layer's own weights.

    layer: the parts of the layer, with those of one expert only (`layer_parts`). They are multiplied by the number of experts that a token
    is sent to; tokens are assumed to be spread evenly over the ranks. Dropout is counted if the config has any.
    """
    dimensions, dropout = model.dimensions, has_dropout(model)
    routed = model.experts_per_token or 1
    whole = divided = 0
    for part in layer:
        if part.role not in ROLES or part.parameter != "weight":
            continue
        role = ROLES[part.role]
        times = 2 * (routed if part.expert is not None else 1) * (dimensions[role.saved_per] if role.saved_per else 1)
        for word, features in (("out", part.array.shape[0]), ("in", part.array.shape[-1])):
            whole += times * features * (word in role.saved.split())
            divided += times * features * (f"{word}/tp" in role.saved.split())
    hidden = dimensions["hidden"]
    return SavedActivations(whole + 2 * hidden * dropout, divided, (2 + 3 * dropout) * dimensions["heads"], 2 * hidden)


def head_bytes(model: Model, batch: Batch, vocabulary: int) -> int:
    """Bytes that the last stage saves after its layers: the inputs of the norm and of the head, and 4-byte logits.

    vocabulary: rows of the head on this rank. Source: section 4.3 of the paper, 4 s b h / t (1 + v / h).
    """
    return math.ceil(Fraction(4 * batch.tokens * model.dimensions["hidden"], batch.sequence_ranks)) + 4 * batch.tokens * vocabulary


def embedding_bytes(model: Model, batch: Batch) -> int:
    """Bytes that the first stage saves before its layers: the mask of the dropout after the embedding, if the model has dropout."""
    return math.ceil(Fraction(batch.tokens * model.dimensions["hidden"], batch.sequence_ranks)) if has_dropout(model) else 0


def has_dropout(model: Model) -> bool:
    """Whether the config has a dropout probability above 0."""
    return any(model.setting(key) for key in ("resid_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout"))
