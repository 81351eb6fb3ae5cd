"""Part: what has one role in a weight. A fused qkv is three parts.

Engines and training frameworks work on parts: what a part does decides how ranks share it, whatever the model calls it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field

from reshard.errors import RequestError
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, joined
from reshard.geometry.value import value
from reshard.models.architecture import EXPERTS
from reshard.models.roles import ROLES, Split
from reshard.models.sizes import evaluate
from reshard.models.stored_forms import BlockShape, Component, StoredForm
from reshard.models.weights import ModelWeight


@value
class Part:
    """The part of a canonical tensor that has one role, viewed as an array [out features, in features] or [out features]."""

    role: str
    """What it does, such as "attention.q"."""
    parameter: str
    """The last word of the canonical name: usually "weight" or "bias"."""
    layer: int | None
    """The index of its layer; None outside of the layers."""
    expert: int | None
    """The index of its expert; None outside of the experts."""
    tensor: str
    """The canonical tensor that it is a part of."""
    pattern: str
    """Its name with {layer} and {expert} in place of these numbers."""
    array: Mosaic
    """The array, as boxes of that tensor in the order of the part's rows."""
    split: Split
    """How tensor-parallel ranks share it."""
    block_shape: BlockShape
    """Weight elements per element of the array, along each axis: 1 for a weight, more for packed codes and block scales. None: one element
    of the array belongs to the whole axis of the weight, and the array is not cut along that axis."""
    form: StoredForm | None = None
    """How the weight is stored if it is quantized; None: as its elements."""
    component: Component | None = None
    """If it is quantized: which of the tensors of its form this part is of. Also for a scale of the KV cache."""
    dimensions: Mapping[str, int] = field(default_factory=dict, compare=False)
    """The dimensions in its layer, which give the number of its heads."""

    @property
    def is_scale(self) -> bool:
        """Whether it stands beside the elements of a quantized weight: its scales, its zero points."""
        return self.component is not None and self.component.is_scale

    @property
    def blocks(self) -> tuple[int, ...]:
        """Weight elements along each axis that ranks do not separate."""
        return self.form.blocks if self.form and not self.is_scale else ()

    @property
    def layer_pattern(self) -> str:
        """Its tensor's name with {layer} in place of the number of the layer."""
        return self.pattern.replace("{expert}", str(self.expert))

    def is_like(self, other: Part) -> bool:
        """Whether the two differ only in their layer, their expert and the name of their tensor."""
        return (
            (self.role, self.parameter, self.split, self.block_shape, self.form, self.component)
            == (other.role, other.parameter, other.split, other.block_shape, other.form, other.component)
        ) and self.array.is_like(other.array)


def parts_of(weight: ModelWeight, dimensions: Mapping[str, int], *, keep_fused: bool = False) -> Iterator[Part]:
    """The parts of a weight. dimensions: those in its layer. keep_fused: whether a fused weight stays one part."""
    whole = Mosaic.of(weight.name, Box.whole(weight.shape))
    if not weight.declared.stacked:
        yield from _parts_of_array(weight, whole, weight.expert, dimensions, keep_fused)
        return
    for number in range(weight.shape[0]):
        expert = number if weight.declared.stacked == EXPERTS else None
        yield from _parts_of_array(weight, whole.item(number), expert, dimensions, keep_fused)


def _parts_of_array(
    weight: ModelWeight, array: Mosaic, expert: int | None, dimensions: Mapping[str, int], keep_fused: bool
) -> Iterator[Part]:
    """The parts of a weight, or of one expert's weight in a tensor of all experts."""
    declared, parameter, component = weight.declared, weight.name.rpartition(".")[2], weight.component
    if component:
        array = _as_weight(array, component)
    elif declared.transposed and len(array.shape) == 2:
        array = array.transposed()
    if declared.stacked:
        parameter = "bias" if parameter.endswith("bias") else "weight_scale" if weight.is_scale else "weight"
    row = ROLES.get(weight.role)
    if row and row.split.is_padded and parameter != "bias":
        parameter = "weight"  # of a table under a name of its own, such as wte.embedding
    if row and row.in_layer and len(row.shape) == 1 < len(array.shape) and math.prod(array.shape) == max(array.shape):
        array = array.squeezed()  # a vector that is stored as [1, n]
    block_shape: BlockShape = component.grid if component else (1,) * len(array.shape)
    place = (weight.layer, expert, weight.name, weight.pattern)

    def part(role: str, rows: Mosaic) -> Part:
        return Part(role, parameter, *place, rows, declared.split or ROLES[role].split, block_shape, weight.form, component, dimensions)

    if keep_fused or not declared.fuses:
        yield part(weight.role, array)
        return
    rounds = dimensions[declared.interleaved_by] if declared.interleaved_by else 1
    rows = {role: evaluate(expression, dimensions) // rounds for role, expression in declared.fuses.items()}
    if block_shape[0] is None:
        yield from (part(role, array) for role in rows)
        return
    round_length, start = sum(rows.values()) // block_shape[0], 0
    for role, count in rows.items():
        length, rest = divmod(count, block_shape[0])
        if rest:
            raise RequestError(f"each of its elements belongs to {block_shape[0]} rows, and its {role} has {count}", where=weight.name)
        starts = [i * round_length + start for i in range(rounds)]
        yield part(role, joined([array.cut(0, first, first + length) for first in starts]))
        start += length


def _as_weight(array: Mosaic, component: Component) -> Mosaic:
    """A component of a quantized weight with the axes of the weight, [out, in]."""
    if component.is_single:
        return array
    if component.is_vector and len(array.shape) == 3:  # of the heads of a KV cache
        return array.without_axes((1, 2))
    if component.is_vector:
        return array.split(0, array.shape[0]) if component.block_shape[0] is None else array
    if component.unit_axes:
        return array.without_axes((len(array.shape) - 3, len(array.shape) - 1))
    return array.transposed() if component.transposed else array
