"""Quantization, described but not computed: each weight of a linear layer becomes the components of a form, computed from its values when
they are written. The config is that of llm-compressor's schemes, which vLLM and transformers load.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from functools import partial
from typing import Any

from reshard.canonical.content import Content
from reshard.canonical.dequantization import with_values
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import BF16, F32, DType, from_safetensors
from reshard.geometry.extents import Extent, Piece
from reshard.geometry.value import value
from reshard.index.origin import Encoded, Tensor
from reshard.index.shards import Shards
from reshard.models.model import Model
from reshard.models.quantization import SETTING, quantization_of, quantization_settings, without_quantization
from reshard.models.roles import FUSED, ROLES
from reshard.models.stored_forms import StoredForm
from reshard.models.weights import ModelWeight


@value
class Form:
    """A form of --quantize: what the config says of it, and how its components are stored. The arithmetic is the recipe of its name."""

    group: Mapping[str, Any]
    """The group of linear layers in the settings of compressed-tensors."""
    codes: str
    """The element type of the codes."""
    scales: str | None
    """That of the scales; None: that of the weights."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Further settings."""
    group_name: str = "group_0"
    """What the group is called."""
    has_shared_scale: bool = False
    """Whether weights that an engine fuses share a global scale."""

    @property
    def settings(self) -> dict[str, Any]:
        """The quantization_config of llm-compressor's scheme."""
        about = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": self.group["format"]}
        return {**about, "config_groups": {self.group_name: self.group}, **self.about}


