"""ModelQuirks: what a serving engine's class of one model does differently from the engine's other classes, as its declaration says it.

    engines:
      vllm: {every_stage: [final_norm, head], names: {mlp.gate: {"0.24": mlp.experts.gate}}}

An engine's file holds what is the same for all models; what is special about one model stands here. declared/engines.py reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, replace
from typing import Any

from reshard.geometry.dtypes import DType
from reshard.geometry.value import value
from reshard.models.roles import Split

# The numbers of a version: (0, 32).
Version = tuple[int, ...]


@value
class EngineName:
    """Words of Hugging Face names, and the words that an engine has in their place in which versions."""

    words: str
    """The words, with dots between them, such as "mlp.gate". They may stand anywhere in a name."""

    replacements: tuple[tuple[Version, str], ...]
    """(first version, words in their place), oldest first. Before the first version the name stays as it is."""

    def at(self, version: Version) -> tuple[str, str] | None:
        """A regular expression and its replacement in one version; None if the version keeps the name."""
        words = [words for since, words in self.replacements if since <= version]
        return (rf"(?<![^.]){re.escape(self.words)}(?![^.])", words[-1]) if words and words[-1] != self.words else None


@value
class ModelQuirks:
    """What an engine's class of one model does differently from the engine's other classes."""

    of_class: Mapping[str, ModelQuirks] = field(default_factory=dict)
    """The quirks of further classes that serve the model, by the name under which the config's `architectures` name them."""

    since: Version = ()
    """The first version of the engine whose class was compared; (): the oldest version that the engine's own file knows."""

    names: tuple[EngineName, ...] = ()
    """Other names, which are applied to every Hugging Face name in this order."""

    names_in: Mapping[str, tuple[EngineName, ...]] = field(default_factory=dict)
    """Set of layers -> further names, which are applied to the names of these layers before `names`."""

    fusions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module -> roles that the class stores as one tensor of that module, in this order, besides those that the engine always joins."""

    keep_fused: Mapping[str, Version] = field(default_factory=dict)
    """Role of a fused weight -> the first version that stores it as the model does."""

    tied_table_stored_as: str = "head"
    """The name under which a stage with embedding and head stores the tied tensor: "head", "embedding" or "both" (two copies). With
    "embedding", a stage that holds only the head uses the embedding's name, too."""

    every_stage: frozenset[str] = frozenset()
    """Roles outside of the layers that every pipeline stage holds; "vision" stands for all roles of the vision tower. Other embeddings are
    on the first stage, the rest on the last."""

    module_names: Mapping[str, str] = field(default_factory=dict)
    """Module names by role, which take precedence over EngineRules.module_names."""

    unsupported: frozenset[tuple[str, str]] = frozenset()
    """(role, "weight" or "bias") pairs that the class has no slot for."""

    even_rows_first: Mapping[str, str] = field(default_factory=dict)
    """Role -> a dimension, such as "head_dim". In each run of so many rows of such a weight, the class stores the rows 0, 2, 4, ... before
    the rows 1, 3, 5, ...: the pairs that rotary embeddings turn become halves."""

    splits: Mapping[str, Split] = field(default_factory=dict)
    """Splits by role, where ranks share a weight in another way than usual."""

    dtypes: Mapping[str, DType | None] = field(default_factory=dict)
    """Element types that the class prescribes, by role, whatever the source has. A value of None prescribes the element type that the model
    computes in."""

    values: Mapping[str, str] = field(default_factory=dict)
    """Role -> the function, one of functions.FUNCTIONS, whose values the class stores in place of such a weight."""

    tp_at_most_experts: bool = False
    """Whether the class refuses more tensor-parallel ranks than experts."""

    least_expert_width: int = 0
    """Ranks that share experts of a smaller width than this are refused: the class would round the width up, and leave the rest unset."""

    quantized_steps: Mapping[str, int] = field(default_factory=dict)
    """Role -> rows or input features, of which each rank of a quantized model holds a multiple; the last ranks are filled up with zeros."""

    stages_need_experts: bool = False
    """Whether the class refuses a pipeline stage without a layer that has experts."""

    one_stage_if: str | None = None
    """A key of the config, or "not KEY": the class refuses several pipeline stages if the key is set, or not set. None: it takes them."""

    layer_lists: Mapping[str, str] = field(default_factory=dict)
    """Set of layers -> the engine's own list of these layers, in which it counts them from 0: model.decoder in place of model.layers."""

    in_place_of: Mapping[str, str] = field(default_factory=dict)
    """Role -> another role, whose weight the class stores also in the place of the first one, where a layer has no weight of that role."""

    one_stage: bool = False
    """Whether the class refuses several pipeline stages."""

    stores_normalizer: bool = False
    """Whether the factor of gemma's embeddings is a tensor of the state dict."""

    normalizer_until: Version | None = None
    """With `stores_normalizer`: the first version that no longer stores the factor; None: every version does."""

    quantizes_router: bool = False
    """Whether the class of a quantized model quantizes the router, too, unless the config excludes it."""

    derives_head_dim: bool = False
    """Whether the class computes the head dimension as hidden size / heads and ignores the config's head_dim."""

    all_layers_sparse: bool = False
    """Whether the class has experts in every layer and ignores the config's dense layers."""

    config_defaults: tuple[tuple[str, object], ...] = ()
    """Config keys that the class needs, each with the value that is written if the config does not have the key. A dot leads into an inner
    config."""

    assumed_settings: tuple[tuple[str, object], ...] = ()
    """Config keys that the class ignores, each with the value that it assumes. A model with another value is refused."""

    not_loadable: str | None = None
    """Why the engine does not load this model from files of its format; None if it does."""

    notes: tuple[str, ...] = ()
    """Sentences for the person who starts the engine."""

    def around(self, inner: ModelQuirks) -> ModelQuirks:
        """These quirks, of a class that makes a language model by another class, with those of that class. Where both say something that
        only one can say, the outer class counts."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(ModelQuirks(), f.name)}
        both = {name: _joined(getattr(inner, name), value) for name, value in own.items()}
        return replace(inner, **{**both, "since": max(self.since, inner.since), "of_class": {}})

    @property
    def changes(self) -> set[Version]:
        """The versions in which something changed."""
        names = (*self.names, *(name for names in self.names_in.values() for name in names))
        renamed = {since for name in names for since, _ in name.replacements}
        return {*renamed, *self.keep_fused.values(), *((self.normalizer_until,) if self.normalizer_until else ())}

    def renames_at(self, version: Version) -> Iterator[tuple[str, str]]:
        """(pattern, replacement) of the names that a version changes."""
        return (rename for name in self.names if (rename := name.at(version)))

    def renames_in_at(self, version: Version) -> dict[str, tuple[tuple[str, str], ...]]:
        """Set of layers -> (pattern, replacement) of the names that a version changes in these layers only."""
        return {of: tuple(rename for name in names if (rename := name.at(version))) for of, names in self.names_in.items()}

    def keeps_fused_at(self, version: Version) -> frozenset[str]:
        """The roles of the fused weights that a version stores as the model does."""
        return frozenset(role for role, since in self.keep_fused.items() if since <= version)

    def stores_normalizer_at(self, version: Version) -> bool:
        """Whether a version stores the factor of the embeddings."""
        return self.stores_normalizer and (self.normalizer_until is None or version < self.normalizer_until)


def _joined(inner: Any, outer: Any) -> Any:
    """The values of a field of two classes in one: collections are joined."""
    match outer:
        case Mapping():
            return {**inner, **outer}
        case tuple():
            return (*inner, *outer)
        case frozenset():
            return inner | outer
    return outer
