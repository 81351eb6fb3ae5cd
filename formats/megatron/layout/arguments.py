"""From Megatron's `args` to the Hugging Face config of the same model.

args is the argparse.Namespace of the training run (megatron/training/arguments.py). It has 650 settings, and about 60 of them describe the
model. It does not tell the vocabulary size without padding: `padded_vocab_size` depends on the tensor-parallel size, and `vocab_size` may
be the tokenizer's size, another number, or None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from reshard.containers.inert_pickle import DTypeName, Inert
from reshard.errors import CheckpointError
from reshard.models.lookup import find_architecture
from reshard.storage.files import Files, read_whole

from .hybrid import gpt_settings
from .save_folders import NEMO_CONFIG
from .stages import Args

# The settings that describe the model and how it was cut: all ranks of a run have the same.
MODEL_ARGS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "padded_vocab_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "params_dtype", "normalization", "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights",
    "position_embedding_type", "rotary_base", "rotary_percent", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "mtp_num_layers",
    "num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_topk", "tensor_model_parallel_size",
    "hybrid_layer_pattern", "pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
# Key of rope_scaling -> Megatron's setting for it in latent attention, in GPTModel (YarnRotaryEmbedding), and what both are by default.
YARN = {
    "factor": ("rotary_scaling_factor", "yarn_rotary_scaling_factor", 1.0),
    "original_max_position_embeddings": ("original_max_position_embeddings", "yarn_original_max_position_embeddings", 4096),
    "beta_fast": ("beta_fast", "yarn_beta_fast", 32.0),
    "beta_slow": ("beta_slow", "yarn_beta_slow", 1.0),
    "mscale": ("mscale", "yarn_mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", "yarn_mscale_all_dim", 0.0),
}
# The factors that Megatron fixes (megatron/core/models/common/embeddings/rotary_pos_embedding.py).
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# More layers than any model has: a damaged file may claim a billion, for each of which something would be made.
_MOST_LAYERS = 4_096


class NotUnderstoodError(CheckpointError):
    """The settings do not describe a model with a known layout. The stored tensors can be shown, but not converted."""

    @property
    def question(self) -> str:
        """What the user has to tell before a conversion."""
        return f"how the model's weights lie in it: {self}"


def plain_args(value: Any) -> dict[str, Any]:
    """The settings in a dict, or in a Namespace as the inert unpickler reads it; empty for anything else."""
    settings = value.state if isinstance(value, Inert) else value
    return {str(key): setting for key, setting in settings.items()} if isinstance(settings, Mapping) else {}


def model_type(args: Args) -> str:
    """The model_type that a Hugging Face config of the same model has."""
    if args.get("multi_latent_attention"):
        is_v3 = (
            args.get("moe_router_score_function") == "sigmoid" or args.get("moe_router_enable_expert_bias") or args.get("mtp_num_layers")
        )
        return "deepseek_v3" if is_v3 else "deepseek_v2"
    if args.get("num_experts"):
        if args.get("qk_layernorm"):
            return "qwen3_moe"
        return "qwen2_moe" if args.get("moe_shared_expert_intermediate_size") else "mixtral"
    if args.get("normalization", "LayerNorm") == "LayerNorm":
        return "gpt2" if args.get("position_embedding_type", "learned_absolute") == "learned_absolute" else "gpt_neox"
    if args.get("qk_layernorm"):
        return "qwen3"
    if args.get("add_qkv_bias"):
        return "qwen2"
    return "mistral" if args.get("window_size") else "llama"


def check_supported(args: Args, where: str) -> None:
    """Raises NotUnderstoodError for settings that change the values or the order of the stored weights in a way that is not read."""
    reasons = {
        "heterogeneous_layers_config_path": "layers differ from each other",
        "cross_attention": "the model also has an encoder",
    }
    if given := next((key for key in reasons if args.get(key)), None):
        raise NotUnderstoodError(
            f"the run was trained with {given}={args[given]!r}",
            where=where,
            why=f"Then {reasons[given]}, which reshard does not convert",
            do="Convert it with Megatron-LM's own tools",
        )


def mlp_width(args: Args) -> int:
    """The intermediate size of the MLP. By default 4 * hidden; with a gate two thirds of that, rounded down to a multiple of 64."""
    if width := args.get("ffn_hidden_size"):
        return int(width)
    hidden = int(args["hidden_size"])
    return int(4 * hidden * 2 / 3 / 64) * 64 if args.get("swiglu") else 4 * hidden


def config_from_args(args: Args, vocabulary: int) -> dict[str, Any]:
    """The Hugging Face config of the model that `args` describe. vocabulary: vocabulary size without padding.

    Raises: KeyError if a setting is missing; ValueError for a model of another kind; CheckpointError for layers without a config.
    """
    args = gpt_settings(args)
    for setting in ("is_hybrid_model", "hybrid_layer_pattern", "hybrid_override_pattern", "experimental_attention_variant"):
        if args.get(setting):
            raise ValueError(f"{setting} is {args[setting]!r}, and the settings do not tell which such model it is")
    kind = model_type(args)
    architecture, heads = find_architecture(kind), args["num_attention_heads"]
    assert architecture is not None and architecture.class_name is not None
    config: dict[str, Any] = {"architectures": [architecture.class_name], "model_type": kind, "vocab_size": vocabulary}
    ends = {"tie_word_embeddings": not args.get("untie_embeddings_and_output_weights", False), "torch_dtype": torch_dtype(args)}
    epsilon = args.get("layernorm_epsilon") or args.get("norm_epsilon") or 1e-5
    if kind == "gpt2":
        return config | {
            "n_embd": args["hidden_size"],
            "n_layer": args["num_layers"],
            "n_head": heads,
            "n_inner": mlp_width(args),
            "n_positions": args["max_position_embeddings"],
            "activation_function": _activation(args),
            "layer_norm_epsilon": epsilon,
            **ends,
        }
    rotary_base = float(args.get("rotary_base") or 10000)
    config |= {
        "hidden_size": args["hidden_size"],
        "intermediate_size": mlp_width(args),
        "num_hidden_layers": args["num_layers"],
        "num_attention_heads": heads,
        "max_position_embeddings": args.get("max_position_embeddings") or args.get("seq_length"),
        **ends,
        "rope_theta": rotary_base,
        "hidden_act": _activation(args),
    }
    if kind == "gpt_neox":
        return config | {
            "layer_norm_eps": epsilon,
            "rotary_pct": args.get("rotary_percent", 1.0),
            "rotary_emb_base": rotary_base,
            "use_parallel_residual": False,
            "attention_bias": bool(args.get("add_bias_linear", True)),
        }
    config |= {"rms_norm_eps": epsilon, **_rope(args)}
    if kind.startswith("deepseek"):
        return config | _latent(args, kind)
    config |= {
        "num_key_value_heads": args.get("num_query_groups") or heads if args.get("group_query_attention") else heads,
        "head_dim": args.get("kv_channels") or args["hidden_size"] // heads,
    }
    if kind in ("llama", "mistral", "qwen3", "qwen3_moe"):
        config["attention_bias"] = bool(args.get("add_bias_linear", False))
    if kind in ("llama", "mistral"):
        config["mlp_bias"] = bool(args.get("add_bias_linear", False))
    if window := args.get("window_size"):
        config["sliding_window"] = int(window[0]) + (kind == "mistral") if isinstance(window, tuple | list) else int(window)
    return config | _experts(args, kind) if args.get("num_experts") else config


def torch_dtype(args: Args) -> str:
    """The element type of the parameters, by torch's name."""
    if isinstance(dtype := args.get("params_dtype"), DTypeName):
        return str(dtype).removeprefix("torch.")
    return "bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else "float32"


