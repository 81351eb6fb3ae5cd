"""Finds the architecture that a config, a model type or a file names. Declarations come from three places:

    reshard/architectures/<model_type>.yaml            built in; only the files of the model at hand are read
    reshard/architectures/towers/<model_type>.yaml     built-in towers, which these and other declarations place beside a language model
    the entry-point group reshard.architectures        other packages: an `Architecture`, or the path of a YAML file
    --architecture my.yaml                             the user's file

If a package declares a model type that is built in, the built-in declaration is used.

Draft models predict further tokens for another model, and are stored as checkpoints of their own (EAGLE, Medusa, MTP, DFlash). The config
of a draft often has the `model_type` of an ordinary model (`llama`), and weights that such a model lacks: its class tells them apart.
Serving engines read a draft from its Hugging Face folder at every tensor-parallel size, because it takes its embedding and often its head
from the model that it drafts for. So a draft is carried as it is, and never cut.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import RequestError, ReshardError, UnsupportedError, choices
from reshard.geometry.value import value
from reshard.models.architecture import Architecture, Weight
from reshard.models.config_values import component_class, stated_class, value_at, with_value
from reshard.models.declared.composition import TOWERS, Find
from reshard.models.declared.reader import parse_declaration
from reshard.models.model import Model
from reshard.models.quantization import unknown_quantization, without_quantization
from reshard.storage.files import LocalFiles, read_whole

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "reshard.architectures"
_BUILT_IN = Path(__file__).resolve().parent.parent / "architectures"

LISTED_BY = "`reshard architectures` lists all"


def find_model(
    config: Mapping[str, Any] | None, architecture: Architecture | None = None, stored: Mapping[str, tuple[int, ...]] | None = None
) -> Model | None:
    """The model that a Hugging Face config describes, with the head of its class.

    None if there is no config, if its architecture is not declared, if it is a draft model, or if its weights are quantized in a way that
    is not known. architecture: is used instead of the one that the config names by its `model_type`. stored: the names and shapes of what
    is stored, which tell a head of its own where the class does not.
    """
    if config is None or unknown_quantization(config) or (architecture is None and draft_class(config)):
        return None
    declared = architecture or find_architecture(_meant(model_type_of(config) or "", config))
    if declared and (named := _named_parts(declared, config)):
        declared = None if _undeclared(declared, named) else _with_parts(declared, tuple(named.items()))
    if declared and declared.head is None and _may_have_head(config, declared, stored or {}):
        from reshard.models.declared.heads import head_of, with_head

        head = head_of(config, declared, stored or {})
        declared = with_head(declared, head) if head else declared
    return _model(declared, config) if declared else None


def _may_have_head(config: Mapping[str, Any], declared: Architecture, stored: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the class, or a stored name, may tell another head than the declared one."""
    modules = ("score.", "classifier.", "value_head", "v_head.", "qa_outputs.", str(config.get("value_head_prefix") or "score."))
    return stated_class(config) != declared.class_name or any(module in name for name in stored for module in modules)


# A large model lists a hundred thousand weights, and a command asks for the same one several times.
_LATEST: deque[Model] = deque(maxlen=2)


def _model(architecture: Architecture, config: Mapping[str, Any]) -> Model:
    """The model of an architecture and a config: the same object, if it is one of the two latest."""
    model = next((known for known in tuple(_LATEST) if known.architecture is architecture and known.config == config), None)
    if model is None:
        _LATEST.append(model := Model(architecture, deepcopy(dict(config))))
    return model


def _meant(model_type: str, config: Mapping[str, Any]) -> str:
    """The model type whose declaration a config of this one means: another one, if the declaration says so."""
    declared = find_architecture(model_type)
    if not declared or not declared.instead:
        return model_type
    model = Model(replace(declared, text_config=None), config)  # the inner config has `architectures`, too
    return next((other for other, when in declared.instead.items() if model.holds(when)), model_type)


def _with_parts(declared: Architecture, named: tuple[tuple[str, str], ...]) -> Architecture | None:
    """An architecture with the parts that a config names."""
    if declared.declaration is None or declared.declared_in is None:
        return find_declaration(declared.model_type, named)
    return declared_by(declared.declaration.encode(), declared.declared_in, named)


