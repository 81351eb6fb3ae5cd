"""Dequantization, described but not computed: each quantized weight becomes one tensor of the model's shape, encoded in stored tensors
that are no longer tensors of the content. The values are computed when the weight is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.canonical.content import Content, Drop
from reshard.errors import CheckpointError, IncompleteError, RequestError, UnsupportedError
from reshard.geometry.dtypes import BF16
from reshard.geometry.value import value
from reshard.index.name_parts import family_of
from reshard.index.origin import Decoded, EncodedPart, Tensor
from reshard.models.model import Model
from reshard.models.quantization import PLACES, quantization_of, unknown_quantization, without_quantization
from reshard.models.stored_forms import Component, Quantization, StoredForm


def with_values(content: Content, config: Mapping[str, Any] | None) -> Content:
    """The content with quantized weights as tensors of their values, and the model without quantization.

    Raises: RequestError if the config does not say how the weights are quantized, CheckpointError if a quantized weight has no scales or
    scales of another shape, UnsupportedError if the model without quantization has the rows of a weight in another order.
    """
    quantization = quantization_of(config or {})
    if quantization is None:
        method = unknown_quantization(config or {})
        raise RequestError(
            f"`dequantize=True`: the quantization method {method} is unknown" if method else "`dequantize=True`: nothing here is quantized",
            why="" if method else f"No settings of a quantization were found in {PLACES}",
            do="Leave it out, or give "
            + ("this model's folder that is not quantized" if method else "the model's own config with `model=DIR`"),
        )
    model = Model(content.model.architecture, without_quantization(content.model.config)) if content.model else None
    if content.model and model:
        _check_order(content.model, model)
    tensors, drops = dict(content.tensors), list(content.drops)
    for weight, form in quantization.stored_weights(_element_types(content)):
        names = form.names(weight)
        _check_is_whole(names, tensors)
        stored = {name: (component, tensors.pop(name)) for name, component in names.items() if name in tensors}
        tensors[weight] = _encoded(weight, form, list(stored.values()))
        for component, tensor in stored.values():
            if reason := _UNUSED.get(component.use):
                drops.append(Drop.of(tensor, reason))
    for name in [name for name in tensors if quantization.is_cache_scale(name)]:
        scales = tensors.pop(name)
        drops.append(Drop(name, scales.kind, scales.nbytes, "a scale of the KV cache, which is no longer quantized"))
    _check_all_have_scales(tensors, quantization)
    in_order = dict.fromkeys((*(name for name in content.tensors if name in tensors), *tensors))
    return replace(content, tensors={name: tensors[name] for name in in_order}, drops=tuple(drops), model=model)


def _check_order(quantized: Model, plain: Model) -> None:
    """Raises UnsupportedError if a weight has another role, and so other rows, in the model without quantization."""
    for name, weight in quantized.weights.items():
        other = plain.weights.get(name)
        if other and not weight.is_scale and other.role != weight.role:
            raise UnsupportedError(
                "the model without quantization has its rows in another order",
                where=name,
                why="The quantized weight has the rows of several ranks, one rank after the other",
                do="Leave out `dequantize=True`",
            )


@value
class QuantizedFamily:
    """Quantized weights that are alike but for the numbers of their layers and experts."""

    JSON = "name form shape weights elements stored"

    name: str
    """Their name, with # in place of numbers."""
    form: str
    """How they are stored, such as "MXFP4"."""
    shape: tuple[int, ...]
    """The shape of each, in elements."""
    weights: int
    """How many they are."""
    stored: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(last word of the name, element type, shape) of each of the tensors in which one of them is stored."""

    @property
    def elements(self) -> int:
        """The number of elements of all of them."""
        return self.weights * math.prod(self.shape)


def quantized_families(content: Content, config: Mapping[str, Any] | None) -> tuple[QuantizedFamily, ...]:
    """The quantized weights of a content, as the config describes them. Weights of which a component is missing are left out."""
    quantization = quantization_of(config or {})
    families = Counter[tuple[Any, ...]]()
    for weight, form in quantization.stored_weights(_element_types(content)) if quantization else ():
        names = form.names(weight)
        if not names.keys() <= content.tensors.keys():
            continue
        tensors = [content.tensors[name] for name in names]
        stored = tuple((each.kind, tensor.dtype.name, tensor.shape) for each, tensor in zip(names.values(), tensors, strict=True))
        families[family_of(weight), form.name, _canonical_shape(form, tensors[0]), stored] += 1
    return tuple(QuantizedFamily(name, kind, shape, count, stored) for (name, kind, shape, stored), count in families.items())


def quantized_names(content: Content, config: Mapping[str, Any] | None) -> frozenset[str]:
    """The names of the tensors in which quantized weights are stored. Their dtypes must not be cast: the values would change."""
    quantization = quantization_of(config or {})
    if quantization is None:
        return frozenset()
    weights = quantization.stored_weights(_element_types(content))
    names = {name for weight, form in weights for name in form.names(weight)}
    return frozenset(names | {name for name in content.tensors if quantization.is_cache_scale(name)})


_UNUSED: Mapping[str, str] = {
    "input scale": "the activation scale of a layer that is no longer quantized",
    "shape": "the shape of a weight that is no longer packed",
}


def _element_types(content: Content) -> dict[str, str]:
    return {name: tensor.dtype.name for name, tensor in content.tensors.items()}


def _check_is_whole(names: Mapping[str, Component], tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError if a component of a weight is not among the tensors, and does not follow from the others."""
    codes, *beside = (name for name, component in names.items() if not component.is_implied)
    missing = [name for name in beside if name not in tensors]
    if missing and len(missing) == len(beside):
        kinds = " or ".join(names[name].kind for name in beside if names[name].use != "input scale")
        raise CheckpointError(f"it is stored as {tensors[codes].dtype}, but has no {kinds}", where=codes)
    if missing:
        raise IncompleteError("it is missing, although other scales of this weight are there", where=missing[0])


