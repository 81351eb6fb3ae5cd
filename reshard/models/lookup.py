"""TODO."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from reshard.errors import RequestError
from reshard.models.quantization import unknown_quantization

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

from reshard.models.architecture import Architecture
from reshard.models.model import Model

GROUP = "reshard.architectures"


def find_model(config: Mapping[str, Any] | None, architecture: Architecture | None = None) -> Model | None:
    """The model that a Hugging Face config describes; None if there is no config or its architecture is not declared.

    architecture: the one that the user named, in place of the one that the config names by its `model_type`. None also if the weights are
    quantised in a way that is not known.
    """
    if config is None or unknown_quantization(config):
        return None
    found = architecture or find_architecture(str(config.get("model_type", "")))
    return Model(found, config) if found else None


def find_architecture(model_type: str) -> Architecture | None:
    """The declaration of a model type: the file of that name in architectures/, or else what another package calls so in the entry-point
    group `reshard.architectures`; None if there is neither."""
    name = model_type.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        return None
    module_name = f"reshard.architectures.{name}"
    try:
        return importlib.import_module(module_name).ARCHITECTURE  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
    point = _entry_points().get(name)
    found = point.load() if point else None
    if found is not None and not isinstance(found, Architecture):
        raise RequestError(
            f"the entry point {name} of the group {GROUP} is a {type(found).__name__}, no Architecture",
            where=point.value if point else None,
            do="Mend or remove the package that brings it",
        )
    return found


def built_in_model_types() -> tuple[str, ...]:
    """The model types that are declared here, sorted."""
    from pkgutil import iter_modules

    from reshard import architectures

    return tuple(sorted(module.name for module in iter_modules(architectures.__path__)))


def known_model_types() -> tuple[str, ...]:
    """The model types that are declared, here or by other packages, sorted."""
    return tuple(sorted({*built_in_model_types(), *_entry_points()}))


@cache
def _entry_points() -> dict[str, EntryPoint]:
    """Other packages' declarations by model type; the packages' metadata are searched once, and only for what is not built in."""
    from importlib.metadata import entry_points

    return {point.name.replace("-", "_"): point for point in entry_points(group=GROUP)}
