"""Dequantization, described but not computed: each quantized weight gets its scales attached, and the scales are no longer tensors of the
content. The values are computed when the weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.canonical.content import Content, Drop
from reshard.errors import CheckpointError, IncompleteError, RequestError
from reshard.index.index import Scaling, Tensor
from reshard.models.model import Model
from reshard.models.quantization import Quantization, quantization_of, unknown_quantization

SETTING = "quantization_config"


def with_scales_attached(content: Content, config: Mapping[str, Any] | None) -> Content:
    """The content with the scales of quantized weights attached to them, and the model without quantization.

    Raises: RequestError if the config does not say how the weights are quantized, CheckpointError if a quantized weight has no scales or
    scales of another shape.
    """
    quantization = quantization_of(config or {})
    if quantization is None:
        method = unknown_quantization(config or {})
        raise RequestError(
            f"--dequantize: the quantization method {method} is unknown" if method else "--dequantize: nothing here is quantized",
            why="" if method else f"The config has no {SETTING}",
            do="Leave it out" if method else "Leave it out, or give the model's own config with --model DIR",
        )
    tensors, drops = dict(content.tensors), list(content.drops)
    for name, tensor in content.tensors.items():
        scale_names = {scale: name.removesuffix("weight") + scale.kind for scale in quantization.scales}
        if not name.endswith(".weight") or not any(scale_name in content.tensors for scale_name in scale_names.values()):
            continue
        for scale, scale_name in scale_names.items():
            scales = tensors.pop(scale_name, None)
            if scales is None:
                raise IncompleteError("it is missing, although other scales of this weight are there", where=scale_name)
            if scale.of_input:
                drops.append(Drop(scale_name, scales.kind, scales.nbytes, "the activation scale of a layer that is no longer quantized"))
            else:
                tensors[name] = replace(tensor, scaling=_scaling(tensor, scales, scale.block_shape, scale.shape(tensor.shape)))
    for name in [name for name in tensors if name.rpartition(".")[2] in {scale.kind for scale in quantization.cache_scales}]:
        scales = tensors.pop(name)
        drops.append(Drop(name, scales.kind, scales.nbytes, "a scale of the KV cache, which is no longer quantized"))
    _check_all_are_scaled(tensors, quantization)
    model = Model(content.model.architecture, without_quantization(content.model.config)) if content.model else None
    return replace(content, tensors=tensors, drops=tuple(drops), model=model)


def quantized_names(content: Content, config: Mapping[str, Any] | None) -> frozenset[str]:
    """The names of the quantized weights and of their scales, whose dtypes must not be cast: the values would change."""
    quantization = quantization_of(config or {})
    kinds = [scale.kind for scale in quantization.scales] if quantization else []
    weights = {name: name.removesuffix(kind) + "weight" for name in content.tensors for kind in kinds if name.endswith("." + kind)}
    return frozenset(name for pair in weights.items() for name in pair)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model, not quantized."""
    return {key: value for key, value in config.items() if key != SETTING}


def _scaling(tensor: Tensor, scales: Tensor, block_shape: tuple[int | None, ...], shape: tuple[int, ...]) -> Scaling:
    """The scaling of a weight by `scales`, which must have the shape `shape` or one element."""
    if scales.shape != shape and scales.elements > 1:
        raise CheckpointError(
            f"its shape is {list(scales.shape)}, expected {list(shape)} for {tensor.name} {list(tensor.shape)}",
            where=scales.name,
            do="Give the model's own config with --model DIR",
        )
    return Scaling(scales, block_shape)


def _check_all_are_scaled(tensors: Mapping[str, Tensor], quantization: Quantization) -> None:
    """Raises CheckpointError for a weight that is stored in FP8 without scales."""
    for name, tensor in tensors.items():
        if tensor.dtype.name.startswith("F8") and tensor.scaling is None:
            kinds = " or ".join(scale.kind for scale in quantization.scales if not scale.of_input)
            raise CheckpointError(f"it is stored as {tensor.dtype}, but has no {kinds}", where=name)
