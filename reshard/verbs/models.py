"""The model that a path or a config describes, for verbs that need no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.adapter.model_files import CONFIG, find_model_files
from reshard.errors import RequestError
from reshard.models.architecture import Architecture
from reshard.models.lookup import find_model, known_model_types, named_architecture
from reshard.models.model import Model
from reshard.storage.tar import open_tree
from reshard.verbs.checkpoint import open
from reshard.verbs.request import PathLike


def model_at(path: PathLike, architecture: Architecture | PathLike | None = None) -> Model:
    """The model of a folder with a config.json, with or without weights; or of a checkpoint whose own settings describe the model."""
    return model_of(find_model_files(open_tree(path)).config or open(path).model_files.config, architecture)


def model_of(config: Mapping[str, Any] | None, architecture: Architecture | PathLike | None = None) -> Model:
    """The model that a config describes. Raises RequestError if there is no config, or its architecture is not declared."""
    if config is None:
        raise RequestError(f"there is no {CONFIG} that says which model this is", do="Give the directory of the model's config")
    found = find_model(config, None if architecture is None else named_architecture(architecture))
    if found is None:
        raise RequestError(
            f"the architecture {config.get('model_type')!r} is not declared, or its weights are quantized in a way that is not known",
            why="What its weights are is not guessed",
            do=f"Known are {', '.join(known_model_types())}; another one can be declared in a file for --architecture",
        )
    return found
