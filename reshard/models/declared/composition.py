"""What a declaration is made of: the model that it extends, and the towers that it places beside the language model.

    extends: {text_config: qwen2, vision_config: siglip_vision_model}     the parts that the model_type in these inner configs names,
                                                                          or else qwen2 and siglip_vision_model
    extends: {text_config: {only: qwen3}, vision_config: {only: qwen3_vl_vision}}     these, whatever the inner configs say
    towers:
      vision_tower: {tower: vision_config}                                names of the tower's weights begin with vision_tower.
    extends: {.: {only: whisper}}                                         a tower whose sizes stand in the config itself
    extends: llava                                                        the parts of llava, at their places there
    defaults: {text_config.model_type: qwen2}                             the part of an inner config that names none

A tower is a declaration of its own, in a file that says `tower:` in place of `model_type:`. It is about the inner config: its keys are
those of the inner config, and its names have no beginning. Both get one where a model places the tower.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace
from functools import reduce
from typing import Protocol

from reshard.geometry.value import value
from reshard.models.architecture import Architecture, Dimension
from reshard.models.declared.node import Node
from reshard.models.engine_rules import EngineRules

TOWERS = "towers/"
# What follows the key of an inner config in the key of its model_type.
_PART = ".model_type"

# The key of an inner config -> the model_type that it names.
Named = Mapping[str, str]


class Find(Protocol):
    """Finds declarations."""

    def __call__(self, name: str, named: tuple[tuple[str, str], ...] = ()) -> Architecture | None:
        """The declaration of a name; None if there is none. The name of a tower begins with TOWERS. named: the items of a Named, for the
        parts that the declaration leaves to the config."""


@value
class Composition:
    """The declarations that a declaration is made of."""

    model: Architecture | None = None
    """The model that is extended, under the names that its weights have here; None: no model is."""
    towers: Mapping[str, Architecture] = field(default_factory=dict)
    """The key of the config for an inner config -> the tower that it describes, under the names and keys that it has here."""
    text_config: str | None = None
    """The config's key for the inner config of the language model, if `extends` names it."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """The key of the config for an inner config whose model_type names the part -> the part that is meant if it names none."""

    @property
    def declarations(self) -> tuple[Architecture, ...]:
        """The model that is extended, if there is one, and the towers."""
        return (*([self.model] if self.model else []), *self.towers.values())

    @property
    def engines(self) -> tuple[Mapping[str, EngineRules], ...]:
        """The rules of the parts, each by engine: the towers, a language model that the config chooses, the parts of the model that is
        extended."""
        of_model: tuple[Mapping[str, EngineRules], ...] = ()
        if self.model:
            is_chosen = self.text_config in self.chosen
            of_model = (_of_language_model(self.model.engines, self.text_config),) if is_chosen else self.model.engines_of_parts
        return (*of_model, *(tower.engines for tower in self.towers.values()))

    @property
    def dimensions(self) -> dict[str, Dimension]:
        """The dimensions of the parts."""
        return {name: dimension for part in self.declarations for name, dimension in part.dimensions.items()}

    def rules(self, own: Mapping[str, EngineRules]) -> dict[str, EngineRules]:
        """The rules of the engines that a declaration lists, with those of its parts put in. An engine that was not compared with one of
        these was not compared with the model."""
        return {
            engine: _with_parts(rules, [part[engine] for part in self.engines])
            for engine, rules in own.items()
            if all(engine in part for part in self.engines)
        }


def _of_language_model(engines: Mapping[str, EngineRules], key: str | None) -> dict[str, EngineRules]:
    """The rules of a language model, whose config is the inner config `key`."""
    return {
        engine: replace(rules, config_defaults=tuple((f"{key}.{own}", setting) for own, setting in rules.config_defaults))
        for engine, rules in engines.items()
    }


def _with_parts(own: EngineRules, parts: Collection[EngineRules]) -> EngineRules:
    """The rules of the parts with those of the class around them put in, also for its other classes."""
    if not parts:
        return own
    inner = reduce(EngineRules.with_quirks, parts)
    return replace(inner.with_quirks(own), of_class={name: inner.with_quirks(rules) for name, rules in own.of_class.items()})


def declared(node: Node, find: Find, folder: str = "", named: Named | None = None) -> Architecture:
    """The declaration that a node names. folder: TOWERS for a tower. named: as for `composition_of`."""
    architecture = find(folder + node.word(r"[\w.-]+"), tuple((named or {}).items()))
    if architecture is None and folder:
        raise node.error(f"no tower is declared as {node.value!r}", do="reshard/architectures/towers/ has the declared towers")
    if architecture is None:
        raise node.error(f"no model is declared as {node.value!r}", do="`reshard architectures` lists the declared models")
    return architecture


def usual_parts(keys: Mapping[str, Node]) -> dict[str, str]:
    """The key of an inner config -> the model_type that it has by the declaration's own defaults."""
    defaults = keys["defaults"].mapping() if "defaults" in keys else {}
    return {key.removesuffix(_PART): node.word() for key, node in defaults.items() if key.endswith(_PART)}


