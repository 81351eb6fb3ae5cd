"""Architecture: a model as a declaration. Names, roles and shapes of its weights in terms of its config; never code.

A file in architectures/ is named after the `model_type` of the configs that it speaks for. `Model` is an architecture
with the numbers of one config put in.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from reshard.boxes import Box
from reshard.errors import RequestError
from reshard.mosaics import Mosaic, joined
from reshard.quantization import Grain, Quantization, Scale, quantization_of, unknown_quantization
from reshard.roles import LINEAR, SPLITS, Split

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal["dense", "sparse", "extra"]
GROUP = "reshard.architectures"


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
    layers: Kind | None = None
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
        first = _count(config, self.first) or 0
        step = _count(config, self.step) or 1
        dense = (config.get(self.dense) if self.dense else None) or ()
        if not isinstance(dense, list | tuple):
            raise RequestError(f"config.json gives {dense!r} for {self.dense}, a list is expected", why="It says which layers are dense")
        return frozenset(layer for layer in range(first, layers) if (layer + self.offset) % step == 0 and layer not in dense)


def _count(config: Mapping[str, Any], key: str | None) -> int | None:
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


@dataclass(frozen=True, slots=True)
class ModelWeight:
    """A weight of one model: its canonical name, role, shape, the layer and the expert it belongs to (None outside of them), and how it is
    declared. optional: a checkpoint may be without it. scales: those beside it; scale: what it is itself, if it is one."""

    name: str
    role: str
    shape: tuple[int, ...]
    layer: int | None
    declared: Weight
    expert: int | None = None
    optional: bool = False
    scales: tuple[Scale, ...] = ()
    scale: Scale | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What one role is in a layer or an expert: [out features, in features], or [out features] of a bias. A view of a canonical tensor.

    kind: the last word of the canonical name, "weight" or "bias" but for a few. split: how ranks share it. grain: of how many of the
    weight's elements along each axis one of the array's stands; None of all, and then no rank has a part of it. blocks: the grain of the
    block scales beside a weight; scale: what it is itself, if it is one.
    """

    role: str
    kind: str
    layer: int | None
    expert: int | None
    tensor: str
    array: Mosaic
    split: Split
    grain: Grain
    blocks: Grain | None = None
    scale: Scale | None = None


class Dimensions(dict[str, int]):
    """The dimensions of one model by name. Raises RequestError where one is asked for that the model's declaration has not."""

    def __init__(self, model_type: str) -> None:
        super().__init__()
        self._model_type = model_type

    def __missing__(self, name: str) -> int:
        raise RequestError(
            f"the declaration of {self._model_type} has no dimension {name!r}, which is needed here",
            why="Weights are split and laid out by it",
            do=f"Add it under `dimensions`, with the key of the config that gives it or a default; it has {', '.join(self)}",
        )