def _named_parts(declared: Architecture, config: Mapping[str, Any]) -> dict[str, str]:
    """The key of an inner config -> the model type that it means, for the parts that the declaration leaves to it, and that are not the
    usual ones."""
    usual = declared.chosen
    inner = {key: value_at(config, key.split(".")) for key in usual}
    named = {key: part.get("model_type") or usual[key] for key, part in inner.items() if isinstance(part, Mapping)}
    meant = {key: _meant(name, inner[key]) for key, name in named.items() if isinstance(name, str)}
    return {key: name for key, name in meant.items() if name != usual[key]}


def _undeclared(declared: Architecture, named: Mapping[str, str]) -> tuple[str, str] | None:
    """The part of a model that a config names and that is not declared: what it is, and what to do; None if all are."""
    for key, name in named.items():
        if key == declared.text_config and not find_architecture(name):
            return f"its language model {name!r}", f"{choices(name, known_model_types())}; {LISTED_BY}"
        if key != declared.text_config and not find_declaration(TOWERS + name):
            return f"its tower {name!r} ({key})", choices(name, built_in_towers())
    return None


def model_type_of(config: Mapping[str, Any]) -> str | None:
    """The model_type of a config. If it has none, that of the declared model whose class is one of its `architectures`. None if the config
    names no model."""
    if config.get("model_type"):
        return str(config["model_type"])
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes:
        return None
    declared = {model_type: find_architecture(model_type) for model_type in known_model_types()}
    return next((name for name, architecture in declared.items() if architecture and architecture.class_name in classes), None)


def unknown_architecture(config: Mapping[str, Any]) -> UnsupportedError:
    """The error for a config whose architecture is not declared."""
    if draft := draft_class(config):
        return UnsupportedError(
            f"this is a draft model ({draft}), which serving engines read from its Hugging Face folder, at every tensor-parallel size",
            why="It shares the embedding, and often the head, with the model that it drafts for",
            do="Convert it with `to=hf`, and name that folder as the engine's draft model",
        )
    if component := component_class(config):
        return UnsupportedError(
            f"{component} is a component of a diffusers pipeline, whose loaders take it whole",
            why="How its weights split over ranks is not known, and is not guessed",
            do="Convert it with `to=hf`",
        )
    known, named = known_model_types(), model_type_of(config)
    model_type = _meant(named, config) if named else None
    if model_type is None:
        return UnsupportedError(
            f"config.json has no model_type, and its architectures ({config.get('architectures')}) are those of no declared model",
            why="What the weights are is not guessed",
            do=f"Add `model=DIR` with the model's own config, or `architecture=NAME`; {LISTED_BY}",
        )
    declared = find_architecture(model_type)
    if declared and (part := _undeclared(declared, _named_parts(declared, config))):
        return UnsupportedError(
            f"the architecture {model_type!r} is declared, {part[0]} is not",
            why="How its weights split over ranks is not known, and is not guessed",
            do=f"{part[1]}. A conversion to hf needs no declaration",
        )
    return UnsupportedError(
        f"the architecture {model_type!r} is not declared",
        why="How its weights split over ranks is not known, and is not guessed",
        do=f"{choices(model_type, known)}; {LISTED_BY}. To declare another one, draft it with "
        "`reshard architectures --start CKPT > my.yaml` and add "
        "`architecture=my.yaml`. A conversion to hf needs no declaration",
    )


def find_architecture(model_type: str) -> Architecture | None:
    """The declaration of a model type, built in or from another package; None if there is none. The built-in ones take precedence."""
    return None if model_type.startswith(TOWERS) else find_declaration(model_type)


def named_architecture(named: Architecture | str | os.PathLike[str]) -> Architecture:
    """The architecture that a user names: by its model type, or by the path of a file, which contains a dot or a slash.

    An Architecture is returned unchanged.

    Raises: RequestError if there is no such declaration, or if the file is not a declaration.
    """
    if isinstance(named, Architecture):
        return named
    if not isinstance(named, str) or not re.fullmatch(r"[\w-]+", named):
        return read_architecture(named)
    architecture = find_architecture(named)
    if architecture is None:
        raise UnsupportedError(
            f"`architecture={named}`: no model is declared by that name",
            do=f"{choices(named, known_model_types())}; {LISTED_BY}. To name a file, write its ending or folder, such as ./{named}.yaml",
        )
    return architecture


