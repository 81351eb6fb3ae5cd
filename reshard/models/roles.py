"""The role table: one row per role, for all models.

A role is what a weight does in its model, such as "attention.q" or "mlp.down". Everything that follows from the role alone is in its row:
how tensor-parallel ranks share the weight, its usual shape, the usual names of its module, and what training saves for the backward pass.
A weight and its bias have the same role. To add a role, add a row to `_ROWS`.

    Role("mlp.down", Row(), ("hidden", "intermediate"), names="down_proj fc2", saved=_DIVIDED_INPUT, quantized=True)
         name        split  usual shape [out, in]       module names           backward              a linear layer

Source of `saved`: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), tensor by
tensor. reshard/training/activations.py adds it up.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.geometry.value import value


@value
class Replicate:
    """Every rank holds the whole tensor."""


@value
class Column:
    """Column-parallel: ranks share the output features, axis 0 of a Linear's [out, in] and of its bias [out], in equal runs."""


@value
class Row:
    """Row-parallel: ranks share the input features, axis 1 of [out, in], in equal runs. A bias [out] is replicated."""


@value
class Vocabulary:
    """Vocabulary-parallel: ranks share the rows of an embedding or head in equal runs, after padding to the engine's multiple."""


@value
class Heads:
    """Ranks share whole attention heads along axis 0."""

    count: str
    """The dimension that counts the heads, such as "kv_heads"."""
    copies: bool = False
    """Whether there may be fewer heads than ranks. Then tp / heads neighbouring ranks hold the same head (KV replication)."""
    only_one: bool = False
    """With `copies`: whether ranks can hold the same head only if there is one head."""


@value
class FirstRank:
    """Rank 0 holds the whole tensor, the others hold zeros in its place: the bias of a row-parallel layer, where the ranks' outputs are
    added up afterwards."""


Split = Replicate | Column | Row | Vocabulary | Heads | FirstRank


@value
class SavedForBackward:
    """How many copies of a module's input and output are saved for the backward pass.

    Each tensor-parallel rank saves all of a "whole" copy; only sequence parallelism splits it. A "divided" copy is always split over the
    tensor-parallel ranks.
    """

    whole_in: int = 0
    """Copies of the input that every rank saves whole."""
    divided_in: int = 0
    """Copies of the input that are split over the ranks."""
    whole_out: int = 0
    """Copies of the output that every rank saves whole."""
    divided_out: int = 0
    """Copies of the output that are split over the ranks."""
    per: str = ""
    """The dimension that counts how often the module is applied to one token: "heads" for a norm per head. Empty: once."""


@value
class Role:
    """One row of the role table."""

    name: str
    """Such as "attention.q"."""
    split: Split
    """How tensor-parallel ranks share a weight of this role."""
    shape: tuple[str, ...] = ()
    """The usual shape, [out, in] or [out], each axis an expression of dimensions. Empty: declarations do not name this role."""
    names: str = ""
    """The usual endings of the names of modules with this role, separated by spaces."""
    saved: SavedForBackward = SavedForBackward()
    """What the backward pass needs from a module of this role."""
    quantized: bool = False
    """Whether quantized models quantize this weight: True for linear layers, False for embeddings, heads, norms and routers."""
    in_layer: bool = True
    """Whether the weight belongs to a layer. False: the model has one such weight, before or after its layers."""
    fuses: tuple[str, ...] = ()
    """The roles that a fused weight of this role contains. An engine that keeps the weight fused splits it as this row says."""


_KV_HEADS = Heads("kv_heads", copies=True)
_WHOLE_INPUT = SavedForBackward(whole_in=1)
_DIVIDED_INPUT = SavedForBackward(divided_in=1)
_DIVIDED_OUTPUT = SavedForBackward(divided_out=1)
_INPUT_AND_OUTPUT = SavedForBackward(whole_in=1, divided_out=1)

