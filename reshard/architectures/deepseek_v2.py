"""DeepSeek-V2: multi-head latent attention, dense layers first, then shared and routed experts.

Source: transformers, models/deepseek_v2/modeling_deepseek_v2.py. Heads of queries and keys are [nope, rope], the rows of kv_b
[nope of the key, value] per head.
"""

from reshard.architectures.llama import ARCHITECTURE as LLAMA
from reshard.architectures.qwen3_moe import MOE
from reshard.models.architecture import Dimension, SparseLayers, Weight

_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attn."
_SHARED = _LAYER + "mlp.shared_experts."

ARCHITECTURE = LLAMA.plus(
    Weight(_ATTENTION + "q_proj.weight", "mla.q", ("heads * qk_dim", "hidden"), when="not q_lora_rank"),
    Weight(_ATTENTION + "q_a_proj.weight", "mla.q_a", ("q_rank", "hidden")),
    Weight(_ATTENTION + "q_a_proj.bias", "mla.q_a", ("q_rank",), when="attention_bias"),
    Weight(_ATTENTION + "q_a_layernorm.weight", "mla.q_a_norm", ("q_rank",)),
    Weight(_ATTENTION + "q_b_proj.weight", "mla.q_b", ("heads * qk_dim", "q_rank")),
    Weight(_ATTENTION + "kv_a_proj_with_mqa.weight", "mla.kv_a", ("kv_rank + rope_dim", "hidden")),
    Weight(_ATTENTION + "kv_a_proj_with_mqa.bias", "mla.kv_a", ("kv_rank + rope_dim",), when="attention_bias"),
    Weight(_ATTENTION + "kv_a_layernorm.weight", "mla.kv_a_norm", ("kv_rank",)),
    Weight(_ATTENTION + "kv_b_proj.weight", "mla.kv_b", ("heads * kv_b_dim", "kv_rank")),
    Weight(_ATTENTION + "o_proj.weight", "attention.o", ("hidden", "heads * v_dim")),
    Weight(_ATTENTION + "o_proj.bias", "attention.o", ("hidden",), when="attention_bias"),
    *MOE,
    Weight(_SHARED + "gate_proj.weight", "shared_expert.gate", ("shared_experts * expert_intermediate", "hidden"), layers="sparse"),
    Weight(_SHARED + "up_proj.weight", "shared_expert.up", ("shared_experts * expert_intermediate", "hidden"), layers="sparse"),
    Weight(_SHARED + "down_proj.weight", "shared_expert.down", ("hidden", "shared_experts * expert_intermediate"), layers="sparse"),
    model_type="deepseek_v2",
    dimensions={
        "kv_heads": Dimension((), default="heads"),
        "head_dim": Dimension(("v_head_dim",)),
        "q_rank": Dimension(("q_lora_rank",), optional=True),
        "kv_rank": Dimension(("kv_lora_rank",)),
        "nope_dim": Dimension(("qk_nope_head_dim",)),
        "rope_dim": Dimension(("qk_rope_head_dim",)),
        "v_dim": Dimension(("v_head_dim",)),
        "qk_dim": Dimension((), default="nope_dim + rope_dim"),
        "kv_b_dim": Dimension((), default="nope_dim + v_dim"),
        "experts": Dimension(("n_routed_experts", "num_experts", "num_local_experts")),
        "shared_experts": Dimension(("n_shared_experts",), optional=True),
        "expert_intermediate": Dimension(("moe_intermediate_size",)),
    },
    without=r"\.(mlp|self_attn)\.",
    sparse=SparseLayers(first="first_k_dense_replace", step="moe_layer_freq"),
)
