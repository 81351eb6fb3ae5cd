"""Architecture: one kind of model as a declaration. Names, roles and shapes of its weights in terms of its config; data, never code.

The declarations of the built-in models are reshard/architectures/<model_type>.yaml, in the language that users write (declared/reader.py).
`Model` (model.py) is an architecture with the numbers of one config put in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from reshard.errors import RequestError
from reshard.models.roles import Split

# A dense layer has one MLP, a sparse layer has experts. Layers for multi-token prediction ("mtp") follow the last layer of the model.
LayerKind = Literal["dense", "sparse", "mtp"]


@dataclass(frozen=True, slots=True)
class Weight:
    """The declaration of one weight, or of one weight per layer and per expert."""

    name: str
    """The canonical name. {layer} stands for the number of the layer, {expert} for that of the expert."""
    role: str
    """What the weight does, such as "attention.q". The names of a fused weight's roles are in `fuses`."""
    shape: tuple[str, ...]
    """Each axis as an expression of dimensions, such as "heads * head_dim"."""
    when: str | None = None
    """A key of the config: the weight exists if it is set. "not KEY": the weight exists if it is not set. None: it always exists."""
    layers: LayerKind | None = None
    """The kind of layers that have the weight; None: all layers. `SparseLayers` says which layers are sparse."""
    fuses: Mapping[str, str] = field(default_factory=dict)
    """The roles of a fused weight, in the order of their rows, with their output features as expressions."""
    interleaved_by: str | None = None
    """A dimension, such as "heads": the roles in `fuses` alternate once per head. None: each role is one run of rows."""
    transposed: bool = False
    """Whether the weight is stored as [in, out], as by a Conv1D."""
    split: Split | None = None
    """How tensor-parallel ranks share the weight; None: as its role says."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """Where a number of the model comes from."""

    keys: tuple[str, ...]
    """Keys of the config. The first one that the config sets is used."""
    default: str | None = None
    """An expression of other dimensions, used if the config sets none of the keys."""
    optional: bool = False
    """Whether a model may be without it: if the config gives none, or 0, all weights whose shape depends on it are absent."""


@dataclass(frozen=True, slots=True)
class SparseLayers:
    """Which layers are sparse: layer i, if i >= first, (i + offset) % step == 0, and `dense` does not list i."""

    first: str | None = None
    """The config's key for the number of the first sparse layer; None: 0."""
    step: str | None = None
    """The config's key for the step; None: 1."""
    offset: int = 0
    """Added to the number of the layer before it is divided by the step."""
    dense: str | None = None
    """The config's key for a list of dense layers; None: there is no list."""

    def among(self, config: Mapping[str, Any], layers: int) -> frozenset[int]:
        """The numbers of the sparse layers of a model with `layers` layers. Raises RequestError if the config has no such numbers."""
        first = whole_number(config, self.first) or 0
        step = whole_number(config, self.step) or 1
        dense = (config.get(self.dense) if self.dense else None) or ()
        if not isinstance(dense, list | tuple):
            raise RequestError(f"config.json gives {dense!r} for {self.dense}; a list is expected", why="It says which layers are dense")
        return frozenset(layer for layer in range(first, layers) if (layer + self.offset) % step == 0 and layer not in dense)


def whole_number(config: Mapping[str, Any], key: str | None) -> int | None:
    """The number of layers under a key of a config; None if there is none. Raises RequestError if it is not a whole number from 0 on."""
    value = config.get(key) if key else None
    if value is not None and (not isinstance(value, int) or value < 0):
        raise RequestError(f"config.json gives {value!r} for {key}; a whole number is expected", why="It says which layers there are")
    return value


@dataclass(frozen=True)
class Architecture:
    """What all models of one `model_type` have in common."""

    model_type: str
    """The `model_type` in the configs of these models."""
    dimensions: Mapping[str, Dimension]
    """The dimensions by name, such as "hidden". A default may use the dimensions before it."""
    weights: tuple[Weight, ...]
    """The weights, in the order of the model's parameters."""
    tied: tuple[str, str] = ("lm_head.weight", "model.embed_tokens.weight")
    """The names of the head and of the embedding. They are one tensor if the config sets tie_word_embeddings."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a checkpoint may contain and that are not converted: regular expression of the name -> reason."""
    sparse_layers: SparseLayers | None = None
    """Which layers have experts; None: no layer."""
    mtp_layers: str | None = None
    """The config's key for the number of layers for multi-token prediction. A checkpoint may be without their weights."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a config that does not set them itself."""
    vocabulary_multiple: int | None = None
    """The multiple to which engines pad the vocabulary of this model; None: the engine's own multiple."""
    like: str | None = None
    """The known model that engines and frameworks take this one for; None: it is known under its own model_type."""
    declared_in: str | None = None
    """The file that declares it; None for a built-in model."""

    @property
    def family(self) -> str:
        """The model type by which the tables of engines and frameworks know the model."""
        return self.like or self.model_type

    def extended(
        self,
        *weights: Weight,
        model_type: str,
        dimensions: Mapping[str, Dimension] | None = None,
        without: Collection[str] = (),
        **fields: Any,
    ) -> Architecture:
        """This architecture under another model_type, with more weights and dimensions, without some weights, and with other `fields`.

        A weight takes the place of the one with the same name. A weight with a new name comes last in its module, where a subclass
        registers it, so that the order remains that of the model's parameters. without: names of weights. `like` is not taken over:
        engines may know this model and not the new one.
        """
        declared = [weight for weight in self.weights if weight.name not in without]
        for weight in weights:
            names = [other.name for other in declared]
            if weight.name in names:
                declared[names.index(weight.name)] = weight
            else:
                declared.insert(1 + _last_of_module(weight.name, names), weight)
        fields = {"like": None, "declared_in": None, **fields}
        return replace(self, model_type=model_type, weights=tuple(declared), dimensions={**self.dimensions, **(dimensions or {})}, **fields)


def _last_of_module(name: str, names: list[str]) -> int:
    """The index of the last of `names` in the same module as `name`, or in the innermost module around it that contains any of them."""
    module = name.rpartition(".")[0]
    while module:
        module = module.rpartition(".")[0]
        if indices := [i for i, other in enumerate(names) if other.startswith(module + ".")]:
            return indices[-1]
    return len(names) - 1
