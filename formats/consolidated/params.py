"""params.json and config.json, one from the other.

params.json has two forms. Meta's has `multiple_of` and `ffn_dim_multiplier`, from which the size of the MLP follows; Mistral's has
`hidden_dim` and `head_dim`. config.json says only what params.json and the shapes of tensors say. A key whose meaning is not known, or a
value that programs complete in different ways, is a question to the user.

Source: llama and llama3 (model.py), llama-models (rope_scaling: constants of Llama 3.1 in the code); mistral-inference (args.py,
transformer.py), vLLM 0.32 (transformers_utils/configs/mistral.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.value import value
from reshard.models.config_values import number, rotary_settings, rotary_type
from reshard.models.model import Model

Shapes = Mapping[str, tuple[int, ...]]

_SIZES = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "norm_eps": "rms_norm_eps"}
# What a run takes as well, and no weight depends on.
_OF_THE_RUN = {"max_batch_size", "max_seq_len", "vocab_size"}
_META = {*_SIZES, *_OF_THE_RUN, "n_kv_heads", "multiple_of", "ffn_dim_multiplier", "rope_theta", "use_scaled_rope"}
_MISTRAL = {
    *_SIZES, *_OF_THE_RUN, "n_kv_heads", "head_dim", "hidden_dim", "rope_theta", "sliding_window", "moe", "tied_embeddings", "model_type",
    "max_position_embeddings", "activation", "dtype",
}  # fmt: skip
_FFN = "layers.0.feed_forward.w1.weight"
# Of the formula that gives the size of the MLP in Meta's code.
_LARGEST_MULTIPLE = 4096


@value
class DerivedConfig:
    """The config.json that follows from params.json."""

    config: dict[str, Any] | None
    """Its content; None if params.json has keys whose meaning is not known."""
    unanswered: tuple[str, ...] = ()
    """What params.json does not say and a conversion needs."""
    notes: tuple[str, ...] = ()
    """Sentences about what config.json leaves out or completes."""


def config_of(params: Mapping[str, Any], shapes: Shapes) -> DerivedConfig:
    """The config of a model, by its params.json and the shapes of its stored tensors.

    Raises: CheckpointError if params.json lacks a size, or the shapes contradict it.
    """
    is_mistral = "hidden_dim" in params
    if unknown := [key for key in params if key not in (_MISTRAL if is_mistral else _META)]:
        return DerivedConfig(None, (f"what {', '.join(unknown)} in params.json mean for config.json (`model=DIR`)",))
    if missing := [key for key in (*_SIZES, *(["head_dim", "n_kv_heads", "vocab_size"] if is_mistral else [])) if key not in params]:
        raise CheckpointError(f"it has no {missing[0]}", where="params.json", do="Give the model's config with `model=DIR`")
    for key in ("dim", "n_layers", "n_heads"):
        if type(params[key]) is not int or params[key] < 1:
            raise CheckpointError(f"{key} is {params[key]!r}; a positive number is needed", where="params.json", do="Copy the file again")
    config: dict[str, Any] = {new: params[key] for key, new in _SIZES.items()}
    config["num_key_value_heads"] = params.get("n_kv_heads") or params["n_heads"]
    config["vocab_size"] = _checked("vocab_size", params.get("vocab_size"), _size(shapes, "tok_embeddings.weight", 0))
    config["head_dim"] = _checked("head_dim", params.get("head_dim"), _size(shapes, "layers.0.attention.wq.weight", 0) // params["n_heads"])
    unanswered = _complete_mistral(config, params) if is_mistral else _complete_llama(config, params, shapes)
    notes = ["config.json follows from params.json"]
    if not is_mistral and "rope_theta" not in params:
        notes.append("params.json has no rope_theta; config.json has 10000, the value in the code of Llama 1 and 2")
    if "max_position_embeddings" not in config:
        notes.append("params.json has no context length; config.json leaves max_position_embeddings out, and loaders use their default")
    return DerivedConfig(config, tuple(unanswered), tuple(notes))


def _complete_llama(config: dict[str, Any], params: Mapping[str, Any], shapes: Shapes) -> list[str]:
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": params.get("rope_theta", 10000.0)}
    config["intermediate_size"] = _size(shapes, _FFN, 0)
    config["tie_word_embeddings"] = "output.weight" not in shapes
    # The factor is 8 for Llama 3.1 and 32 for Llama 3.2, and only the code has it.
    return ["the rotary scaling that use_scaled_rope in params.json stands for (`model=DIR`)"] if params.get("use_scaled_rope") else []


def _complete_mistral(config: dict[str, Any], params: Mapping[str, Any]) -> list[str]:
    unanswered, moe, window = list[str](), params.get("moe"), params.get("sliding_window")
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "intermediate_size": params["hidden_dim"]}
    config["tie_word_embeddings"] = bool(params.get("tied_embeddings", False))
    # Of transformers the default is 4096, of Mistral none.
    config["sliding_window"] = int(window) if isinstance(window, str) and window.isdecimal() else window
    config["hidden_act"] = params.get("activation", "silu")
    if (longest := params.get("max_position_embeddings") or params.get("max_seq_len")) is not None:
        config["max_position_embeddings"] = longest
    if isinstance(config["sliding_window"], list):
        unanswered.append("which layers the list of sliding windows in params.json belongs to (`model=DIR`)")
    if params.get("rope_theta") is None:
        # transformers takes 10,000, mistral-inference 1,000,000.
        unanswered.append("rope_theta (`model=DIR`)")
    else:
        config["rope_theta"] = params["rope_theta"]
    if moe:
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        if not isinstance(moe, Mapping) or set(moe) != {"num_experts", "num_experts_per_tok"}:
            return [*unanswered, "the settings of its experts (`model=DIR`)"]
        config |= {"num_local_experts": moe["num_experts"], "num_experts_per_tok": moe["num_experts_per_tok"]}
    return unanswered


def _size(shapes: Shapes, name: str, axis: int) -> int:
    if name not in shapes or len(shapes[name]) <= axis:
        raise CheckpointError("it is not there, and the model's sizes follow from it", where=name, do="Copy the files again")
    return shapes[name][axis]


def _checked(key: str, stated: Any, stored: int) -> int:
    """The size that the tensors have. Raises CheckpointError if params.json states another; -1 states none."""
    if stated not in (None, -1, stored):
        raise CheckpointError(
            f"{key} is {stated}, and the tensors have {stored}",
            where="params.json",
            why="The file belongs to another model",
            do="Give the params.json of this model, or its config with `model=DIR`",
        )
    return stored


def params_of(model: Model, *, mistral: bool) -> dict[str, Any]:
    """The params.json of a model. Raises UnsupportedError if the config has a setting that it cannot hold."""
    dimensions = model.dimensions
    params: dict[str, Any] = {
        "dim": dimensions["hidden"],
        "n_layers": dimensions["layers"],
        "n_heads": dimensions["heads"],
        "n_kv_heads": dimensions["kv_heads"],
        "norm_eps": model.setting("rms_norm_eps") or 1e-6,
        "vocab_size": dimensions["vocab"],
    }
    rope = rotary_settings(model.settings)
    base = number(rope, "rope_theta") or number({"rope_theta": model.setting("rope_theta")}, "rope_theta")
    params["rope_theta"] = base or (1000000.0 if "experts" in dimensions else 10000.0)
    scaling = rotary_type(rope)
    if scaling != "default":
        raise UnsupportedError(
            f"config.json has the rotary scaling {scaling}, which params.json cannot state",
            why="The readers of these files have its factors in their code",
            do="Write `to=hf`",
        )
    if not mistral:
        return params | _llama_mlp(dimensions["hidden"], dimensions["intermediate"])
    params |= {"head_dim": dimensions["head_dim"], "hidden_dim": dimensions["intermediate"]}
    if model.is_tied:
        params["tied_embeddings"] = True
    if window := model.setting("sliding_window"):
        params["sliding_window"] = window
    if longest := model.setting("max_position_embeddings"):
        params["max_position_embeddings"] = longest
    if "experts" in dimensions:
        params["moe"] = {"num_experts": dimensions["experts"], "num_experts_per_tok": model.setting("num_experts_per_tok") or 2}
    return params


def _llama_mlp(hidden: int, intermediate: int) -> dict[str, Any]:
    """The two settings that give the size of the MLP in Meta's code."""
    multiple = min(intermediate & -intermediate, _LARGEST_MULTIPLE)
    if mlp_size(hidden, multiple) == intermediate:
        return {"multiple_of": multiple}
    # Half an element more, because the code rounds the product down.
    exact = (intermediate + 0.5) / (8 * hidden // 3)
    rounded = (round(exact, digits) for digits in range(1, 16))
    factor = next((factor for factor in rounded if mlp_size(hidden, multiple, factor) == intermediate), exact)
    return {"multiple_of": multiple, "ffn_dim_multiplier": factor}


def mlp_size(hidden: int, multiple: int, factor: float | None = None) -> int:
    """The size of the MLP by Meta's formula (llama, model.py, FeedForward)."""
    size = int(2 * 4 * hidden / 3)
    size = size if factor is None else int(factor * size)
    return -(-size // multiple) * multiple
