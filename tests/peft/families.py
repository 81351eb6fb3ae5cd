"""Tiny models of eight families, and adapters of their experts, for check.py. All sizes differ: no axis can be taken for another."""

from __future__ import annotations

from typing import Any

_COMMON = {
    "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 50,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 12, "num_experts": 3, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 20, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_COMMON, **_EXPERTS, "model_type": "qwen3_moe", "intermediate_size": 28},
    "qwen3_5_moe": {
        **_COMMON, **_EXPERTS, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 14, "linear_num_key_heads": 2,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "mixtral": {**_COMMON, "model_type": "mixtral", "intermediate_size": 12, "num_local_experts": 3, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **_COMMON, "model_type": "deepseek_v3", "num_key_value_heads": 2, "intermediate_size": 28, "moe_intermediate_size": 12,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 6,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5, "head_dim": 4,
    },
    "gpt_oss": {
        **_COMMON, "model_type": "gpt_oss", "intermediate_size": 12, "num_local_experts": 3, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4": {
        **_COMMON, "model_type": "llama4_text", "intermediate_size": 12, "intermediate_size_mlp": 28, "num_local_experts": 3,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
    },
    "llama": {**_COMMON, "model_type": "llama", "intermediate_size": 28},
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe", "tie_word_embeddings": False, "vision_config": _VISION, "image_token_id": 3, "video_token_id": 4,
        "vision_start_token_id": 5, "vision_end_token_id": 6,
        "text_config": {
            **_COMMON, **_EXPERTS, "model_type": "qwen3_vl_moe_text", "intermediate_size": 28, "rope_parameters": _ROPE,
            "tie_word_embeddings": False,
        },
    },
}  # fmt: skip
_BOTH = ("down_proj", "gate_up_proj")
# The parameters of the experts that are adapted, in the order of target_parameters, and settings of LoraConfig.
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "two parameters": (_BOTH, {}),
    "in the other order": (_BOTH[::-1], {}),
    "down alone": (("down_proj",), {}),
    "gate and up alone": (("gate_up_proj",), {}),
    "rsLoRA": (_BOTH, {"use_rslora": True}),
    "patterns": (
        _BOTH,
        {"rank_pattern": {"experts.down_proj": 3, "q_proj": 1}, "alpha_pattern": {"experts.gate_up_proj": 5}},
    ),
}


def settings_of(family: str, variant: str) -> dict[str, Any]:
    """The settings of LoraConfig."""
    parameters, more = VARIANTS[variant]
    modules = {"deepseek_v3": ["q_b_proj"], "qwen3_5_moe": ["q_proj", "in_proj_qkv"]}.get(family, ["q_proj"])
    where = "feed_forward.experts" if family == "llama4" else "mlp.experts"
    experts = {} if family == "llama" else {"target_parameters": [f"{where}.{name}" for name in parameters]}
    return {"r": 2, "lora_alpha": 6, "target_modules": modules, **experts, **more}