def _activation(args: Args) -> str:
    if args.get("swiglu"):
        return "silu"
    if args.get("squared_relu"):
        return "relu2"
    if args.get("quick_geglu"):
        return "quick_gelu"
    # Megatron's fused bias and gelu is the tanh approximation, like OpenAI's.
    return "gelu_new" if args.get("openai_gelu") or args.get("bias_gelu_fusion") else "gelu"


def _rope(args: Args) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if (share := args.get("rotary_percent", 1.0)) != 1.0:
        config["partial_rotary_factor"] = share
    if args.get("use_rope_scaling"):
        config["rope_scaling"] = {"rope_type": "llama3", "factor": float(args.get("rope_scaling_factor", 8.0)), **LLAMA3}
    elif factor := args.get("rotary_seq_len_interpolation_factor"):
        config["rope_scaling"] = {"rope_type": "linear", "factor": float(factor)}
    elif args.get("position_embedding_type") == "yarn" or (args.get("multi_latent_attention") and args.get("rope_type") == "yarn"):
        yarn = {
            key: next((args[name] for name in (latent, usual) if args.get(name) is not None), default)
            for key, (latent, usual, default) in YARN.items()
        }
        if (factor := float(yarn["factor"])) != 1.0:
            config["rope_scaling"] = {"rope_type": "yarn", **yarn, "factor": factor}
    return config


