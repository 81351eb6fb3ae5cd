"""model_config.json: the sizes of nanotron's model, and the config.json that follows from it.

Source: nanotron 0.4 and 2411b022, config/models_config.py (LlamaConfig), examples/llama/convert_weights.py (get_config_mapping).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.light_dataclass import dataclass

from .files import CONFIG

_SAME = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings", "rms_norm_eps",
    "hidden_act", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "use_cache", "pretraining_tp",
)  # fmt: skip
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True, slots=True)
class NanotronModel:
    """What model_config.json says."""

    config: Mapping[str, Any]
    """The config.json that follows."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Rows of each."""
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
    scaling = ("the rotary scaling (rope_scaling in model_config.json) in the terms of transformers (--model DIR)",)
    # 0.4 has no such key either; its model rotates pairs.
    in_pairs = bool(document.get("rope_interleaved", True))
    return NanotronModel(config, heads, kv_heads, hidden // heads, in_pairs, scaling if document.get("rope_scaling") else ())
