"""Architecture: a model as a declaration. Names, roles and shapes of its weights in terms of its config; never code.

A file in architectures/ is named after the `model_type` of the configs that it speaks for. `Model` is an architecture
with the numbers of one config put in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from reshard.errors import RequestError
from reshard.models.roles import Split

if TYPE_CHECKING:
    pass


LayerKind = Literal["dense", "sparse", "extra"]


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight, or one per layer where the name holds {layer}, and one per expert where it holds {expert}.

    `shape` gives each axis as an expression of dimensions ("heads * head_dim"); `when` names a config flag without which
    the weight is absent, or, with a leading "not ", with which it is. layers: only those of that kind have it; `SparseLayers` says which
    are sparse, and extra ones are those that predict further tokens.

    holds: the roles that are fused in it, each with its output features as an expression, one after the other; by: a dimension, such as
    "heads", by which they alternate. transposed: it is stored as [in, out]. split: how ranks share it, where its role does not say.
    """

    name: str
    role: str
    shape: tuple[str, ...]
    when: str | None = None
    layers: LayerKind | None = None
    holds: Mapping[str, str] = field(default_factory=dict)
    by: str | None = None
    transposed: bool = False
    split: Split | None = None


@dataclass(frozen=True, slots=True)
class Dimension:
    """Where a config says a number: its keys, in order of preference, or an expression of other dimensions.

    optional: a config without it, or with 0 or null, has no such part, and no weight whose shape depends on it.
    """

    keys: tuple[str, ...]
    default: str | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class SparseLayers:
    """Which layers have experts in place of one MLP, in terms of config keys: those from number `first` on of which the number, plus
    `offset`, is a multiple of `step`, and which the list `dense` does not name."""

    first: str | None = None
    step: str | None = None
    offset: int = 0
    dense: str | None = None

    def among(self, config: Mapping[str, Any], layers: int) -> frozenset[int]:
        """The sparse ones of so many layers."""
        first = layer_count(config, self.first) or 0
        step = layer_count(config, self.step) or 1
        dense = (config.get(self.dense) if self.dense else None) or ()
        if not isinstance(dense, list | tuple):
            raise RequestError(f"config.json gives {dense!r} for {self.dense}, a list is expected", why="It says which layers are dense")
        return frozenset(layer for layer in range(first, layers) if (layer + self.offset) % step == 0 and layer not in dense)


def layer_count(config: Mapping[str, Any], key: str | None) -> int | None:
    """A number of layers that a config says; None if it says none. Raises RequestError if it says something else."""
    value = config.get(key) if key else None
    if value is not None and (not isinstance(value, int) or value < 0):
        raise RequestError(f"config.json gives {value!r} for {key}, a whole number is expected", why="It says which layers there are")
    return value


@dataclass(frozen=True)
class Architecture:
    """What all models of one `model_type` have in common.

    `tied` names the head's weight and the embedding that it shares when the config says tie_word_embeddings. `dropped` maps patterns of
    names to the reason why nobody needs them. `sparse` says which layers have experts. `extra_layers` is the config's key for how many
    layers follow the last one to predict further tokens; a checkpoint may leave their weights out. `defaults` are the settings of a config
    that does not say them. `vocabulary_multiple` is the multiple to which an engine pads this model's vocabulary, where it is not the
    engine's own. `like` names the declared model as which engines know it, where that is another one; `declared_in` the user's file that
    declares it.
    """

    model_type: str
    dimensions: Mapping[str, Dimension]
    weights: tuple[Weight, ...]
    tied: tuple[str, str] = ("lm_head.weight", "model.embed_tokens.weight")
    dropped: Mapping[str, str] = field(default_factory=dict)
    sparse: SparseLayers | None = None
    extra_layers: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    vocabulary_multiple: int | None = None
    like: str | None = None
    declared_in: str | None = None

    @property
    def family(self) -> str:
        """The model type as which engines and frameworks know it: what a table of theirs is looked up by."""
        return self.like or self.model_type

    def plus(
        self, *weights: Weight, model_type: str, dimensions: Mapping[str, Dimension] | None = None, without: str = "", **other: Any
    ) -> Architecture:
        """This architecture with some weights and dimensions more, without the weights whose names match the pattern `without`, and with
        `other` fields as they are given.

        A weight of a name that is there already takes its place; a new one comes last in its module, where a subclass registers it. So the
        order stays that of the model's parameters.
        """
        own = [weight for weight in self.weights if not (without and re.search(without, weight.name))]
        for weight in weights:
            names = [each.name for each in own]
            if weight.name in names:
                own[names.index(weight.name)] = weight
                continue
            own.insert(1 + _last_beside(weight.name, names), weight)
        return replace(self, model_type=model_type, weights=tuple(own), dimensions={**self.dimensions, **(dimensions or {})}, **other)

    def called(self, model_type: str) -> Architecture:
        """The same under another name."""
        return replace(self, model_type=model_type)


def _last_beside(name: str, names: list[str]) -> int:
    """The index of the last of `names` that lies in the same module as `name`, or in the innermost one around it that has any."""
    module = name.rpartition(".")[0]
    while module:
        module = module.rpartition(".")[0]
        if found := [i for i, each in enumerate(names) if each.startswith(module + ".")]:
            return found[-1]
    return len(names) - 1
