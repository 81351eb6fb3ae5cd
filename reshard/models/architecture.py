"""Architecture: the declaration of one model type. It gives names, roles and shapes of the weights in terms of the config, as data.

The declarations of the built-in models are reshard/architectures/<model_type>.yaml, in the language that users write (declared/reader.py).
`Model` (model.py) is an architecture together with one config.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.value import value
from reshard.models.config_values import value_at, whole_number
from reshard.models.engine_rules import EngineRules
from reshard.models.roles import Split

# The set of layers that hold a block of modules which other layers share.
SHARED_BLOCK = "shared_block"
# The sets of layers that every model has. A dense layer has one MLP, a sparse layer has experts. Layers for multi-token prediction ("mtp")
# follow the last layer of the model; each of them is also dense or sparse. A declaration can add sets under `layer_sets`.
LAYER_SETS = ("dense", "sparse", "mtp", SHARED_BLOCK)

# In a shape: the number of a weight whose name counts a dimension, from 0.
NUMBER_OF_WEIGHT = "number"
# The dimension that counts the experts to which a router sends tokens.
EXPERTS = "experts"
# A dimension in braces in a name.
COUNTED = r"\{(\w+)\}"
# What stands in braces in a name and is no dimension: the index of the layer, of the expert, and of a use of a shared block.
INDICES = ("layer", "expert", "use")
USE = "{use}"


@value
class Weight:
    """The declaration of one weight, or of one weight per layer and per expert."""

    name: str
    """The canonical name. {layer} stands for the index of the layer, {expert} for the index of the expert. {use}, in a shared block, stands
    for the indices of the layers that use it, among all that use any such block. Another word in braces is a dimension: there is one such
    weight for each number below it, as for the blocks of a vision tower."""
    role: str
    """What the weight does, such as "attention.q". For a fused weight: "attention.qkv", or its roles joined by "+"."""
    shape: tuple[str, ...]
    """Each axis as an expression of dimensions, such as "heads * head_dim"."""
    when: str | None = None
    """A key of the config: the weight exists unless the value is missing, false, 0 or null. "not KEY": the weight exists if it is
    one of these. None: the weight always exists."""
    layers: tuple[str, ...] = ()
    """The sets of layers that have the weight, such as "sparse" or "not full_attention": a layer that is in all of them has it. Empty: all
    layers. `LayerRule` says which layers are in a set. If the name counts a dimension, such as the blocks of a tower: the same of these."""
    fuses: Mapping[str, str] = field(default_factory=dict)
    """Role -> number of output features, as an expression, in the order of the rows. Empty: the weight is not fused."""
    interleaved_by: str | None = None
    """A dimension, such as "heads": the rows are q, k, v of head 0, then q, k, v of head 1, ... None: each role is one run of rows."""
    transposed: bool = False
    """Whether the weight is stored as [in, out], as by a Conv1D."""
    split: Split | None = None
    """How tensor-parallel ranks share the weight; None: as its role says."""
    stacked: str = ""
    """The dimension that counts the first axis, along which the weights of all experts are one tensor: "experts", or those that every token
    uses. `transposed` and `fuses` are about one expert's weight. Empty: it is one weight."""
    pieces: str | None = None
    """The last words of the names under which published files hold runs of its rows, such as "shard_{parts}.weight", where a dimension
    counts the runs: all have the same number of rows, but the last one may be shorter. None: published files hold it whole."""
    padded: bool = False
    """Whether checkpoints may store further rows after its own, which mean nothing."""

    def by_expert(self) -> tuple[Weight, ...]:
        """The weights [out, in] of a stacked one, each under a name of its own; empty if no names for them are known.

        experts.gate_up_proj -> experts.{expert}.gate_proj.weight, experts.{expert}.up_proj.weight: the names that llm-compressor 0.14 gives
        them, entrypoints/model_free/process.py (split_fused_moe_experts) and modeling/moe/linear_experts.py.
        """
        module, _, last = self.name.rpartition(".")
        roles = tuple(self.fuses or (self.role,))
        if self.stacked != EXPERTS or not module.endswith(".experts") or _STACKED.get(last) != roles:
            return ()
        rows, *inner = reversed(self.shape[1:]) if self.transposed else self.shape[1:]
        one = replace(self, fuses={}, transposed=False, stacked="")
        return tuple(
            replace(one, name=f"{module}.{{expert}}.{_OF_EXPERT[role]}", role=role, shape=(self.fuses.get(role, rows), *inner))
            for role in roles
        )

    @property
    def counted_by(self) -> str | None:
        """The dimension that the name counts, apart from layers, experts and uses; None if it counts none."""
        return next((word for word in re.findall(COUNTED, self.name) if word not in INDICES), None)

    @property
    def in_shared_block(self) -> bool:
        """Whether it lies in a block that several layers use."""
        return SHARED_BLOCK in self.layers

    @property
    def grows(self) -> bool:
        """Whether its shape depends on its number among the weights that its name counts."""
        return any(re.search(rf"\b{NUMBER_OF_WEIGHT}\b", axis) for axis in self.shape)


