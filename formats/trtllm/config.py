"""config.json of a TensorRT-LLM checkpoint, from and to Hugging Face's: dimensions, parallel sizes, keys of each model class.

Sources, in tensorrt_llm: models/modeling_utils.py (PretrainedConfig), models/llama, qwen and gpt/config.py, layers/moe.py (MoeConfig),
mapping.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard.adapter.model_files import CONFIG, read_json
from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import Parallel
from reshard.models.config_values import rotary_base, rotary_settings, rotary_type
from reshard.models.model import Model
from reshard.serving.weights import model_dtype
from reshard.storage.files import Files


class Copied(NamedTuple):
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
# The model's activation is the tanh approximation of gelu, which TensorRT-LLM names gelu.
_GPT2 = {
    "position_embedding_type": "learned_absolute",
    "norm_epsilon": Copied("layer_norm_epsilon", 1e-5),
    "hidden_act": "gelu",
    "bias": True,
    "q_scaling": 1.0,
}
# Model family -> its class, the keys of the class and their values.
_CLASSES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "mistral": ("MistralForCausalLM", _LLAMA),
    "mixtral": ("MixtralForCausalLM", {**_LLAMA, "hidden_act": "swiglu"}),
    "qwen2": ("Qwen2ForCausalLM", {**_QWEN, "qwen_type": "qwen2"}),
    "qwen3": ("Qwen3ForCausalLM", {**_QWEN, "qwen_type": "qwen3", "attn_bias": False}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**_QWEN_MOE, "qwen_type": "qwen2_moe"}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_QWEN_MOE, "qwen_type": "qwen3_moe", "attn_bias": False}),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
}
# The models whose config is known.
MODEL_TYPES = tuple(_CLASSES)
# (TensorRT-LLM's key, the dimension, Hugging Face's key). The keys of experts follow only where a model has them.
_DIMENSIONS = (
    ("vocab_size", "vocab", "vocab_size"),
    ("hidden_size", "hidden", "hidden_size"),
    ("num_hidden_layers", "layers", "num_hidden_layers"),
    ("num_attention_heads", "heads", "num_attention_heads"),
    ("num_key_value_heads", "kv_heads", "num_key_value_heads"),
    ("head_size", "head_dim", "head_dim"),
    ("intermediate_size", "intermediate", "intermediate_size"),
)
_EXPERT_DIMENSIONS = (
    ("moe_intermediate_size", "expert_intermediate", "moe_intermediate_size"),
    ("moe_shared_expert_intermediate_size", "shared_intermediate", "shared_expert_intermediate_size"),
)
_SAME = tuple((key, "", key) for key in ("max_position_embeddings", "tie_word_embeddings"))


def config_of(model: Model, parallel: Parallel, dtypes: Mapping[str, DType]) -> dict[str, Any]:
    """TensorRT-LLM's config of a model at these parallel sizes: the keys of PretrainedConfig and those of the model's class.

    Raises: RequestError if the weights do not have one element type that the config can name.
    """
    dimensions, config, family = model.dimensions, model.config, model.architecture.family
    class_name, keys_of_class = _CLASSES[family]
    keys: dict[str, Any] = {
        "architecture": class_name,
        "dtype": _one_dtype(model, dtypes).torch,
        "logits_dtype": "float32",
        **{key: dimensions[name] for key, name, _ in _DIMENSIONS},
        "max_position_embeddings": dimensions["positions"] if "positions" in dimensions else config.get("max_position_embeddings"),
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "tie_word_embeddings": model.is_tied,
        **{key: config.get(value.key, value.default) if isinstance(value, Copied) else value for key, value in keys_of_class.items()},
    }
    if "positions" not in dimensions:
        rope = rotary_settings(config)
        kind = rotary_type(rope)
        scaling = None if kind == "default" else {**rope, "type": kind, "rope_type": kind}
        keys |= {"rotary_base": rotary_base(config), "rotary_scaling": scaling}
    mapping = {"world_size": parallel.tp * parallel.pp, "tp_size": parallel.tp, "pp_size": parallel.pp}
    if "experts" in dimensions:
        mapping |= {"moe_tp_size": parallel.tp // parallel.ep, "moe_ep_size": parallel.ep}
        keys["moe"] = _expert_keys(model)
    keys |= {key: dimensions[name] for key, name, _ in _EXPERT_DIMENSIONS if name in dimensions}
    return {**keys, "mapping": mapping, "quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}


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


def trtllm_config(files: Files) -> dict[str, Any] | None:
    """config.json, if it is there and is TensorRT-LLM's."""
    config = read_json(files, CONFIG) if files.size(CONFIG) is not None else {}
    return config if isinstance(config.get("mapping"), dict) and isinstance(config.get("architecture"), str) else None


def stored_config(files: Files) -> dict[str, Any]:
    """TensorRT-LLM's config. Raises CheckpointError if config.json is another one."""
    config = trtllm_config(files)
    if config is None:
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
    family = next((family for family, (class_name, _) in _CLASSES.items() if class_name == config["architecture"]), None)
    if family is None:
        raise CheckpointError(
            f"the architecture {config['architecture']!r} is not known here",
            where=CONFIG,
            why="How its weights are stored in the ranks' files is not guessed",
            do=f"Known architectures are {', '.join(class_name for class_name, _ in _CLASSES.values())}",
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
    keys = [(ours, theirs) for ours, _, theirs in (*_DIMENSIONS, *_SAME, *_EXPERT_DIMENSIONS)]
    result = {theirs: config[ours] for ours, theirs in keys if config.get(ours) is not None}
    result |= {value.key: config[key] for key, value in _CLASSES[family][1].items() if isinstance(value, Copied) and key in config}
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
