"""What a layer keeps for its backward pass: bytes of one microbatch on one rank, 16-bit activations and 1-byte dropout masks.

With s tokens per sequence, b sequences, hidden size h, a heads and t tensor-parallel ranks, one layer keeps

    everything                        s b h (10 + 24/t + 5 a s / (h t))      34 + 5 a s / h for t = 1
    ... with sequence parallelism     s b h (34/t + 5 a s / (h t))
    selective recomputation           the same without 5 a s / (h t), the attention scores: what FlashAttention keeps, too
    full recomputation                2 s b h, its input; 2 s b h / t with sequence parallelism

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), equations 1 to 6 and
table 2, for a GPT: as many KV heads as heads, an MLP of 4 h without gate, dropout. `itemised` is the same count, tensor by tensor, with the
widths that a model has; for a GPT the two are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from reshard.errors import check_word
from reshard.models.model import Model, Part
from reshard.models.roles import ROLES

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch, and how its activations are kept. scores: whether the attention kernel keeps them; FlashAttention does not."""

    seq_len: int
    sequences: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    scores: bool = True

    def __post_init__(self) -> None:
        check_word("--recompute", self.recompute, RECOMPUTE)

    @property
    def tokens(self) -> int:
        return self.seq_len * self.sequences

    @property
    def share(self) -> int:
        """Over how many ranks that is divided which only sequence parallelism divides."""
        return self.tp if self.sequence_parallel else 1


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """What one layer keeps per token, in bytes: what tensor-parallel ranks hold whole, what they divide, its input, and the attention
    scores per token that is attended to."""

    whole: int
    divided: int
    scores: int
    layer_input: int

    def nbytes(self, batch: Batch, recompute: Recompute | None = None) -> int:
        """Bytes of one microbatch on one rank, rounded up."""
        how = recompute or batch.recompute
        if how == "full":
            return math.ceil(Fraction(batch.tokens * self.layer_input, batch.share))
        scores = self.scores * batch.seq_len if how == "none" and batch.scores else 0
        return math.ceil(batch.tokens * (Fraction(self.whole, batch.share) + Fraction(self.divided + scores, batch.tp)))


def published(model: Model) -> SavedActivations:
    """What the paper's formula says for every layer of a model."""
    hidden, heads = model.dimensions["hidden"], model.dimensions["heads"]
    return SavedActivations(whole=10 * hidden, divided=24 * hidden, scores=5 * heads, layer_input=2 * hidden)


def itemised(model: Model, layer: Iterable[Part]) -> SavedActivations:
    """The same with the widths of one layer's own weights.

    Routed experts are counted for as many as a token is sent to, spread evenly over the ranks. Dropout counts if the config has any.
    """
    dimensions, dropout = model.dimensions, has_dropout(model)
    routed = int(model.setting("num_experts_per_tok") or 1)
    whole = divided = 0
    for part in layer:
        if part.role not in ROLES or part.parameter != "weight":
            continue
        saved = ROLES[part.role].saved
        out_features, in_features = part.array.shape[0], part.array.shape[-1]
        times = 2 * (routed if part.expert is not None else 1) * (dimensions[saved.per] if saved.per else 1)
        whole += times * (saved.whole_in * in_features + saved.whole_out * out_features)
        divided += times * (saved.divided_in * in_features + saved.divided_out * out_features)
    hidden = dimensions["hidden"]
    return SavedActivations(whole + 2 * hidden * dropout, divided, (2 + 3 * dropout) * dimensions["heads"], 2 * hidden)


def head_bytes(model: Model, batch: Batch, vocabulary: int) -> int:
    """What the last stage keeps behind its layers: the inputs of the norm and of the head, and 4-byte logits of `vocabulary` rows on this
    rank (section 4.3 of the paper: 4 s b h / t (1 + v / h))."""
    return math.ceil(Fraction(4 * batch.tokens * model.dimensions["hidden"], batch.share)) + 4 * batch.tokens * vocabulary


def embedding_bytes(model: Model, batch: Batch) -> int:
    """What the first stage keeps before its layers: the mask of the dropout behind the embedding, if the model has dropout."""
    return math.ceil(Fraction(batch.tokens * model.dimensions["hidden"], batch.share)) if has_dropout(model) else 0


def has_dropout(model: Model) -> bool:
    """Whether the config says that training drops anything."""
    return any(model.setting(key) for key in ("resid_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout"))
