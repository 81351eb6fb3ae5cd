"""The role table: one row per role, for all models.

A role is what a weight does in its model, such as "attention.q" or "mlp.down". Everything that follows from the role alone is in its row:
how tensor-parallel ranks share the weight, its usual shape, the usual names of its module, and what training saves for the backward pass.
A weight and its bias have the same role. To add a role, add a row to `_ROWS`.

    Role("mlp.down", ROW, ("hidden", "intermediate"), names="down_proj fc2", saved="in/tp", quantized=True)
         name        split  usual shape [out, in]       module names           backward              a linear layer

Source of `saved`: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), tensor by
tensor. reshard/training/activations.py adds it up.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.errors import some
from reshard.geometry.value import value


@value
class Split:
    """How tensor-parallel ranks share a weight: in equal runs along an axis of a Linear's [out, in], or of its bias [out]."""

    axis: int | None = None
    """The axis; None: every rank holds the whole tensor. A part without that axis is replicated, such as a row-parallel layer's bias."""
    heads: str = ""
    """The dimension, such as "kv_heads", that counts the attention heads that the ranks share whole; empty: rows are shared."""
    copies: bool = False
    """Whether there may be fewer heads than ranks. Then tp / heads neighbouring ranks hold the same head (KV replication)."""
    only_one: bool = False
    """With `copies`: whether ranks can hold the same head only if there is one head."""
    exactly: bool = False
    """Whether there must be as many ranks as heads."""
    is_padded: bool = False
    """Whether the rows are padded to the engine's multiple first."""
    on_first_rank: bool = False
    """Whether rank 0 holds the whole tensor and the others hold zeros in its place: the bias of a row-parallel layer, where the ranks'
    outputs are added up afterwards."""


REPLICATE = Split()
COLUMN = Split(0)
ROW = Split(1)
VOCABULARY = Split(0, is_padded=True)
FIRST_RANK = Split(on_first_rank=True)


def heads(count: str, *, copies: bool = False, only_one: bool = False, exactly: bool = False) -> Split:
    """Whole attention heads, which the dimension `count` counts, along axis 0."""
    return Split(0, count, copies, only_one, exactly)


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
    saved: str = ""
    """What is saved of a module for the backward pass, as words: its input "in", its output "out". Each tensor-parallel rank saves all of
    it, and only sequence parallelism splits it; "in/tp" and "out/tp" are always split over the tensor-parallel ranks."""
    saved_per: str = ""
    """The dimension that counts how often the module is applied to one token: "heads" for a norm per head. Empty: once."""
    quantized: bool = False
    """Whether quantized models quantize this weight: True for linear layers, False for embeddings, heads, norms and routers."""
    in_layer: bool = True
    """Whether the weight belongs to a layer. False: the model has one such weight, before or after its layers."""
    fuses: tuple[str, ...] = ()
    """The roles that a fused weight of this role contains. An engine that keeps the weight fused splits it as this row says."""


_KV_HEADS = heads("kv_heads", copies=True)

