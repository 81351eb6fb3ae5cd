"""What a format answers: is this yours, what is in it, and, for a target, what would yours look like. No method takes a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content
from reshard.index.index import Index
from reshard.models.architecture import Architecture
from reshard.models.lookup import find_model
from reshard.models.model import Model
from reshard.plans.layout import Layout
from reshard.plans.target import Target
from reshard.storage.files import Files


@dataclass(frozen=True, slots=True)
class Hints:
    """What the user has said that the files may not say: the model's Hugging Face config; the true size of its vocabulary; the
    architecture, where it is not the one that the config's model_type names."""

    config: Mapping[str, Any] | None = None
    vocabulary: int | None = None
    architecture: Architecture | None = None

    @property
    def model(self) -> Model | None:
        """The model, if there is a config and its architecture is declared."""
        return find_model(self.config, self.architecture)


class Reader(Protocol):
    """A format that can be read. `owns` are globs of the file names that hold its weights and indexes.

    It may have `refines`, names of formats that its checkpoints are made of: where both claim one, it is of this format. And it may have
    `examine(files, index) -> Index`, for what some elements tell that metadata do not; it is asked when a checkpoint is opened.
    """

    name: str
    summary: str
    owns: tuple[str, ...]

    def detect(self, files: Files) -> str | None:
        """Why this is a checkpoint of this format, in a few words; None if it is not. Reads a listing, and little else."""

    def read(self, files: Files, hints: Hints) -> Index:
        """The index, from headers and metadata alone.

        Raises: CheckpointError if something is missing, truncated or contradicts itself.
        """


class Writer(Reader, Protocol):
    """A format that is a target, too.

    `keeps_optimizer`, where it is True, says that it always holds masters and optimizer state; `keeps_masters`, that with the optimizer's
    state it holds both the weights and their full-precision copies; `keeps_names`, that it writes the names that the source has, for a run
    that goes on in the source's library, and not the canonical ones. `options` names those of Target.options that it understands. A serving
    engine's has `engine_rules(model, target) -> EngineRules`, by which `reshard plan` counts what ranks hold; it raises RequestError for
    sizes or versions that the engine does not serve the model with.
    """

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        """The files that hold `content` for `target`: names, fusions and framing, everything but the weights' bytes.

        Raises: RequestError if the model or the degrees do not allow it.
        """
