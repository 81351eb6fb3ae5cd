"""From a Hugging Face config to Megatron's `args`: the reverse of arguments.py.

Settings that describe the model follow from the config. Settings that describe the ranks follow from the target's parallel sizes. All
other settings of a Megatron source are kept.

Source: megatron/training/arguments.py of core_r0.16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.containers.pickle_writer import Call, Instance, Name
from reshard.errors import UnsupportedError
from reshard.models.config_values import number, rotary_settings, rotary_type, whole_number
from reshard.models.model import Model

from .chunks import Chunk
from .parallel_sizes import ParallelSizes

# The models whose settings and computation were compared with Megatron-Core's.
COMPARED_MODELS = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt2", "gpt_neox", "gemma2",
    "phi3",
)  # fmt: skip
# For a source without args: the values with which Megatron's check of a checkpoint against a new run passes.
_DEFAULTS: dict[str, Any] = {
    "make_vocab_size_divisible_by": 128,
    "tokenizer_type": "HuggingFaceTokenizer",
    "transformer_impl": "transformer_engine",
    "context_parallel_size": 1,
    "data_parallel_size": 1,
    "add_position_embedding": True,
    "use_distributed_optimizer": False,
    "moe_grouped_gemm": False,
    "init_method_std": 0.02,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "seed": 1234,
    "micro_batch_size": 1,
}


def model_settings(model: Model) -> dict[str, Any]:
    """The settings that describe the model.

    Raises: RequestError if Megatron cannot compute the model's rotary positions.
    """
    config, dimensions = model.config, model.dimensions
    kind = model.architecture.family
    settings: dict[str, Any] = {
        "num_layers": dimensions["layers"],
        "encoder_num_layers": dimensions["layers"],
        "hidden_size": dimensions["hidden"],
        "ffn_hidden_size": dimensions["intermediate"],
        "num_attention_heads": dimensions["heads"],
        "kv_channels": dimensions["head_dim"],
        "group_query_attention": dimensions["kv_heads"] != dimensions["heads"],
        "num_query_groups": dimensions["kv_heads"] if dimensions["kv_heads"] != dimensions["heads"] else 1,
        "max_position_embeddings": dimensions.get("positions") or config.get("max_position_embeddings"),
        "seq_length": dimensions.get("positions") or config.get("max_position_embeddings"),
        "untie_embeddings_and_output_weights": not model.is_tied,
        "vocab_size": dimensions["vocab"],
        "multi_latent_attention": "kv_rank" in dimensions,
        "num_experts": dimensions.get("experts"),
        "qk_layernorm": any(part.role in ("attention.q_norm", "mla.q_a_norm", "mla.kv_a_norm") for part in _first_layer(model)),
        "add_bias_linear": any(part.role in ("attention.o", "mlp.down") and part.parameter == "bias" for part in _first_layer(model)),
        "rotary_interleaved": False,
        "layernorm_zero_centered_gamma": False,
        "apply_layernorm_1p": False,
        "layernorm_epsilon": next((config[key] for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") if key in config), 1e-5),
        **_positions(config, kind),
        **_activation(config),
    }
    has_bias = any(part.role == "attention.q" and part.parameter == "bias" for part in _first_layer(model))
    settings["add_qkv_bias"] = has_bias and not settings["add_bias_linear"]
    settings["normalization"] = "LayerNorm" if kind in ("gpt2", "gpt_neox") else "RMSNorm"
    if "experts" in dimensions:
        settings |= _experts(model)
    if "kv_rank" in dimensions:
        settings |= _latent(model)
    if (window := whole_number(config, "sliding_window")) and config.get("use_sliding_window", kind == "mistral"):
        settings["window_size"] = (window - 1, 0)
    return settings


def _first_layer(model: Model) -> list[Any]:
    return [part for part in model.parts() if part.layer == 0]


def _positions(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    if kind == "gpt2":
        return {"position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": False}
    rope = rotary_settings(config)
    settings = {
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": False,
        "rotary_base": number(config, "rope_theta") or number(config, "rotary_emb_base") or number(rope, "rope_theta") or 10000,
        "rotary_percent": number(config, "partial_rotary_factor")
        or number(config, "rotary_pct")
        or number(rope, "partial_rotary_factor")
        or 1.0,
    }
    rope_type = rotary_type(rope)
    if rope_type == "llama3":
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if any(rope.get(key) != value for key, value in fixed.items()):
            raise UnsupportedError(
                "the config scales rotary positions with other factors than Megatron, which has fixed ones",
                why=f"Megatron has {fixed}; the config has {rope}",
            )
        return settings | {"use_rope_scaling": True, "rope_scaling_factor": _factor(rope)}
    if rope_type == "linear":
        return settings | {"rotary_seq_len_interpolation_factor": int(_factor(rope))}
    if rope_type == "yarn":
        if not kind.startswith("deepseek"):
            settings["position_embedding_type"] = "yarn"
        return settings | {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope.get("factor", 1.0),
            "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
            "beta_fast": rope.get("beta_fast", 32.0),
            "beta_slow": rope.get("beta_slow", 1.0),
            "mscale": rope.get("mscale", 1.0),
            "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
        }
    if rope_type != "default":
        raise UnsupportedError(
            f"Megatron has no rotary positions of the type {rope_type!r}", why="The config names this type in rope_scaling"
        )
    return settings | ({"rope_type": "rope"} if kind.startswith("deepseek") else {})


def _factor(rope: Mapping[str, Any]) -> float:
    factor = number(rope, "factor")
    if factor is None:
        raise UnsupportedError("rope_scaling has no factor", why=f"Rotary positions of the type {rotary_type(rope)!r} need one")
    return factor


def _activation(config: Mapping[str, Any]) -> dict[str, Any]:
    name = config.get("hidden_act") or config.get("activation_function") or "silu"
    return {
        "swiglu": name in ("silu", "swish"),
        "squared_relu": name == "relu2",
        "openai_gelu": name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
        "bias_gelu_fusion": False,
        "quick_geglu": False,
    }


def _experts(model: Model) -> dict[str, Any]:
    config, dimensions = model.config, model.dimensions
    sparse = [int(layer in model.sparse_layers) for layer in range(dimensions["layers"])]
    shared = dimensions.get("shared_intermediate") or dimensions.get("shared_experts", 0) * dimensions.get("expert_intermediate", 0)
    return {
        "moe_layer_freq": 1 if all(sparse) else sparse,
        "moe_ffn_hidden_size": dimensions.get("expert_intermediate", dimensions["intermediate"]),
        "moe_router_topk": config.get("num_experts_per_tok", 2),
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": any(part.role == "shared_expert.score" for part in model.parts()),
        "moe_router_pre_softmax": model.architecture.family != "mixtral" and not config.get("norm_topk_prob", False),
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": any(part.role == "router.correction" for part in model.parts()),
    }


def _latent(model: Model) -> dict[str, Any]:
    config, dimensions = model.config, model.dimensions
    groups = whole_number(config, "n_group") or 1
    settings = {
        "q_lora_rank": dimensions.get("q_rank"),
        "kv_lora_rank": dimensions["kv_rank"],
        "qk_head_dim": dimensions["nope_dim"],
        "qk_pos_emb_head_dim": dimensions["rope_dim"],
        "v_head_dim": dimensions["v_dim"],
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor"),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": config.get("topk_group") if groups > 1 else None,
        "mtp_num_layers": model.mtp_layers or None,
    }
    if model.architecture.family == "deepseek_v3":
        settings |= {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False}
    return settings


def rank_settings(sizes: ParallelSizes, chunks: Sequence[Chunk], padded_vocab: int, mtp_layers: int = 0) -> dict[str, Any]:
    """The settings that describe the ranks."""
    counts = [len(chunk.layers) for chunk in chunks]
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "transformer_pipeline_model_parallel_size": sizes.pp,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.etp,
        "virtual_pipeline_model_parallel_size": sizes.vp if sizes.vp > 1 else None,
        "num_virtual_stages_per_pipeline_rank": sizes.vp if sizes.vp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": None,
        "padded_vocab_size": padded_vocab,
        "world_size": sizes.tp * sizes.pp,
        "sequence_parallel": False,
    }
    if len(set(counts)) == 1:
        settings["num_layers_per_virtual_pipeline_stage"] = counts[0] if sizes.vp > 1 else None
    elif sizes.vp == 1 and len(set(counts[1:-1])) <= 1 and 0 not in counts:
        settings |= {"decoder_first_pipeline_num_layers": counts[0], "decoder_last_pipeline_num_layers": counts[-1]}
    else:
        layout = ["t" * count for count in counts]
        layout[0], layout[-1] = "E" + layout[0], layout[-1] + "m" * mtp_layers + "L"
        settings["pipeline_model_parallel_layout"] = "|".join(layout)
    return settings


def namespace(settings: Mapping[str, Any]) -> Instance:
    """The argparse.Namespace of a run with these settings. settings["params_dtype"] is torch's name of the parameters' element type."""
    dtype = settings["params_dtype"]
    types = {
        "params_dtype": Name("torch", dtype),
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "model_type": Call(Name("megatron.core.enums", "ModelType"), (1,)),
    }
    return Instance(Name("argparse", "Namespace"), {**_DEFAULTS, **settings, **types})
