"""Qwen2-MoE: qwen2 with the experts of qwen3_moe and one more for every token.

Source: transformers, models/qwen2_moe/modeling_qwen2_moe.py.
"""

from reshard.architectures.qwen3_moe import ARCHITECTURE as QWEN3_MOE
from reshard.models.architecture import Dimension, Weight

_LAYER = "model.layers.{layer}."
_SHARED = _LAYER + "mlp.shared_expert."

ARCHITECTURE = QWEN3_MOE.plus(
    Weight(_LAYER + "self_attn.q_proj.bias", "attention.q", ("heads * head_dim",), when="qkv_bias"),
    Weight(_LAYER + "self_attn.k_proj.bias", "attention.k", ("kv_heads * head_dim",), when="qkv_bias"),
    Weight(_LAYER + "self_attn.v_proj.bias", "attention.v", ("kv_heads * head_dim",), when="qkv_bias"),
    Weight(_SHARED + "gate_proj.weight", "shared_expert.gate", ("shared_intermediate", "hidden"), layers="sparse"),
    Weight(_SHARED + "up_proj.weight", "shared_expert.up", ("shared_intermediate", "hidden"), layers="sparse"),
    Weight(_SHARED + "down_proj.weight", "shared_expert.down", ("hidden", "shared_intermediate"), layers="sparse"),
    Weight(_LAYER + "mlp.shared_expert_gate.weight", "shared_expert.score", ("1", "hidden"), layers="sparse"),
    model_type="qwen2_moe",
    dimensions={"shared_intermediate": Dimension(("shared_expert_intermediate_size",))},
    without=r"\.self_attn\.[qk]_norm\.",
    defaults={"qkv_bias": True},
)
