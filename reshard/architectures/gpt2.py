"""GPT-2: learned positions, biases, Conv1D weights, which are stored as [in, out]. Source: transformers, models/gpt2/modeling_gpt2.py."""

from reshard.models.architecture import Architecture, Dimension, Weight

_LAYER = "transformer.h.{layer}."
_QKV = {"attention.q": "hidden", "attention.k": "hidden", "attention.v": "hidden"}

ARCHITECTURE = Architecture(
    model_type="gpt2",
    dimensions={
        "vocab": Dimension(("vocab_size",)),
        "hidden": Dimension(("n_embd", "hidden_size")),
        "layers": Dimension(("n_layer", "num_hidden_layers")),
        "heads": Dimension(("n_head", "num_attention_heads")),
        "kv_heads": Dimension((), default="heads"),
        "head_dim": Dimension((), default="hidden / heads"),
        "intermediate": Dimension(("n_inner",), default="4 * hidden"),
        "positions": Dimension(("n_positions", "max_position_embeddings")),
    },
    weights=(
        Weight("transformer.wte.weight", "embedding", ("vocab", "hidden")),
        Weight("transformer.wpe.weight", "position_embedding", ("positions", "hidden")),
        Weight(_LAYER + "ln_1.weight", "attention.norm", ("hidden",)),
        Weight(_LAYER + "ln_1.bias", "attention.norm", ("hidden",)),
        Weight(_LAYER + "attn.c_attn.weight", "attention.qkv", ("hidden", "3 * hidden"), holds=_QKV, transposed=True),
        Weight(_LAYER + "attn.c_attn.bias", "attention.qkv", ("3 * hidden",), holds=_QKV),
        Weight(_LAYER + "attn.c_proj.weight", "attention.o", ("hidden", "hidden"), transposed=True),
        Weight(_LAYER + "attn.c_proj.bias", "attention.o", ("hidden",)),
        Weight(_LAYER + "ln_2.weight", "mlp.norm", ("hidden",)),
        Weight(_LAYER + "ln_2.bias", "mlp.norm", ("hidden",)),
        Weight(_LAYER + "mlp.c_fc.weight", "mlp.up", ("hidden", "intermediate"), transposed=True),
        Weight(_LAYER + "mlp.c_fc.bias", "mlp.up", ("intermediate",)),
        Weight(_LAYER + "mlp.c_proj.weight", "mlp.down", ("intermediate", "hidden"), transposed=True),
        Weight(_LAYER + "mlp.c_proj.bias", "mlp.down", ("hidden",)),
        Weight("transformer.ln_f.weight", "final_norm", ("hidden",)),
        Weight("transformer.ln_f.bias", "final_norm", ("hidden",)),
        Weight("lm_head.weight", "head", ("vocab", "hidden")),
    ),
    tied=("lm_head.weight", "transformer.wte.weight"),
    dropped={r"transformer\.h\.\d+\.attn\.(masked_)?bias": "every engine computes it from the config"},
    defaults={"tie_word_embeddings": True},
)
