"""The quantization of MLX: which of its folders are read, and how their weights are stored.

    mode     codes                          beside them, one for each group of input features
    affine   1 to 8 bits, in U32 words      scales and biases, in the type of the model: code * scale + bias
    mxfp4    E2M1, eight in a U32           scales U8: exponents of powers of two, groups of 32
    mxfp8    E4M3, four in a U32            the same
    nvfp4    E2M1, eight in a U32           scales U8: the bits of E4M3, groups of 16

MLX takes a module for quantized if the file has its scales (mlx_lm/utils.py, load_model), so the config alone does not say which are: it
has the sizes for all modules, and lists those with their own. `with_modules` completes it from the names in the file. Experts are stacked:

    mlp.switch_mlp.gate_proj.weight, .scales, .biases [E, out, ...]     of mlp.experts.*.gate_proj, block_sparse_moe.experts.*.w1, ...

Source: MLX 0.32.4, mlx.core.quantize and dequantize; mlx-lm 0.32.2, its `sanitize` of each model run on named random weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from reshard.geometry.dtypes import bit_run, fp4, fp8
from reshard.models.stored_forms import Component, Quantization, StoredForm, UnknownForm

# The types whose weights mlx-lm stores with their own values and axes, under the model's own names, or with the experts stacked.
MODELS = (
    "afmoe", "bailing_moe", "cohere", "cohere2", "deepseek", "deepseek_v2", "dots1", "ernie4_5", "exaone_moe", "gemma",
    "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_bigcode", "granite", "hunyuan_v1_dense", "llama", "mimo", "ministral3",
    "mistral", "mixtral", "nemotron", "olmo2", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
# mode -> the group size and the bits where an entry does not say them. An entry of a module does not take those of the whole model: one
# without a mode is affine (mlx/nn/layers/quantized.py, quantize).
_DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
# What mlx-lm does with others that are common, for a message.
_LATENT = "whose kv_b_proj MLX splits and transposes before it quantizes it"
_CHANGED = "of which MLX adds one to the norms and moves the axes of convolutions"
_OTHERS = {
    "ernie4_5_moe": "whose router loses its correction in MLX",
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _LATENT),
    **dict.fromkeys(("kimi_k2", "kimi_k25", "kimi_linear", "mistral4"), _LATENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "step3p5"), _CHANGED),
}
# The name of a stack of experts -> the modules of single experts that it can stand for.
_STACKS = {
    ".switch_mlp.gate_proj": (".experts.*.gate_proj", ".experts.*.w1"),
    ".switch_mlp.down_proj": (".experts.*.down_proj", ".experts.*.w2"),
    ".switch_mlp.up_proj": (".experts.*.up_proj", ".experts.*.w3"),
    **{f".experts.{name}": (f".experts.*.{name}",) for name in ("gate_proj", "up_proj", "down_proj")},
    ".mlp.gate.gate_proj": (".mlp.gate",),
}
_ONLY_LISTED = "*"
"""The entry, false, of a config that lists all quantized modules."""


def with_modules(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The settings with an entry for each module that has scales among the names in the file, and for no other module."""
    sizes = {key: value for key, value in settings.items() if not isinstance(value, Mapping | bool)}
    listed = {name.removesuffix(".scales"): sizes for name in names if name.endswith(".scales")}
    own = {module: value for module, value in settings.items() if module in listed and isinstance(value, Mapping)}
    return {**sizes, **listed, **own, _ONLY_LISTED: False}


def quantization(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Quantization:
    """The quantization that settings of MLX describe: the modules that they list by name, then all others."""
    _check_keeps_values(config)
    listed: dict[StoredForm, set[str]] = {}
    for name, own in settings.items():
        if isinstance(own, Mapping):
            listed.setdefault(_form(own), set()).update(_modules(name))
    forms = [replace(form, modules=frozenset(names)) for form, names in listed.items()]
    excluded = tuple(module for name, own in settings.items() if own is False for module in _modules(name))
    if _ONLY_LISTED in excluded:
        return Quantization("mlx", tuple(forms), library="MLX", everything=True)
    return Quantization("mlx", (*forms, _form(settings)), excluded, library="MLX", everything=True)


def _check_keeps_values(config: Mapping[str, Any]) -> None:
    model_type = str(config.get("model_type"))
    if model_type not in MODELS:
        why = _OTHERS.get(model_type, "whose weights MLX stores under other names or with other values")
        raise UnknownForm(f" of {model_type[:40]}, {why}")
    if config.get("norm_head"):
        raise UnknownForm(f" of {model_type[:40]} with norm_head, whose head MLX stores normalized")


def _form(sizes: Mapping[str, Any]) -> StoredForm:
    """How the weights of a module with these sizes are stored: weight U32 [out, in * bits / 32], scales [out, in / group]."""
    mode = str(sizes.get("mode", "affine"))
    default_group, default_bits = _DEFAULTS.get(mode, (0, 0))
    bits, group = sizes.get("bits") or default_bits, sizes.get("group_size") or default_group
    if sizes.get("global_scale"):
        raise UnknownForm(" with global scales")
    if mode not in _DEFAULTS:
        raise UnknownForm(f" in the mode {mode[:20]}")
    is_legal = bits in (1, 2, 3, 4, 5, 6, 8) and group in (32, 64, 128) if mode == "affine" else (group, bits) == _DEFAULTS[mode]
    if not is_legal:
        raise UnknownForm(f" in the mode {mode} with {str(bits)[:20]} bits and groups of {str(group)[:20]}")
    if mode in _FLOATS:
        return _FLOATS[mode]
    components = (
        Component("weight", "codes", packing=bit_run(bits)),
        Component("scales", "scale", (1, group)),
        Component("biases", "bias", (1, group)),
    )
    return StoredForm(f"INT{bits} (MLX, group {group})", f"INT{bits} group", components, ("U32",), keeps_scale_type=True)


def _floats(name: str, codes: Component, group: int, scales: str) -> StoredForm:
    beside = Component("scales", "scale", (1, group), read_as=scales, element_type="U8")
    return StoredForm(f"{name} (MLX)", f"{name} group", (codes, beside), ("U32",))


_FLOATS = {
    "mxfp4": _floats("MXFP4", Component("weight", "codes", packing=fp4(count=8)), 32, "F8_E8M0"),
    "mxfp8": _floats("MXFP8", Component("weight", "codes", packing=fp8(count=4)), 32, "F8_E8M0"),
    "nvfp4": _floats("NVFP4", Component("weight", "codes", packing=fp4(count=8)), 16, "F8_E4M3"),
}


def _modules(name: str) -> tuple[str, ...]:
    """The names of a module of MLX in the model: its own, those of its experts, and those where a language model lies in a larger model."""
    inner = name.removeprefix("language_model.")
    outer = (name,) if inner == name else (name, inner, f"model.language_model.{inner.removeprefix('model.')}")
    stack = next((stack for stack in _STACKS if name.endswith(stack)), "")
    return (*outer, *(module.removesuffix(stack) + single for module in outer for single in _STACKS.get(stack, ())))
