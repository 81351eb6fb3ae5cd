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
from reshard.models.architecture import ConfigKey, LayersOf
from reshard.models.config_values import number, rotary_settings, rotary_type
from reshard.models.model import Model
from reshard.models.parts import Part

from .arguments import LLAMA3, YARN
from .hybrid import gpt_settings, stages_of_pattern
from .stages import Chunk, ParallelSizes
from .tensors import computation_of, is_hybrid

# For a source without args: the values with which Megatron's check of a checkpoint against a new run passes.
_DEFAULTS: dict[str, Any] = {
    "make_vocab_size_divisible_by": 128, "tokenizer_type": "HuggingFaceTokenizer", "transformer_impl": "transformer_engine",
    "context_parallel_size": 1, "data_parallel_size": 1, "add_position_embedding": True, "use_distributed_optimizer": False,
    "moe_grouped_gemm": False, "init_method_std": 0.02, "hidden_dropout": 0.0, "attention_dropout": 0.0, "seed": 1234,
    "micro_batch_size": 1,
}  # fmt: skip


def model_settings(model: Model) -> dict[str, Any]:
    """The settings that describe the model: what follows from its weights and config, and then what its declaration says of Megatron.

    Raises: UnsupportedError if Megatron cannot compute the model's activation or rotary positions.
    """
    dimensions, parts = model.dimensions, parts_by_role(model)
    positions = dimensions.get("positions") or model.setting("max_position_embeddings")
    settings: dict[str, Any] = {
        "num_layers": dimensions["layers"],
        "encoder_num_layers": dimensions["layers"],
        "hidden_size": dimensions["hidden"],
        "ffn_hidden_size": dimensions["intermediate"],
        "num_attention_heads": dimensions["heads"],
        "kv_channels": dimensions["head_dim"],
        "group_query_attention": dimensions["kv_heads"] != dimensions["heads"],
        "num_query_groups": dimensions["kv_heads"] if dimensions["kv_heads"] != dimensions["heads"] else 1,
        "max_position_embeddings": positions,
        "seq_length": positions,
        "untie_embeddings_and_output_weights": not model.is_tied,
        "vocab_size": dimensions["vocab"],
        "multi_latent_attention": "kv_rank" in dimensions,
        "num_experts": dimensions.get("experts") if model.sparse_layers else None,
        "qk_layernorm": not parts.keys().isdisjoint(("attention.q_norm", "mla.q_a_norm", "mla.kv_a_norm")),
        "add_bias_linear": _have_bias(parts, *LINEAR_ROLES),
        "softmax_type": "learnable" if "attention.sink" in parts else "vanilla",
        "rotary_interleaved": False,
        "layernorm_zero_centered_gamma": False,
        "apply_layernorm_1p": False,
        "normalization": "LayerNorm" if _have_bias(parts, "attention.norm") else "RMSNorm",
        "layernorm_epsilon": next((value for key in _EPSILONS if (value := model.setting(key)) is not None), 1e-5),
        "mtp_num_layers": model.mtp_layers or None,
        **_positions(model, parts),
        **_activation(model, parts),
    }
    settings["add_qkv_bias"] = _have_bias(parts, "attention.q") and not settings["add_bias_linear"]
    if "experts" in dimensions and model.sparse_layers:
        settings |= _experts(model, parts)
    if "kv_rank" in dimensions:
        settings |= {setting: dimensions.get(dimension) for setting, dimension in _LATENT.items()}
    settings |= _hybrid(model) | _declared(model)
    settings["apply_layernorm_1p"] = settings["layernorm_zero_centered_gamma"]
    return settings | _windows(model, settings.pop("window_size", None))


# Setting of multi-latent attention -> dimension.
_LATENT = {
    "q_lora_rank": "q_rank",
    "kv_lora_rank": "kv_rank",
    "qk_head_dim": "nope_dim",
    "qk_pos_emb_head_dim": "rope_dim",
    "v_head_dim": "v_dim",
}
# Settings that change the order or the values of stored weights -> what that changes.
_OF_LAYOUT = {
    "rotary_interleaved": "the rows of q and k that rotary positions turn are neighbours",
    "attention_output_gate": "linear_qkv also holds a gate",
    "is_hybrid_model": "a layer is a Mamba mixer, attention, an MLP or experts alone",
    "experimental_attention_variant": "some layers have another attention",
}
_MINUS_ONE = ("layernorm_zero_centered_gamma", "apply_layernorm_1p")
# Settings that change what is computed, by which models that store the same weights differ.
_OF_COMPUTATION = ("moe_router_score_function", "softmax_type", "no_rope_freq", "quick_geglu", "qk_l2_norm", "moe_apply_probs_on_input")


