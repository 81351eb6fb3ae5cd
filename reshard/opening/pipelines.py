"""The folder of a diffusers pipeline as a whole: what model_index.json names, and what lies there.

    PIPELINE/model_index.json    {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"], "x": [null, null]}
    PIPELINE/transformer/        config.json names the class again (`_class_name`, or `architectures` of transformers), and weights
    PIPELINE/scheduler/          a part without weights, and without a config.json

Source: diffusers 0.42.1, DiffusionPipeline.save_pretrained and from_pretrained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property

from reshard.adapter.model_files import CONFIG, PIPELINE, read_json
from reshard.errors import ReshardError, SystemRefusal
from reshard.geometry.value import value
from reshard.models.config_values import component_class, stated_class
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.open import look
from reshard.opening.run_folders import format_of
from reshard.storage.files import Files, files_below
from reshard.storage.tar import open_files
from reshard.storage.trees import FolderFiles

_DEPTH = 4
# Options that say which one of several checkpoints is meant, or what it is.
_OF_ONE = ("format", "model", "part", "step", "architecture", "vocab_size")


@value(slots=False, eq=False)
class PipelinePart:
    """A part of a pipeline: an entry of model_index.json, or a folder of a model that it does not name."""

    JSON = "name library class=named_class stored_class format tensors parameters dtypes bytes=nbytes"

    name: str
    """The folder, and the argument of the pipeline's class."""
    library: str | None
    """The library whose class model_index.json names; None if it names none."""
    named_class: str | None
    """The class that model_index.json names; None if it names none."""
    stored_class: str | None
    """The class that the folder's config.json names; None without such a file."""
    format: str | None
    """The format of its weights; None if there are none."""
    nbytes: int
    """The bytes of its files; 0 if the folder is not there."""
    has_config: bool
    """Whether a config.json lies in the folder, so that it is a model, with weights."""
    path: str
    """The path of the folder."""

    @cached_property
    def opened(self) -> Checkpoint | None:
        """Its weights, by their headers; None if there are none, or they cannot be read: `doctor` says why."""
        try:
            return look(self.path, {}) if self.format else None
        except ReshardError:
            return None

    @property
    def tensors(self) -> int:
        """The number of its tensors."""
        return len(self.opened.index.tensors) if self.opened else 0

    @property
    def parameters(self) -> int:
        """The number of elements of its tensors, as stored."""
        return sum(tensor.elements for tensor in self.opened.index.tensors) if self.opened else 0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The element types of its tensors."""
        return tuple(dict.fromkeys(tensor.dtype.name for tensor in self.opened.index.tensors)) if self.opened else ()


@value(eq=False)
class Pipeline:
    """The folder of a pipeline."""

    JSON = "class=class_name version components"

    path: str
    """The folder, as it was given."""
    class_name: str | None
    """The class of the pipeline; None if model_index.json names none."""
    version: str | None
    """The version of diffusers that saved it."""
    components: tuple[PipelinePart, ...]
    """Its parts, those of model_index.json first."""


def pipeline_at(path: str | os.PathLike[str], options: Mapping[str, object]) -> Pipeline | None:
    """The pipeline in a folder; no weights are read. None if no model_index.json lies there, or if an option chooses a part of it.

    Raises: CheckpointError if that file cannot be read; SystemRefusal if the folder's store or file system does not answer.
    """
    root = os.fspath(path)
    if any(options.get(name) for name in _OF_ONE):
        return None
    try:
        files = open_files(root)
    except SystemRefusal:  # another question would wait as long
        raise
    except ReshardError:  # whoever opens it as a checkpoint says what is wrong
        return None
    if files.is_file or files.size(PIPELINE) is None:
        return None
    index = read_json(files, PIPELINE)
    named = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)}
    # A pipeline with code of its own names a file with the class (diffusers 0.42.1, _resolve_custom_pipeline_and_cls).
    own_code = named.pop("_class_name", None)
    folders = {folder.rstrip("/"): FolderFiles(files, folder) for folder in files.list() if folder.endswith("/") and folder[0] != "."}
    others = [name for name, folder in folders.items() if name not in named and (folder.size(CONFIG) is not None or format_of(folder))]
    components = (_component(root, name, named.get(name), folders.get(name)) for name in (*named, *others))
    return Pipeline(root, own_code[1] if own_code else _text(index, "_class_name"), _text(index, "_diffusers_version"), tuple(components))


def _component(root: str, name: str, entry: list[str] | None, files: Files | None) -> PipelinePart:
    has_config = files is not None and files.size(CONFIG) is not None
    config = read_json(files, CONFIG) if files and has_config else {}
    library = entry[0] if entry and isinstance(entry[0], str) else None
    sizes = [] if files is None else [files.size(path) or 0 for path in files_below(files, "", _DEPTH)]
    return PipelinePart(
        name=name,
        library=library,
        named_class=entry[1] if entry else None,
        stored_class=component_class(config) or stated_class(config),
        format=format_of(files) if files else None,
        nbytes=sum(sizes),
        has_config=has_config,
        path=f"{root.rstrip('/')}/{name}",
    )


def _text(index: Mapping[str, object], key: str) -> str | None:
    text = index.get(key)
    return text if isinstance(text, str) else None
