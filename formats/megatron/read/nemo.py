"""NeMo's settings, translated to Megatron's args.

    context/model.yaml    NeMo 2, beside weights/: the arguments that were given to a TransformerConfig
    model_config.yaml     NeMo 1, in a .nemo tar or beside the rank folders

Source: nemo/collections/llm/gpt/model, nemo/collections/nlp/models/language_modeling/megatron_gpt_model.py and its
megatron_gpt_config.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from reshard.errors import CheckpointError
from reshard.storage.files import Files, read_whole

from ..layout.save_folders import NEMO_CONFIG
from ..layout.stages import Args

_NEMO2 = "context/model.yaml"
_LIMIT = 1 << 22
# NeMo's name for a setting -> Megatron's name.
_NAMES = {
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "rotary_percentage": "rotary_percent",
    "scale_factor": "rope_scaling_factor",
    "bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
    "encoder_seq_length": "seq_length",
}
_NORMS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm", "low_precision_layernorm": "LayerNorm"}


def nemo_args(files: Files, folder: str) -> Args:
    """The settings beside the weights in `folder`; empty if there are none.

    Raises: CheckpointError if the file is not YAML, or holds no settings.
    """
    parent = folder.rstrip("/").rpartition("/")[0]
    above = f"{parent}/" if parent else ""
    for path in dict.fromkeys((above + _NEMO2, folder + _NEMO2, above + NEMO_CONFIG, folder + NEMO_CONFIG)):
        if files.size(path) is not None:
            settings = _parse(files, path)
            return _translate(settings["config"] if isinstance(settings.get("config"), Mapping) else settings)
    return {}


class _Loader(yaml.SafeLoader):
    """A loader that reads a value with any custom tag as None, so that no class is looked up."""


_Loader.add_multi_constructor("", lambda *_: None)


def _parse(files: Files, path: str) -> Mapping[str, Any]:
    try:
        value = yaml.load(read_whole(files, path, limit=_LIMIT), Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise CheckpointError(f"it is not YAML: {error}", where=path, do="Copy the file again") from None
    if not isinstance(value, Mapping):
        raise CheckpointError(f"it holds a {type(value).__name__}, settings by name are expected", where=path)
    return value


def _translate(config: Mapping[str, Any]) -> Args:
    args = {_NAMES.get(str(key), str(key)): value for key, value in config.items()}
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
        "normalization": _NORMS.get(str(args.get("normalization", "LayerNorm")).lower(), args.get("normalization")),
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