def other_setting(args: Mapping[str, Any], model: Model, *, is_inferred: bool) -> tuple[str, str] | None:
    """A setting of a run that the model contradicts, and what it changes; None if there is none.

    is_inferred: whether the model was inferred from the settings. Then it also has to compute what the run computed.
    """
    own = _hybrid(model) | _declared(model)
    args = args if is_hybrid(model) else gpt_settings(args)
    for name, change in _OF_LAYOUT.items():
        if name in args and bool(args[name]) != bool(own.get(name)):
            return name, change
    # Megatron-LM's argument and what it sets; a run has either or both.
    if (given := [name for name in _MINUS_ONE if name in args]) and any(args[name] for name in given) != bool(own.get(_MINUS_ONE[0])):
        return given[0], "norms are stored minus one"
    pattern = "".join(stages_of_pattern(args))
    if pattern and pattern.partition("/")[0] != own.get("hybrid_override_pattern"):
        return next(name for name in ("hybrid_layer_pattern", "hybrid_override_pattern") if args.get(name)), "the layers are of other kinds"
    if is_inferred and args.get("position_embedding_type") == "none" and not args.get("multi_latent_attention"):
        return "position_embedding_type", "the model computes something else"
    defaults = {"moe_router_score_function": "softmax", "softmax_type": "vanilla"}
    for name in _OF_COMPUTATION if is_inferred else ():
        if (args.get(name) or defaults.get(name)) != (own.get(name) or defaults.get(name)):
            return name, "the model computes something else"
    return None


LINEAR_ROLES = ("attention.o", "mlp.up", "mlp.down", "expert.up", "expert.down", "shared_expert.up", "shared_expert.down")
"""The roles of the linear layers that all have biases, or none of which has (add_bias_linear)."""
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


# Role of a weight that is stored in another form than usual -> the role of its linear layer.
_SAME_LAYER = {"expert.gate_up": "expert.up", "expert.down_bias": "expert.down"}
Parts = Mapping[str, Mapping[str, Part]]
"""Role -> parameter ("weight", "bias") -> the first part of a model with both."""


def parts_by_role(model: Model) -> Parts:
    """The parts of one layer of each kind, and those outside of the layers."""
    parts: dict[str, dict[str, Part]] = {}
    in_layers = (weight for kind in model.layer_kinds for weight in kind.weights)
    for part in model.parts_of([*model.weights_outside_layers, *in_layers]):
        parts.setdefault(_SAME_LAYER.get(part.role, part.role), {}).setdefault(part.parameter, part)
    return parts


def _have_bias(parts: Parts, *roles: str) -> bool:
    return any("bias" in parts.get(role, ()) for role in roles)


def _declared(model: Model) -> dict[str, Any]:
    """The settings that the declaration gives, without those of which this model has nothing: a key of the config that is not set, or a set
    without layers."""
    computation, layers = computation_of(model), range(model.dimensions["layers"])

    def value_of(value: object) -> object:
        if isinstance(value, LayersOf):
            among = model.layer_sets[value.layer_set]
            return [int(layer in among) for layer in layers] if any(layer in among for layer in layers) else None
        if isinstance(value, ConfigKey):
            return model.setting(value.key) if model.holds(value.when) else None
        return value

    values = {name: value_of(value) for name, value in computation.settings.items()}
    return {name: value for name, value in values.items() if value is not None}


def _positions(model: Model, parts: Parts) -> dict[str, Any]:
    if "position_embedding" in parts:
        return {"position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": False}
    config = model.settings
    rope, is_latent = rotary_settings(config), "kv_rank" in model.dimensions
    settings = {
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": False,
        "rotary_base": number(config, "rope_theta") or number(config, "rotary_emb_base") or number(rope, "rope_theta") or 10000,
        "rotary_percent": number(config, "partial_rotary_factor")
        or number(config, "rotary_pct")
        or number(rope, "partial_rotary_factor")
        or model.setting("partial_rotary_factor")
        or 1.0,
    }
    rope_type = rotary_type(rope)
    if rope_type == "llama3":
        if any(rope.get(key) != value for key, value in LLAMA3.items()):
            raise UnsupportedError(
                "the config scales rotary positions with other factors than Megatron, which has fixed ones",
                why=f"Megatron has {LLAMA3}; the config has {rope}",
            )
        return settings | {"use_rope_scaling": True, "rope_scaling_factor": _factor(rope)}
    if rope_type == "linear":
        return settings | {"rotary_seq_len_interpolation_factor": int(_factor(rope))}
    if rope_type == "yarn" and is_latent:
        required = "original_max_position_embeddings"
        latent = {setting: rope.get(key, None if key == required else default) for key, (setting, _, default) in YARN.items()}
        return settings | {"rope_type": "yarn", **latent}
    if rope_type == "yarn":
        return settings | _yarn(rope)
    if rope_type != "default":
        raise UnsupportedError(
            f"Megatron has no rotary positions of the type {rope_type!r}", why="The config names this type in rope_scaling"
        )
    return settings | ({"rope_type": "rope"} if is_latent else {})


