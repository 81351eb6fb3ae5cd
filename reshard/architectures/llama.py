"""Llama 1 to 3 and what shares its layers; weights in the order of the model's parameters.

Source: transformers, models/llama/{configuration,modeling}_llama.py.
"""

from reshard.models.architecture import Architecture, Dimension, Weight

_LAYER = "model.layers.{layer}."

ARCHITECTURE = Architecture(
    model_type="llama",
    dimensions={
        "vocab": Dimension(("vocab_size",)),
        "hidden": Dimension(("hidden_size",)),
        "layers": Dimension(("num_hidden_layers",)),
        "heads": Dimension(("num_attention_heads",)),
        "kv_heads": Dimension(("num_key_value_heads",), default="heads"),
        "head_dim": Dimension(("head_dim",), default="hidden / heads"),
        "intermediate": Dimension(("intermediate_size",)),
    },
    weights=(
        Weight("model.embed_tokens.weight", "embedding", ("vocab", "hidden")),
        Weight(_LAYER + "self_attn.q_proj.weight", "attention.q", ("heads * head_dim", "hidden")),
        Weight(_LAYER + "self_attn.q_proj.bias", "attention.q", ("heads * head_dim",), when="attention_bias"),
        Weight(_LAYER + "self_attn.k_proj.weight", "attention.k", ("kv_heads * head_dim", "hidden")),
        Weight(_LAYER + "self_attn.k_proj.bias", "attention.k", ("kv_heads * head_dim",), when="attention_bias"),
        Weight(_LAYER + "self_attn.v_proj.weight", "attention.v", ("kv_heads * head_dim", "hidden")),
        Weight(_LAYER + "self_attn.v_proj.bias", "attention.v", ("kv_heads * head_dim",), when="attention_bias"),
        Weight(_LAYER + "self_attn.o_proj.weight", "attention.o", ("hidden", "heads * head_dim")),
        Weight(_LAYER + "self_attn.o_proj.bias", "attention.o", ("hidden",), when="attention_bias"),
        Weight(_LAYER + "mlp.gate_proj.weight", "mlp.gate", ("intermediate", "hidden")),
        Weight(_LAYER + "mlp.gate_proj.bias", "mlp.gate", ("intermediate",), when="mlp_bias"),
        Weight(_LAYER + "mlp.up_proj.weight", "mlp.up", ("intermediate", "hidden")),
        Weight(_LAYER + "mlp.up_proj.bias", "mlp.up", ("intermediate",), when="mlp_bias"),
        Weight(_LAYER + "mlp.down_proj.weight", "mlp.down", ("hidden", "intermediate")),
        Weight(_LAYER + "mlp.down_proj.bias", "mlp.down", ("hidden",), when="mlp_bias"),
        Weight(_LAYER + "input_layernorm.weight", "attention.norm", ("hidden",)),
        Weight(_LAYER + "post_attention_layernorm.weight", "mlp.norm", ("hidden",)),
        Weight("model.norm.weight", "final_norm", ("hidden",)),
        Weight("lm_head.weight", "head", ("vocab", "hidden")),
    ),
    dropped={r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "every engine computes it from the config"},
)
