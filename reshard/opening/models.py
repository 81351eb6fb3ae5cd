"""The model of a config, a folder or a name, with or without weights beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from reshard.adapter import registry
from reshard.adapter.model_files import CONFIG, find_model_files
from reshard.errors import RequestError, UnsupportedError
from reshard.models.architecture import Architecture
from reshard.models.known_models import known_config, with_known_name
from reshard.models.lookup import find_model, named_architecture, unknown_architecture
from reshard.models.model import Model
from reshard.models.quantization import unknown_quantization
from reshard.models.stored_forms import not_read
from reshard.opening.gather import refuse_model_beside_steps
from reshard.opening.keywords import PathLike
from reshard.opening.open import open
from reshard.storage.files import Files
from reshard.storage.tar import open_base


def is_bare(path: PathLike) -> bool:
    """Whether a path is a model's config, a folder with a config and without weights in any known format, or the name of a known model.

    Raises: RequestError if there is nothing, with the known model that may be meant.
    """
    if known_config(path) is not None:
        return True
    files = _files(path)
    return find_model_files(files).config is not None and not registry.is_claimed(files)


def model_at(path: PathLike, architecture: Architecture | PathLike | None = None) -> Model:
    """The model of a folder with a config.json, with or without weights; of a checkpoint whose own settings describe the model; or the
    known model of that name. Raises SeveralCheckpoints if it lies beside the steps of a run, and is not chosen."""
    if (known := known_config(path)) is not None:
        return model_of(known, architecture)
    files = _files(path)
    refuse_model_beside_steps(os.fspath(path), files)
    model_files = find_model_files(files)
    config = model_files.config or open(path).model_files.config
    return model_of(config, architecture or model_files.declared())


def model_of(config: Mapping[str, Any] | None, architecture: Architecture | PathLike | None = None) -> Model:
    """The model that a config describes. Raises RequestError if there is no config, or its architecture is not declared."""
    if config is None:
        raise RequestError(
            f"there is no {CONFIG} in the checkpoint or in its parent directory, so the model is not known",
            do="Add `model=DIR`, the directory with the model's config",
        )
    model = find_model(config, None if architecture is None else named_architecture(architecture))
    if model is not None:
        return model
    if method := unknown_quantization(config):
        raise UnsupportedError(not_read(method))
    raise unknown_architecture(config)


def _files(path: PathLike) -> Files:
    """The files of a checkpoint or a model. Raises RequestError, naming the known model that may be meant, if there is nothing."""
    try:
        return open_base(path)
    except RequestError as error:
        raise with_known_name(error, path) from None
