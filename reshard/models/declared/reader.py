"""Declarations: an architecture that a user wrote as a YAML file, read and checked. docs/architectures.md tells how one is written.

    model_type: mymodel
    dimensions: {hidden: hidden_size, head_dim: {keys: head_dim, default: hidden / heads}, ...}
    weights:
      model.layers.*.self_attn.q_proj.weight: attention.q
      model.layers.*.adapter.weight: {role: my.adapter, split: column, shape: [rank, hidden]}
    ...

Only data, never code. Whatever is not understood is refused with its line: nothing in a declaration is skipped or guessed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from reshard.errors import RequestError
from reshard.models.architecture import Architecture, Dimension, SparseLayers, Weight
from reshard.models.declared import yaml_data
from reshard.models.declared.node import Node, among, expression, shown
from reshard.models.declared.weights import NUMBER, ROLES, Weights, overlap
from reshard.models.lookup import find_architecture, known_model_types
from reshard.storage.files import LocalFiles, read_whole

# Stands where nobody has said yet what it is.
UNKNOWN = "?"
_KEYS = (
    "model_type", "like", "without", "dimensions", "weights", "tied", "dropped", "sparse", "extra_layers", "defaults",
    "vocabulary_multiple",
)  # fmt: skip


def named_architecture(said: Architecture | str | os.PathLike[str]) -> Architecture:
    """The architecture that a user names: a declared model type, or the path of a file, which has a dot or a slash in it.

    Raises: RequestError if there is none of that name, or the file is no declaration.
    """
    if isinstance(said, Architecture):
        return said
    if isinstance(said, str) and re.fullmatch(r"[\w-]+", said):
        found = find_architecture(said)
        if found is None:
            raise RequestError(
                f"--architecture {said}: no model is declared by that name",
                do=f"Declared are {', '.join(known_model_types())}. A file is named with its ending or folder, such as ./{said}.yaml",
            )
        return found
    return read_declaration(said)


def read_declaration(path: str | os.PathLike[str]) -> Architecture:
    """The architecture that a file declares. Raises RequestError, naming the line, if it is not understood to the last word."""
    files = LocalFiles(path)
    if Path(path).is_dir():
        raise RequestError(
            f"--architecture {os.fspath(path)}: this is a directory; a declared model or a file with a declaration is expected"
        )
    return parse_declaration(read_whole(files, Path(path).name, limit=1 << 20), os.fspath(path))


def parse_declaration(content: bytes, where: str) -> Architecture:
    """The architecture that a declaration's content declares; `where` names it in errors."""
    document = yaml_data.parse(content, where)
    root = Node(document.value, (), where, document.lines)
    _refuse_unknown(root)
    said = root.mapping(_KEYS)
    if "model_type" not in said:
        raise root.wrong("it has no model_type", do="Begin it with `model_type:` and the model_type of the model's config")
    model_type = said["model_type"].word(r"[A-Za-z][\w.-]*")
    base = _base(said)
    dimensions = _dimensions(said["dimensions"], base) if "dimensions" in said else dict(base.dimensions if base else {})
    if "layers" not in dimensions:
        raise root.wrong("no dimension is called layers", do="Add it under `dimensions`, such as `layers: num_hidden_layers`")
    reading = Weights(dimensions)
    written = [(at, reading.weight(name, at)) for name, at in said["weights"].mapping().items()] if "weights" in said else []
    added, other = [weight for _, weight in written], _other(said, base)
    if base:
        made = base.plus(*added, model_type=model_type, dimensions=dimensions, without=_without(said, base), like=base.family, **other)
    else:
        made = Architecture(model_type, dimensions, tuple(added), **other)
    if not made.weights:
        raise root.wrong("it declares no weights", do="Name them under `weights`, or start from a declared model with `like:`")
    for at, weight in written:
        _check_layers(weight, made, at)
    _check_names(made, written)
    return replace(made, tied=_tied(said, made, base), declared_in=where)


def _refuse_unknown(root: Node) -> None:
    """Raises RequestError if a "?" still stands anywhere, as `reshard architectures --start` writes it."""
    found = list(_unknown(root))
    if found:
        raise found[0].wrong(
            f"a {UNKNOWN} stands here" + (f", and at {len(found) - 1} more places" if len(found) > 1 else ""),
            why="What nobody has said about a weight is not guessed",
            do=f"Say what it is. Roles are {', '.join(ROLES)}; or one of your own with `split:`",
        )


