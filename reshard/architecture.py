"""Architecture: a model as a declaration. Names, roles and shapes of its weights in terms of its config; never code.

A file in architectures/ is named after the `model_type` of the configs that it speaks for. `Model` is an architecture
with the numbers of one config put in.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from reshard.errors import RequestError


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight, or one per layer where the name holds {layer}.

    `shape` gives each axis as an expression of dimensions ("heads * head_dim"); `when` names a config flag without which
    the weight is absent, or, with a leading "not ", with which it is.
    """

    name: str
    role: str
    shape: tuple[str, ...]
    when: str | None = None


@dataclass(frozen=True, slots=True)
class Dimension:
    """Where a config says a number: its keys, in order of preference, or an expression of other dimensions."""

    keys: tuple[str, ...]
    default: str | None = None


@dataclass(frozen=True)
class Architecture:
    """What all models of one `model_type` have in common.

    `tied` names the head's weight and the embedding that it shares when the config says tie_word_embeddings (or, with
    `tied_by_default`, when it says nothing). `dropped` maps patterns of names to the reason why nobody needs them.
    """

    model_type: str
    dimensions: Mapping[str, Dimension]
    weights: tuple[Weight, ...]
    tied: tuple[str, str] = ("lm_head.weight", "model.embed_tokens.weight")
    tied_by_default: bool = False
    dropped: Mapping[str, str] = field(default_factory=dict)

    def plus(self, *weights: Weight, model_type: str) -> Architecture:
        """This architecture with some weights more.

        One of a name that is there already takes its place; a new one comes last in its module, where a subclass registers it. So the
        order stays that of the model's parameters.
        """
        own = list(self.weights)
        for weight in weights:
            names = [each.name for each in own]
            if weight.name in names:
                own[names.index(weight.name)] = weight
                continue
            module = weight.name.rsplit(".", 2)[0] + "."
            own.insert(1 + max(i for i, name in enumerate(names) if name.startswith(module)), weight)
        return replace(self, model_type=model_type, weights=tuple(own))

    def called(self, model_type: str) -> Architecture:
        """The same under another name."""
        return replace(self, model_type=model_type)


@dataclass(frozen=True, slots=True)
class ModelWeight:
    """A weight of one model: its canonical name, role, shape, and the layer it belongs to (None outside of the layers)."""

    name: str
    role: str
    shape: tuple[int, ...]
    layer: int | None


@dataclass(frozen=True)
class Model:
    """An architecture and one config's numbers."""

    architecture: Architecture
    config: Mapping[str, Any]

    @cached_property
    def dimensions(self) -> dict[str, int]:
        """Every dimension's value. Raises RequestError, naming the key, if the config does not say one."""
        found: dict[str, int] = {}
        for name, dimension in self.architecture.dimensions.items():
            value = next((self.config[key] for key in dimension.keys if self.config.get(key) is not None), None)
            if value is None and dimension.default:
                value = evaluate(dimension.default, found)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(
                    f"config.json gives {value!r} for {' or '.join(dimension.keys)}, a positive number is needed",
                    why=f"A {self.architecture.model_type} model is laid out by it",
                    do="Give the model's own config with --model DIR",
                )
            found[name] = value
        return found

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        value = self.config.get("tie_word_embeddings")
        return self.architecture.tied_by_default if value is None else bool(value)

    @cached_property
    def weights(self) -> dict[str, ModelWeight]:
        """The weights by canonical name, in the model's order; a tied head is not among them."""
        absent = {self.architecture.tied[0]} if self.is_tied else set()
        return {weight.name: weight for weight in self._declared() if weight.name not in absent}

    def reason_to_drop(self, name: str) -> str | None:
        """Why a tensor of that name is left out on purpose; None if it is not."""
        return next((why for pattern, why in self.architecture.dropped.items() if re.fullmatch(pattern, name)), None)

    def _declared(self) -> Iterator[ModelWeight]:
        present = [weight for weight in self.architecture.weights if self._is_present(weight)]
        layered = [weight for weight in present if "{layer}" in weight.name]
        done = False
        for weight in present:
            if "{layer}" not in weight.name:
                yield self._numbered(weight, None)
            elif not done:
                done = True
                for layer in range(self.dimensions["layers"]):
                    yield from (self._numbered(each, layer) for each in layered)

    def _is_present(self, weight: Weight) -> bool:
        if weight.when is None:
            return True
        wanted = not weight.when.startswith("not ")
        return bool(self.config.get(weight.when.removeprefix("not "))) is wanted

    def _numbered(self, weight: Weight, layer: int | None) -> ModelWeight:
        shape = tuple(evaluate(axis, self.dimensions) for axis in weight.shape)
        return ModelWeight(weight.name.replace("{layer}", str(layer)), weight.role, shape, layer)


def evaluate(expression: str, values: Mapping[str, int]) -> int:
    """The value of a product such as "2 * heads * head_dim" or "hidden / heads"; a division must come out even."""
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


def find_model(config: Mapping[str, Any] | None) -> Model | None:
    """The model that a Hugging Face config describes; None if there is no config or its architecture is not declared.

    The architecture is looked up by the config's `model_type`, as the file of that name in architectures/.
    """
    model_type = str((config or {}).get("model_type", "")).replace("-", "_")
    if config is None or not re.fullmatch(r"[a-z][a-z0-9_]*", model_type):
        return None
    module_name = f"reshard.architectures.{model_type}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        return None
    return Model(module.ARCHITECTURE, config)


def known_model_types() -> tuple[str, ...]:
    """The model types that are declared, sorted."""
    from pkgutil import iter_modules

    from reshard import architectures

    return tuple(sorted(module.name for module in iter_modules(architectures.__path__)))
