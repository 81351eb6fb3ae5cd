"""Models of published sizes without weights: config.json, and safetensors files that have a header and a hole.

    python tests/serving/published_sizes.py FOLDER [model ...]

The config values and the names of the tensors are those of the published checkpoints: openai/gpt-oss-120b in its bf16 form,
Qwen/Qwen3-Next-80B-A3B-Instruct, deepseek-ai/DeepSeek-V3 in its bf16 form.
"""

# ruff: noqa: E501

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

Entry = tuple[str, tuple[int, ...]]

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16", "num_hidden_layers": 36,
    "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4, "experts_per_token": 4,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "sliding_window": 128,
    "attention_bias": True, "swiglu_limit": 7.0, "rms_norm_eps": 1e-05, "rope_theta": 150000, "tie_word_embeddings": False,
    "max_position_embeddings": 131072, "initial_context_length": 4096, "hidden_act": "silu",
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
    },
}  # fmt: skip
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "torch_dtype": "bfloat16", "num_hidden_layers": 48,
    "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts": 512, "num_experts_per_tok": 10, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "rope_theta": 10000000,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "full_attention_interval": 4, "vocab_size": 151936, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16", "num_hidden_layers": 61,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_attention_heads": 128, "num_key_value_heads": 128,
    "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}  # fmt: skip


def gpt_oss(config: dict) -> Iterator[tuple[str, Entry]]:
    hidden, experts, width, vocabulary = (config[key] for key in ("hidden_size", "num_local_experts", "intermediate_size", "vocab_size"))
    heads, groups, head = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    yield from _ends(config, vocabulary, hidden)
    for layer in _layers(config):
        yield from _norms(layer, hidden)
        for name, count in (("q", heads), ("k", groups), ("v", groups)):
            yield f"{layer}self_attn.{name}_proj.weight", ("BF16", (count * head, hidden))
            yield f"{layer}self_attn.{name}_proj.bias", ("BF16", (count * head,))
        yield f"{layer}self_attn.o_proj.weight", ("BF16", (hidden, heads * head))
        yield f"{layer}self_attn.o_proj.bias", ("BF16", (hidden,))
        yield f"{layer}self_attn.sinks", ("BF16", (heads,))
        yield f"{layer}mlp.router.weight", ("BF16", (experts, hidden))
        yield f"{layer}mlp.router.bias", ("BF16", (experts,))
        yield f"{layer}mlp.experts.gate_up_proj", ("BF16", (experts, hidden, 2 * width))
        yield f"{layer}mlp.experts.gate_up_proj_bias", ("BF16", (experts, 2 * width))
        yield f"{layer}mlp.experts.down_proj", ("BF16", (experts, width, hidden))
        yield f"{layer}mlp.experts.down_proj_bias", ("BF16", (experts, hidden))