def _encoded(weight: str, form: StoredForm, stored: list[tuple[Component, Tensor]]) -> Tensor:
    """A weight as one tensor, encoded in the stored ones. Raises CheckpointError if one of them has another shape than its codes say."""
    codes, parts = stored[0][1], []
    canonical = _canonical_shape(form, codes)
    shape = _swapped(canonical) if form.transposed else canonical
    for component, tensor in stored:
        if component.use in _UNUSED:
            continue
        expected = component.shape(shape)
        if tensor.shape != expected and (tensor.elements > 1 or component is form.codes):
            raise CheckpointError(
                f"its shape is {list(tensor.shape)}, expected {list(expected)} for {codes.name} {list(codes.shape)}",
                where=tensor.name,
                do="Give the model's own config with `model=DIR`",
            )
        parts.append(_part(component, tensor, len(shape), form))
    scale = next(tensor for component, tensor in stored if component.use == "scale")
    dtype = scale.dtype if form.keeps_scale_type else BF16
    # The pieces of the codes are boxes of the weight.
    axes, grid, shards = list(parts[0].axes), [size or 1 for size in parts[0].grid], parts[0].tensor.shards
    packing = form.codes.packing
    runs = [packing.run if packing and axis == parts[0].packed_axis else 1 for axis in axes]
    pieces = shards.replaced(offsets=shards.offsets[:, axes] // runs * grid, sizes=shards.sizes[:, axes] // runs * grid)
    return replace(codes, name=weight, shape=canonical, origin=Decoded(form.name, tuple(parts), dtype), shards=pieces)


def _canonical_shape(form: StoredForm, codes: Tensor) -> tuple[int, ...]:
    """The shape of the model's own tensor, by that of its codes. Raises CheckpointError for codes without two axes."""
    if len(codes.shape) < 2 + len(form.codes.packing.words if form.codes.packing else ()):
        raise CheckpointError(f"its shape is {list(codes.shape)}; {form.name} weights have two axes or more", where=codes.name)
    shape = form.codes.weight_shape(codes.shape)
    return _swapped(shape) if form.transposed else shape


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _part(component: Component, tensor: Tensor, ndim: int, form: StoredForm) -> EncodedPart:
    stack = ndim - 2
    if component.is_single or tensor.elements == 1:
        return EncodedPart(tensor, component, (None,) * ndim, ())
    if component.is_vector:
        axes = (stack, stack)
    elif component.unit_axes:
        axes = (stack, stack + 2)
    else:
        axes = (stack + component.transposed, stack + 1 - component.transposed)
    sizes = component.block_shape
    if form.transposed:
        axes, sizes = axes[::-1], sizes[::-1]
    return EncodedPart(tensor, component, (*(1,) * stack, *sizes), (*range(stack), *axes))


def _check_all_have_scales(tensors: Mapping[str, Tensor], quantization: Quantization) -> None:
    """Raises CheckpointError for a weight that is stored in FP8 without scales."""
    for name, tensor in tensors.items():
        if tensor.dtype.name.startswith("F8") and not tensor.is_computed:
            kinds = " or ".join(each.kind for form in quantization.forms for each in form.beside if each.use == "scale")
            raise CheckpointError(f"it is stored as {tensor.dtype}, but has no {kinds}", where=name)