# In `saved`, an input that several modules share is counted once: that of q, k and v with q, that of gate and up with up. The product of
# gate and up is the input of down. The activation between them is computed again from its own input, as fused kernels do.
_ROWS = (
    # Before and after the layers.
    Role("embedding", VOCABULARY, ("vocab", "hidden"), in_layer=False, names="embed_tokens wte embed_in word_embeddings tok_embeddings"),
    Role("position_embedding", REPLICATE, ("positions", "hidden"), in_layer=False, names="wpe embed_positions position_embeddings"),
    Role("embedding_norm", REPLICATE, ("hidden",), in_layer=False, names="word_embeddings_layernorm"),
    Role("final_norm", REPLICATE, ("hidden",), in_layer=False, names="norm ln_f final_layernorm final_layer_norm norm_f"),
    Role("head", VOCABULARY, ("vocab", "hidden"), in_layer=False, names="lm_head embed_out"),
    # The head of a classifier, a reward model or a critic, which its class tells (declared/heads.py).
    Role("class_head", REPLICATE, in_layer=False),
    # Attention.
    Role("attention.norm", REPLICATE, ("hidden",), names="input_layernorm ln_1 attention_norm", saved="in"),
    Role("attention.q", heads("heads"), ("heads * head_dim", "hidden"), names="q_proj wq", saved="in out/tp", quantized=True),
    Role("attention.k", _KV_HEADS, ("kv_heads * head_dim", "hidden"), names="k_proj wk", saved="out/tp", quantized=True),
    Role("attention.v", _KV_HEADS, ("kv_heads * head_dim", "hidden"), names="v_proj wv", saved="out/tp", quantized=True),
    # Rows [q; k; v] of each of some tensor-parallel ranks, one rank after the other: the blocks of their scales begin again with each rank.
    Role("attention.qkv_ranks", heads("qkv_ranks", exactly=True), ("qkv_rows", "hidden"), quantized=True),
    Role("attention.qkv", heads("heads"), quantized=True, fuses=("attention.q", "attention.k", "attention.v")),
    Role(
        "attention.o",
        ROW,
        ("hidden", "heads * head_dim"),
        names="o_proj wo attn.c_proj self_attn.out_proj attention.dense self_attention.dense",
        saved="in/tp",
        quantized=True,
    ),
    Role("attention.q_norm", REPLICATE, ("head_dim",), names="q_norm q_layernorm", saved="in/tp", saved_per="heads"),
    Role("attention.k_norm", REPLICATE, ("head_dim",), names="k_norm k_layernorm", saved="in/tp", saved_per="kv_heads"),
    Role("attention.post_norm", REPLICATE, ("hidden",)),
    Role("attention.sink", heads("heads"), ("heads",), names="sinks"),
    # Scales of cached keys and values. They follow from the config's quantization_config and are never declared.
    Role("attention.k_scale", REPLICATE),
    Role("attention.v_scale", REPLICATE),
    Role("attention.k_scales", _KV_HEADS),
    Role("attention.v_scales", _KV_HEADS),
    # Multi-head latent attention: q alone, or q_a and q_b through a bottleneck; keys and values through kv_a and kv_b.
    Role("mla.q", heads("heads"), ("heads * qk_dim", "hidden"), saved="in out/tp", quantized=True),
    Role("mla.q_a", REPLICATE, ("q_rank", "hidden"), saved="in", quantized=True),
    Role("mla.q_a_norm", REPLICATE, ("q_rank",), saved="in"),
    Role("mla.q_b", heads("heads"), ("heads * qk_dim", "q_rank"), saved="in out/tp", quantized=True),
    Role("mla.kv_a", REPLICATE, ("kv_rank + rope_dim", "hidden"), saved="out", quantized=True),
    Role("mla.kv_a_norm", REPLICATE, ("kv_rank",)),
    # An output projection in groups of heads, each with a matrix of its own, and one that joins them.
    Role("mla.o_a", heads("o_groups"), ("o_groups * o_rank", "heads * head_dim / o_groups"), saved="in/tp out/tp", quantized=True),
    Role("mla.o_b", ROW, ("hidden", "o_groups * o_rank"), quantized=True),
    Role("mla.kv_b", heads("heads"), ("heads * kv_b_dim", "kv_rank"), saved="in out/tp", quantized=True),
    # A state-space model (Mamba): the output gate z, the input x, b and c for each group, and dt for each head, in one projection; the
    # parts of its convolution; a number per head. Mamba 1 has a head for each channel, and computes dt, b and c from x.
    Role("ssm.z", heads("ssm_heads"), ("ssm_heads * ssm_head_dim", "hidden"), saved="in out/tp", quantized=True),
    Role("ssm.x", heads("ssm_heads"), ("ssm_heads * ssm_head_dim", "hidden"), saved="out/tp", quantized=True),
    Role("ssm.b", heads("ssm_groups", copies=True), ("ssm_groups * ssm_state", "hidden"), saved="out/tp", quantized=True),
    Role("ssm.c", heads("ssm_groups", copies=True), ("ssm_groups * ssm_state", "hidden"), saved="out/tp", quantized=True),
    Role("ssm.dt", heads("ssm_heads"), ("ssm_heads", "hidden"), saved="out/tp", quantized=True),
    Role("ssm.conv_x", heads("ssm_heads"), ("ssm_heads * ssm_head_dim", "1", "ssm_kernel"), saved="out/tp"),
    Role("ssm.conv_b", heads("ssm_groups", copies=True), ("ssm_groups * ssm_state", "1", "ssm_kernel"), saved="out/tp"),
    Role("ssm.conv_c", heads("ssm_groups", copies=True), ("ssm_groups * ssm_state", "1", "ssm_kernel"), saved="out/tp"),
    Role("ssm.a_log", heads("ssm_heads"), ("ssm_heads",)),
    Role("ssm.d", heads("ssm_heads"), ("ssm_heads",)),
    Role("ssm.dt_bias", heads("ssm_heads"), ("ssm_heads",)),
    Role("ssm.norm", heads("ssm_heads"), ("ssm_heads * ssm_head_dim",), saved="in/tp"),
    Role("ssm.out", ROW, ("hidden", "ssm_heads * ssm_head_dim"), saved="in/tp", quantized=True),
    Role("ssm.dt_b_c", ROW, ("ssm_dt_rank + 2 * ssm_state", "ssm_heads * ssm_head_dim"), saved="in/tp", quantized=True),
    Role("ssm.dt_up", heads("ssm_heads"), ("ssm_heads * ssm_head_dim", "ssm_dt_rank"), saved="out/tp", quantized=True),
    Role("ssm.inner_norm", REPLICATE, ("ssm_state",)),
    # Gated short convolution: a projection to b, c and x, and a kernel for each channel.
    Role("conv.b", COLUMN, ("hidden", "hidden"), saved="in out/tp", quantized=True),
    Role("conv.c", COLUMN, ("hidden", "hidden"), saved="out/tp", quantized=True),
    Role("conv.x", COLUMN, ("hidden", "hidden"), saved="out/tp", quantized=True),
    Role("conv.kernel", COLUMN, ("hidden", "1", "conv_kernel"), saved="in/tp"),
    Role("conv.out", ROW, ("hidden", "hidden"), saved="in/tp", quantized=True),
    # The indexer of sparse attention, which every rank computes whole.
    Role("indexer.q", REPLICATE, ("index_heads * index_dim", "q_rank"), saved="in out/tp", quantized=True),
    Role("indexer.k", REPLICATE, ("index_dim", "hidden"), saved="out/tp", quantized=True),
    Role("indexer.k_norm", REPLICATE, ("index_dim",)),
    Role("indexer.weights", REPLICATE, ("index_heads", "hidden")),
    # Linear attention with a gated delta rule: fewer heads of q and k than of v and of the output gate z; b and a are a number per head.
    # delta.qkvz and delta.ba are stored head of k by head of k. delta.a_log and delta.dt_bias are a number per head.
    Role(
        "delta.qkvz",
        heads("delta_k_heads"),
        ("2 * delta_k_heads * delta_k_dim + 2 * delta_v_heads * delta_v_dim", "hidden"),
        saved="in out/tp",
        quantized=True,
    ),
    Role("delta.ba", heads("delta_k_heads"), ("2 * delta_v_heads", "hidden"), saved="out/tp", quantized=True),
    Role("delta.q", heads("delta_k_heads"), ("delta_k_heads * delta_k_dim", "hidden"), saved="in out/tp", quantized=True),
    Role("delta.k", heads("delta_k_heads"), ("delta_k_heads * delta_k_dim", "hidden"), saved="out/tp", quantized=True),
    Role("delta.v", heads("delta_v_heads"), ("delta_v_heads * delta_v_dim", "hidden"), saved="out/tp", quantized=True),
    Role("delta.z", heads("delta_v_heads"), ("delta_v_heads * delta_v_dim", "hidden"), saved="out/tp", quantized=True),
    Role("delta.b", heads("delta_v_heads"), ("delta_v_heads", "hidden"), saved="out/tp", quantized=True),
    Role("delta.a", heads("delta_v_heads"), ("delta_v_heads", "hidden"), saved="out/tp", quantized=True),
    Role("delta.conv_q", heads("delta_k_heads"), ("delta_k_heads * delta_k_dim", "1", "delta_kernel"), saved="out/tp"),
    Role("delta.conv_k", heads("delta_k_heads"), ("delta_k_heads * delta_k_dim", "1", "delta_kernel"), saved="out/tp"),
    Role("delta.conv_v", heads("delta_v_heads"), ("delta_v_heads * delta_v_dim", "1", "delta_kernel"), saved="out/tp"),
    Role("delta.a_log", heads("delta_v_heads"), ("delta_v_heads",)),
    Role("delta.dt_bias", heads("delta_v_heads"), ("delta_v_heads",)),
    Role("delta.norm", REPLICATE, ("delta_v_dim",), saved="in/tp"),
    Role("delta.out", ROW, ("hidden", "delta_v_heads * delta_v_dim"), saved="in/tp", quantized=True),
    # The MLP of a dense layer.
    Role("mlp.norm", REPLICATE, ("hidden",), names="post_attention_layernorm ln_2 ffn_norm pre_feedforward_layernorm", saved="in"),
    Role("mlp.gate", COLUMN, ("intermediate", "hidden"), names="gate_proj", saved="out/tp", quantized=True),
    Role("mlp.up", COLUMN, ("intermediate", "hidden"), names="up_proj c_fc dense_h_to_4h fc1", saved="in out/tp", quantized=True),
    # For an engine that keeps the two fused and gathers the output before it separates them.
    Role("mlp.gate_up", COLUMN, quantized=True, fuses=("mlp.gate", "mlp.up")),
    Role("mlp.down", ROW, ("hidden", "intermediate"), names="down_proj dense_4h_to_h fc2 mlp.c_proj", saved="in/tp", quantized=True),
    Role("mlp.post_norm", REPLICATE, ("hidden",)),
    # The router and the experts of a sparse layer.
    Role("router", REPLICATE, ("experts", "hidden"), names="mlp.gate block_sparse_moe.gate mlp.router", saved="in out"),
    Role("router.correction", REPLICATE, ("experts",)),
    Role("expert.gate", COLUMN, ("expert_intermediate", "hidden"), saved="out/tp", quantized=True),
    Role("expert.up", COLUMN, ("expert_intermediate", "hidden"), saved="in out/tp", quantized=True),
    # Gate and up in alternating rows, so that a run of rows holds a run of each.
    Role("expert.gate_up", COLUMN, ("2 * expert_intermediate", "hidden"), saved="in out/tp", quantized=True),
    Role("expert.down", ROW, ("hidden", "expert_intermediate"), saved="in/tp", quantized=True),
    Role("expert.down_bias", FIRST_RANK, ("hidden",)),
    Role("shared_expert.gate", COLUMN, ("shared_intermediate", "hidden"), saved="out/tp", quantized=True),
    Role("shared_expert.up", COLUMN, ("shared_intermediate", "hidden"), saved="in out/tp", quantized=True),
    Role("shared_expert.down", ROW, ("hidden", "shared_intermediate"), saved="in/tp", quantized=True),
    Role("shared_expert.score", REPLICATE, ("1", "hidden")),
    # Hyper-connections: several residual streams, which this mixes into one after the last layer.
    Role("hyper.head", REPLICATE, ("hidden",), in_layer=False),
    # Tables of n-grams of tokens, and a projection of their rows to a key for each residual stream and a value (DeepSeek-V4.1).
    Role("engram.table", REPLICATE, ("engram_rows", "engram_dim"), quantized=True),
    Role("engram.kv", COLUMN, ("streams * hidden + hidden", "engram_columns * engram_dim"), quantized=True),
    # The vision tower of a multimodal model, with blocks of its own beside the layers.
    Role("vision.q", heads("vision_heads"), ("vision_hidden", "vision_hidden"), in_layer=False),
    Role("vision.k", heads("vision_heads"), ("vision_hidden", "vision_hidden"), in_layer=False),
    Role("vision.v", heads("vision_heads"), ("vision_hidden", "vision_hidden"), in_layer=False),
    # Where several heads of q share one of k and v.
    Role("vision.group_k", heads("vision_kv_heads", copies=True), ("vision_kv_heads * vision_head_dim", "vision_hidden"), in_layer=False),
    Role("vision.group_v", heads("vision_kv_heads", copies=True), ("vision_kv_heads * vision_head_dim", "vision_hidden"), in_layer=False),
    # Kept fused, a rank holds a run of the rows of [q; k; v], whichever they are; they are exchanged when the tower runs.
    Role("vision.qkv", heads("vision_heads"), fuses=("vision.q", "vision.k", "vision.v"), in_layer=False),
    Role("vision.o", ROW, ("vision_hidden", "vision_hidden"), in_layer=False),
    Role("vision.column", COLUMN, ("vision_hidden", "vision_hidden"), in_layer=False),
    Role("vision.row", ROW, ("vision_hidden", "vision_hidden"), in_layer=False),
    Role("vision.gate", COLUMN, ("vision_intermediate", "vision_hidden"), in_layer=False),
    Role("vision.up", COLUMN, ("vision_intermediate", "vision_hidden"), in_layer=False),
    Role("vision.down", ROW, ("vision_hidden", "vision_intermediate"), in_layer=False),
    Role("vision.whole", REPLICATE, ("vision_hidden",), in_layer=False),
    # The same for a tower for sound.
    Role("audio.q", heads("audio_heads"), ("audio_hidden", "audio_hidden"), in_layer=False),
    Role("audio.k", heads("audio_heads"), ("audio_hidden", "audio_hidden"), in_layer=False),
    Role("audio.v", heads("audio_heads"), ("audio_hidden", "audio_hidden"), in_layer=False),
    Role("audio.o", ROW, ("audio_hidden", "audio_hidden"), in_layer=False),
    Role("audio.up", COLUMN, ("audio_intermediate", "audio_hidden"), in_layer=False),
    Role("audio.down", ROW, ("audio_hidden", "audio_intermediate"), in_layer=False),
    Role("audio.whole", REPLICATE, ("audio_hidden",), in_layer=False),
    # Multi-token prediction: layers after the last one, with copies of the embedding and the head.
    Role("mtp.embedding", VOCABULARY, ("vocab", "hidden")),
    Role("mtp.embedding_norm", REPLICATE, ("hidden",)),
    Role("mtp.hidden_norm", REPLICATE, ("hidden",)),
    Role("mtp.projection", COLUMN, ("hidden", "2 * hidden")),
    Role("mtp.final_norm", REPLICATE, ("hidden",)),
    Role("mtp.head", VOCABULARY, ("vocab", "hidden")),
)

ROLES: Mapping[str, Role] = {role.name: role for role in _ROWS}
# The roles of the table that a declaration may give to a weight. The others are fused, or follow from how the model is quantized.
DECLARED_ROLES = tuple(role.name for role in _ROWS if role.shape)
ROLES_IN_USE = "`reshard architectures llama` shows how roles are used"
ABOUT_ROLES = f"Roles are {some(DECLARED_ROLES)}; {ROLES_IN_USE}"
"""What a message says about the roles that a declaration may use."""

FUSED = (
    ("attention.q", "attention.k", "attention.v"),
    ("mla.q_a", "mla.kv_a"),
    ("mlp.gate", "mlp.up"),
    ("shared_expert.gate", "shared_expert.up"),
    ("expert.gate", "expert.up"),
)
"""The roles whose weights serving engines join into one tensor. A declaration says what the class of its model joins in another way."""
