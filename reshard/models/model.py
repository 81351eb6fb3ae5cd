"""TODO."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from reshard.errors import RequestError
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, joined
from reshard.models.quantization import BlockShape, Quantization, Scale, quantization_of
from reshard.models.roles import LINEAR, SPLITS, Split

if TYPE_CHECKING:
    pass

from reshard.models.architecture import Architecture, Weight, layer_count


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
    parameter: str
    layer: int | None
    expert: int | None
    tensor: str
    array: Mosaic
    split: Split
    block_shape: BlockShape
    blocks: BlockShape | None = None
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
        return layer_count({key: self.setting(key)}, key) or 0 if key else 0

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
        grain: BlockShape = weight.scale.grain if weight.scale else (1,) * len(weight.shape)
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
