"""Quantized weights: a weight [out, in] that is stored as several tensors, its components.

    codes    the elements of the weight, one or several in each stored word
    scales   and zero points, one for a block of elements

Which elements of the weight belong to one element of a component, its grid, decides everything else: the component's shape, where ranks
can cut it, and which part of it is read for a part of the weight.

    weight [out, in]         INT4, groups of 128       block_shape   packing       grid
      weight_packed            [out, in / 8]           (1, 1)        8 along in    (1, 8)
      weight_scale             [out, in / 128]         (1, 128)                    (1, 128)
      weight_zero_point        [out / 8, in / 128]     (1, 128)      8 along out   (8, 128)
"""

from __future__ import annotations

import math
import re
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from reshard.geometry.dtypes import Packing
from reshard.geometry.value import value

# Weight elements per value along each axis of a weight [out, in]. None: one value for the whole axis.
BlockShape = tuple[int | None, ...]

Use = Literal["codes", "scale", "divisor", "zero point", "bias", "group index", "input scale", "shape"]
"""What a component is for: an element's value is (code - zero point) * scale / divisor, or code * scale + bias."""


@value
class Component:
    """One of the tensors in which a quantized weight [out, in] is stored."""

    kind: str
    """The last word of its name, in place of "weight": "weight_scale_inv", "qweight"."""
    use: Use
    """What it is for."""
    block_shape: BlockShape = (1, 1)
    """Weight elements per value along each axis."""
    packing: Packing | None = None
    """How several values lie in one stored word; None: each element is a value."""
    single_shape: tuple[int, ...] = ()
    """The stored shape of a component that does not depend on the weight's: () or (1,) for one number."""
    transposed: bool = False
    """Whether it is stored as [in, out]."""
    is_vector: bool = False
    """Whether it has a single axis: that of the weight along which it has several values."""
    unit_axes: bool = False
    """Whether an axis of one element follows each of its axes: it is stored as [out, 1, in, 1]."""
    read_as: str | None = None
    """The element type whose values its bytes are, whatever their own type says: "F8_E8M0" for exponents e of scales 2^(e - 127). None:
    its own."""
    may_lack: bool = False
    """Whether loaders do without it, as it is implied."""
    kept_once: bool = False
    """Whether of weights that engines join, which have the same inputs, one is kept for all."""
    element_type: str | None = None
    """The element type in which engines hold it; None: in that of the model's other weights, or as it is stored."""

    @property
    def is_scale(self) -> bool:
        """Whether it stands beside the codes."""
        return self.use != "codes"

    @property
    def exponents(self) -> bool:
        """Whether its bytes are exponents of powers of two."""
        return self.read_as == "F8_E8M0"

    @property
    def is_implied(self) -> bool:
        """Whether it says no more than the shape of the weight and the sizes of the groups."""
        return self.use in ("shape", "group index")

    @property
    def grid(self) -> BlockShape:
        """Weight elements per stored element along each axis; a last axis of words, or a run of words, counts as one element."""
        if self.packing is None:
            return self.block_shape
        return tuple(
            size * self.packing.count if size and axis == self.packing.axis else size for axis, size in enumerate(self.block_shape)
        )

    @property
    def is_single(self) -> bool:
        """Whether it is one number, or a few, for the whole weight."""
        return all(size is None for size in self.grid)

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape beside a weight [out, in], or beside a stack [experts, out, in] of weights."""
        if self.is_single:
            return self.single_shape
        *stack, out_size, in_size = weight
        lengths = zip((out_size, in_size), self.grid, strict=True)
        sizes = [1 if size is None else -(-length // size) for length, size in lengths if size is not None or not self.is_vector]
        if self.packing:
            sizes[self.packing.axis] *= self.packing.run
        if self.unit_axes:
            sizes = [length for size in sizes for length in (size, 1)]
        return (*stack, *(reversed(sizes) if self.transposed else sizes), *(self.packing.words if self.packing else ()))

    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape [out, in], or [experts, out, in], of the weight whose codes have the shape `shape`."""
        assert self.use == "codes"
        inner = shape[: len(shape) - len(self.packing.words)] if self.packing else shape
        *stack, first, second = inner
        sizes = (second, first) if self.transposed else (first, second)
        runs = [self.packing.run if self.packing and axis == self.packing.axis else 1 for axis in range(2)]
        return (*stack, *(length // run * (size or 1) for length, run, size in zip(sizes, runs, self.grid, strict=True)))


class UnknownForm(Exception):
    """What about a quantization is not known, as a clause for a message."""


_EXPERT = re.compile(r"\.experts\.\d+\.")


@value
class StoredForm:
    """How a quantized weight is stored: the components of every weight of this form."""

    name: str
    """What the form is called, such as "MXFP4"."""
    unit: str
    """What ranks cannot cut, such as "FP8 block"."""
    components: tuple[Component, ...]
    """The codes, then what stands beside them."""
    code_types: tuple[str, ...]
    """The element types that the codes can have: a weight of another type is not stored in this form."""
    weights: str = r".*\.weight"
    """A regular expression of the names of the weights that can have this form."""
    targets: tuple[str, ...] = ()
    """The modules whose weights have this form, in the language of `Quantization.excluded`; empty: all."""
    modules: frozenset[str] | None = None
    """The names of these modules, where each is listed, with "*" for any expert; None: they are not."""
    transposed: bool = False
    """Whether the model's own tensor is the transpose, [in, out] or [experts, in, out]."""
    keeps_scale_type: bool = False
    """Whether the values have the element type of the scales. False: bfloat16."""

    def implied(self, component: Component, weight: tuple[int, ...]) -> bytes | None:
        """The bytes of a component that is implied by the shape of the weight, [out, in]; None for other components."""
        if not component.is_implied:
            return None
        if component.use == "shape":
            return struct.pack("<2q", *weight[-2:])
        return _neighbours(weight[-1], next(other.grid[1] for other in self.components if other.use == "scale"))

    @property
    def codes(self) -> Component:
        """The component that holds the elements."""
        return self.components[0]

    @property
    def beside(self) -> tuple[Component, ...]:
        """The components that stand beside the codes."""
        return self.components[1:]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Weight elements along each axis that ranks do not separate: those that share a word, or one of several scales."""
        sizes = [tuple(size or 1 for size in component.grid) for component in self.components]
        return tuple(math.lcm(*along) for along in zip(*sizes, strict=True))

    def fits(self, pattern: str) -> bool:
        """Whether weights of that name, or with that pattern of a name, can have this form in some module."""
        return re.fullmatch(self.weights, pattern) is not None

    def takes(self, weight: str) -> bool:
        """Whether a weight of that name can have this form."""
        module = weight.removesuffix(".weight")
        if self.modules is not None and self.modules.isdisjoint((*_names_of(module), *_names_of(_EXPERT.sub(".experts.*.", module)))):
            return False
        return self.fits(weight) and (not self.targets or _is_named(self.targets, module))

    def names(self, weight: str) -> dict[str, Component]:
        """The names of the components of a weight, by the weight's name. They end with the component's kind in place of "weight"."""
        front = weight.removesuffix("weight") if weight.endswith(".weight") else weight
        return {front + component.kind: component for component in self.components}

    def weight_of(self, codes: str) -> str | None:
        """The name of the weight whose codes have this name; None if no weight of this form has such codes."""
        if not codes.endswith(self.codes.kind):
            return None
        front = codes.removesuffix(self.codes.kind)
        name = front + "weight" if front.endswith(".") else front
        return name if self.takes(name) else None


@value
class Quantization:
    """How the linear layers of a model are quantized."""

    method: str
    """The config's quant_method: "fp8", "compressed-tensors"."""
    forms: tuple[StoredForm, ...]
    """How its weights are stored. A weight has the first form that fits its name and its element type."""
    excluded: tuple[str, ...] = ()
    """Modules that are not quantized: names, names with "*", or regular expressions after "re:"."""
    cache_scales: tuple[Component, ...] = ()
    """The scales of cached keys and values, one of each in every layer's attention. Their kinds are all that follows its module's name."""
    by_expert: bool = False
    """Whether each expert has weights under names of its own, also where the same model without quantization stacks them."""
    everything: bool = False
    """Whether any weight with two axes can be quantized: embeddings, heads and routers too, not linear layers alone."""
    library: str | None = None
    """The only library that loads such weights, such as MLX; None: serving engines load them."""

    def form_of(self, weight: str) -> StoredForm | None:
        """The form of the weight of a linear layer, by the weight's name; None if it is not quantized."""
        module = weight.removesuffix(".weight")
        if _is_named(self.excluded, module):
            return None
        return next((form for form in self.forms if form.takes(weight)), None)

    @property
    def kinds(self) -> frozenset[str]:
        """The last words of the names of all scales and other components beside the codes."""
        beside = (*(component for form in self.forms for component in form.beside), *self.cache_scales)
        return frozenset(component.kind.rpartition(".")[2] for component in beside)

    def is_stored(self, names: Iterable[str]) -> bool:
        """Whether one of these is the name of a component beside the codes, so that they are of quantized weights."""
        beside = tuple(f".{kind}" for kind in self.kinds)
        return any(name.endswith(beside) for name in names)

    def is_cache_scale(self, name: str) -> bool:
        """Whether a tensor of this name is a scale of cached keys or values."""
        return name.endswith(tuple(f".{scale.kind}" for scale in self.cache_scales))

    def stored_weights(self, element_types: Mapping[str, str]) -> Iterator[tuple[str, StoredForm]]:
        """The weights that are stored in one of the forms, each with its form. element_types: that of every stored tensor by name."""
        for name, element_type in element_types.items():
            for form in self.forms:
                weight = form.weight_of(name)
                if weight is not None and element_type in form.code_types:
                    yield weight, form
                    break


def _is_named(entries: tuple[str, ...], module: str) -> bool:
    """Whether one of the entries names a module, under its name in the model or in the language model inside of it."""
    return any(_matches(entry, name) for entry in entries for name in _names_of(module))


def _names_of(module: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((module, module.removeprefix("language_model."))))


def _matches(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return module == entry or module.startswith(entry + ".") or ("*" in entry and fnmatchcase(module, entry))


@lru_cache(maxsize=32)
def _neighbours(features: int, group: int | None) -> bytes:
    """The group of each input feature, as 32-bit integers, where groups are runs of neighbours."""
    return array("i", (feature // (group or features) for feature in range(features))).tobytes()


LIBRARIES = ("bitsandbytes", "torchao")
"""Methods of libraries whose packed weights are values after `dequantize=True` alone (requests/library_forms.py)."""


def not_read(method: str) -> str:
    """What is not known of weights that `unknown_quantization` names."""
    if method in LIBRARIES:
        return f"the weights are quantized ({method}) in a form that only `dequantize=True` reads"
    return f"the weights are quantized ({method}) with a method that reshard does not know"


def or_dequantize(method: str, do: str) -> str:
    """Advice about weights that `unknown_quantization` names."""
    return f"Add `dequantize=True`, which makes plain weights. Or: {do}" if method in LIBRARIES else do
