"""An EAGLE-3 draft for fixtures/hf/llama, with the weights that vLLM's Eagle3LlamaForCausalLM reads (tests/serving loads it)."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 88,
    "vocab_size": 250,
    "draft_vocab_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1]},
}
SHAPES = {
    "fc.weight": (32, 32),
    "lm_head.weight": (96, 32),
    "norm.weight": (32,),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.post_attention_layernorm.weight": (32,),
    "midlayer.self_attn.q_proj.weight": (256, 64),
    "midlayer.self_attn.k_proj.weight": (64, 64),
    "midlayer.self_attn.v_proj.weight": (64, 64),
    "midlayer.self_attn.o_proj.weight": (32, 256),
    "midlayer.mlp.gate_proj.weight": (88, 32),
    "midlayer.mlp.up_proj.weight": (88, 32),
    "midlayer.mlp.down_proj.weight": (32, 88),
}


def tensors() -> dict[str, torch.Tensor]:
    """The weights, in bfloat16, and the two integer tables of its vocabulary."""
    chance = torch.Generator().manual_seed(1)
    weights = {name: (torch.randn(shape, generator=chance) * 0.05).bfloat16() for name, shape in SHAPES.items()}
    tokens = torch.arange(96) * 2 + 3
    return {"d2t": tokens - torch.arange(96), "t2d": torch.zeros(250, dtype=torch.bool).index_fill_(0, tokens, True), **weights}


def make_draft(folder: Path) -> Path:
    """The draft as a Hugging Face folder."""
    folder.mkdir(parents=True)
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