def _yarn(rope: Mapping[str, Any]) -> dict[str, Any]:
    """YarnRotaryEmbedding of GPTModel, whose settings have names of their own (gpt_model.py)."""
    if rope.get("attention_factor") is not None:
        raise UnsupportedError(
            "the config gives an attention_factor for its rotary positions", why="Megatron computes the factor and has no setting for it"
        )
    settings = {setting: rope.get(key) for key, (_, setting, _) in YARN.items()}
    for key in ("factor", "beta_fast", "beta_slow"):
        _, setting, default = YARN[key]
        settings[setting] = settings[setting] or default
    return {"position_embedding_type": "yarn", **settings, "yarn_correction_range_round_to_int": rope.get("truncate", True)}


def _factor(rope: Mapping[str, Any]) -> float:
    factor = number(rope, "factor")
    if factor is None:
        raise UnsupportedError("rope_scaling has no factor", why=f"Rotary positions of the type {rotary_type(rope)!r} need one")
    return factor


# (whether the MLP has a gate, activation) -> Megatron's setting for it; None: it is what Megatron computes without one.
_ACTIVATIONS = {
    **{(True, name): "swiglu" for name in ("silu", "swish")},
    (False, "gelu"): None,
    **{(False, name): "openai_gelu" for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")},
    (False, "relu2"): "squared_relu",
}


def _activation(model: Model, parts: Parts) -> dict[str, Any]:
    settings = {"swiglu": False, "squared_relu": False, "openai_gelu": False, "bias_gelu_fusion": False, "quick_geglu": False}
    if "quick_geglu" in _declared(model) or computation_of(model).built_by:
        return settings
    is_gated = "mlp.gate" in parts or "expert.gate" in parts or not ("mlp.up" in parts or "expert.up" in parts)
    name = next(
        (value for key in ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act") if (value := model.setting(key))),
        "silu",
    )
    if (is_gated, name) not in _ACTIVATIONS:
        raise UnsupportedError(
            f"Megatron-LM has no setting for an MLP with{'' if is_gated else 'out'} a gate whose activation is {name!r}",
            why="The weights would load, but the model would be another one",
        )
    setting = _ACTIVATIONS[is_gated, name]
    return {**settings, **({setting: True} if setting else {})}


def _windows(model: Model, window: Any) -> dict[str, Any]:
    """Sliding windows. window: tokens to which a token attends, itself included. Not every layer has one: the config lists them."""
    layers = model.dimensions["layers"]
    kinds = [kind == "sliding_attention" for kind in model.listed("layer_types")[:layers]]
    if not kinds and (first := model.count("max_window_layers")) is not None:
        kinds = [layer >= first for layer in range(layers)]
    if not window or (kinds and not any(kinds)):
        return {}
    settings: dict[str, Any] = {"window_size": (int(window) - 1, 0)}
    return settings if all(kinds) else settings | {"window_attn_skip_freq": [int(has_window) for has_window in kinds]}


def _experts(model: Model, parts: Parts) -> dict[str, Any]:
    dimensions = model.dimensions
    sparse = [int(layer in model.sparse_layers) for layer in range(dimensions["layers"])]
    groups = 1 if model.setting("topk_method") == "greedy" else model.count("n_group") or 1
    return {
        "moe_layer_freq": 1 if all(sparse) else sparse,
        "moe_ffn_hidden_size": dimensions.get("expert_intermediate", dimensions["intermediate"]),
        "moe_router_topk": model.experts_per_token or 2,
        "moe_shared_expert_intermediate_size": next((part.array.shape[0] for part in parts.get("shared_expert.up", {}).values()), None),
        "moe_shared_expert_gate": "shared_expert.score" in parts,
        "moe_router_pre_softmax": not model.setting("norm_topk_prob"),
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": "router.correction" in parts,
        "moe_router_topk_scaling_factor": model.setting("routed_scaling_factor"),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": model.setting("topk_group") if groups > 1 else None,
    }


def _hybrid(model: Model) -> dict[str, Any]:
    """MambaModel, whose layers are listed by a letter each (ssm/mamba_hybrid_layer_allocation.py); empty for other models."""
    if not is_hybrid(model):
        return {}
    letters = {"ssm.out": "M", "attention.o": "*", "router": "E", "mlp.down": "-"}
    of_layer: dict[int, str] = {}
    for kind in model.layer_kinds:
        roles = {part.role for part in model.parts_of(kind.weights)}
        of_layer |= dict.fromkeys(kind.layers, next(letter for role, letter in letters.items() if role in roles))
    dimensions = model.dimensions
    return {
        "is_hybrid_model": True,
        "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
        "hybrid_override_pattern": "".join(of_layer[layer] for layer in range(dimensions["layers"])),
        "mamba_num_heads": dimensions["ssm_heads"],
        "mamba_head_dim": dimensions["ssm_head_dim"],
        "mamba_num_groups": dimensions["ssm_groups"],
        "mamba_state_dim": dimensions["ssm_state"],
        "position_embedding_type": "none",
    }


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
