"""A small config of each declared model type, from the fixtures or made here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from helpers.fixture_places import FIXTURES, HF
from reshard.models.quantization import quantization_settings

OF_HF = ("llama", "llama-tied", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt2",
         "gpt_neox", "gemma2", "phi3")  # fmt: skip
_SIZES = {"vocab_size": 211, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 96, "max_position_embeddings": 128}
_TWO = {**_SIZES, "num_hidden_layers": 2}
# Types of which no fixture has a model.
MADE: dict[str, dict[str, Any]] = {
    "internlm": {**_TWO, "architectures": ["InternLMForCausalLM"]},
    "qwen": {**_TWO, "architectures": ["QWenLMHeadModel"]},
    "refinedweb": {"vocab_size": 211, "hidden_size": 64, "n_layer": 2, "n_head": 8, "n_head_kv": 2, "architectures": ["RWForCausalLM"]},
    "refinedwebmodel": {"vocab_size": 211, "hidden_size": 64, "n_layer": 2, "n_head": 8, "n_head_kv": 1, "multi_query": True,
                        "architectures": ["RWForCausalLM"]},
    "dbrx": {"vocab_size": 211, "d_model": 64, "n_layers": 2, "n_heads": 8, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8},
             "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}, "architectures": ["DbrxForCausalLM"]},
    "internlm2": {**_TWO, "num_key_value_heads": 2, "bias": False, "rms_norm_eps": 1e-6, "hidden_act": "silu",
                  "architectures": ["InternLM2ForCausalLM"]},
    "olmo_hybrid": {**_SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2, "linear_num_key_heads": 8, "linear_num_value_heads": 8,
                    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
                    "architectures": ["OlmoHybridForCausalLM"]},
    "sarvam_mla": {**_TWO, "num_key_value_heads": 8, "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32,
                   "q_lora_rank": None, "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1,
                   "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "moe_router_enable_expert_bias": True,
                   "rms_norm_eps": 1e-6, "architectures": ["SarvamMLAForCausalLM"]},
}  # fmt: skip
# Types whose model is that of another type with these keys, or the language model inside it.
LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseekocr": ("deepseek_ocr", {}),
    "longcat_flash_ngram": ("longcat_flash", {"emb_split_num": 2, "emb_neighbor_num": 3, "ngram_vocab_size_ratio": 2,
                                              "architectures": ["LongcatFlashNgramForCausalLM"]}),
    "minimax_m1": ("mixtral", {"attn_type_list": [0, 1], "architectures": ["MiniMaxM1ForCausalLM"]}),
}  # fmt: skip
INNER = {"qwen4_exp_text": ("qwen4_exp", "Qwen4ExpForCausalLM"), "glm5_next_text": ("glm5_next", "Glm5NextForCausalLM")}


def declared_models() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Small models of declared types, not quantized: name, config, and what the reference of their ranks says besides. A name is the model
    type, or begins with it and a hyphen."""
    for name in OF_HF:
        yield name, json.loads((HF / name / "config.json").read_text()), {}
    for path in sorted((FIXTURES / "vllm_declared").glob("*.json"), key=lambda path: path.stem):
        reference = json.loads(path.read_text())
        if not quantization_settings(reference["config"]):
            yield path.stem, reference["config"], reference
    for name, config in MADE.items():
        yield name, {**config, "model_type": name}, {}
    for name, (other, keys) in LIKE.items():
        place = HF / other / "config.json" if other in OF_HF else FIXTURES / "vllm_declared" / f"{other}.json"
        config = json.loads(place.read_text())
        yield name, {**config.get("config", config), **keys, "model_type": name}, {}
    for name, (outer, inner_class) in INNER.items():
        config = json.loads((FIXTURES / "vllm_declared" / f"{outer}.json").read_text())["config"]["text_config"]
        yield name, {**config, "model_type": name, "architectures": [inner_class]}, {}


def type_of_model(name: str) -> str:
    """The declared type of one of these models."""
    return name.partition("-")[0]
