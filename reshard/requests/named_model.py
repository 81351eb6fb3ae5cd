"""The model that a path or a config describes, for verbs that need no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.adapter.model_files import CONFIG, find_model_files
from reshard.errors import RequestError, UnsupportedError
from reshard.models.architecture import Architecture
from reshard.models.lookup import find_model, named_architecture, unknown_architecture
from reshard.models.model import Model
from reshard.models.quantization import unknown_quantization
from reshard.requests.checkpoint import open
from reshard.requests.request import PathLike
from reshard.storage.tar import open_tree


def model_at(path: PathLike, architecture: Architecture | PathLike | None = None) -> Model:
    """The model of a folder with a config.json, with or without weights; or of a checkpoint whose own settings describe the model."""
    return model_of(find_model_files(open_tree(path)).config or open(path).model_files.config, architecture)


def model_of(config: Mapping[str, Any] | None, architecture: Architecture | PathLike | None = None) -> Model:
    """The model that a config describes. Raises RequestError if there is no config, or its architecture is not declared."""
    if config is None:
        raise RequestError(
            f"there is no {CONFIG} in the checkpoint or in its parent directory, so the model is not known",
            do="Add --model DIR, the directory with the model's config",
        )
    found = find_model(config, None if architecture is None else named_architecture(architecture))
    if found is not None:
        return found
    if method := unknown_quantization(config):
        raise UnsupportedError(f"the weights are quantized ({method}) with a method that reshard does not know")
    raise unknown_architecture(config)
