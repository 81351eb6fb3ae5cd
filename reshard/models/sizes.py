"""Sizes: what a config says for a declared architecture: its settings, its dimensions, and which layers are in which set.

Architecture + config -> settings, conditions    "num_experts", "is_gated is silu"
                      -> dimensions              {"hidden": 4096, ...}, in each layer
                      -> sets of layers          {"sparse": {3, 4, 5}, ...}
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from reshard.errors import RequestError
from reshard.geometry.value import value
from reshard.models.architecture import SHARED_BLOCK, Architecture, Dimension, LayerRule, PrimeSum
from reshard.models.config_values import entries, value_at, whole_number
from reshard.models.quantization import quantization_of
from reshard.models.stored_forms import Quantization

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
class Sizes:
    """What a config says for an architecture."""

    architecture: Architecture
    """The declaration."""
    config: Mapping[str, Any]
    """The content of config.json."""

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

    def holds(self, when: str | None) -> bool:
        """Whether a condition of the declaration holds: a key of the config that is set, "KEY is VALUE", or one of these after "not ";
        several are joined by " and ", which binds first, and " or ". None always holds."""
        return when is None or any(all(map(self._is_so, alternative.split(" and "))) for alternative in when.split(" or "))

    def _is_so(self, when: str) -> bool:
        key, _, value = when.removeprefix("not ").partition(" is ")
        setting = self.setting(key)
        return (str(setting) == value if value else bool(setting)) is not when.startswith("not ")

    @cached_property
    def quantization(self) -> Quantization | None:
        """How the weights are quantized; None if they are not."""
        return quantization_of(self.config)

    @cached_property
    def declared(self) -> Architecture:
        """The architecture with the names of this model's weights: where linear layers are quantized, an expert is a module of its own."""
        return self.architecture.by_expert() if self.quantization and self.quantization.by_expert else self.architecture

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
            if dimension.counts and isinstance(value, list | tuple | str | Mapping):
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

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The indices of the layers without experts, layers for multi-token prediction excluded."""
        return tuple(layer for layer in range(self.dimensions["layers"]) if layer not in self.sparse_layers)

    @cached_property
    def layer_sets(self) -> dict[str, frozenset[int]]:
        """The indices of the layers of each set that a declaration can name under `layers`."""
        layers = self.dimensions["layers"]
        every = frozenset(range(layers + self.mtp_layers))
        sets = {"sparse": self.sparse_layers, "mtp": every - frozenset(range(layers)), "dense": every - self.sparse_layers}
        return self.sets_among(len(every), {**sets, SHARED_BLOCK: frozenset(self.uses_of_blocks)})

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

    def sets_among(self, count: int, sets: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
        """The indices in these sets and in those that the declaration adds, among `count` layers or blocks; and in what they leave."""
        sets = {**sets, **{name: self._among(rule, count) for name, rule in self.architecture.layer_sets.items()}}
        return {**sets, **{f"not {name}": frozenset(range(count)) - of for name, of in sets.items()}}

    def _among(self, rule: LayerRule, count: int) -> frozenset[int]:
        if not self.holds(rule.when):
            return frozenset()
        defaults, lists = self.architecture.defaults, (*rule.keys, *((rule.indices,) if rule.indices else ()))
        if any(self.stated(key) is not None for key in lists):
            defaults = {key: value for key, value in defaults.items() if key not in lists}
        return rule.among({**defaults, **self.settings}, count)


@lru_cache(maxsize=16)
def primes_from(start: int, count: int) -> tuple[int, ...]:
    """The smallest primes that are at least `start`."""
    primes: list[int] = []
    for number in range(max(start, 2), 1 << 63):
        if len(primes) == count:
            break
        if number == 2 or (number % 2 and all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))):
            primes.append(number)
    return tuple(primes)


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
