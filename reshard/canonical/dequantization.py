"""Quantised weights as values: each goes on together with its scales, which have no place of their own any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.canonical.content import Content, Drop
from reshard.errors import CheckpointError, RequestError
from reshard.index.index import Scaling, Tensor
from reshard.models.model import Model
from reshard.models.quantization import Quantization, quantization_of, unknown_quantization

SETTING = "quantization_config"


def dequantized(content: Content, config: Mapping[str, Any] | None) -> Content:
    """The same tensors, the quantised ones with what they are multiplied with; the model is as its config says, but not quantised.

    Raises: RequestError if the config does not say how the weights are quantised, CheckpointError if a quantised one has no scales.
    """
    quantization = quantization_of(config or {})
    if quantization is None:
        method = unknown_quantization(config or {})
        raise RequestError(
            f"--dequantize: weights quantised by {method} are not understood" if method else "--dequantize: nothing here is quantised",
            why="" if method else f"The config has no {SETTING}",
            do="Leave it out" if method else "Leave it out, or give the model's own config with --model DIR",
        )
    tensors, drops = dict(content.tensors), list(content.drops)
    for name, tensor in content.tensors.items():
        beside = {scale: name.removesuffix("weight") + scale.kind for scale in quantization.scales}
        if not name.endswith(".weight") or not any(other in content.tensors for other in beside.values()):
            continue
        for scale, other in beside.items():
            found = tensors.pop(other, None)
            if found is None:
                raise CheckpointError("it is not there, other scales of this weight are", where=other)
            if scale.of_input:
                drops.append(
                    Drop(other, found.kind, found.nbytes, "the scale of a quantised layer's input; the layer is not quantised any more")
                )
            else:
                tensors[name] = replace(tensor, scaling=_scaling(tensor, found, scale.block_shape, scale.shape(tensor.shape)))
    for name in [name for name in tensors if name.rpartition(".")[2] in {scale.kind for scale in quantization.cache_scales}]:
        found = tensors.pop(name)
        drops.append(Drop(name, found.kind, found.nbytes, "a scale of cached keys or values; they are not quantised any more"))
    _check_none_is_left(tensors, quantization)
    model = Model(content.model.architecture, without_quantization(content.model.config)) if content.model else None
    return replace(content, tensors=tensors, drops=tuple(drops), model=model)


def quantized_names(content: Content, config: Mapping[str, Any] | None) -> frozenset[str]:
    """The quantised weights and what lies beside them: a cast would make their values others."""
    quantization = quantization_of(config or {})
    kinds = [scale.kind for scale in quantization.scales] if quantization else []
    beside = {name: name.removesuffix(kind) + "weight" for name in content.tensors for kind in kinds if name.endswith("." + kind)}
    return frozenset(name for pair in beside.items() for name in pair)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model as values."""
    return {key: value for key, value in config.items() if key != SETTING}


def _scaling(tensor: Tensor, scales: Tensor, block_shape: tuple[int | None, ...], shape: tuple[int, ...]) -> Scaling:
    if scales.shape != shape and scales.elements > 1:
        raise CheckpointError(
            f"its shape is {list(scales.shape)}, {list(shape)} is expected beside {tensor.name} {list(tensor.shape)}",
            where=scales.name,
            do="Give the model's own config with --model DIR",
        )
    return Scaling(scales, block_shape)


def _check_none_is_left(tensors: Mapping[str, Tensor], quantization: Quantization) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype.name.startswith("F8") and tensor.scaling is None:
            kinds = " or ".join(scale.kind for scale in quantization.scales if not scale.of_input)
            raise CheckpointError(f"it is stored as {tensor.dtype}, and has no {kinds} beside it", where=name)