# Last word of the name of a stacked weight -> its roles; and the names that one expert's weights get.
_STACKED = {"gate_up_proj": ("expert.gate", "expert.up"), "down_proj": ("expert.down",)}
_OF_EXPERT = {"expert.gate": "gate_proj.weight", "expert.up": "up_proj.weight", "expert.down": "down_proj.weight"}


@value
class PrimeSum:
    """The sum of the smallest primes from a number on, in each layer of a set of those that the layers before it have not taken: the rows
    of tables whose hashes must not meet.

        from 100, two in each layer: 101 + 103 in the first layer of the set, 107 + 109 in the second
    """

    start: str
    """The dimension from which the primes are counted."""
    count: str
    """The dimension that says how many there are in each layer."""
    layers: str
    """The set of layers. Elsewhere, and outside of the layers, the sum is that of its first layer."""


@value
class Dimension:
    """A number of the model, such as the hidden size: where the config gives it, and its default."""

    keys: tuple[str, ...]
    """Keys of the config. The first one that the config sets is used. {layer} in a key stands for the index of a layer, as the entry of a
    list or mapping. Outside of the layers such a key counts only if no other one is set, and stands for its largest entry."""
    default: str | None = None
    """An expression of other dimensions, used if the config sets none of the keys."""
    optional: bool = False
    """Whether a model may lack it. If the config gives no number, or 0, the weights whose shape depends on the dimension do not exist."""
    counts: bool = False
    """Whether the keys name a list, and the dimension is the number of its entries."""
    multiple_of: str | None = None
    """A dimension: the value of the default is rounded down to a whole number, and up to a multiple of it. None: it is not rounded."""
    primes: PrimeSum | None = None
    """What the value is in place of a default, rounded up to `multiple_of`; None: the default counts."""
    when: str | None = None
    """A key of the config, or "not KEY", as for a weight: if it is not set, `otherwise` is used. None: this dimension always holds."""
    otherwise: Dimension | None = None
    """The dimension of the models for which `when` does not hold."""
    in_sets: Mapping[str, Dimension] = field(default_factory=dict)
    """Set of layers, or "not" and a set -> the dimension in its layers. The first set that a layer is in counts; elsewhere, and outside of
    the layers, this dimension holds."""

    @property
    def differs(self) -> bool:
        """Whether it can have other values in other layers."""
        return any(form.in_sets or form.primes or any("{layer}" in key for key in form.keys) for form in self.forms)

    @property
    def forms(self) -> tuple[Dimension, ...]:
        """This dimension, and all others that hold in its place."""
        inner = (*self.in_sets.values(), *((self.otherwise,) if self.otherwise else ()))
        return (self, *(form for other in inner for form in other.forms))