def sparse_layers(args: Args) -> list[bool]:
    """For each layer whether it has routed experts (moe_layer_freq: every n-th layer, or a list of 0 and 1).

    Raises: CheckpointError if moe_layer_freq or num_layers is something else.
    """
    layers, frequency = args["num_layers"], args.get("moe_layer_freq", 1)
    if type(layers) is not int or not 0 < layers <= _MOST_LAYERS:
        raise CheckpointError(f"num_layers is {layers!r}; a number from 1 to {_MOST_LAYERS:,} is expected")
    if isinstance(frequency, list | tuple) and len(frequency) == layers:
        return [bool(is_sparse) for is_sparse in frequency]
    if type(frequency) is int and frequency > 0:
        return [layer % frequency == 0 for layer in range(layers)]
    raise CheckpointError(f"moe_layer_freq is {frequency!r}; a number, or a list of 0 or 1 for each of the {layers} layers, is expected")


def _experts(args: Args, kind: str) -> dict[str, Any]:
    width = args.get("moe_ffn_hidden_size") or mlp_width(args)
    config: dict[str, Any] = {"num_experts_per_tok": args.get("moe_router_topk", 2)}
    if kind == "mixtral":
        if not all(sparse_layers(args)):
            raise CheckpointError(
                "some layers have no experts (moe_layer_freq), which the config of a mixtral model cannot describe",
                do="Give the config of the model with `model=DIR`",
            )
        return config | {"num_local_experts": args["num_experts"], "intermediate_size": width}
    config |= {
        "num_experts": args["num_experts"],
        "moe_intermediate_size": width,
        "norm_topk_prob": not args.get("moe_router_pre_softmax", False),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, is_sparse in enumerate(sparse_layers(args)) if not is_sparse],
    }
    if kind == "qwen2_moe":
        config |= {
            "shared_expert_intermediate_size": args["moe_shared_expert_intermediate_size"],
            "qkv_bias": bool(args.get("add_qkv_bias", False)),
        }
    return config


