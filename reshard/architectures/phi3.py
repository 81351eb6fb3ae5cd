"""Phi-3: llama with q, k and v in one weight, gate and up in another. Source: transformers, models/phi3/modeling_phi3.py."""

from reshard.architectures.llama import ARCHITECTURE as LLAMA
from reshard.models.architecture import Weight

_LAYER = "model.layers.{layer}."
_QKV = {"attention.q": "heads * head_dim", "attention.k": "kv_heads * head_dim", "attention.v": "kv_heads * head_dim"}
_GATE_UP = {"mlp.gate": "intermediate", "mlp.up": "intermediate"}

ARCHITECTURE = LLAMA.plus(
    Weight(_LAYER + "self_attn.qkv_proj.weight", "attention.qkv", ("heads * head_dim + 2 * kv_heads * head_dim", "hidden"), holds=_QKV),
    Weight(_LAYER + "mlp.gate_up_proj.weight", "mlp.gate_up", ("2 * intermediate", "hidden"), holds=_GATE_UP),
    model_type="phi3",
    without=r"\.[qkv]_proj\.|\.(gate|up)_proj\.|\.bias$",
)