@value
class LayerRule:
    """Which layers are in a set, such as the sparse layers.

    If the config has one of the lists `keys`: the layers whose entry is one of `entries`. Otherwise layer i, if first <= i <= last,
    (i + offset) % step == 0, and `dense` does not list i.
    """

    when: str | None = None
    """A key of the config, or "not KEY", as for a weight: if it is not set, the set is empty. None: this rule always holds."""
    keys: tuple[str, ...] = ()
    """The config's keys for a list with an entry for each layer, or a text with a letter for each; the first one that is set is used."""
    entries: tuple[str | int, ...] = ()
    """The entries of the list that stand for a layer of the set."""
    indices: str | None = None
    """The config's key for a list of the indices of the layers of the set, or a text with commas between them, which is used if there is
    none of the lists above."""
    indices_start: int = 0
    """The index that this list gives to the first layer of the model."""
    first: str | None = None
    """The config's key for the index of the first layer of the set; None: 0."""
    last: str | None = None
    """The config's key for the index of the last layer of the set; None, or a value below 0: the last layer of the model."""
    step: str | None = None
    """The config's key for the step; None: 1."""
    every: str | None = None
    """The config's key for a step that is counted from the first layer of the set; None: 1."""
    offset: int = 0
    """Added to the index of the layer before it is divided by the step."""
    dense: str | None = None
    """The config's key for a list of layers that are not in the set; None: there is no list."""
    at_end: str | None = None
    """The config's key for the number of layers at the end of the model that are the set; None: the other fields say which they are."""

    def among(self, config: Mapping[str, Any], layers: int) -> frozenset[int]:
        """The indices of the layers of the set in a model with `layers` layers. Raises RequestError if a value has the wrong type.

        A layer beyond the end of the list, as for multi-token prediction, is like the last one of the list. An empty list counts as none
        where a step says the same, as in transformers.
        """
        listed = next((value for key in self.keys if (value := config.get(key)) is not None), None)
        if listed is not None and not (listed == [] and self.step):
            if not isinstance(listed, list | tuple | str) or not listed:
                raise RequestError(f"config.json gives {listed!r} for {self.keys[0]}; a list is expected", why="It says what each layer is")
            return frozenset(layer for layer in range(layers) if listed[min(layer, len(listed) - 1)] in self.entries)
        numbers = value_at(config, self.indices.split(".")) if self.indices else None
        if isinstance(numbers, str):
            numbers = [int(number) for number in numbers.split(",") if number.strip().isdecimal()]
        if isinstance(numbers, int):
            numbers = [numbers]
        if isinstance(numbers, list | tuple):
            return frozenset(layer for layer in range(layers) if layer + self.indices_start in numbers)
        if self.at_end:
            return frozenset(range(layers)[max(0, layers - (whole_number(config, self.at_end) or 0)) :])
        first = whole_number(config, self.first) or 0
        step, every = whole_number(config, self.step) or 1, whole_number(config, self.every) or 1
        last = config.get(self.last) if self.last else None
        stop = last + 1 if isinstance(last, int) and 0 <= last < layers else layers
        dense = (config.get(self.dense) if self.dense else None) or ()
        if not isinstance(dense, list | tuple):
            raise RequestError(f"config.json gives {dense!r} for {self.dense}; a list is expected", why="It says which layers are dense")
        layers_of_set = (layer for layer in range(first, stop, every) if (layer + self.offset) % step == 0)
        return frozenset(layer for layer in layers_of_set if layer not in dense)


@value
class SharedBlocks:
    """Layers that share blocks of modules in turn: with 2 blocks, those of the set take the blocks 0, 1, 0, 1, ...

    Each block is stored once, in the first layer that uses it. The layers that hold a block are the set SHARED_BLOCK.
    """

    layers: str
    """The set of layers that use the blocks."""
    count: str
    """The config's key for the number of blocks."""
    when: str | None = None
    """A condition on the config, as for a weight: if it does not hold, each layer holds a copy of its block. None: always shared."""


@value
class ConfigKey:
    """A setting whose value is that of a key of the model's config."""

    key: str
    when: str | None = None
    """A key of the config, or "not KEY": the setting is left out unless it is set. None: it always counts."""


@value
class LayersOf:
    """A setting whose value is a list with 1 for each layer of a set and 0 for the others."""

    layer_set: str