def _unknown(at: Node) -> Iterator[Node]:
    if isinstance(at.value, dict | list):
        for key, value in at.value.items() if isinstance(at.value, dict) else enumerate(at.value):
            if key == UNKNOWN:
                yield at.inner(key, value)
            yield from _unknown(at.inner(str(key), value))
    elif at.value == UNKNOWN:
        yield at


def _base(said: Mapping[str, Node]) -> Architecture | None:
    if "like" not in said:
        if "without" in said:
            raise said["without"].wrong("it takes weights away from those of `like:`, which is not there")
        return None
    found = find_architecture(said["like"].word())
    if found is None:
        raise said["like"].wrong(f"no model is declared as {said['like'].value!r}", do=among(known_model_types()))
    return found


def _without(said: Mapping[str, Node], base: Architecture) -> str:
    """The pattern, as Architecture.plus wants it, of the names that globs match."""
    names: list[str] = []
    for at in said["without"].items() if "without" in said else ():
        matched = [weight.name for weight in base.weights if fnmatchcase(weight.name, at.word())]
        if not matched:
            raise at.wrong(
                f"no weight of {base.model_type} is called {at.value!r}",
                do=f"They are called like {base.weights[len(base.weights) // 2].name}; * stands for anything",
            )
        names += matched
    return rf"\A(?:{'|'.join(map(re.escape, names))})\Z" if names else ""


def _dimensions(at: Node, base: Architecture | None) -> dict[str, Dimension]:
    known = dict(base.dimensions) if base else {}
    own: dict[str, Dimension] = {}
    for name, inner in at.mapping().items():
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", name):
            raise inner.wrong("the name of a dimension is a word in small letters")
        own[name] = _dimension(inner)
    # A default is an expression of what stands before it; what `like` declares keeps its place.
    known |= own
    before: dict[str, Dimension] = {}
    for name, dimension in known.items():
        if dimension.default and name in own:
            expression(at.inner(name, dimension.default), before, what="a default says a dimension by those that stand before it")
        before[name] = dimension
    for name in ("layers", "experts"):
        if name in known and known[name].optional:
            raise at.inner(name, None).wrong(f"{name} cannot be optional", why="It says how often weights are repeated")
    return known


def _dimension(at: Node) -> Dimension:
    if isinstance(at.value, int) and not isinstance(at.value, bool):
        return Dimension((), default=str(at.number(1)))
    if not isinstance(at.value, dict):
        return Dimension(_config_keys(at))
    said = at.mapping(("keys", "default", "optional"))
    keys = _config_keys(said["keys"]) if "keys" in said else ()
    default = str(said["default"].value) if "default" in said else None
    if default is not None and not isinstance(said["default"].value, str | int):
        raise said["default"].wrong(f"{shown(said['default'].value)} stands here, an expression of dimensions is expected")
    if not keys and default is None:
        raise at.wrong("it says neither keys of the config nor a default", do="Write the config's key, such as `hidden: hidden_size`")
    return Dimension(keys, default, said["optional"].flag() if "optional" in said else False)


def _config_keys(at: Node) -> tuple[str, ...]:
    return tuple(item.word(r"[\w.-]+", "a key of the config") for item in at.items())


def _other(said: Mapping[str, Node], base: Architecture | None) -> dict[str, Any]:
    """The fields of Architecture beside names, dimensions and weights."""
    other: dict[str, Any] = {}
    if "dropped" in said:
        own = {_regex(glob): _reason(at) for glob, at in said["dropped"].mapping().items()}
        other["dropped"] = {**(base.dropped if base else {}), **own}
    if "sparse" in said:
        other["sparse"] = _sparse(said["sparse"])
    if "extra_layers" in said:
        other["extra_layers"] = said["extra_layers"].word(r"[\w.-]+", "a key of the config")
    if "defaults" in said:
        own = {key: _setting(at) for key, at in said["defaults"].mapping().items()}
        other["defaults"] = {**(base.defaults if base else {}), **own}
    if "vocabulary_multiple" in said:
        other["vocabulary_multiple"] = said["vocabulary_multiple"].number(1)
    return other


