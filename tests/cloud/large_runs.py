"""Checkpoints of a thousand files, each a few kB, as the frameworks lay them out."""

import json

import numpy as np
from safetensors.numpy import save_file

import reshard

LAYERS, HIDDEN, FEED_FORWARD, VOCABULARY = 500, 8, 16, 64


def write_hf(folder):
    """A llama of 500 layers in 1,002 files."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": FEED_FORWARD,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "head_dim": 4,
        "rms_norm_eps": 1e-5, "torch_dtype": "float32", "tie_word_embeddings": False, "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    groups = [{"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}, {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        groups.append({prefix + f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"} | {prefix + "input_layernorm.weight": (HIDDEN,)})
        groups.append(
            {prefix + f"mlp.{name}_proj.weight": (FEED_FORWARD, HIDDEN) for name in ("gate", "up")}
            | {prefix + "mlp.down_proj.weight": (HIDDEN, FEED_FORWARD), prefix + "post_attention_layernorm.weight": (HIDDEN,)}
        )
    index = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file({key: random.standard_normal(shape, np.float32) for key, shape in group.items()}, folder / name)
        index |= dict.fromkeys(group, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def converted(source, folder, **options):
    """The same model in another format."""
    reshard.convert(reshard.plan(reshard.open(source), **options), folder)
    return folder