@dataclass(frozen=True, eq=False)
class Model:
    """An architecture and one config's numbers."""

    architecture: Architecture
    config: Mapping[str, Any]

    @cached_property
    def dimensions(self) -> dict[str, int]:
        """Every dimension's value; without those that this model has not. Raises RequestError, naming the key, if the config does not say
        one."""
        found = Dimensions(self.architecture.model_type)
        for name, dimension in self.architecture.dimensions.items():
            value = next((self.config[key] for key in dimension.keys if self.config.get(key) is not None), None)
            if value is None and dimension.default:
                value = evaluate(dimension.default, found)
            if dimension.optional and not value:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(
                    f"config.json gives {value!r} for {' or '.join(dimension.keys)}, a positive number is needed",
                    why=f"A {self.architecture.model_type} model is laid out by it",
                    do="Give the model's own config with --model DIR",
                )
            found[name] = value
        return found

    @cached_property
    def quantization(self) -> Quantization | None:
        """How the weights are quantised, if they are."""
        return quantization_of(self.config)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return bool(self.setting("tie_word_embeddings"))

    def setting(self, key: str) -> Any:
        """What the config says, or its default where it says nothing."""
        value = self.config.get(key)
        return self.architecture.defaults.get(key) if value is None else value

    @cached_property
    def extra_layers(self) -> int:
        """How many layers follow the last one."""
        key = self.architecture.extra_layers
        return _count({key: self.setting(key)}, key) or 0 if key else 0

    @cached_property
    def sparse_layers(self) -> frozenset[int]:
        """The layers that have experts."""
        sparse, layers = self.architecture.sparse, self.dimensions["layers"] + self.extra_layers
        return sparse.among({**self.architecture.defaults, **self.config}, layers) if sparse else frozenset()

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers, but those that predict further tokens, that have no experts."""
        return tuple(layer for layer in range(self.dimensions["layers"]) if layer not in self.sparse_layers)

    @cached_property
    def weights(self) -> dict[str, ModelWeight]:
        """The weights by canonical name, in the model's order; a tied head is not among them."""
        absent = {self.architecture.tied[0]} if self.is_tied else set()
        return {weight.name: weight for weight in self._declared() if weight.name not in absent}

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Every weight by what it does: a fused one is several parts."""
        return self.parts_but(frozenset())

    def parts_but(self, whole: frozenset[str]) -> tuple[Part, ...]:
        """Every weight by what it does; but fused ones of those roles are one part each."""
        return tuple(part for weight in self.weights.values() for part in self._parts(weight, weight.role in whole))

    def reason_to_drop(self, name: str) -> str | None:
        """Why a tensor of that name is left out on purpose; None if it is not."""
        return next((why for pattern, why in self.architecture.dropped.items() if re.fullmatch(pattern, name)), None)

    def _declared(self) -> Iterator[ModelWeight]:
        present = [(weight, self._shape(weight)) for weight in self.architecture.weights if self._is_present(weight)]
        layered = [(weight, shape) for weight, shape in present if "{layer}" in weight.name]
        layers = self.dimensions["layers"]
        done = False
        for weight, shape in present:
            if "{layer}" not in weight.name:
                yield from self._numbered([(weight, shape)], None)
            elif not done:
                done = True
                for layer in range(layers + self.extra_layers):
                    kinds = {None, "sparse" if layer in self.sparse_layers else "dense", "extra" if layer >= layers else None}
                    yield from self._numbered([each for each in layered if each[0].layers in kinds], layer)

    def _is_present(self, weight: Weight) -> bool:
        missing = self.architecture.dimensions.keys() - self.dimensions.keys()
        if missing & set(re.findall(r"\w+", " ".join(weight.shape))):
            return False
        if weight.when is None:
            return True
        wanted = not weight.when.startswith("not ")
        return bool(self.setting(weight.when.removeprefix("not "))) is wanted

    def _shape(self, weight: Weight) -> tuple[int, ...]:
        shape = tuple(evaluate(axis, self.dimensions) for axis in weight.shape)
        if weight.holds:
            rows = {role: evaluate(expression, self.dimensions) for role, expression in weight.holds.items()}
            out, rounds = shape[-1 if weight.transposed else 0], self.dimensions[weight.by] if weight.by else 1
            if sum(rows.values()) != out or any(count % rounds for count in rows.values()):
                raise RequestError(
                    f"it has {out} output features, and what is fused in it has {' + '.join(map(str, rows.values()))}"
                    + (f" in {rounds} equal runs, one per each of the {weight.by}" if weight.by else ""),
                    where=weight.name,
                    why="So the declaration does not say what every row of it is",
                    do="Compare its `shape` and what it `holds` with the config",
                )
        return shape

    def _numbered(self, weights: list[tuple[Weight, tuple[int, ...]]], layer: int | None) -> Iterator[ModelWeight]:
        """The weights of one layer, each before its scales; those of experts expert after expert."""
        optional = layer is not None and layer >= self.dimensions["layers"]
        for is_expert, run in groupby(weights, key=lambda each: "{expert}" in each[0].name):
            held = list(run)
            for expert in range(self.dimensions["experts"]) if is_expert else (None,):
                for weight, shape in held:
                    name = weight.name.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                    scales = self._scales(weight, name)
                    yield ModelWeight(name, weight.role, shape, layer, weight, expert, optional, scales)
                    for scale in scales:
                        beside = name.removesuffix("weight") + scale.kind
                        yield ModelWeight(beside, weight.role, scale.shape(shape), layer, weight, expert, optional, scale=scale)
                    if weight.role == "attention.o" and scales and self.quantization:
                        module = name.removesuffix(".weight").rpartition(".")[0]
                        for scale in self.quantization.cache:
                            role = f"attention.{scale.kind}"
                            yield ModelWeight(f"{module}.{scale.kind}", role, scale.one, layer, weight, expert, optional, scale=scale)

    def _scales(self, weight: Weight, name: str) -> tuple[Scale, ...]:
        roles = {weight.role, *weight.holds}
        if self.quantization is None or not name.endswith(".weight") or not roles & LINEAR:
            return ()
        return self.quantization.scales_of(name)

    def _parts(self, weight: ModelWeight, whole: bool) -> Iterator[Part]:
        declared, kind = weight.declared, weight.name.rpartition(".")[2]
        array = Mosaic.of(weight.name, Box.whole(weight.shape))
        if declared.transposed and len(weight.shape) == 2:
            array = array.transposed()
        grain: Grain = weight.scale.grain if weight.scale else (1,) * len(weight.shape)
        blocks = next((scale.grain for scale in weight.scales if scale.is_blocked), None)
        where = (weight.layer, weight.expert, weight.name)

        def part(role: str, held: Mosaic) -> Part:
            return Part(role, kind, *where, held, declared.split or SPLITS[role], grain, blocks, weight.scale)

        if whole or not declared.holds:
            yield part(weight.role, array)
            return
        rounds = self.dimensions[declared.by] if declared.by else 1
        rows = {role: evaluate(expression, self.dimensions) // rounds for role, expression in declared.holds.items()}
        if grain[0] is None:
            yield from (part(role, array) for role in rows)
            return
        start = 0
        for role, count in rows.items():
            size, rest = divmod(count, grain[0])
            if rest:
                raise RequestError(f"its scales stand for {grain[0]} rows each, its {role} has {count}", where=weight.name)
            turn = sum(rows.values()) // grain[0]
            yield part(role, joined([array.cut(0, i * turn + start, i * turn + start + size) for i in range(rounds)]))
            start += size


def evaluate(expression: str, values: Mapping[str, int]) -> int:
    """The value of a sum of products such as "2 * heads * head_dim + rope"; a division must come out even."""
    return sum(_product(summand, values) for summand in expression.split("+"))


def _product(expression: str, values: Mapping[str, int]) -> int:
    result = 1
    for sign, word in re.findall(r"(?:^|([*/]))\s*(\w+)\s*", expression):
        number = int(word) if word.isdigit() else values[word]
        if sign == "/":
            result, rest = divmod(result, number)
            if rest:
                raise RequestError(f"{expression!r} does not come out even for {dict(values)}", do="Check the config given with --model")
        else:
            result *= number
    return result


def find_model(config: Mapping[str, Any] | None, architecture: Architecture | None = None) -> Model | None:
    """The model that a Hugging Face config describes; None if there is no config or its architecture is not declared.

    architecture: the one that the user named, in place of the one that the config names by its `model_type`. None also if the weights are
    quantised in a way that is not known.
    """
    if config is None or unknown_quantization(config):
        return None
    found = architecture or find_architecture(str(config.get("model_type", "")))
    return Model(found, config) if found else None


def find_architecture(model_type: str) -> Architecture | None:
    """The declaration of a model type: the file of that name in architectures/, or else what another package calls so in the entry-point
    group `reshard.architectures`; None if there is neither."""
    name = model_type.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        return None
    module_name = f"reshard.architectures.{name}"
    try:
        return importlib.import_module(module_name).ARCHITECTURE  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
    point = _entry_points().get(name)
    found = point.load() if point else None
    if found is not None and not isinstance(found, Architecture):
        raise RequestError(
            f"the entry point {name} of the group {GROUP} is a {type(found).__name__}, no Architecture",
            where=point.value if point else None,
            do="Mend or remove the package that brings it",
        )
    return found


def built_in_model_types() -> tuple[str, ...]:
    """The model types that are declared here, sorted."""
    from pkgutil import iter_modules

    from reshard import architectures

    return tuple(sorted(module.name for module in iter_modules(architectures.__path__)))


def known_model_types() -> tuple[str, ...]:
    """The model types that are declared, here or by other packages, sorted."""
    return tuple(sorted({*built_in_model_types(), *_entry_points()}))


@cache
def _entry_points() -> dict[str, EntryPoint]:
    """Other packages' declarations by model type; the packages' metadata are searched once, and only for what is not built in."""
    from importlib.metadata import entry_points

    return {point.name.replace("-", "_"): point for point in entry_points(group=GROUP)}