@value
class Computation:
    """How a training framework computes one model. A model without one was not compared with the framework.

    The weights of a model do not show how its router scores experts or which pairs of rows its rotary positions turn. What follows from the
    weights, and from config keys that all models share, is in the framework's own file.
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    """The framework's own settings: a value, a ConfigKey or a LayersOf."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Role -> the function, one of functions.FUNCTIONS, whose values the framework stores in place of such a weight."""
    assumes: tuple[tuple[str, object], ...] = ()
    """Config keys that the framework cannot set, each with the value that it computes. A model with another value is refused."""
    lacks: str | None = None
    """What the framework does not have and the model needs, as a noun phrase; None: it computes the model."""
    built_by: str | None = None
    """The library that builds the model of the framework's layers and some of its own, and its class; None: the framework itself."""


@value
class ClassHead:
    """What a class other than that of language models has after the last layer (declared/heads.py)."""

    class_name: str
    """The class that loads these weights, by which engines and transformers choose theirs."""
    what: str
    """What such a model is, such as "a reward model"."""
    module: str = ""
    """The name of the head's module; empty: there is none."""
    parts: tuple[str, ...] = ()
    """The tensors in it, in the order of the parameters: "weight" and "bias", or "0.weight" ... of the first and "2.weight" ... of the last
    matrix of an MLP."""
    is_usual: bool = True
    """Whether classes of that name have such a head; False: the files have another one."""
    labels: int | None = None
    """The number of outputs where the config does not say it; None: 2, as in transformers."""
    beside: bool = False
    """Whether the head of the language model is there, too."""
    front: tuple[str, str] = ("", "")
    """The first word of the language model's names, such as "model.", and what stands in its place, which may be empty."""


