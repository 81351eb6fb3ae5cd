"""Declarations: an architecture as a YAML file, read and checked. docs/architectures.md describes the language.

    language: 2
    model_type: mymodel
    extends: llama
    dimensions: {rank: adapter_rank}
    weights:
      model.layers.*.self_attn.q_proj.bias: attention.q
      model.layers.*.adapter.weight: {role: my.adapter, split: column, shape: [rank, hidden]}

A declaration is data, never code. A key or value that is not understood is refused with its line; nothing is skipped or guessed. The
declarations of other models come from the function `find`, so that this file knows neither the folder of the built-in ones nor packages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from reshard.errors import RequestError
from reshard.models.architecture import (
    LAYER_SETS,
    SHARED_BLOCK,
    USE,
    Architecture,
    Dimension,
    LayerRule,
    LayersOf,
    PrimeSum,
    SharedBlocks,
    Weight,
)
from reshard.models.declared.composition import TOWERS, Composition, Find, Named, composition_of, declared, is_place, usual_parts
from reshard.models.declared.engines import engines_of, frameworks_of
from reshard.models.declared.node import KEY_OF_LAYER, Node, expression, parse
from reshard.models.declared.version_1 import in_version_2
from reshard.models.declared.weights import NUMBER, WeightReader, layer_set, overlap
from reshard.models.quantization import SETTING, quantization_of
from reshard.models.roles import ABOUT_ROLES

# The version of the language that is described in docs/architectures.md and that drafts are written in.
LANGUAGE = 2
# Stands for everything that a draft leaves open.
UNKNOWN = "?"
KEYS = (
    "language", "model_type", "class", "extends", "like", "instead", "text_config", "without", "renamed", "dimensions", "towers",
    "weights", "tied", "sparse_layers", "layer_sets", "shared_blocks", "mtp_layers", "dropped", "carried", "defaults",
    "vocabulary_multiple", "quantized_as", "engines", "frameworks",
)  # fmt: skip
TOWER_KEYS = ("language", "tower", "extends", "without", "dimensions", "weights", "layer_sets", "dropped", "carried", "defaults", "engines")


def parse_declaration(content: bytes, where: str, find: Find, named: Named | None = None) -> Architecture:
    """The architecture that a declaration declares, or the tower.

    where: the file, as errors name it. find: returns the declarations of the models and towers that `extends` and `like` name. named: the
    key of an inner config -> the model_type that it names, where `extends` leaves a part to the config. A part that is not named is the one
    of the declaration.

    Raises: RequestError, naming the line, if any part of the declaration is not understood.
    """
    root = _root(content, where)
    _refuse_unknown(root)
    is_tower = "tower" in root.value if isinstance(root.value, dict) else False
    keys = root.mapping(TOWER_KEYS if is_tower else KEYS)
    if not is_tower and "model_type" not in keys:
        raise root.error("it has no model_type", do="Add `model_type:` and the model_type of the model's config")
    name = keys["tower" if is_tower else "model_type"].word(r"[A-Za-z][\w.-]*")
    named = {**usual_parts(keys), **(named or {})}
    parts = composition_of(keys, (lambda name, named=(): find(TOWERS + name, named)) if is_tower else find, named)
    base = parts.model
    if base is None and (needless := next((key for key in ("without", "renamed") if key in keys), None)):
        raise keys[needless].error(f"`{needless}` is about the weights of the model that `extends:` names, and there is no such model")
    dimensions = _dimensions(keys["dimensions"], parts.dimensions) if "dimensions" in keys else parts.dimensions
    if not is_tower and "layers" not in dimensions:
        raise root.error("no dimension is called layers", do="Add it under `dimensions`, such as `layers: num_hidden_layers`")
    reader = WeightReader(dimensions)
    towers = _weights(keys["towers"], reader, parts) if "towers" in keys else []
    nodes = _weights(keys["weights"], reader) if "weights" in keys else []
    weights, fields = [weight for _, weight in nodes], _fields(keys, parts, dimensions, partial(declared, find=find, named=named))
    if base:
        made = base.extended(*weights, model_type=name, without=_without(keys, base), **fields)
        made = replace(made, dimensions=dimensions)
    else:
        made = Architecture(name, dimensions, tuple(weights), **fields)
    made = replace(made, weights=(*(weight for _, weight in towers), *made.weights))
    if not made.weights:
        raise root.error("it declares no weights", do="Name them under `weights`, or take over those of another model with `extends:`")
    _check(made, [*towers, *nodes], root)
    return made if is_tower else replace(made, tied=_tied(keys, made, base))


def _check(made: Architecture, nodes: Sequence[tuple[Node, Weight]], root: Node) -> None:
    """Raises RequestError if weights, settings or dimensions name a set of layers that is not declared, or two weights have one name."""
    for node, weight in nodes:
        _check_layers(weight, made, node)
    for computation in made.frameworks.values():
        _check_sets([value.layer_set for value in computation.settings.values() if isinstance(value, LayersOf)], made, root)
    if made.shared_blocks and made.shared_blocks.layers not in made.layer_sets:
        raise root.error(
            f"no set of layers is called {made.shared_blocks.layers!r}, which `shared_blocks` names", do="Declare it under `layer_sets`"
        )
    for name, dimension in made.dimensions.items():
        sets = [of for form in dimension.forms for of in (*form.in_sets, *([form.primes.layers] if form.primes else []))]
        _check_sets(sets, made, root.inner(name, None))
    _check_names(made, nodes)


def _weights(node: Node, reader: WeightReader, parts: Composition | None = None) -> list[tuple[Node, Weight]]:
    """The weights of a mapping, those of the towers of `parts` at their places. The value of a name may be a list, each item of which is
    about other layers."""
    weights: list[tuple[Node, Weight]] = []
    for name, inner in node.mapping().items():
        if parts and is_place(inner):
            weights += [(inner, weight) for weight in parts.towers[inner.value["tower"]].weights]
        else:
            weights += [(item, reader.weight(name, item)) for item in inner.items()]
    return weights


def _root(content: bytes, where: str) -> Node:
    """The root of the document, in the newest version of the language."""
    document = parse(content, where)
    root = Node.of(document, where)
    if not isinstance(document.value, dict) or "language" not in document.value:
        return Node.of(in_version_2(document, where), where)
    node = root.inner("language", document.value["language"])
    if node.number(1) == 1:
        return Node.of(in_version_2(document, where), where)
    if node.value != LANGUAGE:
        raise node.error(
            f"the declaration is in version {node.value} of the language",
            why=f"This reshard reads versions 1 to {LANGUAGE}",
            do="Install a newer reshard",
        )
    return root


def _refuse_unknown(root: Node) -> None:
    """Raises RequestError if the file still contains a "?", as `reshard architectures --start` writes it."""
    if nodes := list(_unknown(root)):
        raise nodes[0].error(
            f'a "{UNKNOWN}" marks an open question here' + (f", and in {len(nodes) - 1} more places" if len(nodes) > 1 else ""),
            why="What a declaration leaves open is not guessed",
            do=f"Replace it with the answer. {ABOUT_ROLES}; a new role needs `split:`",
        )


def _unknown(node: Node) -> Iterator[Node]:
    if isinstance(node.value, dict | list):
        for key, value in node.value.items() if isinstance(node.value, dict) else enumerate(node.value):
            if key == UNKNOWN:
                yield node.inner(key, value)
            yield from _unknown(node.inner(str(key), value))
    elif node.value == UNKNOWN:
        yield node


def _without(keys: Mapping[str, Node], base: Architecture) -> frozenset[str]:
    """The names of the weights of `base` that are removed."""
    names: set[str] = set()
    for node in keys["without"].items() if "without" in keys else ():
        matched = {weight.name for weight in base.weights if fnmatchcase(weight.name, node.word())}
        if not matched:
            raise node.error(
                f"no weight of {base.model_type} has a name like {node.value!r}",
                do=f"Its names are like {base.weights[len(base.weights) // 2].name}; * matches anything",
            )
        names |= matched
    return frozenset(names)


def _dimensions(node: Node, inherited: dict[str, Dimension]) -> dict[str, Dimension]:
    """The dimensions of the parts, with those that the declaration states itself."""
    own_dimensions: dict[str, Dimension] = {}
    for name, inner in node.mapping().items():
        if inner.value == "none":
            if inherited.pop(name, None) is None:
                raise inner.error("`none` removes a dimension of the extended model, and it has no such dimension")
            continue
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", name):
            raise inner.error("the name of a dimension is a word in lower case")
        own_dimensions[name] = _dimension(inner)
    dimensions = {**inherited, **own_dimensions}
    # A default may use the dimensions before it. Those of the extended declaration keep their places.
    before: dict[str, Dimension] = {}
    for name, dimension in dimensions.items():
        for form in dimension.forms if name in own_dimensions else ():
            for used in (form.primes.start, form.primes.count) if form.primes else ():
                expression(node.inner(name, used), before, why="The primes are counted by dimensions before it")
            if form.multiple_of:
                expression(node.inner(name, form.multiple_of), before, why="A default is rounded to a multiple of a dimension before it")
            if form.default:
                itself = {} if form is dimension else {name: dimension}
                why = "A default is an expression of the dimensions before it"
                expression(node.inner(name, form.default), {**before, **itself}, why=why)
        before[name] = dimension
    if "layers" in dimensions and dimensions["layers"].optional and not dimensions["layers"].counts:
        raise node.inner("layers", None).error("layers cannot be optional", why="It is the number of times that weights are repeated")
    for name in ("layers", "experts"):
        if name in dimensions and dimensions[name].differs:
            raise node.inner(name, None).error(f"{name} is the same in all layers", do="Leave out `in` and {layer}")
    return dimensions


def _dimension(node: Node) -> Dimension:
    if isinstance(node.value, int) and not isinstance(node.value, bool):
        return Dimension((), default=str(node.number(1)))
    if not isinstance(node.value, dict):
        return Dimension(_keys_of_layers(node))
    keys = node.mapping(("keys", "default", "optional", "entries_of", "multiple_of", "primes", "when", "otherwise", "in"))
    config_keys = _keys_of_layers(keys["keys"]) if "keys" in keys else ()
    if "entries_of" in keys:
        if "keys" in keys or "default" in keys:
            raise node.error("`entries_of` counts the entries of a list of the config", do="Leave out `keys` and `default`")
        return Dimension(_config_keys(keys["entries_of"]), optional=True, counts=True)
    of_sets = keys["in"].mapping() if "in" in keys else {}
    default = str(keys["default"].value) if "default" in keys else None
    if default is not None and not isinstance(keys["default"].value, str | int):
        raise keys["default"].unexpected("an expression of dimensions")
    if not config_keys and default is None and "primes" not in keys:
        raise node.error("it has neither `keys` nor `default`", do="Write the config's key, such as `hidden: hidden_size`")
    if ("when" in keys) != ("otherwise" in keys):
        raise node.error("`when` says for which models the dimension holds, and `otherwise` what holds for the others", do="Write both")
    return Dimension(
        config_keys,
        default,
        keys["optional"].flag() if "optional" in keys else False,
        multiple_of=keys["multiple_of"].word(r"[a-z_][a-z0-9_]*", "a dimension") if "multiple_of" in keys else None,
        primes=_primes(keys["primes"]) if "primes" in keys else None,
        when=keys["when"].condition() if "when" in keys else None,
        otherwise=_dimension(keys["otherwise"]) if "otherwise" in keys else None,
        in_sets={layer_set(inner.inner("", name)): _dimension(inner) for name, inner in of_sets.items()},
    )


def _primes(node: Node) -> PrimeSum:
    keys = node.mapping(("from", "count", "layers"))
    if len(keys) < 3:
        written = "{from: DIMENSION, count: DIMENSION, layers: SET}"
        raise node.error("a sum of primes has a start, a count and a set of layers", do=f"Write {written}")
    return PrimeSum(*(keys[key].word(r"[a-z_][a-z0-9_]*", "a word") for key in ("from", "count", "layers")))


def _keys_of_layers(node: Node) -> tuple[str, ...]:
    return tuple(item.word(KEY_OF_LAYER, "a key of the config") for item in node.items())


def _config_keys(node: Node) -> tuple[str, ...]:
    return tuple(item.config_key() for item in node.items())


def _fields(
    keys: Mapping[str, Node], parts: Composition, dimensions: Mapping[str, Dimension], declared: Callable[[Node], Architecture]
) -> dict[str, Any]:
    """The fields of the architecture that the declaration sets, except dimensions, weights and `tied`."""
    fields = dict[str, Any](chosen=parts.chosen, engines_of_parts=parts.engines)
    if "class" in keys:
        fields["class_name"] = keys["class"].word(r"[A-Za-z_]\w*")
    if "like" in keys:
        like = declared(keys["like"])
        fields["like"], fields["engines"], fields["frameworks"] = like.family, like.engines, like.frameworks
    if "engines" in keys:
        fields["engines"] = {**fields.get("engines", {}), **parts.rules(engines_of(keys["engines"], dimensions))}
    if "frameworks" in keys:
        fields["frameworks"] = {**fields.get("frameworks", {}), **frameworks_of(keys["frameworks"])}
    why = "the reason why the tensor is not needed"
    for key in ("dropped", "carried"):
        reasons = {_regex(glob): node.sentence(why) for glob, node in keys[key].mapping().items()} if key in keys else {}
        fields[key] = {pattern: reason for part in parts.declarations for pattern, reason in getattr(part, key).items()} | reasons
    fields["layer_sets"] = {name: rule for part in parts.declarations for name, rule in part.layer_sets.items()}
    if "layer_sets" in keys:
        rule_of = _rule_of_blocks if "tower" in keys else _layer_rule
        sets = {name: rule_of(node) for name, node in keys["layer_sets"].mapping().items()}
        if strange := next((name for name in sets if name in LAYER_SETS or not re.fullmatch(r"[a-z_][a-z0-9_]*", name)), None):
            raise keys["layer_sets"].error(f"a set of layers cannot be called {strange!r}", do="Name it by another word in lower case")
        fields["layer_sets"] |= sets
    if "text_config" in keys or parts.text_config:
        fields["text_config"] = keys["text_config"].config_key() if "text_config" in keys else parts.text_config
    own = {key: _default(node) for key, node in keys["defaults"].mapping().items()} if "defaults" in keys else {}
    defaults = {key: setting for part in parts.declarations for key, setting in part.defaults.items()} | own
    fields["defaults"] = {key: setting for key, setting in defaults.items() if setting != "none"}
    return fields | {key: read(keys[key]) for key, read in _FIELDS.items() if key in keys}


def _default(node: Node) -> bool | int | str | list[bool | int | str]:
    """The default of a key: a setting, or a list of settings."""
    return [item.setting() for item in node.items()] if isinstance(node.value, list) else node.setting()


def _quantization(node: Node) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = node.settings()
    if not isinstance(settings, Mapping) or quantization_of({SETTING: settings}) is None:
        raise node.error("it is no quantization_config that reshard reads", do="Copy the one of the published model")
    return settings


def _regex(glob: str) -> str:
    """A regular expression for the names that a glob matches: * is anything, {layer} and {expert} are numbers, {mtp} is the number of a
    layer after the last one."""
    special = {"{layer}": r"\d+", "{expert}": r"\d+", "{mtp}": r"(?P<mtp>\d{1,6})", "*": r".*"}
    return "".join(special.get(word, re.escape(word)) for word in re.split(r"(\{layer\}|\{expert\}|\{mtp\}|\*)", glob))


def _layer_rule(node: Node) -> LayerRule:
    if node.value == "all":
        return LayerRule()
    rule = node.read(_LAYER_KEYS)
    if ("list" in rule) != ("entries" in rule):
        raise node.error("`list` names a list of the config and `entries` which of its entries count", do="Write both, or none of them")
    return LayerRule(keys=rule.pop("list", ()), **rule)


def _shared_blocks(node: Node) -> SharedBlocks:
    blocks = node.read({"layers": layer_set, "count": Node.config_key, "when": Node.condition})
    if not {"layers", "count"} <= blocks.keys():
        raise node.error("`layers` names the layers that share blocks and `count` the config's key for their number", do="Write both")
    return SharedBlocks(**blocks)


def _rule_of_blocks(node: Node) -> LayerRule:
    """Which blocks of a tower are in a set: those that a list of its config names."""
    keys = node.mapping(("indices",))
    if not keys:
        raise node.error("it names no list of the config", do="Write {indices: KEY}")
    return LayerRule(indices=keys["indices"].config_key())


def _entry(node: Node) -> str | int:
    return node.number(0) if isinstance(node.value, int) else node.word()


_LAYER_KEYS: dict[str, Callable[[Node], Any]] = {
    "when": Node.condition,
    "list": _config_keys,
    "entries": lambda node: tuple(map(_entry, node.items())),
    "offset": lambda node: node.number(0),
    "indices_start": lambda node: node.number(0),
    **dict.fromkeys(("indices", "first", "last", "step", "every", "dense", "at_end"), Node.config_key),
}
# The keys that are fields of the architecture, each by itself.
_FIELDS: dict[str, Callable[[Node], Any]] = {
    "sparse_layers": _layer_rule,
    "shared_blocks": _shared_blocks,
    "instead": lambda node: {model: inner.condition() for model, inner in node.mapping().items()},
    "mtp_layers": Node.config_key,
    "vocabulary_multiple": lambda node: node.number(1),
    "quantized_as": lambda node: {form: _quantization(inner) for form, inner in node.mapping().items()},
}


def _tied(keys: Mapping[str, Node], made: Architecture, base: Architecture | None) -> tuple[str, str]:
    """The head and the embedding that a config can tie: those written under `tied`, or those of `base`, or the only such weights."""
    names = [weight.name for weight in made.weights]
    if "tied" in keys:
        tied = keys["tied"].mapping(("head", "embedding"))
        for key in ("head", "embedding"):
            if key not in tied:
                raise keys["tied"].error(f"it does not name the {key}", do="Write {head: NAME, embedding: NAME}")
        if tied["embedding"].word() not in names:
            raise tied["embedding"].error(f"no weight is called {tied['embedding'].value!r}", do="Write the name as under `weights`")
        return tied["head"].word(), tied["embedding"].word()
    usual = base.tied if base else Architecture.tied
    if base and set(usual) <= set(names):
        return usual
    heads = [weight.name for weight in made.weights if weight.role == "head" and not weight.name.endswith(".bias")] or [usual[0]]
    embeddings = [weight.name for weight in made.weights if weight.role == "embedding"]
    if len(heads) == 1 and len(embeddings) == 1:
        return heads[0], embeddings[0]
    if not embeddings:
        return usual
    raise RequestError(
        f"{len(heads)} weights are heads and {len(embeddings)} are embeddings",
        where=f"{next(iter(keys.values())).file}: weights",
        why="It is not clear which two are one tensor if the config sets tie_word_embeddings",
        do="Add `tied: {head: NAME, embedding: NAME}`",
    )


def _check_layers(weight: Weight, made: Architecture, node: Node) -> None:
    """Raises RequestError if a weight belongs to layers or experts that its name has no index for, or that are not declared."""
    if weight.layers and "{layer}" not in weight.name and not weight.counted_by:
        raise node.error(f"`layers: {', '.join(weight.layers)}` needs the number of the layer in the name, and the name has none")
    sets = _check_sets(weight.layers, made, node)
    if "mtp" in sets and made.mtp_layers is None:
        raise node.error("the number of layers for multi-token prediction is not declared", do="Add `mtp_layers:` and the config's key")
    if SHARED_BLOCK in sets and made.shared_blocks is None:
        raise node.error("the layers that share blocks are not declared", do="Add `shared_blocks: {layers: SET, count: KEY}`")
    if USE in weight.name and not weight.in_shared_block:
        raise node.error(f"{USE} counts the uses of a shared block, and the weight is in none", do=f"Write `layers: {SHARED_BLOCK}`")
    if "{expert}" in weight.name and "experts" not in made.dimensions:
        raise node.error(
            "the name contains the number of an expert, and no dimension is called experts", do="Add `experts:` under `dimensions`"
        )
    if weight.stacked and weight.stacked not in made.dimensions:
        raise node.error(
            f"its first axis counts the experts, and no dimension is called {weight.stacked}",
            do=f"Add `{weight.stacked}:` under `dimensions`",
        )
    if ("sparse" in sets or weight.stacked or "{expert}" in weight.name) and made.sparse_layers is None:
        raise node.error(
            "it belongs to a sparse layer, and the sparse layers are not declared",
            do="Add `sparse_layers:`, or `sparse_layers: all` if all layers have experts",
        )


def _check_sets(names: Iterable[str], made: Architecture, node: Node) -> list[str]:
    """The names of sets of layers without `not`. Raises RequestError if one is not declared."""
    sets = [name.removeprefix("not ") for name in names]
    if strange := next((name for name in sets if name not in (*LAYER_SETS, *made.layer_sets)), None):
        raise node.error(
            f"no set of layers is called {strange!r}",
            do=f"The sets are {', '.join((*LAYER_SETS, *made.layer_sets))}; declare another one under `layer_sets`",
        )
    return sets


def _check_names(made: Architecture, nodes: Sequence[tuple[Node, Weight]]) -> None:
    """Raises RequestError if one tensor could belong to two of the names."""
    by_pattern: dict[str, list[str]] = {}
    for name in (*(weight.name for _, weight in nodes), *(weight.name for weight in made.weights)):
        by_pattern.setdefault(re.sub(NUMBER, "#", name), []).append(name)
    for node, weight in nodes:
        names = by_pattern[re.sub(NUMBER, "#", weight.name)]
        other = next((name for name in names if name != weight.name and overlap(name, weight.name)), None)
        alike = [one for _, one in nodes if one.name == weight.name]
        if other or (len(alike) > 1 and not all(one.layers or one.when for one in alike)):
            raise node.error(
                f"one tensor could have this name and {other or weight.name}",
                do="Leave one of the two, or name the layers or the condition of each",
            )
