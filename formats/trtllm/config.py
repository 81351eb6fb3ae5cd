"""config.json of a TensorRT-LLM checkpoint, from and to Hugging Face's: dimensions, parallel sizes, keys of each model class.

Sources, in tensorrt_llm: models/modeling_utils.py (PretrainedConfig), models/llama, qwen and gpt/config.py, layers/moe.py (MoeConfig),
mapping.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.adapter.model_files import CONFIG, read_json
from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import Parallel
from reshard.geometry.value import value
from reshard.models.config_values import rotary_base, rotary_settings, rotary_type
from reshard.models.model import Model
from reshard.serving.weights import model_dtype
from reshard.storage.files import Files


@value
class Copied:
    """A value that is taken from the Hugging Face config."""

    key: str
    """The key there."""

    default: Any = None
    """The value if the key is absent."""


_ROTARY = {"position_embedding_type": "rope_gpt_neox", "norm_epsilon": Copied("rms_norm_eps", 1e-6)}
_LLAMA = {
    **_ROTARY,
    "hidden_act": Copied("hidden_act", "silu"),
    "attn_bias": Copied("attention_bias", False),
    "mlp_bias": Copied("mlp_bias", False),
    "residual_mlp": False,
}
_QWEN = {**_ROTARY, "hidden_act": "silu", "attn_bias": True, "mlp_bias": False, "seq_length": 8192, "use_logn_attn": False}
_QWEN_MOE = {**_QWEN, "hidden_act": "swiglu"}
# Model family -> keys of its class, and their values.
_KEYS: dict[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": {**_LLAMA, "hidden_act": "swiglu"},
    "qwen2": {**_QWEN, "qwen_type": "qwen2"},
    "qwen3": {**_QWEN, "qwen_type": "qwen3", "attn_bias": False},
    "qwen2_moe": {**_QWEN_MOE, "qwen_type": "qwen2_moe"},
    "qwen3_moe": {**_QWEN_MOE, "qwen_type": "qwen3_moe", "attn_bias": False},
    # The model's activation is the tanh approximation of gelu, which TensorRT-LLM names gelu.
    "gpt2": {
        "position_embedding_type": "learned_absolute",
        "norm_epsilon": Copied("layer_norm_epsilon", 1e-5),
        "hidden_act": "gelu",
        "bias": True,
        "q_scaling": 1.0,
    },
}
_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GPT2LMHeadModel": "gpt2",
}
# The models whose config is known.
MODEL_TYPES = tuple(_CLASSES.values())
# TensorRT-LLM's key -> Hugging Face's.
_SHARED_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "moe_intermediate_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}


def config_of(model: Model, parallel: Parallel, dtypes: Mapping[str, DType]) -> dict[str, Any]:
    """TensorRT-LLM's config of a model at these parallel sizes: the keys of PretrainedConfig and those of the model's class.

    Raises: RequestError if the weights do not have one element type that the config can name.
    """
    dimensions, config, family = model.dimensions, model.config, model.architecture.family
    keys: dict[str, Any] = {
        "architecture": next(name for name, model_type in _CLASSES.items() if model_type == family),
        "dtype": _one_dtype(model, dtypes).torch,
        "logits_dtype": "float32",
        "vocab_size": dimensions["vocab"],
        "hidden_size": dimensions["hidden"],
        "num_hidden_layers": dimensions["layers"],
        "num_attention_heads": dimensions["heads"],
        "num_key_value_heads": dimensions["kv_heads"],
        "head_size": dimensions["head_dim"],
        "intermediate_size": dimensions["intermediate"],
        "max_position_embeddings": dimensions["positions"] if "positions" in dimensions else config.get("max_position_embeddings"),
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "tie_word_embeddings": model.is_tied,
        **{key: config.get(value.key, value.default) if isinstance(value, Copied) else value for key, value in _KEYS[family].items()},
    }
    if "positions" not in dimensions:
        keys |= _rotary_keys(config)
    mapping = {"world_size": parallel.tp * parallel.pp, "tp_size": parallel.tp, "pp_size": parallel.pp}
    if "experts" in dimensions:
        mapping |= {"moe_tp_size": parallel.tp // parallel.ep, "moe_ep_size": parallel.ep}
        keys["moe"] = _expert_keys(model)
    for key, name in (("moe_intermediate_size", "expert_intermediate"), ("moe_shared_expert_intermediate_size", "shared_intermediate")):
        if name in dimensions:
            keys[key] = dimensions[name]
    return {**keys, "mapping": mapping, "quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}


def _rotary_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = rotary_settings(config)
    kind = rotary_type(rope)
    return {
        "rotary_base": rotary_base(config),
        "rotary_scaling": None if kind == "default" else {**rope, "type": kind, "rope_type": kind},
    }


def _expert_keys(model: Model) -> dict[str, Any]:
    config, is_mixtral = model.config, model.architecture.family == "mixtral"
    # 1: the weights of the chosen experts are scaled to a sum of 1; 0: they are not (MoeConfig.ExpertScaleNormalizationMode).
    is_normalized = bool(config.get("norm_topk_prob", is_mixtral))
    return {
        "num_experts": model.dimensions["experts"],
        "top_k": config.get("num_experts_per_tok", 2 if is_mixtral else None),
        "normalization_mode": int(is_normalized),
    }


def _one_dtype(model: Model, dtypes: Mapping[str, DType]) -> DType:
    """The element type of all weights. Raises RequestError if there are several, since the config names one."""
    main = model_dtype(model, dtypes)
    other = next((name for name in model.weights if dtypes[name] != main), None)
    if other or main.torch not in ("float16", "bfloat16", "float32"):
        raise UnsupportedError(
            f"its element type is {dtypes[other]}, that of others is {main}" if other else f"the weights are {main}",
            where=other,
            why="A TensorRT-LLM checkpoint has one element type: float16, bfloat16 or float32",
            do="Choose one for all with `dtype=`",
        )
    return main


def read_config(files: Files) -> dict[str, Any]:
    """config.json, whoever wrote it; empty if there is none."""
    return read_json(files, CONFIG) if files.size(CONFIG) is not None else {}


def is_trtllm(config: Mapping[str, Any]) -> bool:
    """Whether a config is TensorRT-LLM's."""
    return isinstance(config.get("mapping"), dict) and isinstance(config.get("architecture"), str)


