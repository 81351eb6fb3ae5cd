"""The weights of a checkpoint under the names that a declaration gives them, and its nearest relative: the declared model whose names
and shapes are most like those that are stored.

    model.layers.0.mlp.experts.0.up_proj.weight [8, 4]
    model.layers.0.mlp.experts.1.up_proj.weight [8, 4]      ->      model.layers.{layer}.mlp.experts.{expert}.up_proj.weight
    model.layers.1.mlp.experts.0.up_proj.weight [8, 4]

Tensors whose names differ only in the index of the layer or of the expert are one weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from reshard.errors import RequestError
from reshard.geometry.boxes import Shape
from reshard.geometry.value import value
from reshard.models.architecture import Architecture
from reshard.models.model import Model

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


@value
class Relative:
    """A declared model compared with a checkpoint."""

    model: Model
    """The declared model with the checkpoint's config."""
    shared: tuple[StoredWeight, ...]
    """The stored weights that the model has under the same names, with the same shapes, in the same layers."""
    others: tuple[StoredWeight, ...]
    """The stored weights that it does not have, or has with other shapes or in other layers."""
    missing: tuple[str, ...]
    """The names of its weights that are not stored, with {layer} and {expert}."""

    @property
    def distance(self) -> int:
        """The number of weights to add, replace or remove in a declaration that extends this model."""
        return len(self.others) + len(self.missing)


def nearest(weights: Sequence[StoredWeight], config: Mapping[str, Any], architectures: Iterable[Architecture]) -> Relative | None:
    """The relative at the smallest distance; None if none shares more weights than it differs in. If several have that distance, it is the
    one that most engines were compared with, and then the first."""
    relatives = [relative for architecture in architectures if (relative := _relative(weights, Model(architecture, config)))]
    near = (relative for relative in relatives if relative.distance < len(relative.shared))
    return min(near, key=_rank, default=None)


def _rank(relative: Relative) -> tuple[int, int]:
    """What decides between two relatives. A head that is not stored does not count if the config does not say whether it is tied."""
    model = relative.model
    open_head = model.architecture.tied[0] in relative.missing and model.config.get("tie_word_embeddings") is None
    return relative.distance - open_head, -len(model.architecture.engines)


def _relative(weights: Sequence[StoredWeight], model: Model) -> Relative | None:
    """A model compared with a checkpoint; None if the config lacks a number that the model needs."""
    try:
        declared = [weight for weight in model.weights.values() if not weight.is_scale]
    except RequestError:
        return None
    expected: dict[str, dict[str, Shape]] = {}
    for weight in declared:
        expected.setdefault(weight.declared.name, {})[weight.name] = weight.shape
    optional = {weight.name for weight in declared if weight.optional}

    def is_shared(weight: StoredWeight) -> bool:
        shapes = expected.get(weight.name, {})
        return weight.tensors.items() <= shapes.items() and shapes.keys() <= weight.tensors.keys() | optional

    needed = [weight for weight in weights if not all(_is_redundant(name, model) for name in weight.tensors)]
    stored = {weight.name for weight in weights}
    return Relative(
        model,
        tuple(weight for weight in needed if is_shared(weight)),
        tuple(weight for weight in needed if not is_shared(weight)),
        tuple(name for name, shapes in expected.items() if name not in stored and not shapes.keys() <= optional),
    )


def _is_redundant(name: str, model: Model) -> bool:
    """Whether a model does not need a stored tensor: it drops the tensor, or the tensor is a head that it ties to the embedding."""
    return model.reason_to_drop(name) is not None or name in model.aliases