def read_architecture(path: str | os.PathLike[str]) -> Architecture:
    """The architecture that a file declares. Raises RequestError, naming the line, if any part of it is not understood.

    What engines do differently for a built-in model_type holds for a file that declares that model_type again and does not say otherwise.
    """
    if Path(path).is_dir():
        raise RequestError(
            f"`architecture=` {os.fspath(path)}: this is a directory; a declared model or a file with a declaration is expected"
        )
    return declared_by(_content(Path(path)), os.fspath(path))


@lru_cache(maxsize=16)
def declared_by(content: bytes, where: str, named: tuple[tuple[str, str], ...] = ()) -> Architecture:
    """The architecture that the content of a user's file declares. named: as for `find_declaration`. Raises: as `read_architecture`."""
    declared = parse_declaration(content, where, find_declaration, dict(named))
    declared = replace(declared, declared_in=where, declaration=content.decode())
    built_in = None if declared.engines or declared.like else find_architecture(declared.model_type)
    return replace(declared, engines=built_in.engines, frameworks=built_in.frameworks) if built_in else declared


def declared_at(architecture: Architecture, weight: Weight) -> str | None:
    """The file of the user that declares an architecture, with the line of a weight if the file names it; None for a built-in one."""
    if architecture.declared_in is None or architecture.declaration is None:
        return None
    # Files write `*` where a name has the number of a layer or of an expert.
    name = r"(?:\*|\{\w+\})".join(map(re.escape, re.split(r"\{\w+\}", weight.name)))
    key = re.compile(rf"""['"]?{name}['"]?\s*:""")
    lines = enumerate(architecture.declaration.splitlines(), 1)
    line_number = next((number for number, line in lines if key.match(line.strip())), None)
    return architecture.declared_in if line_number is None else f"{architecture.declared_in}, line {line_number},"


def declaration_text(model_type: str) -> str:
    """The text of the file that declares a model type or a tower; that of the model if both have the name, unless it begins with TOWERS.

    Raises: RequestError if there is none, or it is not in a file.
    """
    tower = model_type.removeprefix(TOWERS)
    if tower in built_in_towers() and (tower != model_type or tower not in built_in_model_types()):
        return _content(_built_in_file(TOWERS + tower)).decode()
    architecture = find_architecture(model_type)
    if architecture is None:
        raise RequestError(f"no model is declared as {model_type!r}", do=f"{choices(model_type, known_model_types())}; {LISTED_BY}")
    if architecture.declaration is not None:
        return architecture.declaration
    path = _built_in_file(_file_name(architecture.model_type))
    if not path.is_file():
        raise RequestError(f"{model_type} is declared by a package as a Python object, and not in a file")
    return _content(path).decode()


def built_in_model_types() -> tuple[str, ...]:
    """The model types that are built in, sorted."""
    return tuple(sorted(path.stem for path in _BUILT_IN.glob("*.yaml")))


def built_in_towers() -> tuple[str, ...]:
    """The towers that declarations can place, sorted."""
    return tuple(sorted(path.stem for path in (_BUILT_IN / TOWERS).glob("*.yaml")))


def known_model_types() -> tuple[str, ...]:
    """The model types that are declared, built in or by other packages, sorted."""
    return tuple(sorted({*built_in_model_types(), *_entry_points()}))


@cache
def find_declaration(name: str, named: tuple[tuple[str, str], ...] = (), extending: tuple[str, ...] = ()) -> Architecture | None:
    """What `extends` can name: the declaration of a model type, or after TOWERS that of a tower; None if there is none.

    named: the key of an inner config and the model type that it names, of the parts that the declaration leaves to the config. extending:
    the model types whose declarations are being read.
    """
    name = _file_name(name)
    if not re.fullmatch(rf"({TOWERS})?[a-z][a-z0-9_]{{0,99}}", name):
        return None
    if name in extending:
        raise RequestError(
            f"the declarations of {', '.join(extending)} extend each other in a circle", do="Correct `extends:` in one of them"
        )
    find = partial(find_declaration, extending=(*extending, name))
    path = _built_in_file(name)
    if path.is_file():
        return parse_declaration(_content(path), f"reshard/architectures/{name}.yaml", find, dict(named))
    point = _entry_points().get(name)
    return _loaded(point, find) if point else None