def _latent(args: Args, kind: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_key_value_heads": args["num_attention_heads"],
        "q_lora_rank": args.get("q_lora_rank"),
        "kv_lora_rank": args["kv_lora_rank"],
        "qk_nope_head_dim": args["qk_head_dim"],
        "qk_rope_head_dim": args["qk_pos_emb_head_dim"],
        "v_head_dim": args["v_head_dim"],
        "attention_bias": bool(args.get("add_bias_linear", False)),
        "num_nextn_predict_layers": args.get("mtp_num_layers") or 0,
    }
    sparse = sparse_layers(args) if args.get("num_experts") else [False] * args["num_layers"]
    first_sparse = sparse.index(True) if True in sparse else len(sparse)
    if not all(sparse[first_sparse:]):
        raise CheckpointError(
            "layers without experts follow layers with experts, which a DeepSeek config cannot describe",
            do="Give the config of the model with `model=DIR`",
        )
    width = args.get("moe_ffn_hidden_size") or mlp_width(args)
    shared = args.get("moe_shared_expert_intermediate_size") or 0
    config |= {
        "first_k_dense_replace": first_sparse,
        "moe_intermediate_size": width,
        "n_routed_experts": args.get("num_experts"),
        "n_shared_experts": shared // width if shared else None,
        "num_experts_per_tok": args.get("moe_router_topk", 2),
        "routed_scaling_factor": args.get("moe_router_topk_scaling_factor") or 1.0,
        "n_group": args.get("moe_router_num_groups") or 1,
        "topk_group": args.get("moe_router_group_topk") or 1,
    }
    if kind == "deepseek_v3":
        return config | {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    has_groups = bool(args.get("moe_router_num_groups"))
    return config | {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "group_limited_greedy" if has_groups else "greedy"}


# ---- NeMo's settings ----
#
#    context/model.yaml    NeMo 2, beside weights/: the arguments that were given to a TransformerConfig
#    model_config.yaml     NeMo 1, in a .nemo tar or beside the rank folders
#
# Source: nemo/collections/llm/gpt/model, nemo/collections/nlp/models/language_modeling/megatron_gpt_model.py and its
# megatron_gpt_config.yaml.

_NEMO2 = "context/model.yaml"
_BRIDGE = "run_config.yaml"
_NEMO_LIMIT = 1 << 22
# NeMo's name for a setting -> Megatron's name.
_NEMO_NAMES = {
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "rotary_percentage": "rotary_percent",
    "scale_factor": "rope_scaling_factor",
    "bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
    "encoder_seq_length": "seq_length",
}
_NEMO_NORMS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm", "low_precision_layernorm": "LayerNorm"}


def nemo_args(files: Files, folder: str) -> Args:
    """The settings beside the weights in `folder`; empty if there are none.

    Raises: CheckpointError if the file is not YAML, or holds no settings.
    """
    parent = folder.rstrip("/").rpartition("/")[0]
    above = f"{parent}/" if parent else ""
    for path in dict.fromkeys((above + _NEMO2, folder + _NEMO2, above + NEMO_CONFIG, folder + NEMO_CONFIG)):
        if files.size(path) is not None:
            settings = _parse(files, path)
            return _from_nemo(settings["config"] if isinstance(settings.get("config"), Mapping) else settings)
    return {}


def bridge_expert_parallel(files: Files, folder: str) -> int | None:
    """The expert-parallel size in run_config.yaml, which Megatron Bridge writes beside the weights; None if it is not told."""
    model = _parse(files, folder + _BRIDGE).get("model") if files.size(folder + _BRIDGE) is not None else None
    size = model.get("expert_model_parallel_size") if isinstance(model, Mapping) else None
    return size if type(size) is int else None


class _Loader(yaml.SafeLoader):
    """A loader that reads a value with any custom tag as None, so that no class is looked up."""


_Loader.add_multi_constructor("", lambda *_: None)


def _parse(files: Files, path: str) -> Mapping[str, Any]:
    try:
        value = yaml.load(read_whole(files, path, limit=_NEMO_LIMIT), Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise CheckpointError(f"it is not YAML: {error}", where=path, do="Copy the file again") from None
    if not isinstance(value, Mapping):
        raise CheckpointError(f"it holds a {type(value).__name__}, settings by name are expected", where=path)
    return value


def _from_nemo(config: Mapping[str, Any]) -> Args:
    args = {_NEMO_NAMES.get(str(key), str(key)): value for key, value in config.items()}
    function = args.get("activation_func")
    function = function.get("_target_") if isinstance(function, Mapping) else function
    activation = str(function or args.get("activation") or "")
    gated = bool(args.get("gated_linear_unit")) or activation.startswith(("fast-", "swiglu")) or activation.endswith("glu")
    args |= {
        "swiglu": gated and ("silu" in activation or "swiglu" in activation),
        "squared_relu": "squared" in activation,
        "openai_gelu": "openai_gelu" in activation,
        "untie_embeddings_and_output_weights": not args.get("share_embeddings_and_output_weights", True),
        "group_query_attention": bool(args.get("num_query_groups")),
        "normalization": _NEMO_NORMS.get(str(args.get("normalization", "LayerNorm")).lower(), args.get("normalization")),
        "apply_layernorm_1p": "1p" in str(args.get("normalization", "")).lower(),
        "max_position_embeddings": args.get("max_position_embeddings") or args.get("seq_length"),
        "transformer_impl": "transformer_engine",
    }
    if isinstance(args.get("params_dtype"), Mapping):
        del args["params_dtype"]
    precision = str(args.get("precision", "bf16"))
    args.setdefault("bf16", "bf16" in precision)
    args.setdefault("fp16", "fp16" in precision or precision in ("16", "16-mixed"))
    return args
