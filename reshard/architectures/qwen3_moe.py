"""Qwen3-MoE: qwen3 with experts in most layers. Source: transformers, models/qwen3_moe/modeling_qwen3_moe.py."""

from reshard.architectures.qwen3 import ARCHITECTURE as QWEN3
from reshard.models.architecture import Dimension, SparseLayers, Weight

_MLP = "model.layers.{layer}.mlp."
_EXPERT = _MLP + "experts.{expert}."

# One MLP in dense layers, a router and experts in sparse ones: other models call them the same.
MOE = (
    Weight(_MLP + "gate_proj.weight", "mlp.gate", ("intermediate", "hidden"), layers="dense"),
    Weight(_MLP + "up_proj.weight", "mlp.up", ("intermediate", "hidden"), layers="dense"),
    Weight(_MLP + "down_proj.weight", "mlp.down", ("hidden", "intermediate"), layers="dense"),
    Weight(_MLP + "gate.weight", "router", ("experts", "hidden"), layers="sparse"),
    Weight(_EXPERT + "gate_proj.weight", "expert.gate", ("expert_intermediate", "hidden"), layers="sparse"),
    Weight(_EXPERT + "up_proj.weight", "expert.up", ("expert_intermediate", "hidden"), layers="sparse"),
    Weight(_EXPERT + "down_proj.weight", "expert.down", ("hidden", "expert_intermediate"), layers="sparse"),
)

ARCHITECTURE = QWEN3.plus(
    *MOE,
    model_type="qwen3_moe",
    dimensions={
        "experts": Dimension(("num_experts", "num_local_experts")),
        "expert_intermediate": Dimension(("moe_intermediate_size",)),
    },
    without=r"\.mlp\.",
    sparse=SparseLayers(step="decoder_sparse_step", offset=1, dense="mlp_only_layers"),
)
