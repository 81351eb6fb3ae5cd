"""The nearest relative of a checkpoint: the declared model whose names and shapes are most like those that are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard.errors import RequestError
from reshard.geometry.value import value
from reshard.models.architecture import Architecture
from reshard.models.declared.stored_weights import Shape, StoredWeight
from reshard.models.model import Model


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
    return model.reason_to_drop(name) is not None or (model.is_tied and name == model.architecture.tied[0])
