"""The section `engines` of a declaration: what a serving engine's class of the model does differently from the engine's other classes.

    engines:
      vllm:
        every_stage: [embedding, final_norm, head]
        names: {mlp.gate: {"0.24": mlp.experts.gate}}
      sglang: {}

The keys of an engine are the fields of ModelQuirks. An engine that is listed, even without a key, was compared with the declaration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reshard.geometry.dtypes import FLOATING_WORDS, DType, from_user
from reshard.geometry.functions import FUNCTIONS
from reshard.models.declared.node import Node
from reshard.models.declared.weights import layer_set, split_of
from reshard.models.quirks import EngineName, ModelQuirks, Version
from reshard.models.roles import ROLES

_WORDS = r"[\w-]+(\.[\w-]+)*"
_PARAMETERS = ("weight", "bias")
_NO_LAYER = (*(role.name for role in ROLES.values() if not role.in_layer), "vision")


def engines_of(node: Node) -> dict[str, ModelQuirks]:
    """The quirks by the name of the engine's format. Raises RequestError, naming the line, for a key that is not understood."""
    return {engine: _quirks(inner) for engine, inner in node.mapping().items()}


def _quirks(node: Node) -> ModelQuirks:
    return ModelQuirks(**{key: ENGINE_KEYS[key](value) for key, value in node.mapping(tuple(ENGINE_KEYS)).items()})


def _version(node: Node) -> Version:
    text = node.word(r"\d+(\.\d+)*", 'a version in quotes, such as "0.32"')
    return tuple(int(number) for number in text.split("."))


def _names(node: Node) -> tuple[EngineName, ...]:
    return tuple(_name(words, inner) for words, inner in node.mapping().items())


def _name(words: str, node: Node) -> EngineName:
    """Other words, or a mapping of versions to words."""
    node.inner("", words).word(_WORDS, "words of a name, with dots between them")
    if not isinstance(node.value, dict):
        return EngineName(words, (((), _engine_words(node)),))
    by_version = {_version(inner.inner("", since)): _engine_words(inner) for since, inner in node.mapping().items()}
    return EngineName(words, tuple(sorted(by_version.items())))


def _engine_words(node: Node) -> str:
    return node.word(_WORDS, "words of the engine's name, with dots between them")


def _unsupported(node: Node) -> frozenset[tuple[str, str]]:
    pairs = [item.word(r"[\w.-]+\.\w+", "a role and a parameter, such as attention.o.bias").rpartition(".") for item in node.items()]
    if wrong := next((pair for pair in pairs if pair[2] not in _PARAMETERS), None):
        raise node.error(f"{''.join(wrong)!r} does not end in .weight or .bias", do="Write the role and the parameter")
    return frozenset((role, parameter) for role, _, parameter in pairs)


def _settings(node: Node) -> tuple[tuple[str, object], ...]:
    return tuple((key, inner.setting()) for key, inner in node.mapping().items())


def _dtype(node: Node) -> DType | None:
    """An element type; None for the one that the model computes in."""
    return from_user(node.one_of(("model", *FLOATING_WORDS)))


def _roles(node: Node) -> tuple[str, ...]:
    return tuple(item.word(r"[\w.-]+", "a role") for item in node.items())


def _sentence(node: Node) -> str:
    if not isinstance(node.value, str) or not node.value.strip():
        raise node.unexpected("a sentence")
    return node.value


ENGINE_KEYS: dict[str, Callable[[Node], Any]] = {
    "of_class": lambda node: {name: _quirks(inner) for name, inner in node.mapping().items()},
    "since": _version,
    "names": _names,
    "names_in": lambda node: {layer_set(inner.inner("", name)): _names(inner) for name, inner in node.mapping().items()},
    "fusions": lambda node: {module: _roles(inner) for module, inner in node.mapping().items()},
    "even_rows_first": lambda node: {role: inner.word(r"[a-z_][a-z0-9_]*", "a dimension") for role, inner in node.mapping().items()},
    "dtypes": lambda node: {role: _dtype(inner) for role, inner in node.mapping().items()},
    "values": lambda node: {role: inner.one_of(FUNCTIONS) for role, inner in node.mapping().items()},
    "splits": lambda node: {role: split_of(inner) for role, inner in node.mapping().items()},
    "keep_fused": lambda node: {role: _version(inner) for role, inner in node.mapping().items()},
    "tied_table_stored_as": lambda node: node.one_of(("head", "embedding", "both")),
    "every_stage": lambda node: frozenset(item.one_of(_NO_LAYER) for item in node.items()),
    "module_names": lambda node: {role: inner.word() for role, inner in node.mapping().items()},
    "unsupported": _unsupported,
    "tp_at_most_experts": Node.flag,
    "least_expert_width": lambda node: node.number(1),
    "quantized_steps": lambda node: {role: inner.number(1) for role, inner in node.mapping().items()},
    "stages_need_experts": Node.flag,
    "one_stage": Node.flag,
    "one_stage_if": Node.condition,
    "layer_lists": lambda node: {layer_set(inner.inner("", name)): _engine_words(inner) for name, inner in node.mapping().items()},
    "in_place_of": lambda node: {role: inner.word(r"[\w.-]+", "a role") for role, inner in node.mapping().items()},
    "stores_normalizer": Node.flag,
    "normalizer_until": _version,
    "quantizes_router": Node.flag,
    "derives_head_dim": Node.flag,
    "all_layers_sparse": Node.flag,
    "config_defaults": _settings,
    "assumed_settings": _settings,
    "not_loadable": _sentence,
    "notes": lambda node: tuple(_sentence(item) for item in node.items()),
}
