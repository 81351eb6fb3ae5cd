"""Qwen3: llama with a norm over each query and key head. Source: transformers, models/qwen3/modeling_qwen3.py."""

from reshard.architectures.llama import ARCHITECTURE as LLAMA
from reshard.models.architecture import Weight

_ATTENTION = "model.layers.{layer}.self_attn."

ARCHITECTURE = LLAMA.plus(
    Weight(_ATTENTION + "q_norm.weight", "attention.q_norm", ("head_dim",)),
    Weight(_ATTENTION + "k_norm.weight", "attention.k_norm", ("head_dim",)),
    model_type="qwen3",
)
