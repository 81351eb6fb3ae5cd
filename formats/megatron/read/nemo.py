"""NeMo's settings, as Megatron's args would say them.

    context/model.yaml    NeMo 2, beside weights/: the arguments of a TransformerConfig, those that were given
    model_config.yaml     NeMo 1, in a .nemo tar or beside the ranks' folders

Source: nemo/collections/llm/gpt/model, nemo/collections/nlp/models/language_modeling/megatron_gpt_model.py and its
megatron_gpt_config.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from reshard.errors import CheckpointError
from reshard.storage.files import Files, read_whole

from ..layout.arguments import Args
from ..layout.save_folders import NEMO_CONFIG

_NEMO2 = "context/model.yaml"
_LIMIT = 1 << 22
# Names that differ; all others are Megatron's own.
_NAMES = {
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "rotary_percentage": "rotary_percent",
    "scale_factor": "rope_scaling_factor",
    "layernorm_zero_centered_gamma": "layernorm_zero_centered_gamma",
    "bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
    "encoder_seq_length": "seq_length",
}
_NORMS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm", "low_precision_layernorm": "LayerNorm"}


def nemo_args(files: Files, folder: str) -> Args:
    """The settings beside the weights in `folder`; empty if there are none.

    Raises: CheckpointError if the file is no YAML.
    """
    parent = folder.rstrip("/").rpartition("/")[0]
    above = f"{parent}/" if parent else ""
    for path in dict.fromkeys((above + _NEMO2, folder + _NEMO2, above + NEMO_CONFIG, folder + NEMO_CONFIG)):
        if files.size(path) is not None:
            found = _parsed(files, path)
            return _args(found["config"] if isinstance(found.get("config"), Mapping) else found)
    return {}


class _Loader(yaml.SafeLoader):
    """Tags of other programs become nothing: no class is looked up."""


_Loader.add_multi_constructor("", lambda *_: None)


def _parsed(files: Files, path: str) -> Mapping[str, Any]:
    try:
        value = yaml.load(read_whole(files, path, limit=_LIMIT), Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise CheckpointError(f"it is no YAML that can be read: {error}", where=path, do="Copy the file again") from None
    if not isinstance(value, Mapping):
        raise CheckpointError(f"it holds a {type(value).__name__}, settings by name were expected", where=path)
    return value


def _args(config: Mapping[str, Any]) -> Args:
    found = {_NAMES.get(str(key), str(key)): value for key, value in config.items()}
    activation = str(_target(found.get("activation_func")) or found.get("activation") or "")
    gated = bool(found.get("gated_linear_unit")) or activation.startswith(("fast-", "swiglu")) or activation.endswith("glu")
    found |= {
        "swiglu": gated and ("silu" in activation or "swiglu" in activation),
        "squared_relu": "squared" in activation,
        "openai_gelu": "openai_gelu" in activation,
        "untie_embeddings_and_output_weights": not found.get("share_embeddings_and_output_weights", True),
        "group_query_attention": bool(found.get("num_query_groups")),
        "normalization": _NORMS.get(str(found.get("normalization", "LayerNorm")).lower(), found.get("normalization")),
        "apply_layernorm_1p": "1p" in str(found.get("normalization", "")).lower(),
        "max_position_embeddings": found.get("max_position_embeddings") or found.get("seq_length"),
        "transformer_impl": "transformer_engine",
    }
    if isinstance(found.get("params_dtype"), Mapping):
        del found["params_dtype"]
    precision = str(found.get("precision", "bf16"))
    found.setdefault("bf16", "bf16" in precision)
    found.setdefault("fp16", "fp16" in precision or precision in ("16", "16-mixed"))
    return found


def _target(value: Any) -> Any:
    return value.get("_target_") if isinstance(value, Mapping) else value