@value(slots=False)
class Architecture:
    """What all models of one `model_type` have in common."""

    model_type: str
    """The `model_type` in the configs of these models."""
    dimensions: Mapping[str, Dimension]
    """The dimensions by name, such as "hidden". A default may use the dimensions before it."""
    weights: tuple[Weight, ...]
    """The weights, in the order of the model's parameters."""
    tied: tuple[str, str] = ("lm_head.weight", "model.embed_tokens.weight")
    """The names of the head and of the embedding. They are one tensor if tie_word_embeddings is true."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a checkpoint may contain and that are not converted: regular expression of the name -> reason."""
    carried: Mapping[str, str] = field(default_factory=dict)
    """Further tensors that a checkpoint may contain, such as a draft model: regular expression of the name -> why serving engines leave
    them out. All other formats carry them unchanged."""
    sparse_layers: LayerRule | None = None
    """Which layers have experts; None: no layer."""
    layer_sets: Mapping[str, LayerRule] = field(default_factory=dict)
    """Further sets of layers by name, such as "full_attention"."""
    shared_blocks: SharedBlocks | None = None
    """Which layers share blocks of modules; None: no layers do."""
    text_config: str | None = None
    """The config's key for an inner config, which is that of the language model; None: the config itself is."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """The config's key for an inner config whose `model_type` names the declared part that it describes, the language model or a tower ->
    the part that is meant if it names none. Other parts are always the same."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """The declared model that a config of this `model_type` describes in place of this one -> the condition on the config, as for a weight,
    under which it does. The first one whose condition holds counts."""
    mtp_layers: str | None = None
    """The config's key for the number of layers for multi-token prediction. A checkpoint may lack their weights."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of config keys that a config does not set."""
    vocabulary_multiple: int | None = None
    """Engines pad the vocabulary of this model to a multiple of this; None: to the engine's own multiple."""
    quantized_as: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What --quantize takes -> the quantization_config of the published model in that form. Other models get that of compressed-tensors."""
    head: ClassHead | None = None
    """The head that a config's class has in place of the declared one; None: the declared one."""
    engines: Mapping[str, EngineRules] = field(default_factory=dict)
    """What the classes of serving engines do differently for this model, by the name of the engine's format. The classes of the engines
    that are listed were compared with the declaration."""
    engines_of_parts: tuple[Mapping[str, EngineRules], ...] = ()
    """The rules of the towers, and of a language model that the config chooses, each by engine. `engines` contains them; a declaration that
    extends this one gets them without what the class around them does."""
    frameworks: Mapping[str, Computation] = field(default_factory=dict)
    """How training frameworks compute the model, by the name of the framework's format. Only those that were compared are listed."""
    like: str | None = None
    """The model_type that engines and frameworks treat this model as; None: its own."""
    class_name: str | None = None
    """The model's class in transformers, by which engines choose their own class; None if the declaration does not say it."""
    declared_in: str | None = None
    """The file that declares it; None for a built-in model."""
    declaration: str | None = None
    """The text of that file; None for a built-in model."""

    def by_expert(self) -> Architecture:
        """The architecture of the same model with the weights of each expert under names of their own, where such names are known."""
        return replace(self, weights=tuple(single for weight in self.weights for single in weight.by_expert() or (weight,)))

    def __repr__(self) -> str:
        return f"Architecture({self.model_type}, {len(self.weights)} roles)"

    def check_head(self, what: str) -> None:
        """Raises UnsupportedError if the models have another head than language models. what: such as "these files are", of those."""
        if self.head is not None:
            part = f"its head, {self.head.module}," if self.head.module else "a model without a head"
            raise UnsupportedError(
                f"{what} written of language models, and this is {self.head.what} ({self.head.class_name})",
                why=f"How they hold {part} is not known, and is not guessed",
                do="Use its Hugging Face folder, which `to=hf` writes; `reshard serve-check` says whether an engine takes it",
            )

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

        A weight replaces the one with the same name; several with one name are about other layers, and replace it together. A new bias
        comes after the weight of its module. Any other weight with a new name comes after the last weight of the module that contains its
        own module: a subclass registers a new module there, so the order remains that of the model's parameters. without: names of
        weights, whose places count for that. `like`, `instead`, `engines`, `frameworks` and the class are not inherited: engines may know
        this model and not the new one.
        """
        declared = list(self.weights)
        removed = {id(weight) for weight in declared if weight.name in without}
        kept = frozenset(weight.name for weight in declared if id(weight) not in removed)
        replaced: set[str] = set()
        for weight in weights:
            present = [None if id(other) in removed else other.name for other in declared]
            if weight.name in replaced:  # the same name in other layers
                declared.insert(len(present) - present[::-1].index(weight.name), weight)
            elif weight.name in present:
                declared[present.index(weight.name)] = weight
                replaced.add(weight.name)
            else:
                names = [other.name for other in declared]
                declared.insert(1 + _predecessor(weight.name, names, present, kept), weight)
                replaced.add(weight.name)
        declared = [weight for weight in declared if id(weight) not in removed]
        none = dict.fromkeys(("like", "class_name", "declared_in", "declaration"))
        fields = {**none, "instead": {}, "engines": {}, "frameworks": {}, **fields}
        return replace(self, model_type=model_type, weights=tuple(declared), dimensions={**self.dimensions, **(dimensions or {})}, **fields)


def _predecessor(name: str, names: Sequence[str], present: Sequence[str | None], kept: Collection[str]) -> int:
    """The index of the weight that a new weight follows.

    A bias follows its weight. Any other weight follows the last one in the module around its own module, or in the next outer module that
    has any. In a module whose weights are all removed, the first new weight takes their place.

    names: of the weights so far, removed ones included. present: the same, None for a removed weight. kept: those of the extended model.
    """
    if name.endswith(".bias") and (weight := name.removesuffix("bias") + "weight") in present:
        return len(present) - 1 - present[::-1].index(weight)
    module, place = name.rpartition(".")[0], None
    while module := module.rpartition(".")[0]:
        of_module = [i for i, other in enumerate(names) if other.startswith(module + ".")]
        if here := [i for i in of_module if present[i] is not None]:
            return place if place is not None and any(present[i] in kept for i in here) else here[-1]
        place = of_module[-1] if of_module else place
    return len(names) - 1 if place is None else place
