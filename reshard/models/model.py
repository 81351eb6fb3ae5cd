"""Model: an architecture together with one config. It lists the weights by name, and the parts of weights by role.

    Architecture + config -> dimensions {"hidden": 4096, ...}
                          -> weights    one ModelWeight per tensor of the model, quantization scales included
                          -> parts()    one Part per role of each weight: a fused qkv is three parts

Engines and training frameworks work on parts: what a part does decides how ranks share it, whatever the model calls it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from operator import attrgetter
from sys import intern
from typing import Any

from reshard.errors import RequestError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType, from_safetensors
from reshard.geometry.mosaics import Mosaic, joined
from reshard.geometry.quantities import grouped
from reshard.geometry.value import value
from reshard.models.architecture import (
    COUNTED,
    EXPERTS,
    NUMBER_OF_WEIGHT,
    SHARED_BLOCK,
    USE,
    Architecture,
    Dimension,
    LayerRule,
    PrimeSum,
    Weight,
)
from reshard.models.config_values import entries, value_at, whole_number
from reshard.models.engine_rules import EngineRules
from reshard.models.quantization import quantization_of
from reshard.models.roles import REPLICATE, ROLES, Split
from reshard.models.stored_forms import BlockShape, Component, Quantization, StoredForm


@value
class ModelWeight:
    """One tensor of one model."""

    name: str
    """The canonical name, with the numbers of its layer and expert."""
    role: str
    """What it does, such as "attention.q"."""
    shape: tuple[int, ...]
    """The shape, as stored."""
    layer: int | None
    """The index of its layer; None outside of the layers."""
    declared: Weight
    """The declaration that it follows from."""
    pattern: str
    """The name with {layer} and {expert} in place of these numbers."""
    expert: int | None = None
    """The index of its expert; None outside of the experts."""
    optional: bool = False
    """Whether a checkpoint may lack it."""
    form: StoredForm | None = None
    """How it is stored if it is quantized; None: as its elements."""
    component: Component | None = None
    """If it is quantized: which of the tensors of its form this one is. Also for a scale of the KV cache."""
    implied: bytes | None = None
    """Its bytes, if they follow from the shape of the weight beside which it stands."""

    @property
    def is_scale(self) -> bool:
        """Whether it stands beside the elements of a quantized weight: its scales, its zero points."""
        return self.component is not None and self.component.is_scale

    @property
    def is_cache_scale(self) -> bool:
        """Whether it is a scale of cached keys or values."""
        return self.component is not None and self.form is None

    @property
    def component_dtype(self) -> DType | None:
        """The element type in which a component of a quantized weight is stored; None: as other weights."""
        if self.component is None:
            return None
        named = self.form.code_types[0] if self.form and not self.component.is_scale else self.component.element_type
        return from_safetensors(named, where=self.name) if named else None

    @property
    def elements(self) -> int:
        """The number of elements of the weight; 0 for what stands beside them."""
        packing = self.component.packing if self.component else None
        if self.is_scale:
            return 0
        return math.prod(self.shape) // math.prod(packing.words) * packing.count if packing else math.prod(self.shape)


@value(eq=False)
class LayerKind:
    """Layers whose weights are alike but for the number of the layer."""

    layers: tuple[int, ...]
    """The indices of the layers, in order."""
    weights: tuple[ModelWeight, ...]
    """The weights of the first of them, in the model's order."""


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


# The keys of configs for the experts that each token is sent to.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_experts_per_token", "top_k_experts")
# The largest dimensions of a config that are believed. The largest published models have some 130 layers, 2,048 experts, 31,000 experts in
# all layers together, and a vocabulary of 300,000. `degrees` and `estimate` look at each layer and expert, and take 6 s for 50,000 experts;
# products of the others stay below 2^63.
_MOST = {"layers": 4_096, "experts": 4_096, "heads": 100_000, "kv_heads": 100_000, "engram_rows": 10_000_000_000}
_MOST_EXPERTS_OF_ALL_LAYERS = 250_000
_MOST_OF_OTHERS = 100_000_000
_MOST_OF_SUMS = 1 << 32
_MOST_PRIMES = 2_048


