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
    "position_embedding": Replicate(),
    "head": Vocabulary(),
    "final_norm": Replicate(),
    "attention.norm": Replicate(),
    "attention.q": Heads("heads"),
    "attention.k": Heads("kv_heads", copies=True),
    "attention.v": Heads("kv_heads", copies=True),
    # All three in one tensor, head by head, where an engine keeps them so.
    "attention.qkv": Heads("heads"),
    "attention.o": Row(),
    "attention.k_scale": Replicate(),
    "attention.v_scale": Replicate(),
    "attention.q_norm": Replicate(),
    "attention.k_norm": Replicate(),
    # Multi-head latent attention: q or, through a bottleneck, q_a and q_b; keys and values through kv_a and kv_b.
    "mla.q": Heads("heads"),
    "mla.q_a": Replicate(),
    "mla.q_a_norm": Replicate(),
    "mla.q_b": Heads("heads"),
    "mla.kv_a": Replicate(),
    "mla.kv_a_norm": Replicate(),
    "mla.kv_b": Heads("heads"),
    "attention.post_norm": Replicate(),
    "mlp.norm": Replicate(),
    "mlp.post_norm": Replicate(),
    "mlp.gate": Column(),
    "mlp.up": Column(),
    "mlp.down": Row(),
    "router": Replicate(),
    "router.correction": Replicate(),
    "expert.gate": Column(),
    "expert.up": Column(),
    "expert.down": Row(),
    "shared_expert.gate": Column(),
    "shared_expert.up": Column(),
    "shared_expert.down": Row(),
    "shared_expert.score": Replicate(),
    # Layers that predict further tokens, and their copies of what the model has at its ends.
    "extra.embedding": Vocabulary(),
    "extra.embedding_norm": Replicate(),
    "extra.hidden_norm": Replicate(),
    "extra.projection": Column(),
    "extra.final_norm": Replicate(),
    "extra.head": Vocabulary(),
}

# The weights of linear layers that quantisation changes; embeddings, heads, norms and routers stay as they are.
LINEAR = {
    role
    for role in SPLITS
    if role.startswith(("attention.", "mla.", "mlp.", "expert.", "shared_expert.")) and not role.endswith(("norm", "score", "_scale"))
}
