"""Mixtral: mistral with experts in every layer. Source: transformers, models/mixtral; names as it and the published models store them."""

from reshard.architectures.llama import ARCHITECTURE as LLAMA
from reshard.models.architecture import Dimension, SparseLayers, Weight

_MOE = "model.layers.{layer}.block_sparse_moe."
_EXPERT = _MOE + "experts.{expert}."

ARCHITECTURE = LLAMA.plus(
    Weight(_MOE + "gate.weight", "router", ("experts", "hidden")),
    Weight(_EXPERT + "w1.weight", "expert.gate", ("intermediate", "hidden")),
    Weight(_EXPERT + "w2.weight", "expert.down", ("hidden", "intermediate")),
    Weight(_EXPERT + "w3.weight", "expert.up", ("intermediate", "hidden")),
    model_type="mixtral",
    dimensions={"experts": Dimension(("num_local_experts", "num_experts"))},
    without=r"\.mlp\.",
    sparse=SparseLayers(),
)
