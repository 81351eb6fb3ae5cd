"""Gemma 2: llama with norms before and after attention and MLP, and always tied. Source: transformers, models/gemma2/modeling_gemma2.py.

The norms' weights are stored minus one; engines add it when they compute.
"""

from reshard.architectures.llama import ARCHITECTURE as LLAMA
from reshard.models.architecture import Dimension, Weight

_LAYER = "model.layers.{layer}."

ARCHITECTURE = LLAMA.plus(
    Weight(_LAYER + "post_attention_layernorm.weight", "attention.post_norm", ("hidden",)),
    Weight(_LAYER + "pre_feedforward_layernorm.weight", "mlp.norm", ("hidden",)),
    Weight(_LAYER + "post_feedforward_layernorm.weight", "mlp.post_norm", ("hidden",)),
    model_type="gemma2",
    dimensions={"head_dim": Dimension(("head_dim",), default="256")},
    defaults={"tie_word_embeddings": True},
)
