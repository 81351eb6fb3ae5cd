"""Quantised weights: which scales lie beside a weight, how they are called, and for how many of its elements one of them stands.

Sources: transformers, quantizers (finegrained_fp8, compressed_tensors); vLLM 0.32, layers/quantization/{fp8,compressed_tensors}; published
configs of DeepSeek-V3, Qwen3-FP8 and llm-compressor's models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Per axis of a weight [out, in]: how many elements share a scale; None: all of the axis.
BlockShape = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """A tensor beside a weight, under the weight's name with `kind` as its last word. shape: of a scale that is one for all, as it is
    stored. of_input: it is not the weight's, but of what is multiplied with it."""

    kind: str
    grain: BlockShape
    one: tuple[int, ...] = ()
    of_input: bool = False

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """The scale's shape beside a weight of that shape."""
        if all(step is None for step in self.grain):
            return self.one
        return tuple(1 if step is None else -(-size // step) for size, step in zip(weight, self.grain, strict=True))

    @property
    def is_blocked(self) -> bool:
        """Whether several rows or several columns, but not all, share one."""
        return any(step is not None and step > 1 for step in self.grain)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model's linear layers are quantised. kept: modules that are not, as names, or as patterns after "re:". cache: the scales of
    keys and values that every layer's attention has for them."""

    method: str
    scales: tuple[Scale, ...]
    kept: tuple[str, ...] = ()
    cache: tuple[Scale, ...] = ()

    def scales_of(self, weight: str) -> tuple[Scale, ...]:
        """The scales beside a linear layer's weight."""
        module = weight.removesuffix(".weight")
        return () if any(_names(entry, module) for entry in self.kept) else self.scales


def _names(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return module == entry or module.startswith(entry + ".")


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """What a config says of quantised weights; None if there are none, or ones that are not known (`unknown_quantization` tells)."""
    said = config.get("quantization_config")
    if not isinstance(said, Mapping):
        return None
    method = said.get("quant_method")
    kept = said.get("modules_to_not_convert") or said.get("ignored_layers") or said.get("ignore") or ()
    scales = _fp8(said) if method == "fp8" else _compressed(said) if method == "compressed-tensors" else None
    cache = said.get("kv_cache_scheme")
    of_cache = (_scale("k_scale"), _scale("v_scale")) if isinstance(cache, Mapping) and not cache.get("dynamic") else ()
    return Quantization(str(method), scales, tuple(map(str, kept)), of_cache) if scales else None


def _scale(kind: str) -> Scale:
    return Scale(kind, (None, None), (1,))


def unknown_quantization(config: Mapping[str, Any]) -> str | None:
    """The method that a config names, if its weights are stored in a way that is not known."""
    said = config.get("quantization_config")
    if not said or quantization_of(config) is not None:
        return None
    return str(said.get("quant_method")) if isinstance(said, Mapping) else repr(said)


def _fp8(said: Mapping[str, Any]) -> tuple[Scale, ...] | None:
    block = said.get("weight_block_size")
    if block is not None:
        # A multiplier, in spite of its name.
        return (Scale("weight_scale_inv", (int(block[0]), int(block[1]))),)
    inputs = (Scale("input_scale", (None, None), of_input=True),) if said.get("activation_scheme") == "static" else ()
    return (Scale("weight_scale", (None, None)), *inputs)


def _compressed(said: Mapping[str, Any]) -> tuple[Scale, ...] | None:
    groups = said.get("config_groups")
    if said.get("format") not in ("float-quantized", "naive-quantized", None) or not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    (group,) = groups.values()
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    if list(group.get("targets") or ()) != ["Linear"] or weights.get("type") != "float" or weights.get("num_bits") != 8:
        return None
    block = tuple(weights.get("block_structure") or ())
    grain: BlockShape = {"tensor": (None, None), "channel": (1, None), "block": block}.get(str(weights.get("strategy")), ())
    if not grain:
        return None
    static = (Scale("input_scale", (None, None), (1,), of_input=True),) if inputs and not inputs.get("dynamic") else ()
    return (Scale("weight_scale", grain, (1,)), *static)