def _float(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def _of_scheme(format: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"format": format, "targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}


# What llm-compressor 0.14 writes for its schemes FP8_BLOCK, MXFP4A16, NVFP4A16, MXFP8A16 and FP8_DYNAMIC, with compressed-tensors 0.20. Of
# the first two, what was there when they were added.
_NOTHING = dict.fromkeys(("global_compression_ratio", "kv_cache_scheme", "moe_sparsity_config"))
_ABOUT: Mapping[str, Any] = {**_NOTHING, "transform_config": {}, "version": "0.20.0"}
_BY_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True, "group_size": None}
FORMS: Mapping[str, Form] = {
    "fp8-block": Form(
        {
            "format": "float-quantized",
            "targets": ["Linear"],
            "weights": _float(8, "block", block_structure=[128, 128]),
            "input_activations": _float(8, "group", group_size=128) | {"dynamic": True},
        },
        "F8_E4M3",
        None,
    ),
    "mxfp4": Form(
        {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": _float(4, "group", group_size=32, scale_dtype="torch.uint8"),
        },
        "U8",
        "U8",
    ),
    "mxfp8": Form(
        _of_scheme("mxfp8-quantized", _float(8, "group", group_size=32, scale_dtype="torch.uint8")), "F8_E4M3", "U8", _ABOUT, "MXFP8A16"
    ),
    "nvfp4": Form(
        _of_scheme("nvfp4-pack-quantized", _float(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")),
        "U8",
        "F8_E4M3",
        _ABOUT,
        "NVFP4A16",
        has_shared_scale=True,
    ),
    "fp8-channel": Form(
        _of_scheme("float-quantized", _float(8, "channel", group_size=None), _BY_TOKEN), "F8_E4M3", None, _ABOUT, "FP8_DYNAMIC"
    ),
}
QUANTIZE, REQUANTIZE = tuple(FORMS), ("fp8-block", "nvfp4")
"""What --quantize and --requantize take."""
NEED_DATA: Mapping[str, str] = {
    **dict.fromkeys(("awq", "gptq", "w4a16-awq", "w4a16-gptq", "int4-awq", "smoothquant"), "the scales of its weights"),
    **dict.fromkeys(("fp8", "fp8-static", "fp8-tensor", "nvfp4-w4a4", "w4a4", "int8-static"), "the scales of its activations"),
}
"""Forms that --quantize does not take because they need calibration, and what of them does."""


def form_of_settings(config: Mapping[str, Any]) -> str | None:
    """The form of QUANTIZE in which a quantized config holds its weights; None if it is another form, or several.

    Raises: RequestError for settings that are not those of a known method.
    """
    signature = _signature(config)
    return next((name for name, form in FORMS.items() if signature and _signature({SETTING: form.settings}) == signature), None)


def _signature(config: Mapping[str, Any]) -> list[tuple[Any, ...]] | None:
    """What the components of the only form of a config are for, and how their values lie; None if there is no form, or several."""
    quantization = quantization_of(config)
    if quantization is None or len(quantization.forms) != 1:
        return None
    return [
        (
            component.use,
            component.block_shape,
            component.exponents,
            component.unit_axes or component.is_vector or component.transposed,
            component.packing and (component.packing.name, component.packing.axis),
        )
        for component in quantization.forms[0].components
    ]


def quantized(
    content: Content,
    config: Mapping[str, Any] | None,
    form: str,
    settings: Mapping[str, Any] | None = None,
    dtype_of: Callable[[Tensor], DType] = lambda tensor: tensor.dtype,
) -> tuple[Content, dict[str, Any]]:
    """The content with its linear layers quantized to `form`, one of QUANTIZE, and the config that says so.

    dtype_of: the element type in which the target would store a tensor. Weights are taken in it, so that they are quantized as after a
    conversion to that type. settings: a quantization_config of this form, which says how the components are called and which modules it
    leaves out; None: that of llm-compressor's scheme, or that with which the model is published.

    Raises: RequestError if the model is not known or is quantized already, UnsupportedError for experts in one tensor.
    """
    if quantization_settings(config or {}):
        raise RequestError("`quantize=`: the weights are quantized already", do="Use `requantize=`, or `dequantize=True` first")
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
    return _quantized(content, config, form, form, {name: (tensor, _computed_in(dtype_of(tensor))) for name, tensor in chosen.items()})


def _computed_in(dtype: DType) -> DType:
    """The element type in which a weight of a type is quantized."""
    if dtype.name in ("F16", "F32"):
        return dtype
    return F32 if dtype.name == "F64" else BF16


def _is_linear(name: str, weights: Mapping[str, ModelWeight]) -> bool:
    """Whether a tensor is the weight of a linear layer that engines quantize."""
    roles = (weights[name].role, *weights[name].declared.fuses) if name in weights else ()
    return not name.endswith("bias") and any(ROLES[role].quantized for role in roles if role in ROLES)


def requantized(content: Content, config: Mapping[str, Any] | None, form: str) -> tuple[Content, dict[str, Any]]:
    """The content with its quantized weights in another form that holds the same values, one of REQUANTIZE, and the config that says so.

    Raises: as `with_values`, and UnsupportedError for experts in one tensor, or for NVFP4 of weights that are not MXFP4.
    """
    content = with_values(content, config)
    if FORMS[form].has_shared_scale and content.model is None:
        raise RequestError(
            f"`requantize={form}`: the model is not known, so neither are the weights that engines fuse",
            why="Fused weights need one global scale",
            do="Add `model=DIR` with its config",
        )
    chosen = {name: tensor for name, tensor in content.tensors.items() if tensor.is_computed}
    for name, tensor in chosen.items():
        if len(tensor.shape) != 2:
            raise UnsupportedError(
                f"`requantize=`: it holds all experts, {list(tensor.shape)}",
                where=name,
                why="The forms that engines load hold each expert under a name of its own",
                do="Use `dequantize=True`, or convert to hf unchanged",
            )
        if FORMS[form].has_shared_scale and tensor.values_dtype != BF16:
            raise UnsupportedError(
                f"`requantize={form}`: it is stored in {tensor.origin.decoded.name if tensor.origin.decoded else tensor.dtype}",
                where=name,
                why="Only the values of MXFP4, 4-bit floats with powers of two as scales, are also those of NVFP4",
                do=f"Use `dequantize=True`, and quantize the result with `quantize={form}`",
            )
    config = _with_settings(without_quantization(config or {}), form, content, chosen)
    return _quantized(content, config, form, f"exact-{form}", {name: (tensor, tensor.values_dtype) for name, tensor in chosen.items()})


def _with_settings(config: Mapping[str, Any], form: str, content: Content, chosen: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config with the settings of compressed-tensors for the chosen weights.

    Libraries take a linear layer that is not named for a quantized one, find no scale, and compute with whatever memory held. So layers are
    left out under all their names. A head that is the embedding has no weight of its own, and transformers 5 calls every head lm_head. What
    lies in another module than the quantized layers, such as a tower for images, has other names in transformers 5 than in the files.
    """
    weights = {name for name, tensor in content.weights.items() if len(tensor.shape) == 2 and name not in chosen}
    if content.model and not content.model.architecture.head:
        weights |= {"lm_head.weight", content.model.architecture.tied[0]} - chosen.keys()
    ignored = {name.removesuffix(".weight") for name in weights if name.endswith(".weight")}
    below = {name.removeprefix("model.").partition(".") for name in ignored}
    others = {module for module, _, rest in below if rest} - {name.removeprefix("model.").partition(".")[0] for name in chosen}
    patterns = [rf"re:(model\.)?{re.escape(module)}\..*" for module in sorted(others)]
    return {**config, SETTING: {**FORMS[form].settings, "ignore": [*sorted(ignored), *patterns]}}


def _quantized(
    content: Content, config: dict[str, Any], form: str, recipe: str, chosen: Mapping[str, tuple[Tensor, DType]]
) -> tuple[Content, dict[str, Any]]:
    """The content with the chosen weights in the form that the config describes. chosen: each with the type in which it is computed."""
    quantization = quantization_of(config)
    assert quantization is not None, "it is a form that reshard reads"
    (stored_form,) = quantization.forms
    sets = fused_sets(content.model, chosen) if FORMS[form].has_shared_scale and content.model else {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in content.tensors.items():
        if name in chosen:
            tensors |= _components(
                tensor,
                stored_form,
                FORMS[form],
                partial(Encoded, recipe=recipe, dtype=chosen[name][1], sharing=tuple(content.tensors[each] for each in sets.get(name, ()))),
            )
        else:
            tensors[name] = tensor
    model = Model(content.model.architecture, config) if content.model else None
    return replace(content, tensors=tensors, model=model), config


def fused_sets(model: Model, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Weight -> the weights that an engine joins into one tensor, itself among them: those of one module, such as an attention or an
    expert, whose roles are fused. names: the weights to consider."""
    quirks = [model.quirks_of(engine) for engine in model.architecture.engines]
    fusions = [*FUSED, *(fusion.roles for rules in quirks if rules for fusion in rules.fusions)]
    set_of = {role: roles for roles in fusions for role in roles}
    weights = model.weights
    keys = {}
    for name in names:
        if name in weights:
            roles = (weights[name].role, *weights[name].declared.fuses)
            keys[name] = name.rsplit(".", 2)[0], next((set_of[role] for role in roles if role in set_of), (name,))
    sets: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, key in keys.items():
        sets.setdefault(key, []).append(name)
    return {name: tuple(sets[key]) for name, key in keys.items()}


def _components(weight: Tensor, stored_form: StoredForm, form: Form, encoded: Callable[..., Encoded]) -> dict[str, Tensor]:
    """The components of a weight. encoded: makes the origin of one, of `weight` and `component`. Raises UnsupportedError if the groups do
    not divide its rows."""
    if stored_form.transposed and weight.is_computed:
        raise UnsupportedError(
            "an adapter is merged into it, and it is quantized in the same conversion",
            where=weight.name,
            do="Merge the adapter first, then quantize the result",
        )
    if stored_form.transposed:
        weight = _transposed(weight)
    group = next((size for part in stored_form.beside for size in part.block_shape[1:] if size and part.block_shape[0] == 1), None)
    if group and weight.shape[-1] % group:
        raise UnsupportedError(
            f"it has {weight.shape[-1]} input features, which is not a multiple of the group of {group}", where=weight.name
        )
    first, components = weight.leaves[0].shards, dict[str, Tensor]()
    for name, component in stored_form.names(weight.name).items():
        shape = component.shape(weight.shape)
        named = "F32" if component.use == "divisor" else form.scales if component.is_scale else form.codes
        origin = encoded(weight=weight, component=component)
        dtype = from_safetensors(named, where=name) if named else origin.dtype
        shards = Shards.of([Piece(Box.whole(shape), Extent(first.path(0), int(first.positions[0]), row_major(shape), dtype))])
        components[name] = Tensor(name, dtype, shape, weight.kind, shards, origin=origin)
    return components


def _transposed(weight: Tensor) -> Tensor:
    """A weight [..., in, out] as [..., out, in]."""
    *experts, into, out = ((size, axis, 1) for axis, size in enumerate(weight.shape))
    axes = (*experts, out, into)
    return replace(weight, shape=tuple(size for size, _, _ in axes), shards=weight.shards.strided((0,) * len(axes), axes))
