"""Tiny transformers models of declared model types, for the check that Megatron computes what they compute.

Real classes with sizes of a few rows, deterministic weights, and nothing trivial in them: two or three layers, of which each kind of the
model has one, more query heads than groups, a vocabulary that needs padding.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 50,
    "hidden_size": 16,
    "head_dim": 6,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
NO_HEAD_DIM = {key: size for key, size in COMMON.items() if key != "head_dim"}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1}
ROUTED |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
LATENT = {"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 2}
LATENT |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "num_hidden_layers": 2, "head_dim": 4}
DELTA = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 6, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4}
SHARED_EXPERT = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10}
# Megatron Bridge's norms after attention and the MLP have this epsilon in all models.
GEMMA = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}

# Model type -> the sizes of its config.
SIZES: dict[str, dict[str, object]] = {
    "arcee": COMMON,
    "cwm": COMMON | {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"], "rope_parameters": ROPE},
    "deepseek_v2": COMMON | LATENT | {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 2, "norm_topk_prob": False},
    "deepseek_v3": COMMON | LATENT | {"n_group": 2, "topk_group": 1, "norm_topk_prob": True},
    "dots1": COMMON | ROUTED,
    "ernie4_5": COMMON | {"use_bias": False},
    "exaone_moe": COMMON
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_shared_experts": 1, "norm_topk_prob": True}
    | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    "gemma": COMMON | GEMMA,
    # Its window is longer than what is compared: Megatron Bridge 0.3.1 gives windows to the other half of the layers.
    "gemma2": COMMON
    | GEMMA
    | {"query_pre_attn_scalar": 9, "sliding_window": 64, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "glm": COMMON | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "head_dim": 8},
    "glm4_moe": COMMON | ROUTED | {"use_qk_norm": True, "head_dim": 8},
    "glm4_moe_lite": COMMON | LATENT | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "mlp_layer_types": ["dense", "sparse"]},
    "gpt_bigcode": {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 40, "n_positions": 24} | NO_DROPOUT,
    "gpt_oss": COMMON
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "head_dim": 8, "intermediate_size": 12}
    | {"rope_parameters": YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}},
    "hy_v3": COMMON
    | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_shared_experts": 1}
    | {"router_scaling_factor": 1.5, "mlp_layer_types": ["dense", "sparse"], "first_k_dense_replace": 1},
    "jais2": COMMON,
    "llama4_text": COMMON
    | {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "moe_layers": None, "intermediate_size": 12}
    | {"intermediate_size_mlp": 20, "no_rope_layers": [1, 0], "use_qk_norm": False, "rope_parameters": ROPE},
    "mistral": COMMON | {"sliding_window": 5},
    "nemotron_h": COMMON
    | {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": 4}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "moe_latent_size": 8}
    | {"moe_shared_expert_intermediate_size": 12, "routed_scaling_factor": 1.5, "mamba_num_heads": 4, "mamba_head_dim": 6}
    | {"n_groups": 2, "ssm_state_size": 5},
    "phi3": NO_HEAD_DIM | {"sliding_window": 5},
    "qwen3": COMMON | {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3_5_moe_text": COMMON | DELTA | SHARED_EXPERT,
    "qwen3_5_text": COMMON | DELTA,
    "qwen3_next": COMMON | DELTA | SHARED_EXPERT,
    "seed_oss": COMMON,
    "smollm3": NO_HEAD_DIM | {"no_rope_layers": [1, 0]},
    "stablelm": NO_HEAD_DIM | {"use_qkv_bias": True, "hidden_size": 32},
    "starcoder2": NO_HEAD_DIM | {"sliding_window": 5},
}

# Types that transformers has no class for, as their code comes with the checkpoint -> the type that computes the same, and further keys of
# their configs. Sources: modeling_{internlm2,exaone,qwen}.py of the published models; Megatron Bridge has MiMo as a Qwen2 and
# Ling 2.0 with GLM-4.5's layers, and transformers 5 InternLM3 as a Llama.
OF_CONFIG = {key: size for key, size in NO_HEAD_DIM.items() if not key.endswith("_token_id")} | {
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
TWINS: dict[str, tuple[str, dict[str, object]]] = {
    "bailing_moe": (
        "glm4_moe",
        {"architectures": ["BailingMoeV2ForCausalLM"], "head_dim": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "use_qk_norm": True}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_shared_experts": 1, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "score_function": "sigmoid"}
        | {"moe_router_enable_expert_bias": True, "partial_rotary_factor": 0.5, "use_qkv_bias": False},
    ),
    "exaone": (
        "llama",
        {"architectures": ["ExaoneForCausalLM"], "num_layers": 2, "activation_function": "silu", "layer_norm_epsilon": 1e-6},
    ),
    "internlm2": ("llama", {"architectures": ["InternLM2ForCausalLM"], "bias": False, "rms_norm_eps": 1e-6}),
    "internlm3": ("llama", {"architectures": ["InternLM3ForCausalLM"], "bias": False, "qkv_bias": False, "rms_norm_eps": 1e-6}),
    "mimo": ("qwen2", {"architectures": ["MiMoForCausalLM"], "rms_norm_eps": 1e-6}),
    "qwen": (
        "qwen2",
        {"architectures": ["QWenLMHeadModel"], "intermediate_size": 40, "kv_channels": 4, "rotary_emb_base": 10000, "no_bias": True}
        | {"layer_norm_epsilon": 1e-6, "num_key_value_heads": 4},
    ),
}
# What parts of the names of a Llama are called, in this order.
_AS_GPT2 = {
    r"model\.embed_tokens": "transformer.wte", r"model\.layers": "transformer.h", r"model\.norm": "transformer.ln_f",
    r"input_layernorm": "ln_1", r"post_attention_layernorm": "ln_2",
}  # fmt: skip
_EXAONE = _AS_GPT2 | {
    r"self_attn": "attn.attention", r"o_proj": "out_proj", r"gate_proj": "c_fc_0", r"up_proj": "c_fc_1", r"down_proj": "c_proj",
}  # fmt: skip
_INTERNLM2 = {
    r"embed_tokens": "tok_embeddings", r"lm_head": "output", r"self_attn\.o_proj": "attention.wo", r"mlp\.gate_proj": "feed_forward.w1",
    r"mlp\.up_proj": "feed_forward.w3", r"mlp\.down_proj": "feed_forward.w2", r"input_layernorm": "attention_norm",
    r"post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_QWEN = _AS_GPT2 | {
    r"self_attn\.o_proj": "attn.c_proj", r"gate_proj": "w2", r"up_proj": "w1", r"down_proj": "c_proj",
    r"attention\.query_key_value": "attn.c_attn",
}  # fmt: skip
_BAILING_MOE = {
    r"embed_tokens": "word_embeddings", r"self_attn\.o_proj": "attention.dense", r"self_attn\.q_norm": "attention.query_layernorm",
    r"self_attn\.k_norm": "attention.key_layernorm", r"e_score_correction_bias": "expert_bias",
}  # fmt: skip


def write_twins(model_type: str, folder: Path) -> None:
    """A model of TWINS under its published names, and beside it the model that computes the same."""
    same, further = TWINS[model_type]
    sizes = {"rms_norm_eps": 1e-6, "num_key_value_heads": further.get("num_key_value_heads", 2)}
    model = _built(same, **NO_HEAD_DIM | sizes)
    twin = folder.parent / f"{folder.name}-twin"
    model.save_pretrained(twin)
    stored = safetensors.torch.load_file(twin / "model.safetensors")
    folder.mkdir()
    config = OF_CONFIG | {"model_type": model_type} | further
    if model_type == "qwen":
        del config["num_key_value_heads"], config["hidden_act"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    safetensors.torch.save_file(_published(model_type, stored), folder / "model.safetensors", {"format": "pt"})


def _published(model_type: str, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of the twin under the names and in the fusions of a type of TWINS."""
    stored = dict(stored)
    fused = {}
    for name in [each for each in stored if ".q_proj." in each and model_type in ("bailing_moe", "internlm2", "qwen")]:
        q, k, v = (stored.pop(name.replace("q_proj", f"{word}_proj")) for word in "qkv")
        if model_type != "internlm2":
            fused[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat([q, k, v])
        else:  # heads of 4 rows, two query heads for each KV head
            groups = [part for group in range(2) for part in (q[8 * group : 8 * group + 8], k[4 * group :][:4], v[4 * group :][:4])]
            fused[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(groups)
    names = {"bailing_moe": _BAILING_MOE, "exaone": _EXAONE, "internlm2": _INTERNLM2, "qwen": _QWEN}.get(model_type, {})
    found = {}
    for name, value in (stored | fused).items():
        for pattern, word in names.items():
            name = re.sub(pattern, word, name)
        found[name] = value.clone()
    return found


def write(name: str, folder: Path) -> None:
    """A model of SIZES, as save_pretrained writes it; "-mtp" adds a layer for multi-token prediction, which transformers leaves out. Or a
    model of TWINS."""
    model_type, _, predicting = name.partition("-")
    if model_type in TWINS:
        write_twins(model_type, folder)
        return
    model = _built(model_type)
    model.save_pretrained(folder)
    if not predicting:
        return
    layers, hidden = model.config.num_hidden_layers, model.config.hidden_size
    own = {f"{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")} | {"eh_proj.weight": (hidden, 2 * hidden)}
    further = {f"model.layers.{layers}.{name}": _filling(name, torch.Size(shape)) for name, shape in own.items()}
    with tempfile.TemporaryDirectory() as larger:
        _built(model_type, num_hidden_layers=layers + 1).save_pretrained(larger)
        stored = safetensors.torch.load_file(Path(larger) / "model.safetensors")
    further |= {name: value for name, value in stored.items() if name.startswith(f"model.layers.{layers}.")}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(stored | further, folder / "model.safetensors", {"format": "pt"})


def _built(model_type: str, **sizes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES.get(model_type, {}) | sizes), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_filling(name, parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape))
    return model


def _filling(name: str, shape: torch.Size) -> torch.Tensor:
    if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
        return 1 + 0.2 * torch.randn(shape)
    if len(shape) == 1:
        return 0.5 * torch.randn(shape)
    return torch.randn(shape) / shape[-1] ** 0.5
