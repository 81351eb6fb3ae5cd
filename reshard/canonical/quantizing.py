"""Quantization, described but not computed: each weight of a linear layer becomes the components of a form, computed from its values when
they are written. The config is that of llm-compressor's schemes, which vLLM and transformers load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.canonical.content import Content
from reshard.canonical.dequantization import with_values
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType, from_safetensors
from reshard.geometry.extents import Extent, Piece
from reshard.index.origin import Encoded, Tensor
from reshard.index.shards import Shards
from reshard.models.model import Model
from reshard.models.quantization import SETTING, quantization_of, quantization_settings, without_quantization
from reshard.models.roles import ROLES
from reshard.models.stored_forms import StoredForm
from reshard.models.weights import ModelWeight

QUANTIZE, REQUANTIZE = ("fp8-block", "mxfp4"), ("fp8-block",)
"""What --quantize and --requantize take."""


# What llm-compressor 0.14 writes for its schemes FP8_BLOCK and MXFP4A16.
_GROUPS_OF_4 = {"num_bits": 4, "type": "float", "strategy": "group"}
_GROUPS: Mapping[str, Mapping[str, Any]] = {
    "fp8-block": {
        "format": "float-quantized",
        "targets": ["Linear"],
        "weights": {
            "num_bits": 8,
            "type": "float",
            "strategy": "block",
            "symmetric": True,
            "dynamic": False,
            "block_structure": [128, 128],
        },
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "symmetric": True, "dynamic": True, "group_size": 128},
    },
    "mxfp4": {
        "format": "mxfp4-pack-quantized",
        "targets": ["Linear"],
        "weights": {**_GROUPS_OF_4, "symmetric": True, "dynamic": False, "group_size": 32, "scale_dtype": "torch.uint8"},
    },
}  # fmt: skip
_STORED: Mapping[str, tuple[str, str]] = {"fp8-block": ("F8_E4M3", "BF16"), "mxfp4": ("U8", "U8")}


def form_of_settings(config: Mapping[str, Any]) -> str | None:
    """The form of QUANTIZE in which a quantized config holds its weights; None if it is another form, or several.

    Raises: RequestError for settings that are not those of a known method.
    """
    quantization = quantization_of(config)
    if quantization is None or len(quantization.forms) != 1:
        return None
    codes, *beside = quantization.forms[0].components
    packing = codes.packing and (codes.packing.name, codes.packing.axis, codes.transposed)
    scales = [(each.use, each.block_shape, each.exponents, each.unit_axes) for each in beside]
    if (codes.packing, scales) == (None, [("scale", (128, 128), False, False)]):
        return "fp8-block"
    return "mxfp4" if (packing, scales) == (("FP4", 1, False), [("scale", (1, 32), True, False)]) else None


def quantized(
    content: Content, config: Mapping[str, Any] | None, form: str, settings: Mapping[str, Any] | None = None
) -> tuple[Content, dict[str, Any]]:
    """The content with its linear layers quantized to `form`, one of QUANTIZE, and the config that says so.

    settings: a quantization_config of this form, which says how the components are called and which modules it leaves out; None: that of
    llm-compressor's scheme, or that with which the model is published.

    Raises: RequestError if the model is not known or is quantized already, UnsupportedError for experts in one tensor.
    """
    if quantization_settings(config or {}):
        raise RequestError("`quantize=`: the weights are quantized already", do="Use `requantize=fp8-block`, or `dequantize=True` first")
    if content.model is None:
        raise RequestError("`quantize=`: the model is not known, so neither are its linear layers", do="Add `model=DIR` with its config")
    weights, published = content.model.weights, content.model.architecture.quantized_as.get(form)
    known = settings or published
    described = quantization_of({**(config or {}), SETTING: known}) if known else None
    chosen = {
        name: tensor
        for name, tensor in content.tensors.items()
        if (published or _is_linear(name, weights)) and (described is None or described.form_of(name))
    }
    for name in () if published else chosen:
        if len(chosen[name].shape) != 2 or weights[name].declared.transposed:
            raise UnsupportedError(
                f"`quantize=`: its shape is {list(chosen[name].shape)}; a weight [out, in] with a name of its own is needed",
                where=name,
                why="The forms that engines load hold each expert under a name of its own",
            )
    config = {**(config or {}), SETTING: known} if known else _with_settings(config or {}, form, content, chosen)
    return _quantized(content, config, form, form, chosen)


def _is_linear(name: str, weights: Mapping[str, ModelWeight]) -> bool:
    """Whether a tensor is the weight of a linear layer that engines quantize."""
    roles = (weights[name].role, *weights[name].declared.fuses) if name in weights else ()
    return not name.endswith("bias") and any(ROLES[role].quantized for role in roles if role in ROLES)


def requantized(content: Content, config: Mapping[str, Any] | None, form: str) -> tuple[Content, dict[str, Any]]:
    """The content with its quantized weights in another form that holds the same values, one of REQUANTIZE, and the config that says so.

    Raises: as `with_values`, and UnsupportedError for experts in one tensor.
    """
    content = with_values(content, config)
    chosen = {name: tensor for name, tensor in content.tensors.items() if tensor.is_computed}
    for name, tensor in chosen.items():
        if len(tensor.shape) != 2:
            raise UnsupportedError(
                f"`requantize=`: it holds all experts, {list(tensor.shape)}",
                where=name,
                why="The forms that engines load hold each expert under a name of its own",
                do="Use `dequantize=True`, or convert to hf unchanged",
            )
    config = _with_settings(without_quantization(config or {}), form, content, chosen)
    return _quantized(content, config, form, f"exact-{form}", chosen)


def _with_settings(config: Mapping[str, Any], form: str, content: Content, chosen: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config with the settings of compressed-tensors for the chosen weights."""
    ignored = sorted(
        name.removesuffix(".weight")
        for name, tensor in content.weights.items()
        if name.endswith(".weight") and len(tensor.shape) == 2 and name not in chosen
    )
    group = _GROUPS[form]
    about = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": group["format"]}
    return {**config, SETTING: {**about, "config_groups": {"group_0": group}, "ignore": ignored}}