def composition_of(keys: Mapping[str, Node], find: Find, named: Named) -> Composition:
    """The parts of a declaration. named: those that the config names, as far as it is known, or else the defaults of the declaration.

    Raises: RequestError, naming the line, if a part is not declared, or a tower has no place or two.
    """
    places = _places(keys)
    node = keys.get("extends")
    if node is not None and not isinstance(node.value, dict):
        if places:
            raise next(iter(places.values()))[1].error(
                "`extends` does not say which tower the inner config describes", do="Write extends: {text_config: MODEL, KEY: TOWER}"
            )
        whole = declared(node, find, named=named)
        usual = {key: name for key, name in usual_parts(keys).items() if key in whole.chosen}
        return Composition(_named_here(whole, keys), chosen={**whole.chosen, **usual})
    inner = node.mapping() if node else {}
    if strange := next((key for key in places if key not in inner), None):
        raise places[strange][1].error(f"`extends` names no tower for {strange}", do=f"Write extends: {{{strange}: TOWER}}")
    models = [key for key in inner if key not in places]
    if len(models) > 1:
        raise inner[models[1]].error(
            "one part is the language model, and each other one is a tower, which needs a place",
            do=f"Add `NAME: {{tower: {models[1]}}}` under `towers`, where NAME is the beginning of the tower's names",
        )
    chosen = {key: part.word() for key, part in inner.items() if not isinstance(part.value, dict)}
    nodes = {key: _part(part, named.get(key)) for key, part in inner.items()}
    towers = {key: _placed(declared(nodes[key], find, TOWERS), key, *places[key]) for key in inner if key in places}
    text = models[0] if models else None
    model = _named_here(declared(nodes[text], find), keys) if text else None
    return Composition(model, towers, text, chosen)


def _part(node: Node, named: str | None) -> Node:
    """The name of a part: the only one, or the one that the config names, or the usual one."""
    if isinstance(node.value, dict):
        only = node.mapping(("only",))
        if "only" not in only:
            raise node.unexpected("a part, or {only: PART} for a part that the config does not choose")
        return only["only"]
    return replace(node, value=named) if named else node


def _places(keys: Mapping[str, Node]) -> dict[str, tuple[str, Node]]:
    """The key of the config for the inner config of a tower -> the beginning of its names, and the node that says so."""
    places: dict[str, tuple[str, Node]] = {}
    for name, node in keys["towers"].mapping().items() if "towers" in keys else ():
        if not is_place(node):
            continue
        key = node.mapping(("tower", "inside"))["tower"].config_key()
        if key in places:
            raise node.error(f"the tower of {key} has two places")
        places[key] = name, node
    return places


def is_place(node: Node) -> bool:
    """Whether an entry under `towers` is the place of a tower, and no weight."""
    return isinstance(node.value, dict) and "tower" in node.value


def _named_here(model: Architecture, keys: Mapping[str, Node]) -> Architecture:
    """The model that is extended, with other first words in the names of its tensors."""
    if "renamed" not in keys:
        return model
    words = {old: inner.word() for old, inner in keys["renamed"].mapping().items()}

    def renamed(name: str, escaped: Callable[[str], str] = str) -> str:
        """The name, or with re.escape the regular expression, with its first words replaced."""
        for old, new in words.items():
            if name.startswith(escaped(old + ".")):
                return escaped(new + ".") + name.removeprefix(escaped(old + "."))
        return name

    return replace(
        model,
        weights=tuple(replace(weight, name=renamed(weight.name)) for weight in model.weights),
        tied=(renamed(model.tied[0]), renamed(model.tied[1])),
        dropped={renamed(pattern, re.escape): reason for pattern, reason in model.dropped.items()},
        carried={renamed(pattern, re.escape): reason for pattern, reason in model.carried.items()},
    )


def _placed(tower: Architecture, key: str, name: str, node: Node) -> Architecture:
    """The tower under the names and config keys that it has in a model."""
    keys = node.mapping()
    module = keys["inside"].word() + "." if "inside" in keys else ""
    if module and not any(weight.name.startswith(module) for weight in tower.weights):
        raise keys["inside"].error(f"no weight of {tower.model_type} is in {module[:-1]}")
    escaped = re.escape(module), re.escape(name + ".")
    return replace(
        tower,
        dimensions={dimension_name: _of_inner(dimension, key) for dimension_name, dimension in tower.dimensions.items()},
        weights=tuple(
            replace(weight, name=f"{name}.{weight.name.removeprefix(module)}", when=_condition(weight.when, key))
            for weight in tower.weights
            if weight.name.startswith(module)
        ),
        dropped={escaped[1] + pattern.removeprefix(escaped[0]): reason for pattern, reason in tower.dropped.items()},
        carried={escaped[1] + pattern.removeprefix(escaped[0]): reason for pattern, reason in tower.carried.items()},
        defaults={_whole_key(key, inner): setting for inner, setting in tower.defaults.items()},
        layer_sets={kind: replace(rule, indices=_whole_key(key, rule.indices)) for kind, rule in tower.layer_sets.items() if rule.indices},
    )


def _of_inner(dimension: Dimension, key: str) -> Dimension:
    """A dimension whose keys are those of an inner config, with the keys of the whole config."""
    return replace(
        dimension,
        keys=tuple(_whole_key(key, inner) for inner in dimension.keys),
        when=_condition(dimension.when, key),
        otherwise=_of_inner(dimension.otherwise, key) if dimension.otherwise else None,
    )


def _condition(when: str | None, key: str) -> str | None:
    """A condition on an inner config as one on the whole config."""
    if when is None:
        return None
    return re.sub(r"(^| and | or )(not )?", lambda term: term[0] + _whole_key(key, ""), when)


def _whole_key(key: str, inner: str) -> str:
    """A key of an inner config as one of the whole config, which is "." itself."""
    return inner if key == "." else f"{key}.{inner}"
