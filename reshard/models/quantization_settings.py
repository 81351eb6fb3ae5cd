"""Where the settings of a model's quantization stand, and what they are once found.

    config.json               quantization_config, text_config.quantization_config, or compression_config (compressed-tensors before 0.5)
    hf_quant_config.json      ModelOpt; alone up to 0.29, beside those of config.json later
    quantize_config.json      AutoGPTQ, and early AutoAWQ
    quant_config.json         AutoAWQ

A file is read if config.json has no settings; its content then stands in the config, under quantization_config, as engines put it there.

Source: vLLM 0.32, transformers_utils/config.py (get_config) and model_loader/weight_utils.py (get_quant_config).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SETTING = "quantization_config"
_OLD_SETTING = "compression_config"
_INNER = "text_config"
SETTINGS_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""The files beside config.json in which settings stand, in the order in which they are looked for."""

PLACES = f"{SETTING}, {_INNER}.{SETTING} and {_OLD_SETTING} of config.json, {', '.join(SETTINGS_FILES[:-1])} and {SETTINGS_FILES[-1]}"
"""All places, for a message."""


def quantization_settings(config: Mapping[str, Any]) -> Any:
    """The settings in a config; None if it has none. They are a mapping unless the config is broken."""
    found = next((settings for settings in _places(config).values() if settings), None)
    return _with_method(found) if isinstance(found, Mapping) else found


def settings_key(config: Mapping[str, Any]) -> str | None:
    """The key under which the settings stand, with a dot before that of an inner config; None if there are none."""
    return next((key for key, settings in _places(config).items() if settings), None)


def _places(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get(_INNER)
    of_inner = inner.get(SETTING) if isinstance(inner, Mapping) else None
    return {SETTING: config.get(SETTING), f"{_INNER}.{SETTING}": of_inner, _OLD_SETTING: config.get(_OLD_SETTING)}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model, not quantized."""
    plain = {key: value for key, value in config.items() if key not in (SETTING, _OLD_SETTING)}
    inner = plain.get(_INNER)
    if isinstance(inner, Mapping) and SETTING in inner:
        plain[_INNER] = {key: value for key, value in inner.items() if key != SETTING}
    return plain


def settings_of_file(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of one of SETTINGS_FILES as the settings of a config: with the method that wrote it, if it names none."""
    methods = {"hf_quant_config.json": "modelopt", "quant_config.json": "awq"}
    return {"quant_method": methods.get(name, "awq" if "w_bit" in content else "gptq"), **content}


def _with_method(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings with the name of their method: ModelOpt's can name their producer instead, compressed-tensors' is written in two ways."""
    method, producer = settings.get("quant_method"), settings.get("producer")
    if method is None and isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        method = "modelopt"
    elif method is None and "config_groups" in settings:
        method = "compressed-tensors"
    elif isinstance(method, str):
        method = method.lower().replace("compressed_tensors", "compressed-tensors")
    return settings if method == settings.get("quant_method") else {**settings, "quant_method": method}
