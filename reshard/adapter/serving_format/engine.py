"""ServingEngine: what one serving engine says of its rank files: its name, its rules, the names of its files."""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from reshard.adapter.format import Format

if TYPE_CHECKING:
    from reshard.adapter.format import Hints
    from reshard.adapter.serving_format.release import Release
    from reshard.adapter.serving_format.weight_checker import WeightChecker
    from reshard.containers.safetensors import TensorEntry
    from reshard.geometry.dtypes import DType
    from reshard.geometry.meshes import Parallel
    from reshard.models.engine_rules import EngineRules
    from reshard.models.model import Model
    from reshard.plans.layout import Target, TargetFile
    from reshard.storage.files import Files


# Tensor -> its file and its entry in the file's header.
Headers = dict[str, "tuple[TargetFile, TensorEntry]"]
# (pp_rank, tp_rank)
StageRank = tuple[int, int]
RankHeaders = Mapping[StageRank, Headers]


LEARNING_OPTIONS = ("learn", "layout_dir", "engine_python", "trust_remote_code")
"""The options by which a layout is learned, or chosen among learned ones."""
LIBRARY = "RESHARD_LAYOUT_DIR"
"""The environment variable that names a library of learned layouts for models that are not declared."""


class ServingEngine(Format):
    """What a serving engine says of its format. A subclass sets the members without a default, and those that differ from the defaults.

    Three files of its folder are known by name: rules.py with the functions `rules_for_target` and, where it applies, `notes`;
    stored_version.py with `stored_rules`; weight_checker.py with `weight_checker`, which makes one. A class may define the methods instead.
    """

    engine: ClassVar[str]
    """The engine's name, for messages."""
    producer: ClassVar[str]
    """The name of such a checkpoint, for `reshard inspect`."""
    file_pattern: ClassVar[re.Pattern[str]]
    """Pattern of the names of ranks' files. Its groups are `pp` and `tp`, or `rank`: the number pp_rank * tp + tp_rank."""
    sizes: ClassVar[tuple[str, ...]] = ("tp", "pp", "ep")
    """The parallel sizes that its files can have."""

    until: ClassVar[str | None] = None
    """The last release of the engine that reads such files; None: those of today do."""

    needs_model_files = True

    @property
    def release(self) -> Release | None:
        """What the newest known release takes of a Hugging Face folder: release.json in the folder of the format; None without it."""
        from pathlib import Path

        from reshard.adapter.serving_format.release import release_at

        module = sys.modules[type(self).__module__].__file__
        return release_at(Path(module).parent / "release.json", self.engine) if module else None

    @abstractmethod
    def file_name(self, parallel: Parallel, pp_rank: int, tp_rank: int, part: int) -> str:
        """The name of one file of a rank; `part` counts the rank's files from 0."""

    def rules(self, model: Model, target: Target) -> EngineRules:
        """How the engine stores the model, at the target's sizes and engine version.

        Raises: RequestError for sizes, versions or models that the engine's files cannot have.
        """
        rules_for_target = self._needed(
            "rules", "rules_for_target", "has neither a function `rules_for_target` in rules.py nor a method `rules`"
        )
        rules: EngineRules = rules_for_target(model, target)
        return rules

    tracer: ClassVar[str | None] = None
    """The package with the program that traces the engine's own loader (`reshard learn`); None if there is none."""

    @property
    def weight_checker(self) -> WeightChecker | None:
        """How a live server of the engine tells what its ranks hold; None if it does not."""
        make = self._function("weight_checker", "weight_checker")
        checker: WeightChecker | None = make() if make else None
        return checker

    def layout_notes(self, names: Collection[str]) -> tuple[str, ...]:
        """Notes about files with tensors of these names that follow a learned layout, such as how to start the engine."""
        return ()

    # Writing: what a subclass may override.

    def notes(self, model: Model, target: Target) -> tuple[str, ...]:
        """Sentences about the result for the user, in addition to those in the rules."""
        notes = self._function("rules", "notes")
        told: tuple[str, ...] = notes(model, target) if notes else ()
        return told

    def engine_config(self, model: Model, parallel: Parallel, dtypes: Mapping[str, DType]) -> dict[str, Any] | None:
        """config.json in the engine's own terms; None: the engine reads the Hugging Face config. dtypes: the weights' element types.

        Raises: RequestError if the config cannot express the element types.
        """
        return None

    def keys_for_ranks(self, config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, object]:
        """Keys of config.json, with dots before those of inner configs, that the engine needs beside files of ranks alone. names: those of
        the model's tensors."""
        return {}

    def check_head(self, model: Model) -> None:
        """Raises UnsupportedError for another head than that of language models (declared/heads.py), unless the rules are about it."""
        model.architecture.check_head(f"{self.engine}'s files of ranks are")

    def not_loaded(self, model: Model) -> tuple[str, str] | None:
        """What a rank of the model holds and the engine's own loader of such files refuses, and what to do; None if it takes all."""
        return None

    # Reading: what a subclass may override.

    def options_of_stages(self, layers_of_stages: tuple[int, ...]) -> Mapping[str, Any]:
        """The options with which files of these stages are written; empty for stages that the engine makes itself."""
        return {}

    def about_folder(self, model: Model, parallel: Parallel) -> str | None:
        """What these sizes do to a model that is served from its Hugging Face folder, beside what its rules say; None: nothing more."""
        return None

    def not_told(self, model: Model, target: Target) -> str | None:
        """What the engine must be told at its start to take files that were written so, and is not told here; None if there is nothing."""
        return None

    def stored_config(self, files: Files, hints: Hints) -> Mapping[str, Any] | None:
        """The Hugging Face config of a checkpoint; None if there is none. Raises CheckpointError for an unreadable engine config."""
        return hints.config

    def stored_sizes(self, files: Files) -> Parallel | None:
        """The parallel sizes that a file of the checkpoint states; None: the names and shapes in the files tell them."""
        return None

    def stored_rules(self, model: Model, parallel: Parallel, headers: RankHeaders) -> tuple[EngineRules, str | None]:
        """The rules that a checkpoint's files follow, and the engine versions with these rules as a version specifier, if known."""
        stored_rules = self._function("stored_version", "stored_rules")
        if stored_rules is None:
            from reshard.plans.layout import Target

            return self.rules(model, Target(self.name, parallel)), None
        rules: tuple[EngineRules, str | None] = stored_rules(model, parallel, headers)
        return rules

    # The same for all engines.

    def engine_rules(self, model: Model, target: Target) -> EngineRules:
        """The rules for a target, after a check that the engine serves the model as its config describes it.

        Raises: RequestError for sizes, versions or models that the engine does not serve.
        """
        from reshard.serving.legality import check_served

        self.check_head(model)
        self.check_sizes(target.parallel)
        rules = self.rules(model, target)
        check_served(model, rules)
        return rules

    def check_sizes(self, parallel: Parallel) -> None:
        """Raises RequestError for a size that its files cannot have."""
        parallel.allow(*self.sizes, what=f"{self.engine}'s files, which are split by {', '.join(self.sizes)} only")

    def detect(self, files: Files) -> str | None:
        return next((path for path in files.list() if self.file_pattern.fullmatch(path)), None)