# In `saved`, an input that several modules share is counted once: that of q, k and v with q, that of gate and up with up. The product of
# gate and up is the input of down. The activation between them is computed again from its own input, as fused kernels do.
_ROWS = (
    # Before and after the layers.
    Role("embedding", Vocabulary(), ("vocab", "hidden"), in_layer=False, names="embed_tokens wte embed_in word_embeddings tok_embeddings"),
    Role("position_embedding", Replicate(), ("positions", "hidden"), in_layer=False, names="wpe embed_positions position_embeddings"),
    Role("embedding_norm", Replicate(), ("hidden",), in_layer=False, names="word_embeddings_layernorm"),
    Role("final_norm", Replicate(), ("hidden",), in_layer=False, names="norm ln_f final_layernorm final_layer_norm norm_f"),
    Role("head", Vocabulary(), ("vocab", "hidden"), in_layer=False, names="lm_head embed_out"),
    # Attention.
    Role("attention.norm", Replicate(), ("hidden",), names="input_layernorm ln_1 attention_norm", saved=_WHOLE_INPUT),
    Role("attention.q", Heads("heads"), ("heads * head_dim", "hidden"), names="q_proj wq", saved=_INPUT_AND_OUTPUT, quantized=True),
    Role("attention.k", _KV_HEADS, ("kv_heads * head_dim", "hidden"), names="k_proj wk", saved=_DIVIDED_OUTPUT, quantized=True),
    Role("attention.v", _KV_HEADS, ("kv_heads * head_dim", "hidden"), names="v_proj wv", saved=_DIVIDED_OUTPUT, quantized=True),
    Role("attention.qkv", Heads("heads"), quantized=True, fuses=("attention.q", "attention.k", "attention.v")),
    Role(
        "attention.o",
        Row(),
        ("hidden", "heads * head_dim"),
        names="o_proj wo attn.c_proj self_attn.out_proj attention.dense self_attention.dense",
        saved=_DIVIDED_INPUT,
        quantized=True,
    ),
    Role("attention.q_norm", Replicate(), ("head_dim",), names="q_norm q_layernorm", saved=SavedForBackward(divided_in=1, per="heads")),
    Role("attention.k_norm", Replicate(), ("head_dim",), names="k_norm k_layernorm", saved=SavedForBackward(divided_in=1, per="kv_heads")),
    Role("attention.post_norm", Replicate(), ("hidden",)),
    Role("attention.sink", Heads("heads"), ("heads",), names="sinks"),
    # Scales of cached keys and values. They follow from the config's quantization_config and are never declared.
    Role("attention.k_scale", Replicate()),
    Role("attention.v_scale", Replicate()),
    # Multi-head latent attention: q alone, or q_a and q_b through a bottleneck; keys and values through kv_a and kv_b.
    Role("mla.q", Heads("heads"), ("heads * qk_dim", "hidden"), saved=_INPUT_AND_OUTPUT, quantized=True),
    Role("mla.q_a", Replicate(), ("q_rank", "hidden"), saved=_WHOLE_INPUT, quantized=True),
    Role("mla.q_a_norm", Replicate(), ("q_rank",), saved=_WHOLE_INPUT),
    Role("mla.q_b", Heads("heads"), ("heads * qk_dim", "q_rank"), saved=_INPUT_AND_OUTPUT, quantized=True),
    Role("mla.kv_a", Replicate(), ("kv_rank + rope_dim", "hidden"), saved=SavedForBackward(whole_out=1), quantized=True),
    Role("mla.kv_a_norm", Replicate(), ("kv_rank",)),
    Role("mla.kv_b", Heads("heads"), ("heads * kv_b_dim", "kv_rank"), saved=_INPUT_AND_OUTPUT, quantized=True),
    # A state-space model (Mamba): the output gate z, the input x, b and c for each group, and dt for each head, in one projection; the
    # parts of its convolution; a number per head. Mamba 1 has a head for each channel, and computes dt, b and c from x.
    Role("ssm.z", Heads("ssm_heads"), ("ssm_heads * ssm_head_dim", "hidden"), saved=_INPUT_AND_OUTPUT, quantized=True),
    Role("ssm.x", Heads("ssm_heads"), ("ssm_heads * ssm_head_dim", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("ssm.b", Heads("ssm_groups", copies=True), ("ssm_groups * ssm_state", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("ssm.c", Heads("ssm_groups", copies=True), ("ssm_groups * ssm_state", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("ssm.dt", Heads("ssm_heads"), ("ssm_heads", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("ssm.conv_x", Heads("ssm_heads"), ("ssm_heads * ssm_head_dim", "1", "ssm_kernel"), saved=_DIVIDED_OUTPUT),
    Role("ssm.conv_b", Heads("ssm_groups", copies=True), ("ssm_groups * ssm_state", "1", "ssm_kernel"), saved=_DIVIDED_OUTPUT),
    Role("ssm.conv_c", Heads("ssm_groups", copies=True), ("ssm_groups * ssm_state", "1", "ssm_kernel"), saved=_DIVIDED_OUTPUT),
    Role("ssm.a_log", Heads("ssm_heads"), ("ssm_heads",)),
    Role("ssm.d", Heads("ssm_heads"), ("ssm_heads",)),
    Role("ssm.dt_bias", Heads("ssm_heads"), ("ssm_heads",)),
    Role("ssm.norm", Heads("ssm_heads"), ("ssm_heads * ssm_head_dim",), saved=_DIVIDED_INPUT),
    Role("ssm.out", Row(), ("hidden", "ssm_heads * ssm_head_dim"), saved=_DIVIDED_INPUT, quantized=True),
    Role("ssm.dt_b_c", Row(), ("ssm_dt_rank + 2 * ssm_state", "ssm_heads * ssm_head_dim"), saved=_DIVIDED_INPUT, quantized=True),
    Role("ssm.dt_up", Heads("ssm_heads"), ("ssm_heads * ssm_head_dim", "ssm_dt_rank"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("ssm.inner_norm", Replicate(), ("ssm_state",)),
    # Gated short convolution: a projection to b, c and x, and a kernel for each channel.
    Role("conv.b", Column(), ("hidden", "hidden"), saved=_INPUT_AND_OUTPUT, quantized=True),
    Role("conv.c", Column(), ("hidden", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("conv.x", Column(), ("hidden", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("conv.kernel", Column(), ("hidden", "1", "conv_kernel"), saved=_DIVIDED_INPUT),
    Role("conv.out", Row(), ("hidden", "hidden"), saved=_DIVIDED_INPUT, quantized=True),
    # The indexer of sparse attention, which every rank computes whole.
    Role("indexer.q", Replicate(), ("index_heads * index_dim", "q_rank"), saved=_INPUT_AND_OUTPUT, quantized=True),
    Role("indexer.k", Replicate(), ("index_dim", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("indexer.k_norm", Replicate(), ("index_dim",)),
    Role("indexer.weights", Replicate(), ("index_heads", "hidden")),
    # Linear attention with a gated delta rule: fewer heads of q and k than of v and of the output gate z; b and a are a number per head.
    # delta.qkvz and delta.ba are stored head of k by head of k. delta.a_log and delta.dt_bias are a number per head.
    Role(
        "delta.qkvz",
        Heads("delta_k_heads"),
        ("2 * delta_k_heads * delta_k_dim + 2 * delta_v_heads * delta_v_dim", "hidden"),
        saved=_INPUT_AND_OUTPUT,
        quantized=True,
    ),
    Role("delta.ba", Heads("delta_k_heads"), ("2 * delta_v_heads", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("delta.q", Heads("delta_k_heads"), ("delta_k_heads * delta_k_dim", "hidden"), saved=_INPUT_AND_OUTPUT, quantized=True),
    Role("delta.k", Heads("delta_k_heads"), ("delta_k_heads * delta_k_dim", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("delta.v", Heads("delta_v_heads"), ("delta_v_heads * delta_v_dim", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("delta.z", Heads("delta_v_heads"), ("delta_v_heads * delta_v_dim", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("delta.b", Heads("delta_v_heads"), ("delta_v_heads", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("delta.a", Heads("delta_v_heads"), ("delta_v_heads", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("delta.conv_q", Heads("delta_k_heads"), ("delta_k_heads * delta_k_dim", "1", "delta_kernel"), saved=_DIVIDED_OUTPUT),
    Role("delta.conv_k", Heads("delta_k_heads"), ("delta_k_heads * delta_k_dim", "1", "delta_kernel"), saved=_DIVIDED_OUTPUT),
    Role("delta.conv_v", Heads("delta_v_heads"), ("delta_v_heads * delta_v_dim", "1", "delta_kernel"), saved=_DIVIDED_OUTPUT),
    Role("delta.a_log", Heads("delta_v_heads"), ("delta_v_heads",)),
    Role("delta.dt_bias", Heads("delta_v_heads"), ("delta_v_heads",)),
    Role("delta.norm", Replicate(), ("delta_v_dim",), saved=_DIVIDED_INPUT),
    Role("delta.out", Row(), ("hidden", "delta_v_heads * delta_v_dim"), saved=_DIVIDED_INPUT, quantized=True),
    # The MLP of a dense layer.
    Role(
        "mlp.norm", Replicate(), ("hidden",), names="post_attention_layernorm ln_2 ffn_norm pre_feedforward_layernorm", saved=_WHOLE_INPUT
    ),
    Role("mlp.gate", Column(), ("intermediate", "hidden"), names="gate_proj", saved=_DIVIDED_OUTPUT, quantized=True),
    Role("mlp.up", Column(), ("intermediate", "hidden"), names="up_proj c_fc dense_h_to_4h fc1", saved=_INPUT_AND_OUTPUT, quantized=True),
    # For an engine that keeps the two fused and gathers the output before it separates them.
    Role("mlp.gate_up", Column(), quantized=True, fuses=("mlp.gate", "mlp.up")),
    Role(
        "mlp.down", Row(), ("hidden", "intermediate"), names="down_proj dense_4h_to_h fc2 mlp.c_proj", saved=_DIVIDED_INPUT, quantized=True
    ),
    Role("mlp.post_norm", Replicate(), ("hidden",)),
    # The router and the experts of a sparse layer.
    Role(
        "router",
        Replicate(),
        ("experts", "hidden"),
        names="mlp.gate block_sparse_moe.gate mlp.router",
        saved=SavedForBackward(whole_in=1, whole_out=1),
    ),
    Role("router.correction", Replicate(), ("experts",)),
    Role("expert.gate", Column(), ("expert_intermediate", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("expert.up", Column(), ("expert_intermediate", "hidden"), saved=_INPUT_AND_OUTPUT, quantized=True),
    # Gate and up in alternating rows, so that a run of rows holds a run of each.
    Role("expert.gate_up", Column(), ("2 * expert_intermediate", "hidden"), saved=_INPUT_AND_OUTPUT, quantized=True),
    Role("expert.down", Row(), ("hidden", "expert_intermediate"), saved=_DIVIDED_INPUT, quantized=True),
    Role("expert.down_bias", FirstRank(), ("hidden",)),
    Role("shared_expert.gate", Column(), ("shared_intermediate", "hidden"), saved=_DIVIDED_OUTPUT, quantized=True),
    Role("shared_expert.up", Column(), ("shared_intermediate", "hidden"), saved=_INPUT_AND_OUTPUT, quantized=True),
    Role("shared_expert.down", Row(), ("hidden", "shared_intermediate"), saved=_DIVIDED_INPUT, quantized=True),
    Role("shared_expert.score", Replicate(), ("1", "hidden")),
    # The vision tower of a multimodal model, with blocks of its own beside the layers.
    Role("vision.q", Heads("vision_heads"), ("vision_hidden", "vision_hidden"), in_layer=False),
    Role("vision.k", Heads("vision_heads"), ("vision_hidden", "vision_hidden"), in_layer=False),
    Role("vision.v", Heads("vision_heads"), ("vision_hidden", "vision_hidden"), in_layer=False),
    # Kept fused, a rank holds a run of the rows of [q; k; v], whichever they are; they are exchanged when the tower runs.
    Role("vision.qkv", Heads("vision_heads"), fuses=("vision.q", "vision.k", "vision.v"), in_layer=False),
    Role("vision.o", Row(), ("vision_hidden", "vision_hidden"), in_layer=False),
    Role("vision.column", Column(), ("vision_hidden", "vision_hidden"), in_layer=False),
    Role("vision.gate", Column(), ("vision_intermediate", "vision_hidden"), in_layer=False),
    Role("vision.up", Column(), ("vision_intermediate", "vision_hidden"), in_layer=False),
    Role("vision.down", Row(), ("vision_hidden", "vision_intermediate"), in_layer=False),
    Role("vision.whole", Replicate(), ("vision_hidden",), in_layer=False),
    # Multi-token prediction: layers after the last one, with copies of the embedding and the head.
    Role("mtp.embedding", Vocabulary(), ("vocab", "hidden")),
    Role("mtp.embedding_norm", Replicate(), ("hidden",)),
    Role("mtp.hidden_norm", Replicate(), ("hidden",)),
    Role("mtp.projection", Column(), ("hidden", "2 * hidden")),
    Role("mtp.final_norm", Replicate(), ("hidden",)),
    Role("mtp.head", Vocabulary(), ("vocab", "hidden")),
)

ROLES: Mapping[str, Role] = {role.name: role for role in _ROWS}
# The roles of the table that a declaration may give to a weight. The others are fused, or follow from how the model is quantized.
DECLARED_ROLES = tuple(role.name for role in _ROWS if role.shape)