def stored_config(files: Files) -> dict[str, Any]:
    """TensorRT-LLM's config. Raises CheckpointError if config.json is another one."""
    config = read_config(files)
    if not is_trtllm(config):
        raise CheckpointError("it is not the config of a TensorRT-LLM checkpoint", where=CONFIG, do="Give another `format=`")
    return config


def sizes_of(config: Mapping[str, Any]) -> Parallel:
    """The parallel sizes in TensorRT-LLM's config. Raises CheckpointError if they contradict the world size."""
    mapping = config["mapping"]
    sizes = (mapping.get(name, 1) for name in ("tp_size", "pp_size", "cp_size", "moe_ep_size"))
    tp, pp, cp, ep = (size if isinstance(size, int) and size > 0 else 1 for size in sizes)
    if mapping.get("world_size", tp * pp) != tp * pp * cp:
        raise CheckpointError(f"its mapping is {dict(mapping)}; the sizes do not multiply to the world size", where=CONFIG)
    return Parallel(tp=tp, pp=pp, ep=ep)


def hugging_face_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The Hugging Face config of the model that TensorRT-LLM's config describes.

    Raises: CheckpointError for a model or a form of its weights that is not read.
    """
    family = _CLASSES.get(config["architecture"])
    if family is None:
        raise CheckpointError(
            f"the architecture {config['architecture']!r} is not known here",
            where=CONFIG,
            why="How its weights are stored in the ranks' files is not guessed",
            do=f"Known architectures are {', '.join(_CLASSES)}",
        )
    moe, quantization = (part if isinstance(part := config.get(key), dict) else {} for key in ("moe", "quantization"))
    algorithms = {value for value in quantization.values() if isinstance(value, str)}
    if algorithms:
        raise CheckpointError(
            f"the weights are quantized ({', '.join(sorted(algorithms))})",
            where=CONFIG,
            do="Convert the checkpoint that it was made from",
        )
    if (not config.get("use_parallel_embedding") and sizes_of(config).tp > 1) or config.get("embedding_sharding_dim"):
        raise CheckpointError("its tables are not split by rows", where=CONFIG, why="Only checkpoints with tables split by rows are read")
    result = {theirs: config[ours] for ours, theirs in _SHARED_KEYS.items() if config.get(ours) is not None}
    result |= {value.key: config[key] for key, value in _KEYS[family].items() if isinstance(value, Copied) and key in config}
    if moe.get("num_experts"):
        result["num_local_experts" if family == "mixtral" else "num_experts"] = moe["num_experts"]
        result["num_experts_per_tok"] = moe.get("top_k")
        if family != "mixtral":
            result["norm_topk_prob"] = bool(moe.get("normalization_mode"))
    if config.get("rotary_base") is not None:
        result |= {"rope_theta": config["rotary_base"], "rope_scaling": config.get("rotary_scaling")}
    if family == "gpt2":
        result |= {"n_inner": config.get("intermediate_size"), "activation_function": "gelu_new"}
    elif family == "mixtral" or family.startswith("qwen"):
        result["hidden_act"] = "silu"
    return {"architectures": [config["architecture"]], "model_type": family, "torch_dtype": config.get("dtype"), **result}
