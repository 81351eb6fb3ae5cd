"""The sections `engines` and `frameworks` of a declaration: what a serving engine's class of the model does differently from the engine's
other classes, and how training frameworks compute the model.

    engines:
      vllm:
        every_stage: [embedding, final_norm, head]
        names: {mlp.gate: {"0.24": mlp.experts.gate}}
        assumes: {tie_word_embeddings: false, head_dim: hidden / heads}
        refuses: {tp > experts: "{tp} ranks are more than its {experts} experts"}
      sglang: {}
    frameworks:
      megatron:
        settings: {moe_router_score_function: sigmoid, moe_router_topk_scaling_factor: {key: routed_scaling_factor}}

The keys of an engine are fields of EngineRules, those of a framework are fields of Computation. An engine or framework that is listed, even
without a key, was compared with the declaration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from reshard.geometry.dtypes import FLOATING_WORDS, DType, from_user
from reshard.geometry.functions import FUNCTIONS, INVERTIBLE
from reshard.models.architecture import USE, Computation, ConfigKey, Dimension, LayersOf
from reshard.models.declared.node import Node, expression
from reshard.models.declared.single_rules import in_rows
from reshard.models.declared.weights import layer_set, split_of
from reshard.models.engine_rules import WORDS, EngineRules, ExtraTensor, Fusion, LeftOut, Rename, Version, renames_of, words_of
from reshard.models.roles import ROLES

_WORDS = r"[\w-]+(\.[\w-]+)*"
_ENGINE_WORDS = rf"[\w-]+(\.({USE}|[\w-]+))*"
_PARAMETERS = ("weight", "bias")
_NO_LAYER = (*(role.name for role in ROLES.values() if not role.in_layer), "vision", "audio")


def engines_of(node: Node, dimensions: Mapping[str, Dimension]) -> dict[str, EngineRules]:
    """The rules by the name of the engine's format. dimensions: those of the model.

    Raises: RequestError, naming the line, for a key that is not understood.
    """
    return {engine: _rules(inner, dimensions) for engine, inner in node.mapping().items()}


def _rules(node: Node, dimensions: Mapping[str, Dimension]) -> EngineRules:
    readers: dict[str, Callable[[Node], Any]] = {
        "of_class": lambda inner: {
            replace(other, value=when).condition(): _rules(other, dimensions) for when, other in inner.mapping().items()
        },
        **ENGINE_KEYS,
        "assumes": partial(_assumptions, dimensions=dimensions),
        "refuses": partial(_refusals, dimensions={**dimensions, **dict.fromkeys(WORDS, Dimension(()))}),
    }
    rules = (node if node.mapping().keys() <= readers.keys() else in_rows(node)).read(readers)
    if "names_in" in rules:
        rules["names"] = (*rules.pop("names_in"), *rules.get("names", ()))
    return EngineRules(**rules)


def _assumptions(node: Node, dimensions: Mapping[str, Dimension]) -> dict[str, object]:
    """Config key -> setting, or dimension -> expression."""
    return {key: expression(inner, dimensions) if key in dimensions else inner.setting() for key, inner in node.mapping().items()}


def _refusals(node: Node, dimensions: Mapping[str, Dimension]) -> dict[str, str]:
    """Condition -> reason. dimensions: also the words that a condition can name."""
    for when, inner in node.mapping().items():
        numbers = re.findall(r"\{(\w+)\}", inner.sentence())
        for term in re.split(" and | or ", when):
            sides = term.removeprefix("not ").split(" > ")
            if len(sides) > 1 or words_of(sides[0]) <= dimensions.keys():
                numbers += sides
            else:
                replace(inner, value=term).condition()
        for number in numbers:
            expression(replace(inner, value=number), dimensions, optional=True, signs="*/%+-")
    return dict(node.value)


def _version(node: Node) -> Version:
    text = node.word(r"\d+(\.\d+)*", 'a version in quotes, such as "0.32"')
    return tuple(int(number) for number in text.split("."))


def _names(node: Node, layers: str = "") -> tuple[Rename, ...]:
    return tuple(rename for words, inner in node.mapping().items() for rename in _renames(words, inner, layers))


def _renames(words: str, node: Node, layers: str) -> Iterator[Rename]:
    """Other words, or a mapping of versions to words."""
    node.inner("", words).word(_WORDS, "words of a name, with dots between them")
    versions = node.mapping().items() if isinstance(node.value, dict) else ()
    by_version = {_version(inner.inner("", since)): _engine_words(inner) for since, inner in versions}
    return renames_of(words, by_version or {(): _engine_words(node)}, layers)


def _engine_words(node: Node) -> str:
    return node.word(_ENGINE_WORDS, "words of the engine's name, with dots between them")


def _parameters(node: Node) -> frozenset[tuple[str, str]]:
    pairs = [item.word(r"[\w.-]+\.\w+", "a role and a parameter, such as attention.o.bias").rpartition(".") for item in node.items()]
    if wrong := next((pair for pair in pairs if pair[2] not in _PARAMETERS), None):
        raise node.error(f"{''.join(wrong)!r} does not end in .weight or .bias", do="Write the role and the parameter")
    return frozenset((role, parameter) for role, _, parameter in pairs)


def _extra_tensor(name: str, node: Node) -> ExtraTensor:
    values = ("square_root_of", "zeros", "ones")
    keys = node.mapping(("beside", *values, "dtype", "until"))
    stated = [key for key in values if key in keys]
    if "beside" not in keys or len(stated) != 1:
        raise node.error(
            "it needs `beside` and one of `square_root_of`, `zeros` and `ones`",
            do="Write {beside: ROLE, square_root_of: DIMENSION}, {beside: ROLE, zeros: SHAPE} or {beside: ROLE, ones: SHAPE}",
        )
    root = _dimension(keys["square_root_of"]) if stated == ["square_root_of"] else ""
    return ExtraTensor(
        _role(keys["beside"]),
        name,
        float(stated == ["ones"]),
        _dtype(keys["dtype"]) if "dtype" in keys else None,
        () if root else tuple(str(axis.value) for axis in keys[stated[0]].items()),
        root,
        until=_version(keys["until"]) if "until" in keys else None,
    )


def _fusions(module: str, node: Node) -> Iterator[Fusion]:
    """A list of roles; or several such lists, for modules of the same name in several places of a layer."""
    groups = node.items() if isinstance(node.value, list) and any(isinstance(item, list) for item in node.value) else [node]
    return (Fusion(tuple(map(_role, group.items())), module) for group in groups)


def _left_out(names: str, node: Node) -> LeftOut:
    """The reason; or a mapping of the reason and the key for the last block that is used."""
    if not isinstance(node.value, dict):
        return LeftOut(names, node.sentence("the reason"))
    keys = node.mapping(("behind", "because"))
    if missing := next((key for key in ("behind", "because") if key not in keys), None):
        raise node.error(f"it has no `{missing}`", do="Write the reason, or {behind: KEY, because: REASON}")
    return LeftOut(names, keys["because"].sentence("the reason"), keys["behind"].config_key())


def _dtype(node: Node) -> DType | None:
    """An element type; None for the one that the model computes in."""
    return from_user(node.one_of(("model", *FLOATING_WORDS)))


def _role(node: Node) -> str:
    return node.word(r"[\w.-]+", "a role")


def _dimension(node: Node) -> str:
    return node.word(r"[a-z_][a-z0-9_]*", "a dimension")


# Those that need the dimensions of the model, `of_class`, `assumes` and `refuses`, are read by _rules.
ENGINE_KEYS: dict[str, Callable[[Node], Any]] = {
    "since": _version,
    "names": _names,
    "names_in": lambda node: tuple(chain(*(_names(inner, layer_set(inner.inner("", of))) for of, inner in node.mapping().items()))),
    "fusions": lambda node: tuple(fusion for module, inner in node.mapping().items() for fusion in _fusions(module, inner)),
    "even_rows_first": lambda node: {role: _dimension(inner) for role, inner in node.mapping().items()},
    "side_by_side": lambda node: frozenset(map(_role, node.items())),
    "unit_axes": lambda node: {role: tuple(axis.number(0) for axis in inner.items()) for role, inner in node.mapping().items()},
    "dtypes": lambda node: {role: _dtype(inner) for role, inner in node.mapping().items()},
    "values": lambda node: {role: inner.one_of(FUNCTIONS) for role, inner in node.mapping().items()},
    "splits": lambda node: {role: split_of(inner) for role, inner in node.mapping().items()},
    "keep_fused": lambda node: {role: _version(inner) for role, inner in node.mapping().items()},
    "tied_table_stored_as": lambda node: node.one_of(("head", "embedding", "both")),
    "every_stage": lambda node: frozenset(item.one_of(_NO_LAYER) for item in node.items()),
    "module_names": lambda node: {role: inner.word() for role, inner in node.mapping().items()},
    "unsupported": _parameters,
    "left_out": lambda node: tuple(_left_out(names, inner) for names, inner in node.mapping().items()),
    "zeros": _parameters,
    "padded_rows": lambda node: {role: inner.number(1) for role, inner in node.mapping().items()},
    "quantized_steps": lambda node: {role: inner.number(1) for role, inner in node.mapping().items()},
    "layer_lists": lambda node: {layer_set(inner.inner("", name)): _engine_words(inner) for name, inner in node.mapping().items()},
    "in_place_of": lambda node: {role: _role(inner) for role, inner in node.mapping().items()},
    "extra_tensors": lambda node: tuple(_extra_tensor(name, inner) for name, inner in node.mapping().items()),
    "config_defaults": lambda node: tuple((key, inner.setting()) for key, inner in node.mapping().items()),
    "notes": lambda node: tuple(map(Node.sentence, node.items())),
}


_FRAMEWORK_KEYS: dict[str, Callable[[Node], Any]] = {
    "settings": lambda node: {name: _value(inner) for name, inner in node.mapping().items()},
    "values": lambda node: {role: inner.one_of(INVERTIBLE) for role, inner in node.mapping().items()},
    "assumes": lambda node: tuple((key, _plain(inner)) for key, inner in node.mapping().items()),
    "lacks": partial(Node.sentence, expected="what the framework lacks"),
    "built_by": partial(Node.sentence, expected="a library and its class"),
}


def frameworks_of(node: Node) -> dict[str, Computation]:
    """The computations by the name of the framework's format. Raises RequestError, naming the line, for what is not understood."""
    return {framework: Computation(**inner.read(_FRAMEWORK_KEYS)) for framework, inner in node.mapping().items()}


def _value(node: Node) -> object:
    if isinstance(node.value, dict):
        keys = node.mapping(("key", "when", "layers"))
        if ("key" in keys) == ("layers" in keys):
            raise node.unexpected("a value, {key: KEY} with a key of the config, or {layers: SET} with a set of layers")
        when = keys["when"].condition() if "when" in keys else None
        return ConfigKey(keys["key"].config_key(), when) if "key" in keys else LayersOf(layer_set(keys["layers"]))
    return _plain(node)


def _plain(node: Node) -> object:
    if not isinstance(node.value, bool | int | float | str):
        raise node.unexpected("true, false, a number or a word")
    return node.value
