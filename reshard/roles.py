"""How each role in a model splits over tensor-parallel ranks: once, for all models.

A role says what a weight does ("attention.q", "mlp.down"). Its weight and its bias share it; a split that cuts the input
features (Row) leaves a bias, which has none, whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds all of it."""


@dataclass(frozen=True, slots=True)
class Column:
    """Output features, axis 0 of a Linear's [out, in] and of its bias, in equal runs."""


@dataclass(frozen=True, slots=True)
class Row:
    """Input features, axis 1 of [out, in], in equal runs; a bias is replicated."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rows of an embedding or head, in equal runs after zero rows have been added up to the engine's multiple."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Whole attention heads along axis 0; `count` names the dimension that says how many there are.

    With `copies`, fewer heads than ranks are legal: each is held by tp / heads neighbouring ranks (KV replication).
    """

    count: str
    copies: bool = False


Split = Replicate | Column | Row | Vocabulary | Heads

SPLITS: dict[str, Split] = {
    "embedding": Vocabulary(),
    "head": Vocabulary(),
    "norm": Replicate(),
    "final_norm": Replicate(),
    "attention.q": Heads("heads"),
    "attention.k": Heads("kv_heads", copies=True),
    "attention.v": Heads("kv_heads", copies=True),
    "attention.o": Row(),
    "attention.q_norm": Replicate(),
    "attention.k_norm": Replicate(),
    "mlp.gate": Column(),
    "mlp.up": Column(),
    "mlp.down": Row(),
}