def _too_large(what: str, limit: int) -> RequestError:
    return RequestError(
        f"config.json gives {what}; reshard supports {limit:,}",
        why="No known model comes close, so the file is damaged or was made by hand",
        do="Give the model's own config with `model=DIR`",
    )


class Dimensions(dict[str, int]):
    """The dimensions of one model by name. Raises RequestError for a dimension that the model does not have."""

    def __init__(self, model_type: str) -> None:
        super().__init__()
        self._model_type = model_type

    def __missing__(self, name: str) -> int:
        raise RequestError(
            f"the declaration of {self._model_type} has no dimension {name!r}, which is needed here",
            why="Weights are split and laid out by it",
            do=f"Add it under `dimensions`, with the key of the config that gives it or a default. Declared are {', '.join(self)}",
        )


@value(slots=False, eq=False)
class Model:
    """An architecture together with one config."""

    architecture: Architecture
    """The declaration."""
    config: Mapping[str, Any]
    """The content of config.json."""

    @cached_property
    def dimensions(self) -> dict[str, int]:
        """The value of each dimension, without the optional ones that this model does not have. Of a dimension that differs between layers,
        the value outside of the layers.

        Raises: RequestError, naming the key, if the config does not give a dimension.
        """
        return self._dimensions(None)

    def dimensions_in(self, layer: int | None) -> dict[str, int]:
        """The value of each dimension in one layer; None: outside of the layers. Layers with the same values share one mapping."""
        return self.dimensions if layer is None or not self._dimensions_by_layer else self._dimensions_by_layer[layer]

    @cached_property
    def _dimensions_by_layer(self) -> tuple[dict[str, int], ...]:
        """The dimensions in each layer; empty if they are the same in all layers."""
        if not any(dimension.differs for dimension in self.architecture.dimensions.values()):
            return ()
        distinct: dict[tuple[tuple[str, int], ...], dict[str, int]] = {tuple(self.dimensions.items()): self.dimensions}
        layers = range(self.dimensions["layers"] + self.mtp_layers)
        return tuple(distinct.setdefault(tuple(values.items()), values) for values in map(self._dimensions, layers))

    def _form_of(self, dimension: Dimension, layer: int | None) -> Dimension:
        """The form of a dimension that holds in a layer of this model; None: outside of the layers."""
        inner = next((form for name, form in dimension.in_sets.items() if layer is not None and layer in self.layer_sets[name]), None)
        inner = inner or (dimension.otherwise if dimension.otherwise and not self.holds(dimension.when) else None)
        return self._form_of(inner, layer) if inner else dimension

    def _dimensions(self, layer: int | None) -> dict[str, int]:
        values = Dimensions(self.architecture.model_type)
        for name, declared in self.architecture.dimensions.items():
            dimension = self._form_of(declared, layer)
            if layer is not None and name in self.dimensions:
                values[name] = self.dimensions[name]  # a default in a set of layers may use the value elsewhere
            value = self._stated_size(dimension, layer)
            if dimension.counts and isinstance(value, list | tuple | str):
                value = len(value)
            elif isinstance(value, str) and value.isdecimal() and len(value) < 10:
                value = int(value)  # MiMo-V2.5 states a size as a text
            if value is None and dimension.primes:
                step = values[dimension.multiple_of] if dimension.multiple_of else 1
                value = -(-self._prime_sum(dimension.primes, values, layer) // step) * step
            if value is None and dimension.default:
                step = values[dimension.multiple_of] if dimension.multiple_of else 1
                value = -(-evaluate(dimension.default, values, exact=dimension.multiple_of is None) // step) * step
            if dimension.optional and not value:
                values.pop(name, None)
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(
                    f"config.json gives {value!r} for {' or '.join(dimension.keys)}; a positive number is needed",
                    why=f"The layout of a {self.architecture.model_type} model depends on it",
                    do="Give the model's own config with `model=DIR`",
                )
            limit = _MOST_OF_SUMS if dimension.primes else _MOST.get(name, _MOST_OF_OTHERS)
            if value > limit:
                raise _too_large(f"{value:,} for {' or '.join(dimension.keys)}", limit)
            values[name] = value
        if (count := values.get("layers", 1) * values.get("experts", 1)) > _MOST_EXPERTS_OF_ALL_LAYERS:
            raise _too_large(f"{count:,} experts in all layers", _MOST_EXPERTS_OF_ALL_LAYERS)
        return values

    def _prime_sum(self, primes: PrimeSum, values: Mapping[str, int], layer: int | None) -> int:
        """Raises RequestError for more primes than any model has."""
        before = 0 if layer is None else sum(other < layer for other in self.layer_sets[primes.layers])
        count, is_in = values[primes.count], layer is not None and layer in self.layer_sets[primes.layers]
        first = before * count if is_in else 0
        if first + count > _MOST_PRIMES:
            raise _too_large(f"{first + count:,} tables of n-grams", _MOST_PRIMES)
        return sum(primes_from(values[primes.start], first + count)[first:])

    def _stated_size(self, dimension: Dimension, layer: int | None) -> Any:
        """What the config, or else the declaration's `defaults`, says for a dimension in a layer (None: outside of the layers); None if
        neither says anything."""
        of_layers = [key for key in dimension.keys if "{layer}" in key]
        keys = dimension.keys if layer is not None else [key for key in dimension.keys if key not in of_layers]
        stated = (self.stated(key.replace("{layer}", str(layer))) for key in keys)
        value = next((value for value in stated if value is not None and not (of_layers and isinstance(value, list))), None)
        if value is None and layer is None:
            value = max((entry for key in of_layers for entry in self._entries(key) if isinstance(entry, int)), default=None)
        return next(filter(None, map(self._default, keys)), None) if value is None else value

    def _entries(self, key: str) -> list[Any]:
        """What the config says for all layers, for a key with {layer}."""
        front, _, inner = key.partition(".{layer}")
        container = self.stated(front)
        entries = container.values() if isinstance(container, Mapping) else container if isinstance(container, list) else ()
        return [value_at(entry, inner.split(".")[1:]) for entry in entries]

    @cached_property
    def quantization(self) -> Quantization | None:
        """How the weights are quantized; None if they are not."""
        return quantization_of(self.config)

    @cached_property
    def declared(self) -> Architecture:
        """The architecture with the names of this model's weights: where linear layers are quantized, an expert is a module of its own."""
        return self.architecture.by_expert() if self.quantization and self.quantization.by_expert else self.architecture

    @property
    def is_tied(self) -> bool:
        """Whether the head and the embedding are one tensor."""
        return bool(self.setting("tie_word_embeddings"))

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The values of the config's keys, those of the inner config of the language model included."""
        inner = value_at(self.config, self.architecture.text_config.split(".")) if self.architecture.text_config else None
        return {**self.config, **inner} if isinstance(inner, Mapping) else self.config

    def stated(self, key: str) -> Any:
        """What the config says for a key; None if it does not have the key. A dot leads into an inner config or to the entry of a list. A
        key that begins with a dot is one of the config itself, even if that of the language model has it, too."""
        return value_at(self.config, key[1:].split(".")) if key.startswith(".") else value_at(self.settings, key.split("."))

    def setting(self, key: str) -> Any:
        """The value of a key of the config; the architecture's default if the config does not have the key."""
        value = self.stated(key)
        return self._default(key) if value is None else value

    def _default(self, key: str) -> Any:
        """The architecture's default for a key; None if there is none, if the config says null for the key, or if the config lacks the
        inner config that the key is in: the model then lacks what the key is about, such as a tower."""
        default, words = self.architecture.defaults.get(key), key.split(".")
        if default is None or (len(words) > 1 and words[0] not in self.settings):
            return None
        return value_at(self.settings, words, default)

    def count(self, key: str) -> int | None:
        """The whole number that `setting` gives; None if there is none. Raises RequestError if it is not a whole number."""
        return whole_number({key: self.setting(key)}, key)

    def listed(self, key: str) -> Sequence[Any]:
        """The list that `setting` gives; empty if there is none. Raises RequestError if it is not a list."""
        return entries({key: self.setting(key)}, key)

    @property
    def experts_per_token(self) -> int | None:
        """The number of routed experts that each token is sent to; None if the config does not say it, or not one for all."""
        key, stated = next(((key, value) for key in _EXPERTS_PER_TOKEN if (value := self.setting(key))), ("", None))
        if isinstance(stated, list):  # one for each layer, as in Hunyuan's configs
            stated = stated[0] if all(each == stated[0] for each in stated) else None
        return whole_number({key: stated}, key)

    @property
    def class_name(self) -> str | None:
        """The class by which engines choose their own: the first of the config's `architectures`, or else the one of the declaration."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else self.architecture.class_name

    def quirks_of(self, engine: str) -> EngineRules | None:
        """What an engine's class for this model does differently, to be put into the engine's rules; None if no class of that engine was
        compared."""
        quirks = self.architecture.engines.get(engine)
        of_class = quirks.of_class.items() if quirks else ()
        return next((rules for name, rules in of_class if name == self.class_name or self.holds(name)), quirks)

    def holds(self, when: str | None) -> bool:
        """Whether a condition of the declaration holds: a key of the config that is set, "KEY is VALUE", or one of these after "not ";
        several are joined by " and ", which binds first, and " or ". None always holds."""
        return when is None or any(all(map(self._is_so, each.split(" and "))) for each in when.split(" or "))

    def _is_so(self, when: str) -> bool:
        key, _, value = when.removeprefix("not ").partition(" is ")
        setting = self.setting(key)
        return (str(setting) == value if value else bool(setting)) is not when.startswith("not ")

    @cached_property
    def mtp_layers(self) -> int:
        """The number of layers for multi-token prediction, which follow the last layer."""
        key = self.architecture.mtp_layers
        count = self.count(key) or 0 if key else 0
        if count > _MOST["layers"]:
            raise _too_large(f"{count:,} for {key}", _MOST["layers"])
        return count

    @cached_property
    def sparse_layers(self) -> frozenset[int]:
        """The indices of the layers with experts, layers for multi-token prediction included."""
        rule = self.architecture.sparse_layers
        return self._among(rule, self.dimensions["layers"] + self.mtp_layers) if rule else frozenset()

    @cached_property
    def layer_sets(self) -> dict[str, frozenset[int]]:
        """The indices of the layers of each set that a declaration can name under `layers`."""
        layers = self.dimensions["layers"]
        every = frozenset(range(layers + self.mtp_layers))
        sets = {"sparse": self.sparse_layers, "mtp": every - frozenset(range(layers)), "dense": every - self.sparse_layers}
        sets[SHARED_BLOCK] = frozenset(self.uses_of_blocks)
        return {**sets, **{f"not {name}": every - of for name, of in sets.items()}, **self._sets_among(len(every))}

    @cached_property
    def uses_of_blocks(self) -> dict[int, dict[int, int]]:
        """The layer that holds a shared block -> the uses of the block, by their numbers among all uses -> the layer of each.

        Layers 2, 5, 10 and 11 that share 2 blocks: {2: {0: 2, 2: 10}, 5: {1: 5, 3: 11}}. Where each layer holds a copy of its block, also
        10 and 11 are keys.
        """
        shared = self.architecture.shared_blocks
        if shared is None:
            return {}
        users = sorted(self._among(self.architecture.layer_sets[shared.layers], self.dimensions["layers"]))
        blocks = max(1, self.count(shared.count) or 1)
        holders = users[:blocks] if self.holds(shared.when) else users
        return {layer: dict(list(enumerate(users))[number % blocks :: blocks]) for number, layer in enumerate(holders)}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Further names that a checkpoint may have for a weight -> the name of the weight: that of a tied head, and those of a shared block
        in the other layers that use it."""
        head, embedding = self.architecture.tied
        of_blocks = {
            numbered(weight.pattern, layer, weight.expert): weight.name
            for weight in (self.weights.values() if self.uses_of_blocks else ())
            if weight.declared.in_shared_block
            for layer in self.uses_of_blocks[weight.layer or 0].values()
            if layer not in self.uses_of_blocks
        }
        return {**({head: embedding} if self.is_tied else {}), **of_blocks}

    def _sets_among(self, count: int) -> dict[str, frozenset[int]]:
        """The indices in the sets that the declaration adds, among so many layers or blocks."""
        sets = {name: self._among(rule, count) for name, rule in self.architecture.layer_sets.items()}
        return {**sets, **{f"not {name}": frozenset(range(count)) - of for name, of in sets.items()}}

    def _among(self, rule: LayerRule, count: int) -> frozenset[int]:
        if not self.holds(rule.when):
            return frozenset()
        defaults, lists = self.architecture.defaults, (*rule.keys, *((rule.indices,) if rule.indices else ()))
        if any(self.stated(key) is not None for key in lists):
            defaults = {key: value for key, value in defaults.items() if key not in lists}
        return rule.among({**defaults, **self.settings}, count)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The indices of the layers without experts, layers for multi-token prediction excluded."""
        return tuple(layer for layer in range(self.dimensions["layers"]) if layer not in self.sparse_layers)

    @cached_property
    def weights(self) -> dict[str, ModelWeight]:
        """The weights by canonical name, in the order of the model's parameters. A tied head is not among them."""
        found: dict[str, ModelWeight] = {}
        for weight in self._all_weights():
            if found.setdefault(weight.name, weight) is not weight:
                raise RequestError(
                    f"it is declared twice, as {found[weight.name].role} and as {weight.role}",
                    where=weight.name,
                    why="The layers of the two have this one in common",
                    do="Compare the sets of layers in the declaration with the config",
                )
        if self.is_tied:
            found.pop(self.architecture.tied[0], None)
        return found

    @cached_property
    def pieces(self) -> dict[str, Mosaic]:
        """The runs of rows of weights that published files hold in pieces, by the names that they have there, in order."""
        found: dict[str, Mosaic] = {}
        for weight in self.weights.values() if any(each.pieces for each in self.declared.weights) else ():
            ending = weight.declared.pieces
            if ending is None or weight.is_scale:
                continue
            module, rows = weight.name.rpartition(".")[0], weight.shape[0]
            length = -(-rows // self.dimensions[re.findall(COUNTED, ending)[0]])
            for number, start in enumerate(range(0, rows, length)):
                box = Box.whole(weight.shape).narrow(0, start, min(start + length, rows))
                found[f"{module}.{re.sub(COUNTED, str(number), ending)}"] = Mosaic.of(weight.name, box)
        return found

    def as_published(self, whole: Collection[str] = ()) -> dict[str, ModelWeight]:
        """The weights by the names that published files have for them: pieces in place of weights that these files hold in pieces, unless
        they are in `whole`."""
        pieces: dict[str, dict[str, ModelWeight]] = {}
        for name, array in self.pieces.items():
            weight = self.weights[array.names[0]]
            pieces.setdefault(weight.name, {})[name] = replace(weight, name=name, shape=array.shape)
        inner = (pieces.get(name, {name: weight}) if name not in whole else {name: weight} for name, weight in self.weights.items())
        return {name: weight for found in inner for name, weight in found.items()}

    def parts(self, *, keep_fused: frozenset[str] = frozenset()) -> tuple[Part, ...]:
        """The parts of all weights. keep_fused: roles of fused weights, such as "attention.qkv", that stay one part."""
        return self.parts_of(self.weights.values(), keep_fused=keep_fused) if keep_fused else self._separate_parts

    def parts_of(self, weights: Iterable[ModelWeight], *, keep_fused: frozenset[str] = frozenset()) -> tuple[Part, ...]:
        """The parts of some weights of the model. keep_fused: as for `parts`."""
        return tuple(part for weight in weights for part in self._parts_of(weight, weight.role in keep_fused))

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The layers in groups whose weights are alike, layers for multi-token prediction included."""
        rows = grouped((weight for weight in self.weights.values() if weight.layer is not None), attrgetter("layer"))

        def form(layer: int) -> tuple[object, ...]:
            weights = ((w.pattern, w.role, w.expert, w.shape, w.declared.split, w.form, w.component) for w in rows[layer])
            return id(self.dimensions_in(layer)), *weights

        return tuple(LayerKind(tuple(layers), tuple(rows[layers[0]])) for layers in grouped(rows, form).values())

    @cached_property
    def weights_outside_layers(self) -> tuple[ModelWeight, ...]:
        """The weights that are in no numbered layer, such as the embedding."""
        return tuple(weight for weight in self.weights.values() if weight.layer is None)

    def reason_to_drop(self, name: str) -> str | None:
        """Why a tensor of that name is left out on purpose; None if it is not. Weights of the model never are."""
        return self._reason(name, self.architecture.dropped)

    def reason_not_served(self, name: str) -> str | None:
        """Why serving engines leave out a tensor that a checkpoint may contain besides the weights; None for other names."""
        return self._reason(name, self.architecture.carried)

    def _reason(self, name: str, reasons: Mapping[str, str]) -> str | None:
        """The reason for a tensor that is no weight of the model. The layer that {mtp} stands for in a pattern comes after the last one."""
        for pattern, reason in reasons.items() if name not in self.weights else ():
            if found := re.fullmatch(pattern, name):
                layer = found.groupdict().get("mtp")
                if layer is None or int(layer) >= self.dimensions["layers"]:
                    return reason
        return None

    def is_in_layer(self, name: str) -> bool:
        """Whether a name lies in one of the numbered layers that the architecture declares."""
        fronts = {weight.name.partition("{layer}")[0] for weight in self.architecture.weights if "{layer}" in weight.name}
        return any(name.startswith(front) and name.removeprefix(front)[:1].isdecimal() for front in fronts)

    def _all_weights(self) -> Iterator[ModelWeight]:
        present = self._present(self.dimensions)
        in_layers = {id(self.dimensions): present}
        layers = self.dimensions["layers"]
        done = False
        for (counted_by, is_in_layer, _), run in groupby(present, key=lambda item: _block_list(item[0])):
            if counted_by:
                of_block, sets = list(run), self._sets_among(self.dimensions[counted_by])
                for number in range(self.dimensions[counted_by]):
                    dimensions = {**self.dimensions, NUMBER_OF_WEIGHT: number}
                    yield from self._numbered(
                        [
                            (weight, self._shape(weight, dimensions) if weight.grows else shape)
                            for weight, shape in of_block
                            if all(number in sets[name] for name in weight.layers)
                        ],
                        None,
                        {counted_by: number},
                    )
            elif not is_in_layer:
                yield from self._numbered(list(run), None)
            elif not done:
                done = True
                for layer in range(layers + self.mtp_layers):
                    here = self.dimensions_in(layer)
                    if id(here) not in in_layers:
                        in_layers[id(here)] = self._present(here)
                    yield from self._in_layer([item for item in in_layers[id(here)] if self._is_in(layer, item[0])], layer)

    def _in_layer(self, weights: list[tuple[Weight, tuple[int, ...]]], layer: int) -> Iterator[ModelWeight]:
        """The tensors of one layer. In a shared block, a list has an item for each use of the block."""
        uses = self.uses_of_blocks.get(layer)
        if uses is None:
            yield from self._numbered(weights, layer)
            return
        for of_list, run in groupby(weights, key=lambda item: USE in item[0].name and item[0].name.partition(USE)[0]):
            items = list(run)
            for use in uses if of_list else (None,):
                yield from self._numbered(items, layer, {"use": use} if use is not None else None)

    def _is_in(self, layer: int, weight: Weight) -> bool:
        """Whether a layer has a weight."""
        return "{layer}" in weight.name and all(layer in self.layer_sets[name] for name in weight.layers)

    def _present(self, dimensions: Mapping[str, int]) -> list[tuple[Weight, tuple[int, ...]]]:
        """The weights that exist where these dimensions hold, with their shapes there."""
        missing = self.architecture.dimensions.keys() - dimensions.keys()
        present = [
            weight
            for weight in self.declared.weights
            if not missing & {weight.counted_by, *re.findall(r"\w+", " ".join(weight.shape))}
            and not ("experts" in missing and "{expert}" in weight.name)
            and self.holds(weight.when)
        ]
        return [(weight, self._shape(weight, {NUMBER_OF_WEIGHT: 0, **dimensions})) for weight in present]

    def _shape(self, weight: Weight, dimensions: Mapping[str, int]) -> tuple[int, ...]:
        shape = tuple(evaluate(axis, dimensions) for axis in weight.shape)
        if weight.fuses:
            own = shape[1:] if weight.stacked else shape
            rows = {role: evaluate(expression, dimensions) for role, expression in weight.fuses.items()}
            rounds = dimensions[weight.interleaved_by] if weight.interleaved_by else 1
            out_features = own[-1 if weight.transposed else 0]
            if sum(rows.values()) != out_features or any(count % rounds for count in rows.values()):
                interleaved = f" in {rounds} equal runs each, one per {weight.interleaved_by}" if weight.interleaved_by else ""
                raise RequestError(
                    f"it has {out_features} output features, and the roles fused in it have {' + '.join(map(str, rows.values()))}"
                    + interleaved,
                    where=weight.name,
                    why="So the declaration does not say which role each row has",
                    do="Compare its `shape` and `fuses` with the config",
                )
        return shape

    def _numbered(
        self, weights: list[tuple[Weight, tuple[int, ...]]], layer: int | None, numbers: Mapping[str, int] | None = None
    ) -> Iterator[ModelWeight]:
        """The tensors of one layer (None: outside of the layers), each weight followed by its scales, the experts one after the other.

        numbers: of other words in braces, such as the block of a vision tower.
        """
        optional = layer is not None and layer >= self.dimensions["layers"]
        for is_expert, run in groupby(weights, key=lambda item: "{expert}" in item[0].name):
            # What the experts share is computed once.
            alike = []
            for weight, shape in run:
                pattern = weight.name.format(layer="{layer}", expert="{expert}", **numbers) if numbers else weight.name
                runs = self._runs(weight)
                forms = [(form, self._components(form, pattern, shape, layer, runs)) for form in self._forms(weight, pattern)]
                alike.append((weight, shape, pattern, _names_in(layer, pattern), forms))
            for expert in range(self.dimensions["experts"]) if is_expert else (None,):
                for weight, shape, pattern, name_in, forms in alike:
                    name = name_in(expert)
                    form = self.quantization.form_of(name) if self.quantization and forms else None
                    if form is None:
                        yield ModelWeight(name, weight.role, shape, layer, weight, pattern, expert, optional)
                        continue
                    for component, stored, its, its_name, implied in next(components for of_form, components in forms if of_form is form):
                        name = its_name(expert)
                        yield ModelWeight(name, weight.role, stored, layer, weight, its, expert, optional, form, component, implied)
                    if weight.role == "attention.o" and self.quantization:
                        module = pattern.removesuffix(".weight").rpartition(".")[0]
                        for component in self.quantization.cache_scales:
                            pattern, role = f"{module}.{component.kind}", f"attention.{component.kind.rpartition('.')[2]}"
                            name, stored = numbered(pattern, layer, expert), component.single_shape
                            yield ModelWeight(name, role, stored, layer, weight, pattern, expert, True, component=component)

    def _forms(self, weight: Weight, pattern: str) -> list[StoredForm]:
        """The forms in which a weight can be stored, unless the config excludes its module; none: weights of its role are not quantized."""
        if self.quantization is None:
            return []
        is_linear = any(role in ROLES and ROLES[role].quantized for role in (weight.role, *weight.fuses))
        if not is_linear and not (self.quantization.everything and len(weight.shape) > 1):
            return []
        return [form for form in self.quantization.forms if form.fits(pattern) and form.transposed == weight.transposed]

    def _runs(self, weight: Weight) -> int:
        """The number of equal runs of rows of a weight, each with blocks of its own."""
        split = weight.split or (ROLES[weight.role].split if weight.role in ROLES else REPLICATE)
        return self.dimensions[split.heads] if split.exactly else 1

    @staticmethod
    def _components(
        form: StoredForm, pattern: str, shape: tuple[int, ...], layer: int | None, runs: int
    ) -> list[tuple[Component, tuple[int, ...], str, Callable[[int | None], str], bytes | None]]:
        """The components of a weight in a form: each with its shape, its pattern and its names, and its bytes if they are implied."""
        of_weight = (*shape[:-2], shape[-1], shape[-2]) if form.transposed else shape

        def stored(component: Component) -> tuple[int, ...]:
            if runs == 1:
                return component.shape(of_weight)
            rows, *others = component.shape((of_weight[0] // runs, *of_weight[1:]))
            return (runs * rows, *others)

        return [
            (component, stored(component), name, _names_in(layer, name), form.implied(component, of_weight))
            for name, component in form.names(pattern).items()
        ]

    @cached_property
    def _separate_parts(self) -> tuple[Part, ...]:
        return self.parts_of(self.weights.values())

    def _parts_of(self, weight: ModelWeight, keep_fused: bool) -> Iterator[Part]:
        whole = Mosaic.of(weight.name, Box.whole(weight.shape))
        if not weight.declared.stacked:
            yield from self._parts_of_array(weight, whole, weight.expert, keep_fused)
            return
        for number in range(weight.shape[0]):
            expert = number if weight.declared.stacked == EXPERTS else None
            yield from self._parts_of_array(weight, whole.item(number), expert, keep_fused)

    def _parts_of_array(self, weight: ModelWeight, array: Mosaic, expert: int | None, keep_fused: bool) -> Iterator[Part]:
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
        dimensions = self.dimensions_in(weight.layer)

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
    if component.is_vector:
        return array.split(0, array.shape[0]) if component.block_shape[0] is None else array
    if component.unit_axes:
        return array.without_axes((len(array.shape) - 3, len(array.shape) - 1))
    return array.transposed() if component.transposed else array


def _block_list(weight: Weight) -> tuple[str | None, bool, str]:
    """The dimension that a weight's name counts, whether it is in a layer, and the list of blocks that it belongs to."""
    return weight.counted_by, "{layer}" in weight.name, weight.name.partition("{")[0] if weight.counted_by else ""


def _names_in(layer: int | None, pattern: str) -> Callable[[int | None], str]:
    """A function from an expert to its name in one layer. Equal names are one object, since they are compared a million times."""
    front, number, back = pattern.replace("{layer}", str(layer)).partition("{expert}")
    return (lambda expert: intern(f"{front}{expert}{back}")) if number else (lambda _: intern(front))


@lru_cache(maxsize=16)
def primes_from(start: int, count: int) -> tuple[int, ...]:
    """The smallest primes that are at least `start`."""
    found: list[int] = []
    for number in range(max(start, 2), 1 << 63):
        if len(found) == count:
            break
        if number == 2 or (number % 2 and all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))):
            found.append(number)
    return tuple(found)


def numbered(pattern: str, layer: int | None, expert: int | None = None) -> str:
    """The name that a pattern with {layer} and {expert} stands for."""
    return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def evaluate(expression: str, values: Mapping[str, int], *, exact: bool = True) -> int:
    """The value of sums and differences of products such as "2 * heads * head_dim + rope_dim"; % is the remainder of a division.

    Raises: RequestError if a division leaves a remainder, or if the value is below 0. exact=False: divisions are rounded down instead.
    """
    terms = re.findall(r"(^|[+-])([^+-]+)", expression)
    result = sum(_product(term, values, exact) * (-1 if sign == "-" else 1) for sign, term in terms)
    if result < 0:
        raise RequestError(f"{expression!r} is below 0 for {dict(values)}", do="Check the config given with `model=`")
    return result


def _product(expression: str, values: Mapping[str, int], exact: bool) -> int:
    result = 1
    for sign, word in re.findall(r"(?:^|([*/%]))\s*(\w+)\s*", expression):
        number = int(word) if word.isdigit() else values[word]
        if sign == "/":
            result, rest = divmod(result, number)
            if rest and exact:
                raise RequestError(f"{expression!r} is not a whole number for {dict(values)}", do="Check the config given with `model=`")
        elif sign == "%":
            result %= number
        else:
            result *= number
    return result
