"""Quantized weights: the scales that are stored beside a weight, their names, and the block of the weight that each scale belongs to.

Sources: transformers, quantizers (finegrained_fp8, compressed_tensors); vLLM 0.32, layers/quantization/{fp8,compressed_tensors}; published
configs of DeepSeek-V3, Qwen3-FP8 and llm-compressor's models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reshard.errors import RequestError

# Weight elements per scale along each axis of a weight [out, in]. None: one scale for the whole axis.
BlockShape = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """A tensor stored beside a weight [out, in]. Stored elements times the scale are the values of the weight, or of the layer's input."""

    kind: str
    """The last word of its name, in place of "weight": "weight_scale_inv", "input_scale"."""
    block_shape: BlockShape
    """Weight elements per scale along each axis."""
    single_shape: tuple[int, ...] = ()
    """The stored shape of a scale that is one number for the whole weight: () or (1,)."""
    of_input: bool = False
    """Whether it is the scale of the layer's input, not of the weight."""

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """The scale's shape beside a weight of shape `weight`."""
        if all(size is None for size in self.block_shape):
            return self.single_shape
        return tuple(1 if size is None else -(-length // size) for length, size in zip(weight, self.block_shape, strict=True))

    @property
    def is_blocked(self) -> bool:
        """Whether several rows or several columns, but not the whole axis, share one scale."""
        return any(size is not None and size > 1 for size in self.block_shape)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the linear layers of a model are quantized."""

    method: str
    """The config's quant_method: "fp8", "compressed-tensors"."""
    scales: tuple[Scale, ...]
    """The scales beside each quantized weight."""
    excluded: tuple[str, ...] = ()
    """Modules that are not quantized, as names, or as regular expressions after "re:"."""
    cache_scales: tuple[Scale, ...] = ()
    """The scales of cached keys and values, one of each in every layer's attention."""

    def scales_of(self, weight: str) -> tuple[Scale, ...]:
        """The scales beside the weight of a linear layer, by the weight's name."""
        module = weight.removesuffix(".weight")
        return () if any(_matches(entry, module) for entry in self.excluded) else self.scales


def _matches(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return module == entry or module.startswith(entry + ".")


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """The quantization that a config describes; None if there is none, or its method is not known (`unknown_quantization`)."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return None
    method = settings.get("quant_method")
    excluded = settings.get("modules_to_not_convert") or settings.get("ignored_layers") or settings.get("ignore") or ()
    if not isinstance(excluded, list | tuple):
        raise RequestError(
            f"the quantization_config of config.json excludes the modules {str(excluded)[:100]!r}; a list of names is expected",
            why="Which weights have scales depends on it",
            do="Give the model's own config with --model DIR",
        )
    scales = _fp8(settings) if method == "fp8" else _compressed(settings) if method == "compressed-tensors" else None
    cache = settings.get("kv_cache_scheme")
    has_cache_scales = isinstance(cache, Mapping) and not cache.get("dynamic")
    cache_scales = (_cache_scale("k_scale"), _cache_scale("v_scale")) if has_cache_scales else ()
    return Quantization(str(method), scales, tuple(map(str, excluded)), cache_scales) if scales else None


def _cache_scale(kind: str) -> Scale:
    return Scale(kind, (None, None), (1,))


def unknown_quantization(config: Mapping[str, Any]) -> str | None:
    """The method that a config names, if weights quantized by it cannot be read; None if they can, or are not quantized."""
    settings = config.get("quantization_config")
    if not settings or quantization_of(config) is not None:
        return None
    return str(settings.get("quant_method")) if isinstance(settings, Mapping) else repr(settings)


def _fp8(settings: Mapping[str, Any]) -> tuple[Scale, ...] | None:
    block = settings.get("weight_block_size")
    if block is not None:
        # Weights are multiplied by weight_scale_inv, in spite of its name.
        return (Scale("weight_scale_inv", _block(block)),)
    inputs = (Scale("input_scale", (None, None), of_input=True),) if settings.get("activation_scheme") == "static" else ()
    return (Scale("weight_scale", (None, None)), *inputs)


def _block(value: Any) -> BlockShape:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(size) is int and 0 < size < 1 << 31 for size in value):
        raise RequestError(
            f"the quantization_config of config.json has the block size {str(value)[:100]}; two positive numbers are expected",
            why="The places of the scales depend on it",
            do="Give the model's own config with --model DIR",
        )
    return value[0], value[1]


def _compressed(settings: Mapping[str, Any]) -> tuple[Scale, ...] | None:
    groups = settings.get("config_groups")
    if settings.get("format") not in ("float-quantized", "naive-quantized", None) or not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    (group,) = groups.values()
    if not isinstance(group, Mapping):
        return None
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping):
        return None
    if group.get("targets") != ["Linear"] or weights.get("type") != "float" or weights.get("num_bits") != 8:
        return None
    strategy, block = str(weights.get("strategy")), weights.get("block_structure")
    block_shape: BlockShape = _block(block) if strategy == "block" else {"tensor": (None, None), "channel": (1, None)}.get(strategy, ())
    if not block_shape:
        return None
    input_scales = (Scale("input_scale", (None, None), (1,), of_input=True),) if inputs and not inputs.get("dynamic") else ()
    return (Scale("weight_scale", block_shape, (1,)), *input_scales)
