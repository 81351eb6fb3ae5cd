"""The weights of a checkpoint under the names that a declaration gives them.

    model.layers.0.mlp.experts.0.up_proj.weight [8, 4]
    model.layers.0.mlp.experts.1.up_proj.weight [8, 4]      ->      model.layers.{layer}.mlp.experts.{expert}.up_proj.weight
    model.layers.1.mlp.experts.0.up_proj.weight [8, 4]

Tensors whose names differ only in the index of the layer or of the expert are one weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from reshard.geometry.value import value

Shape = tuple[int, ...]
_EXPERT = re.compile(r"(?<=experts)\.\d+\.|(?<=expert)\.\d+\.")


@value
class StoredWeight:
    """The tensors that one line of a declaration is about."""

    name: str
    """Their name, with {layer} and {expert} in place of the numbers."""
    tensors: dict[str, Shape] = field(default_factory=dict)
    """The shape of each tensor by its stored name."""
    layers_of_shape: dict[Shape, list[int]] = field(default_factory=dict)
    """Shape -> the layers with a tensor of that shape; an empty list for a weight outside of the layers."""

    @property
    def layers(self) -> list[int]:
        """The indices of the layers that have it."""
        return sorted({layer for layers in self.layers_of_shape.values() for layer in layers})

    @property
    def module(self) -> str:
        """The name without its last word."""
        return self.name.rpartition(".")[0]

    @property
    def parameter(self) -> str:
        """The last word of the name, usually "weight" or "bias"."""
        return self.name.rpartition(".")[2]


def stored_weights(shapes: Mapping[str, Shape]) -> list[StoredWeight]:
    """The weights of a checkpoint with tensors of these names and shapes, in their order."""
    prefix = _layer_prefix(shapes)
    weights: dict[str, StoredWeight] = {}
    for name, shape in shapes.items():
        match = re.match(rf"{re.escape(prefix)}(\d+)\.(.*)", name) if prefix else None
        pattern = f"{prefix}{{layer}}.{_EXPERT.sub('.{expert}.', match[2])}" if match else name
        weight = weights.setdefault(pattern, StoredWeight(pattern))
        weight.tensors[name] = shape
        layers = weight.layers_of_shape.setdefault(shape, [])
        if match and int(match[1]) not in layers:
            layers.append(int(match[1]))
    return list(weights.values())


def _layer_prefix(shapes: Mapping[str, Shape]) -> str | None:
    """The part of the names before the index of the layer: the text before the first number that most tensors share."""
    counts: dict[str, int] = {}
    for name in shapes:
        if match := re.match(r"(.*?\.)\d+\.", name):
            counts[match[1]] = counts.get(match[1], 0) + 1
    return max(counts, key=lambda prefix: counts[prefix], default=None)
