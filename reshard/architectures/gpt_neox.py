"""GPT-NeoX and Pythia: q, k and v fused head by head. Source: transformers, models/gpt_neox/modeling_gpt_neox.py."""

from reshard.models.architecture import Architecture, Dimension, Weight

_LAYER = "gpt_neox.layers.{layer}."
_QKV = {"attention.q": "hidden", "attention.k": "hidden", "attention.v": "hidden"}

ARCHITECTURE = Architecture(
    model_type="gpt_neox",
    dimensions={
        "vocab": Dimension(("vocab_size",)),
        "hidden": Dimension(("hidden_size",)),
        "layers": Dimension(("num_hidden_layers",)),
        "heads": Dimension(("num_attention_heads",)),
        "kv_heads": Dimension((), default="heads"),
        "head_dim": Dimension((), default="hidden / heads"),
        "intermediate": Dimension(("intermediate_size",)),
    },
    weights=(
        Weight("gpt_neox.embed_in.weight", "embedding", ("vocab", "hidden")),
        Weight(_LAYER + "input_layernorm.weight", "attention.norm", ("hidden",)),
        Weight(_LAYER + "input_layernorm.bias", "attention.norm", ("hidden",)),
        Weight(_LAYER + "post_attention_layernorm.weight", "mlp.norm", ("hidden",)),
        Weight(_LAYER + "post_attention_layernorm.bias", "mlp.norm", ("hidden",)),
        Weight(_LAYER + "attention.query_key_value.weight", "attention.qkv", ("3 * hidden", "hidden"), holds=_QKV, by="heads"),
        Weight(_LAYER + "attention.query_key_value.bias", "attention.qkv", ("3 * hidden",), holds=_QKV, by="heads", when="attention_bias"),
        Weight(_LAYER + "attention.dense.weight", "attention.o", ("hidden", "hidden")),
        Weight(_LAYER + "attention.dense.bias", "attention.o", ("hidden",), when="attention_bias"),
        Weight(_LAYER + "mlp.dense_h_to_4h.weight", "mlp.up", ("intermediate", "hidden")),
        Weight(_LAYER + "mlp.dense_h_to_4h.bias", "mlp.up", ("intermediate",)),
        Weight(_LAYER + "mlp.dense_4h_to_h.weight", "mlp.down", ("hidden", "intermediate")),
        Weight(_LAYER + "mlp.dense_4h_to_h.bias", "mlp.down", ("hidden",)),
        Weight("gpt_neox.final_layer_norm.weight", "final_norm", ("hidden",)),
        Weight("gpt_neox.final_layer_norm.bias", "final_norm", ("hidden",)),
        Weight("embed_out.weight", "head", ("vocab", "hidden")),
    ),
    tied=("embed_out.weight", "gpt_neox.embed_in.weight"),
    dropped={
        r"gpt_neox\.layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)": "every engine computes it from the config",
    },
    defaults={"attention_bias": True},
)
