"""model_config.json and config.json, one from the other.

Source: nanotron 0.4 and 2411b022, config/models_config.py (LlamaConfig), examples/llama/convert_weights.py (get_config_mapping).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.adapter.model_files import CONFIG as MODEL_CONFIG
from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.value import value
from reshard.models.config_values import rotary_base, rotary_settings, rotary_type
from reshard.models.model import Model

from .files import CONFIG

_SAME = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings", "rms_norm_eps",
    "hidden_act", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "use_cache", "pretraining_tp",
)  # fmt: skip
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


@value
class NanotronModel:
    """What model_config.json says."""

    config: Mapping[str, Any]
    """The config.json that follows."""
    head_dim: int
    """Rows of each head."""
    rotated: int
    """Rows of all query and key heads."""
    in_pairs: bool
    """Whether row 2 i of a query or key head is rotated with row 2 i + 1; False: row i with row i + head_dim / 2."""
    unanswered: tuple[str, ...] = ()
    """What the file does not say and a conversion needs."""


def model_of(document: Mapping[str, Any]) -> NanotronModel:
    """The model of a model_config.json.

    Raises: UnsupportedError for another model than Llama, CheckpointError for a size that is missing or impossible.
    """
    if not document.get("is_llama_config"):
        kind = next((key for key in document if key.startswith("is_") and key.endswith("_config")), "another model")
        raise UnsupportedError(
            f"it is of {kind}; reshard reads is_llama_config",
            where=CONFIG,
            why="The names and the order of rows of other models were not compared with nanotron's own code",
            do="Convert it with nanotron's own scripts",
        )
    if document.get("attention_bias"):
        raise UnsupportedError("attention_bias is set: the model has biases, which reshard does not read", where=CONFIG)
    kv_heads: Any = document.get("num_key_value_heads") or document.get("num_attention_heads")
    sizes = [document.get(key) for key in _SIZES] + [kv_heads]
    for key, size in zip((*_SIZES, "num_key_value_heads"), sizes, strict=True):
        if type(size) is not int or size < 1:
            raise CheckpointError(f"{key} is {size!r}; a positive number is needed", where=CONFIG, do="Copy the file again")
    hidden, heads = document["hidden_size"], document["num_attention_heads"]
    if hidden % heads or hidden // heads % 2:
        raise CheckpointError(f"{heads} heads do not divide hidden_size {hidden} into heads of even size", where=CONFIG, do="Copy it again")
    config = {key: document[key] for key in _SAME if key in document}
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": kv_heads}
    # 0.4 has no such key; its model rotates with 10000.
    config["rope_theta"] = document.get("rope_theta", 10000.0)
    config["attention_bias"] = False
    scaling = ("the rotary scaling (rope_scaling in model_config.json) in the terms of transformers (`model=DIR`)",)
    # 0.4 has no such key either; its model rotates pairs.
    in_pairs = bool(document.get("rope_interleaved", True))
    unanswered = scaling if document.get("rope_scaling") else ()
    return NanotronModel(config, hidden // heads, (heads + kv_heads) * (hidden // heads), in_pairs, unanswered)


def document_of(model: Model, *, in_pairs: bool) -> dict[str, Any]:
    """The model_config.json of a model. in_pairs: whether row 2 i of a query or key head is rotated with row 2 i + 1.

    Raises: UnsupportedError if nanotron's Llama is another model.
    """
    config, sizes = model.config, model.dimensions
    if sizes["head_dim"] * sizes["heads"] != sizes["hidden"]:
        raise _not_nanotrons(f"its heads have {sizes['head_dim']} rows, and nanotron's {sizes['hidden']} / {sizes['heads']}")
    rotary = rotary_settings(config)
    if rotary_type(rotary) != "default":
        raise _not_nanotrons(
            f"config.json has the rotary scaling {rotary_type(rotary)}, and nanotron's terms are not those of transformers"
        )
    document = {"is_llama_config": True, **{key: config[key] for key in _SAME if key in config}, "rope_scaling": None}
    document |= {"num_key_value_heads": sizes["kv_heads"], "tie_word_embeddings": model.is_tied}
    base = rotary_base(config)
    # nanotron 0.4 refuses keys that it does not know; its model rotates pairs, with 10000.
    if not in_pairs or base != 10000.0:
        document |= {"rope_theta": base, "rope_interleaved": in_pairs}
    return dict(sorted(document.items()))


def _not_nanotrons(what: str) -> UnsupportedError:
    return UnsupportedError(what, where=MODEL_CONFIG, why="Its model would compute other values from these weights", do="Write `to=hf`")
