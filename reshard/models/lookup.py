"""Finds the architecture that a config, a model type or a file names. Declarations come from three places:

    reshard/architectures/<model_type>.yaml            built in; only the files of the model at hand are read
    the entry-point group reshard.architectures        other packages: an `Architecture`, or the path of a YAML file
    --architecture my.yaml                             the user's file

If a package declares a model type that is built in, the built-in declaration is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import RequestError, UnsupportedError, choices
from reshard.models.architecture import Architecture
from reshard.models.declared.reader import Find, parse_declaration
from reshard.models.drafts import draft_class
from reshard.models.model import Model
from reshard.models.quantization import unknown_quantization
from reshard.storage.files import LocalFiles, read_whole

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "reshard.architectures"
_BUILT_IN = Path(__file__).resolve().parent.parent / "architectures"


def find_model(config: Mapping[str, Any] | None, architecture: Architecture | None = None) -> Model | None:
    """The model that a Hugging Face config describes.

    None if there is no config, if its architecture is not declared, if it is a draft model, or if its weights are quantized in a way that
    is not known. architecture: is used instead of the one that the config names by its `model_type`.
    """
    if config is None or unknown_quantization(config) or (architecture is None and draft_class(config)):
        return None
    declared = architecture or find_architecture(model_type_of(config) or "")
    if declared and (named := _language_model(declared, config)):
        declared = _find(declared.model_type, (), named) if find_architecture(named) else None
    return _model(_Description(declared, config)) if declared else None


class _Description:
    """An architecture and a config as a key of a cache. Two are equal if the architecture is the same object and the configs are equal."""

    def __init__(self, architecture: Architecture, config: Mapping[str, Any]) -> None:
        self.architecture, self.config = architecture, deepcopy(dict(config))

    def __hash__(self) -> int:
        return hash(frozenset(self.config))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Description) and self.architecture is other.architecture and self.config == other.config


# A large model lists a hundred thousand weights, and a command asks for the same one several times.
@lru_cache(maxsize=2)
def _model(description: _Description) -> Model:
    return Model(description.architecture, description.config)


def _language_model(declared: Architecture, config: Mapping[str, Any]) -> str | None:
    """The model type that the config names for the language model inside a built-in model; None if the declaration does not ask for it."""
    inner = config.get(declared.language_model_in) if declared.language_model_in and not declared.declared_in else None
    named = inner.get("model_type") if isinstance(inner, Mapping) else None
    return named if isinstance(named, str) else None


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
            do="Convert it with --to hf, and name that folder as the engine's draft model",
        )
    known, model_type = known_model_types(), model_type_of(config)
    if model_type is None:
        return UnsupportedError(
            f"config.json has no model_type, and its architectures ({config.get('architectures')}) are those of no declared model",
            why="What the weights are is not guessed",
            do=f"Add --model DIR with the model's own config, or --architecture NAME: {', '.join(known)}",
        )
    declared = find_architecture(model_type)
    if declared and (named := _language_model(declared, config)):
        return UnsupportedError(
            f"the architecture {model_type!r} is declared, its language model {named!r} is not",
            why="How its weights split over ranks is not known, and is not guessed",
            do=f"{choices(named, known)}. A conversion to hf needs no declaration",
        )
    return UnsupportedError(
        f"the architecture {model_type!r} is not declared",
        why="How its weights split over ranks is not known, and is not guessed",
        do=f"{choices(model_type, known)}. To declare another one, draft it with `reshard architectures --start CKPT > my.yaml` and add "
        "--architecture my.yaml. A conversion to hf needs no declaration",
    )


def find_architecture(model_type: str) -> Architecture | None:
    """The declaration of a model type, built in or from another package; None if there is none. The built-in ones take precedence."""
    return _find(model_type, ())


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
            f"--architecture {named}: no model is declared by that name",
            do=f"{choices(named, known_model_types())}. To name a file, write its ending or folder, such as ./{named}.yaml",
        )
    return architecture


def read_architecture(path: str | os.PathLike[str]) -> Architecture:
    """The architecture that a file declares. Raises RequestError, naming the line, if any part of it is not understood.

    What engines do differently for a built-in model_type holds for a file that declares that model_type again and does not say otherwise.
    """
    if Path(path).is_dir():
        raise RequestError(
            f"--architecture {os.fspath(path)}: this is a directory; a declared model or a file with a declaration is expected"
        )
    declared = replace(_read(Path(path), os.fspath(path), find_architecture), declared_in=os.fspath(path))
    built_in = None if declared.engines or declared.like else find_architecture(declared.model_type)
    return replace(declared, engines=built_in.engines, frameworks=built_in.frameworks) if built_in else declared


def declaration_text(model_type: str) -> str:
    """The text of the file that declares a model type. Raises RequestError if the model is not declared, or not in a file."""
    architecture = find_architecture(model_type)
    if architecture is None:
        raise RequestError(f"no model is declared as {model_type!r}", do=choices(model_type, known_model_types()))
    path = Path(architecture.declared_in or _built_in_file(architecture.model_type))
    if not path.is_file():
        raise RequestError(f"{model_type} is declared by a package as a Python object, and not in a file")
    return _content(path).decode()


def built_in_model_types() -> tuple[str, ...]:
    """The model types that are built in, sorted."""
    return tuple(sorted(path.stem for path in _BUILT_IN.glob("*.yaml")))


def known_model_types() -> tuple[str, ...]:
    """The model types that are declared, built in or by other packages, sorted."""
    return tuple(sorted({*built_in_model_types(), *_entry_points()}))


@cache
def _find(model_type: str, extending: tuple[str, ...], language_model: str | None = None) -> Architecture | None:
    """The declaration of a model type. extending: the model types whose declarations are being read. language_model: the language model
    inside it, if the config says which one it is."""
    name = model_type.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,99}", name):
        return None
    if name in extending:
        raise RequestError(
            f"the declarations of {', '.join(extending)} extend each other in a circle", do="Correct `extends:` in one of them"
        )
    find = partial(_find, extending=(*extending, name))
    path = _built_in_file(name)
    if path.is_file():
        return _read(path, f"reshard/architectures/{path.name}", find, language_model)
    point = _entry_points().get(name)
    return _loaded(point, find) if point else None


def _built_in_file(name: str) -> Path:
    return _BUILT_IN / f"{name}.yaml"


def _loaded(point: EntryPoint, find: Find) -> Architecture:
    """The architecture that an entry point declares."""
    declared = point.load()
    if isinstance(declared, Architecture):
        return declared
    if isinstance(declared, str | os.PathLike):
        return replace(_read(Path(declared), os.fspath(declared), find), declared_in=os.fspath(declared))
    raise RequestError(
        f"the entry point {point.name} of the group {GROUP} is a {type(declared).__name__}; an Architecture or a path is expected",
        where=point.value,
        do="Update or remove the package that brings it",
    )


def _read(path: Path, where: str, find: Find, language_model: str | None = None) -> Architecture:
    return parse_declaration(_content(path), where, find, language_model)


def _content(path: Path) -> bytes:
    return read_whole(LocalFiles(path), path.name, limit=1 << 20)


@cache
def _entry_points() -> dict[str, EntryPoint]:
    """The declarations of other packages by model type. The metadata of packages is searched once, and only if a model is not built in."""
    from importlib.metadata import entry_points

    return {point.name.replace("-", "_"): point for point in entry_points(group=GROUP)}