def _file_name(model_type: str) -> str:
    """A model type in the spelling of declarations and their files: refinedweb for RefinedWeb."""
    return model_type.replace("-", "_").lower()


def _built_in_file(name: str) -> Path:
    return _BUILT_IN / f"{name}.yaml"


def _loaded(point: EntryPoint, find: Find) -> Architecture:
    """The architecture that an entry point declares."""
    declared = point.load()
    if isinstance(declared, Architecture):
        return declared
    if isinstance(declared, str | os.PathLike):
        content, where = _content(Path(declared)), os.fspath(declared)
        return replace(parse_declaration(content, where, find), declared_in=where, declaration=content.decode())
    raise RequestError(
        f"the entry point {point.name} of the group {GROUP} is a {type(declared).__name__}; an Architecture or a path is expected",
        where=point.value,
        do="Update or remove the package that brings it",
    )


def _content(path: Path) -> bytes:
    return read_whole(LocalFiles(path), path.name, limit=1 << 20)


@cache
def _entry_points() -> dict[str, EntryPoint]:
    """The declarations of other packages by model type. The metadata of packages is searched once, and only if a model is not built in."""
    from importlib.metadata import entry_points

    return {point.name.replace("-", "_"): point for point in entry_points(group=GROUP)}


# Source: vLLM 0.32, model_executor/models/registry.py, _SPECULATIVE_DECODING_MODELS; speculators 0.3.
# Eagle2_5_VL is a model with a vision tower, and no draft.
_CLASS = re.compile(r"^P?[Ee]agle(?!2_5)|Eagle3?(?:Model)?$|Medusa|MTP|DFlash|DSpark|Speculator|DraftModel$")


def draft_class(config: Mapping[str, Any]) -> str | None:
    """The class of a draft model, from a Hugging Face config; None if it describes no draft model."""
    classes = config.get("architectures")
    named = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    if drafts := [name for name in named if _CLASS.search(name)]:
        return drafts[0]
    method = config.get("speculators_model_type")
    return method if isinstance(method, str) else None


@value
class ChangedKey:
    """A key of a config with two values. None: the config does not set it."""

    key: str
    """The key; a dot leads into an inner config, as in "text_config.hidden_size"."""
    old: Any
    """The value in the first config."""
    new: Any
    """The value in the second one."""

    def __str__(self) -> str:
        old, new = ("not set" if value is None else json.dumps(value)[:60] for value in (self.old, self.new))
        return f"{self.key} {old} -> {new}"


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], architecture: Architecture | None = None) -> tuple[ChangedKey, ...]:
    """The keys that give the model another layout in the second config than in the first; empty if its declaration is not known.

    Each key is tried alone: it counts if the first config with that value of the second one has other dimensions or weights. So keys that
    no declaration reads, such as torch_dtype, do not count. Settings of a quantization are compared with the weights when these are read.
    """
    old, new = without_quantization(old), without_quantization(new)
    layout = None if old == new else _layout(old, architecture)
    if layout is None or layout == _layout(new, architecture):
        return ()
    changed = list(_differences(old, new))
    alone = [change for change in changed if _layout(with_value(old, change.key.split("."), change.new), architecture) != layout]
    return tuple(alone or changed)


def _layout(config: Mapping[str, Any], architecture: Architecture | None) -> object:
    """What the layout of the weights follows from; None if the config describes no declared model."""
    try:
        model = find_model(config, architecture)
        if model is None:
            return None
        in_layers = [model.dimensions_in(layer) for layer in range(model.dimensions.get("layers", 0))]
        weights = {name: (weight.role, weight.shape, weight.declared) for name, weight in model.weights.items()}
        return model.dimensions, in_layers, model.is_tied, weights
    except ReshardError:
        return None


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[ChangedKey]:
    """Every key with two values, those of inner configs one by one."""
    for key in dict.fromkeys((*new, *old)):
        values = value_at(old, [key]), value_at(new, [key])
        if all(isinstance(value, Mapping) for value in values):
            yield from _differences(*values, f"{prefix}{key}.")
        elif values[0] != values[1]:
            yield ChangedKey(prefix + key, *values)