def _quantized(
    content: Content, config: dict[str, Any], form: str, recipe: str, chosen: Mapping[str, Tensor]
) -> tuple[Content, dict[str, Any]]:
    """The content with the chosen weights in the form that the config describes."""
    quantization = quantization_of(config)
    assert quantization is not None, "it is a form that reshard reads"
    (stored_form,) = quantization.forms
    types = tuple(from_safetensors(name, where=form) for name in _STORED[form])
    tensors: dict[str, Tensor] = {}
    for name, tensor in content.tensors.items():
        if name in chosen:
            tensors |= _components(tensor, stored_form, recipe, types)
        else:
            tensors[name] = tensor
    model = Model(content.model.architecture, config) if content.model else None
    return replace(content, tensors=tensors, model=model), config


def _components(weight: Tensor, form: StoredForm, recipe: str, types: tuple[DType, ...]) -> dict[str, Tensor]:
    """The components of a weight, computed by a recipe. Raises UnsupportedError if the groups do not divide its rows."""
    if form.transposed and weight.is_computed:
        raise UnsupportedError(
            "an adapter is merged into it, and it is quantized in the same conversion",
            where=weight.name,
            do="Merge the adapter first, then quantize the result",
        )
    if form.transposed:
        weight = _transposed(weight)
    group = form.codes.packing and next(size for each in form.beside for size in each.block_shape[1:] if size)
    if group and weight.shape[-1] % group:
        raise UnsupportedError(
            f"it has {weight.shape[-1]} input features, which is not a multiple of the group of {group}", where=weight.name
        )
    first, components = weight.leaves[0].shards, dict[str, Tensor]()
    for name, component in form.names(weight.name).items():
        shape, dtype = component.shape(weight.shape), types[component.is_scale]
        shards = Shards.of([Piece(Box.whole(shape), Extent(first.path(0), int(first.positions[0]), row_major(shape), dtype))])
        components[name] = Tensor(name, dtype, shape, weight.kind, shards, origin=Encoded(weight, recipe, component))
    return components


def _transposed(weight: Tensor) -> Tensor:
    """A weight [..., in, out] as [..., out, in]."""
    *experts, into, out = ((size, axis, 1) for axis, size in enumerate(weight.shape))
    axes = (*experts, out, into)
    return replace(weight, shape=tuple(size for size, _, _ in axes), shards=weight.shards.strided((0,) * len(axes), axes))