def qwen3_next(config: dict) -> Iterator[tuple[str, Entry]]:
    hidden, heads, groups, head = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    yield from _ends(config, config["vocab_size"], hidden)
    for number, layer in enumerate(_layers(config)):
        yield from _norms(layer, hidden)
        if (number + 1) % config["full_attention_interval"]:
            yield f"{layer}linear_attn.in_proj_qkvz.weight", ("BF16", (2 * keys + 2 * values, hidden))
            yield f"{layer}linear_attn.in_proj_ba.weight", ("BF16", (2 * config["linear_num_value_heads"], hidden))
            yield f"{layer}linear_attn.conv1d.weight", ("BF16", (2 * keys + values, 1, config["linear_conv_kernel_dim"]))
            yield f"{layer}linear_attn.dt_bias", ("BF16", (config["linear_num_value_heads"],))
            yield f"{layer}linear_attn.A_log", ("BF16", (config["linear_num_value_heads"],))
            yield f"{layer}linear_attn.norm.weight", ("BF16", (config["linear_value_head_dim"],))
            yield f"{layer}linear_attn.out_proj.weight", ("BF16", (hidden, values))
        else:
            yield f"{layer}self_attn.q_proj.weight", ("BF16", (2 * heads * head, hidden))
            for name in ("k", "v"):
                yield f"{layer}self_attn.{name}_proj.weight", ("BF16", (groups * head, hidden))
            yield f"{layer}self_attn.o_proj.weight", ("BF16", (hidden, heads * head))
            for name in ("q", "k"):
                yield f"{layer}self_attn.{name}_norm.weight", ("BF16", (head,))
        yield f"{layer}mlp.gate.weight", ("BF16", (config["num_experts"], hidden))
        yield f"{layer}mlp.shared_expert_gate.weight", ("BF16", (1, hidden))
        yield from _gated(f"{layer}mlp.shared_expert.", hidden, config["shared_expert_intermediate_size"])
        for expert in range(config["num_experts"]):
            yield from _gated(f"{layer}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])


def deepseek_v3(config: dict) -> Iterator[tuple[str, Entry]]:
    hidden, heads, query, latent = (config[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    yield from _ends(config, config["vocab_size"], hidden)
    for number, layer in enumerate(_layers(config)):
        yield from _norms(layer, hidden)
        yield f"{layer}self_attn.q_a_proj.weight", ("BF16", (query, hidden))
        yield f"{layer}self_attn.q_a_layernorm.weight", ("BF16", (query,))
        yield f"{layer}self_attn.q_b_proj.weight", ("BF16", (heads * (nope + rope), query))
        yield f"{layer}self_attn.kv_a_proj_with_mqa.weight", ("BF16", (latent + rope, hidden))
        yield f"{layer}self_attn.kv_a_layernorm.weight", ("BF16", (latent,))
        yield f"{layer}self_attn.kv_b_proj.weight", ("BF16", (heads * (nope + value), latent))
        yield f"{layer}self_attn.o_proj.weight", ("BF16", (hidden, heads * value))
        if number < config["first_k_dense_replace"]:
            yield from _gated(f"{layer}mlp.", hidden, config["intermediate_size"])
            continue
        yield f"{layer}mlp.gate.weight", ("BF16", (config["n_routed_experts"], hidden))
        yield f"{layer}mlp.gate.e_score_correction_bias", ("F32", (config["n_routed_experts"],))
        yield from _gated(f"{layer}mlp.shared_experts.", hidden, config["moe_intermediate_size"] * config["n_shared_experts"])
        for expert in range(config["n_routed_experts"]):
            yield from _gated(f"{layer}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])


def _layers(config: dict) -> list[str]:
    return [f"model.layers.{number}." for number in range(config["num_hidden_layers"])]


def _ends(config: dict, vocabulary: int, hidden: int) -> Iterator[tuple[str, Entry]]:
    yield "model.embed_tokens.weight", ("BF16", (vocabulary, hidden))
    yield "model.norm.weight", ("BF16", (hidden,))
    yield "lm_head.weight", ("BF16", (vocabulary, hidden))


def _norms(layer: str, hidden: int) -> Iterator[tuple[str, Entry]]:
    yield f"{layer}input_layernorm.weight", ("BF16", (hidden,))
    yield f"{layer}post_attention_layernorm.weight", ("BF16", (hidden,))


def _gated(module: str, hidden: int, width: int) -> Iterator[tuple[str, Entry]]:
    yield f"{module}gate_proj.weight", ("BF16", (width, hidden))
    yield f"{module}up_proj.weight", ("BF16", (width, hidden))
    yield f"{module}down_proj.weight", ("BF16", (hidden, width))


MODELS = {"gpt-oss-120b": (GPT_OSS, gpt_oss), "qwen3-next-80b": (QWEN3_NEXT, qwen3_next), "deepseek-v3": (DEEPSEEK_V3, deepseek_v3)}


def write(folder: Path, config: dict, entries: dict[str, Entry]) -> None:
    """A folder with the config, and one safetensors file of the right length, whose tensors are a hole."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    header, stop = {}, 0
    for name, (dtype, shape) in entries.items():
        start, stop = stop, stop + math.prod(shape) * {"BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + stop)


def main(folder: Path, names: list[str]) -> None:
    for name in names or MODELS:
        config, entries = MODELS[name]
        write(folder / name, config, dict(entries(config)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
