"""Qwen2 and Qwen2.5: llama with biases on q, k and v. Source: transformers, models/qwen2/modeling_qwen2.py."""

from reshard.architectures.llama import ARCHITECTURE as LLAMA
from reshard.models.architecture import Weight

_ATTENTION = "model.layers.{layer}.self_attn."

ARCHITECTURE = LLAMA.plus(
    Weight(_ATTENTION + "q_proj.bias", "attention.q", ("heads * head_dim",)),
    Weight(_ATTENTION + "k_proj.bias", "attention.k", ("kv_heads * head_dim",)),
    Weight(_ATTENTION + "v_proj.bias", "attention.v", ("kv_heads * head_dim",)),
    model_type="qwen2",
)
