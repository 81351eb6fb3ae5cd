"""Tiny random models of many types, saved by transformers.

    python tests/serving/tiny_models.py FOLDER [model_type ...]

One recipe for all: every size in a config that the recipe knows is made small. The sizes differ from each other, so that no axis is
mistaken for another. A row in OWN says what else a type needs. Prints one JSON line for each model: its name, and the error if it was not made.

Environment: that of tests/serving/requirements.txt.
"""

# ruff: noqa: E501, RUF024

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

SIZES: dict[str, object] = {
    "vocab_size": 250, "hidden_size": 64, "n_embd": 64, "d_model": 64, "n_embed": 64, "dim": 64, "intermediate_size": 96, "ffn_dim": 96,
    "n_inner": 96, "word_embed_proj_dim": 64, "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4,
    "num_attention_heads": 8, "n_head": 8, "n_heads": 8, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "rotary_dim": 4,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_sequence_length": 256, "max_seq_len": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # experts
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_k": 2, "moe_intermediate_size": 32, "expert_ffn_hidden_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "moe_layer_start_index": 1,
    # latent attention
    "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    # linear attention and state spaces
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4, "state_size": 16, "ssm_state_size": 16, "mamba_d_state": 16, "mamba_d_ssm": 64, "mamba_n_heads": 8,
    "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "mamba_expand": 2,
    "mamba_dt_rank": 6, "time_step_rank": 6, "num_heads": 8, "mamba_chunk_size": 16, "chunk_size": 16, "conv_dim": 64,
    # others
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "sliding_window": 32, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 250, "laurel_rank": 8, "num_nextn_predict_layers": 0, "initializer_range": 0.2,
}  # fmt: skip
HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
VISION = {
    "depth": 2, "num_hidden_layers": 2, "embed_dim": 32, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "num_heads": 4,
    "num_attention_heads": 4, "patch_size": 4, "spatial_patch_size": 4, "image_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1], "window_size": 8,
    "projection_dim": 32, "num_channels": 3, "vision_use_head": False, "model_type": None,
}  # fmt: skip
OWN: dict[str, dict[str, object]] = {
    "qwen3_next": {"layer_types": HYBRID, "num_hidden_layers": 4},
    "qwen3_5_text": {"layer_types": HYBRID},
    "qwen3_5_moe_text": {"layer_types": HYBRID},
    "gpt_oss": {"layer_types": SLIDING[2:] * 2, "intermediate_size": 64, "hidden_size": 64},
    "whisper": {
        "encoder_attention_heads": 4, "decoder_attention_heads": 8, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 48, "decoder_start_token_id": 1, "max_source_positions": 20, "max_target_positions": 24,
    },
    "dbrx": {
        "d_model": 64, "n_heads": 8, "attn_config": {"kv_n_heads": 2, "rope_theta": 10000},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 64},
    },
    "mamba": {"hidden_size": 64, "intermediate_size": 128, "expand": 2, "num_heads": None},
    "falcon_mamba": {"hidden_size": 64, "intermediate_size": 128, "expand": 2, "num_heads": None},
    "mamba2": {"hidden_size": 64, "head_dim": 16, "num_heads": 8, "expand": 2, "n_groups": 2},
    "falcon": {"num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False, "bias": False},
    "bloom": {"n_head": 8, "hidden_size": 64, "num_attention_heads": None},
    "gpt_bigcode": {"n_head": 8, "multi_query": True, "num_key_value_heads": None},
    "gptj": {"n_head": 8, "rotary_dim": 4},
    "jamba": {"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2, "use_mamba_kernels": False},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 16},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mamba", "mlp"], "hybrid_override_pattern": "M*M-", "n_groups": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma3_text": {"layer_types": SLIDING},
    "olmo3": {"layer_types": SLIDING},
    "cohere2": {"layer_types": SLIDING},
    "exaone4": {"layer_types": SLIDING},
    "llama4_text": {"interleave_moe_layer_step": 2, "moe_layers": None, "intermediate_size_mlp": 96, "intermediate_size": 32, "num_local_experts": 4},
    "lfm2": {"block_dim": 64, "conv_dim": 64, "full_attn_idxs": [2], "layer_types": ["conv", "conv", "full_attention", "conv"],
             "block_ff_dim": 96, "block_multiple_of": 16, "block_auto_adjust_ff_dim": False, "conv_L_cache": 3},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1, "conv_L_cache": 3},
    "opt": {"do_layer_norm_before": True},
    "phi": {"num_key_value_heads": 8},
    "gpt2": {"n_head": 8},
    "gpt_neox": {"num_attention_heads": 8},
    "stablelm": {"use_qkv_bias": True},
    "minimax_m2": {"rotary_dim": 4},
    **dict.fromkeys(("hunyuan_v1_dense", "ministral"), {"head_dim": 8}),
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "hunyuan_v1_moe": {"head_dim": 8, "intermediate_size": 32, "moe_topk": [2] * 4, "num_shared_expert": [1] * 4, "moe_intermediate_size": [32] * 4, "use_mixed_mlp_moe": True},
    "deepseek_v3": {"topk_method": "noaux_tc", "num_key_value_heads": 8},
    "deepseek_v2": {"num_key_value_heads": 8, "n_group": 1, "topk_method": "greedy"},
    "deepseek_v32": {"topk_method": "noaux_tc", "num_key_value_heads": 8},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "num_key_value_heads": 8},
    "glm4_moe_lite": {"num_key_value_heads": 8},
    **dict.fromkeys(("glm5_next", "glm5_next_text"), {
        "num_key_value_heads": 8, "qk_rope_head_dim": 0, "linear_num_heads": 16, "linear_head_dim": 6, "index_head_dim": 128,
        "index_kpool": 4, "hc_mult": 2, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": [*HYBRID[1:], HYBRID[0]], "indexer_types": ["full"] * 4,
    }),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), {
        "layer_types": HYBRID, "hc_count": 2, "hc_lowrank": 14, "ple_layer_ids": [1, 3], "ple_embed_dim": 32, "heads_per_ngram": 2,
        "ngram_vocab_size_base": 100, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 6, "indexer_n_heads": 4,
        "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4, "eos_token_id": 2,
    }),
    "minicpm3": {"num_key_value_heads": 8},
    "kimi_linear": {"num_key_value_heads": 8, "linear_num_heads": 16, "linear_head_dim": 6, "q_lora_rank": None, "n_group": 1,
                    "moe_intermediate_size": 512, "layer_types": HYBRID, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "afmoe": {"layer_types": SLIDING, "num_dense_layers": 1, "n_group": 1},
    "phimoe": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_interval": 1},
    "granitemoeshared": {"shared_intermediate_size": 32},
    "qwen3_vl_moe": {"tie_word_embeddings": False},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 48, "output_proj_dims": 48}, "audio_config": {"audio_embed_dim": 40}},
    # Without its talker, which transformers cannot make of the defaults of its config class.
    "qwen3_omni_moe": {"enable_audio_output": False, "thinker_config": {"text_config": {
        "vocab_size": 250, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8,
        "num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 32}}},
    "longcat_flash": {"num_layers": 2, "ffn_hidden_size": 96, "zero_expert_num": 2},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3, "layer_types": ["mamba", "hybrid"] * 3, "num_mem_blocks": 2},
    "molmo2_config": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "molmo2_vision": {"head_dim": 8, "num_key_value_heads": 4},
    "inkling_mm_model_text": {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "swa_num_attention_heads": 16,
                              "swa_num_key_value_heads": 4, "swa_head_dim": 6, "d_rel": 6, "rel_extent": 24, "sliding_window_size": 16, "n_shared_experts": 3},
    "inkling_mm_model_vision": {"n_layers": 4, "patch_size": 24},
    "exaone_moe": {"layer_types": SLIDING, "is_moe_layer": [False, True, True, True], "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
}  # fmt: skip
# Keys that published configs have, that vLLM's classes read, and that transformers leaves out.
PUBLISHED: dict[str, dict[str, object]] = {
    "afmoe": {"score_func": "sigmoid", "n_group": 1, "topk_group": 1, "route_norm": True},
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax"},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "deepseek_v32": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "glm_moe_dsa": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "qwen3_5": {"full_attention_interval": 4},
    "qwen3_5_moe": {"full_attention_interval": 4},
    "qwen3_5_moe_text": {"full_attention_interval": 4},
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
    "glm4_moe": {"head_dim": 8},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 32, "qk_norm": True, "route_norm": True},
    "glm4v": {"attention_bias": True},
    "kimi_linear": {
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "head_dim": 6,
            "num_heads": 16,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
    },
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_num": 2, "zero_expert_type": "identity"},
    "mimo_v2_flash": {"hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1]},
    "qwen3_vl_moe": {"norm_topk_prob": True},
}
# transformers saves the stacked experts of these types in another orientation than published files have.
TRANSPOSED = ("qwen3_vl_moe",)
# Names that published files have in place of those that transformers saves: (pattern, replacement).
RENAMED = {"kimi_linear": (r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1")}
TYPES = (
    *("afmoe", "apertus", "arcee", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "gemma3n_text"),
    *("gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj"),
    *("granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba", "kimi_linear"),
    *("laguna", "lfm2", "lfm2_moe", "llama", "llama4_text", "longcat_flash", "mamba", "mamba2", "mimo_v2_flash", "minicpm3", "minimax_m2"),
    *("ministral", "ministral3", "mistral", "mixtral", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3"),
    *("phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3"),
    *("stablelm", "starcoder2", "zamba2", "hy_v3", "mistral4", "deepseek_v4"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "gemma3", "llava", "mistral3", "internvl", "qwen3_5", "qwen3_5_moe"),
)


def config_of(model_type: str):
    """A small config of a type."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    defaults = kind()
    own = OWN.get(model_type, {})
    if getattr(defaults, "vision_config", None) is not None and getattr(defaults, "text_config", None) is not None:
        text = {"model_type": defaults.text_config.model_type, **_small(defaults.text_config, OWN.get(f"{model_type}_text", own))}
        known = defaults.vision_config.to_dict()
        vision = {key: value for key, value in VISION.items() if key in known and value is not None}
        if isinstance(known.get("image_size"), list):
            vision["image_size"] = [VISION["image_size"]] * 2
        vision |= OWN.get(f"{model_type}_vision", {})
        ids = {key: 10 + number for number, key in enumerate(sorted(defaults.to_dict())) if key.endswith(("token_id", "token_index"))}
        return kind(text_config=text, vision_config=vision, **ids, **OWN.get(f"{model_type}_config", {}))
    return kind(**_small(defaults, own))


def _small(defaults, own: dict[str, object]) -> dict[str, object]:
    known = defaults.to_dict()
    sizes = {key: value for key, value in SIZES.items() if known.get(key) is not None or key == "pad_token_id"}
    sizes |= {"layer_types": None} if "layer_types" in known and "layer_types" not in own else {}
    layers = {"mlp_layer_types": None} if "mlp_layer_types" in known else {}
    chosen = {**sizes, **layers, **own}
    return {key: value for key, value in chosen.items() if value is not None or key in ("layer_types", "mlp_layer_types")}


def save(model_type: str, folder: Path) -> None:
    """Save a model of a type, with values that differ everywhere, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = config_of(model_type)
    is_tower = getattr(config, "vision_config", None) is not None
    maker = AutoModelForImageTextToText if is_tower else AutoModelForCausalLM
    model = maker.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) * 0.2)
    model.save_pretrained(folder)
    if model_type in (*TRANSPOSED, *RENAMED):
        _as_published(model_type, folder / "model.safetensors")
    path = folder / "config.json"
    saved, added = json.loads(path.read_text()), PUBLISHED.get(model_type, {})
    inner = saved["text_config"] if is_tower else saved
    inner.update({key: value for key, value in added.items() if key not in inner})
    path.write_text(json.dumps(saved, indent=1))


def _as_published(model_type: str, path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    if model_type in TRANSPOSED:
        stacked = {name for name, tensor in tensors.items() if name.endswith(("gate_up_proj", "down_proj")) and tensor.ndim == 3}
        tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in stacked}
    if model_type in RENAMED:
        tensors = {re.sub(*RENAMED[model_type], name): tensor for name, tensor in tensors.items()}
    save_file(tensors, path, {"format": "pt"})


def main(folder: Path, names: list[str]) -> None:
    for name in names or TYPES:
        error = None
        try:
            save(name, folder / name)
        except BaseException as raised:
            if os.environ.get("DEBUG"):
                import traceback

                traceback.print_exc()
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
        print(json.dumps({"model": name, "error": error}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