def _regex(glob: str) -> str:
    """A regular expression for the names that a glob matches: * is anything, {layer} and {expert} are numbers."""
    special = {"{layer}": r"\d+", "{expert}": r"\d+", "*": r".*"}
    return "".join(special.get(word, re.escape(word)) for word in re.split(r"(\{layer\}|\{expert\}|\*)", glob))


def _reason(at: Node) -> str:
    if not isinstance(at.value, str) or not at.value.strip():
        raise at.wrong(f"{shown(at.value)} stands here, the reason why nobody needs it is expected")
    return at.value


def _setting(at: Node) -> Any:
    if not isinstance(at.value, bool | int | str):
        raise at.wrong(f"{shown(at.value)} stands here, true, false, a whole number or a word is expected")
    return at.value


def _sparse(at: Node) -> SparseLayers:
    if at.value == "all":
        return SparseLayers()
    said = at.mapping(("first", "step", "offset", "dense"))
    keys = {key: said[key].word(r"[\w.-]+", "a key of the config") for key in ("first", "step", "dense") if key in said}
    return SparseLayers(offset=said["offset"].number(0) if "offset" in said else 0, **keys)


def _tied(said: Mapping[str, Node], made: Architecture, base: Architecture | None) -> tuple[str, str]:
    """The head and the embedding that it shares where a config ties them: as said, or the only ones there are."""
    names = [weight.name for weight in made.weights]
    if "tied" in said:
        keys = said["tied"].mapping(("head", "embedding"))
        for key in ("head", "embedding"):
            if key not in keys:
                raise said["tied"].wrong(f"it does not say the {key}", do="Write {head: NAME, embedding: NAME}")
        found = keys["head"].word(), keys["embedding"].word()
        if found[1] not in names:
            raise keys["embedding"].wrong(f"no weight is called {found[1]!r}", do="Name the embedding as under `weights`")
        return found
    usual = base.tied if base else Architecture.tied
    if base and set(usual) <= set(names):
        return usual
    by_kind = {role: [weight.name for weight in made.weights if weight.role == role] for role in ("head", "embedding")}
    heads, embeddings = by_kind["head"] or [usual[0]], by_kind["embedding"]
    if len(heads) == 1 and len(embeddings) == 1:
        return heads[0], embeddings[0]
    if not embeddings:
        return usual
    raise RequestError(
        f"{len(heads)} weights are heads and {len(embeddings)} embeddings",
        where=f"{next(iter(said.values())).file}: weights",
        why="Which of them a config with tie_word_embeddings ties is not clear",
        do="Add `tied: {head: NAME, embedding: NAME}`",
    )


def _check_layers(weight: Weight, made: Architecture, at: Node) -> None:
    """Raises RequestError if a weight is of layers that there are none of, or counts experts that nobody has counted."""
    if weight.layers and "{layer}" not in weight.name:
        raise at.wrong(f"`layers: {weight.layers}` is said of a weight that is no layer's")
    if weight.layers == "extra" and made.extra_layers is None:
        raise at.wrong("it is an extra layer's, and nothing says how many there are", do="Add `extra_layers:` and the config's key")
    if "{expert}" in weight.name and "experts" not in made.dimensions:
        raise at.wrong("its name counts experts, and no dimension is called experts", do="Add `experts:` under `dimensions`")
    if (weight.layers == "sparse" or "{expert}" in weight.name) and made.sparse is None:
        raise at.wrong("it is a sparse layer's, and nothing says which layers are sparse", do="Add `sparse:`; `sparse: all` if all are")


def _check_names(made: Architecture, written: Sequence[tuple[Node, Weight]]) -> None:
    """Raises RequestError if a weight could be of two of the names."""
    alike: dict[str, list[str]] = {}
    for name in (*(weight.name for _, weight in written), *(weight.name for weight in made.weights)):
        alike.setdefault(re.sub(NUMBER, "#", name), []).append(name)
    for at, weight in written:
        others = alike[re.sub(NUMBER, "#", weight.name)]
        found = next((name for name in others if name != weight.name and overlap(name, weight.name)), None)
        if found or others.count(weight.name) > 2:
            raise at.wrong(f"a weight could be of this name and of {found or weight.name} at once", do="Leave one of the two")
