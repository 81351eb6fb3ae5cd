"""Format: what a checkpoint format answers. Is this checkpoint yours? What is in it? And, for a target: what would yours look like?

A format is a folder, and three of its files are known by name:

    __init__.py    light: the class with its name, its options and `detect`, and the object FORMAT
    read.py        the functions `read` and, where they apply, `check_values` and `read_memory`
    write.py       the functions `lay_out` and, where it applies, `lay_out_memory`; a format that is only read has none

These functions are the methods of Format of the same names, without `self`. They are imported when they are called, so only the format that
claims a checkpoint is ever loaded. A class may define the methods itself instead. No method takes a tensor.

An Option is a setting that only some targets understand. It is declared once, in the format's light module: the command line makes a flag
of it, shown under the format's name, and Python takes it as a keyword of `plan`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from reshard.errors import RequestError, UnsupportedError, choices
from reshard.geometry.quantities import parse_size
from reshard.geometry.value import value

if TYPE_CHECKING:
    from reshard.adapter.dcp_reader import KeyedFolder
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.models.architecture import Architecture
    from reshard.models.model import Model
    from reshard.plans.layout import Layout, Target
    from reshard.storage.files import Files


@value
class Hints:
    """What the user has said about a checkpoint that its files may not say."""

    config: Mapping[str, Any] | None = None
    """The model's Hugging Face config."""

    vocabulary: int | None = None
    """Vocabulary size without padding."""

    architecture: Architecture | None = None
    """The architecture, if it is not the one that the config's model_type names."""

    layout: str | None = None
    """The path of the learned layout that a serving engine's files follow, if none lies beside them."""

    stored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The names and shapes of the stored weights, which may tell the model's head; empty if they are not known yet."""

    @property
    def model(self) -> Model | None:
        """The model, if there is a config and its architecture is declared."""
        if self.config is None:
            return None
        from reshard.models.lookup import find_model

        return find_model(self.config, self.architecture, self.stored)


class Format(ABC):
    """A checkpoint format. A subclass sets the members that differ from these defaults."""

    name: ClassVar[str]
    """The word for --to and --format."""

    summary: ClassVar[str]
    """One line for `reshard formats`."""

    owns: ClassVar[tuple[str, ...]] = ()
    """Globs of the file names that hold its weights and indexes; --overwrite removes such files and no others."""

    refines: ClassVar[tuple[str, ...]] = ()
    """Names of more general formats. Where one of them and this format claim the same folder, the folder belongs to this format."""

    needs_vocabulary: ClassVar[bool] = False
    """Whether its checkpoints may not say the vocabulary size without padding, so that --vocab-size applies to them."""

    one_file_suffices: ClassVar[bool] = False
    """Whether one file without its directory can be a checkpoint of this format."""

    options: ClassVar[tuple[Option, ...]] = ()
    """The options that it understands as a target."""

    changes_base: ClassVar[bool] = False
    """Whether its checkpoints hold what changed in another checkpoint, and are read on top of that one."""

    keeps_names: ClassVar[bool] = False
    """Whether a conversion to it keeps the source's tensor names, so that the run can resume, even if canonical names are asked for."""

    keeps_optimizer: ClassVar[bool] = False
    """Whether it always needs optimizer state: a conversion to it then takes optimizer state and masters without being asked."""

    keeps_masters: ClassVar[bool] = False
    """Whether its checkpoints with optimizer state hold the weights and, beside them, their full-precision copies (masters)."""

    keeps_packed_states: ClassVar[bool] = False
    """Whether its optimizer states have the names that an optimizer of torch gives them: those in 8 and 4 bits stay as they are stored."""

    needs_model_files: ClassVar[bool] = False
    """Whether engines load its folders, and need the model's config and tokenizer beside the weights."""

    other_names: ClassVar[tuple[str, ...]] = ()
    """What other programs call it; `to=` and `format=` understand these names, too."""

    framework: ClassVar[str] = ""
    """The framework whose keys `read_memory` reads; empty: none."""

    holds_rows: ClassVar[bool] = False
    """Whether its ranks hold the rows of every tensor, in runs of ceil(rows / ranks), as FSDP2 cuts them."""

    holds_adapters: ClassVar[bool] = False
    """Whether its checkpoints hold a LoRA adapter and no model: a conversion to it takes the adapter and leaves out the base weights."""

    reader: ClassVar[str] = "read"
    """The module of the format's folder that reads. Formats that share a folder name one each, such as `read.legacy`."""

    writer: ClassVar[str] = "write"
    """The module of the format's folder that writes."""

    @abstractmethod
    def detect(self, files: Files) -> str | None:
        """Why this is a checkpoint of this format, in a few words; None if it is not. Reads a listing, and little else."""

    def read(self, files: Files, hints: Hints) -> Index:
        """The index, from headers and metadata alone.

        Raises: CheckpointError if something is missing, truncated or contradicts itself.
        """
        read = self._needed(self.reader, "read", f"has neither a file {self.reader}.py with a function `read` nor a method `read`")
        index: Index = read(files, hints)
        return index

    def complete(self, files: Files) -> str | None:
        """What tells that all files are there, in a few words, from a listing; None if nothing does but that they do not change."""
        return None

    def read_memory(self, memory: KeyedFolder, settings: Mapping[str, Any], hints: Hints) -> Index:
        """The index of what ranks of the framework hold in memory, under its keys. settings: those of the run.

        Raises: CheckpointError if the keys and the settings do not describe one model.
        """
        read_memory = self._needed(self.reader, "read_memory", "does not read the memory of ranks")
        index: Index = read_memory(memory, settings, hints)
        return index

    def check_values(self, files: Files, index: Index) -> Index:
        """The index, corrected by what a few elements tell and metadata do not. Called once, when a checkpoint is opened.

        Raises: CheckpointError if the elements contradict the metadata.
        """
        check_values = self._function(self.reader, "check_values")
        checked: Index = check_values(files, index) if check_values else index
        return checked

    def settled(self, content: Content, target: Target, companions: ModelFiles) -> Target:
        """The target with options that name what was found, in place of those that say where to look. Called once, before `lay_out`."""
        return target

    def form_of_adapter(self, content: Content, target: Target) -> str | None:
        """The form into which the LoRA adapter of experts is brought before `lay_out` (canonical/adapters/forms.py); None for its own."""
        return None

    def about_serving(
        self, index: Index, settings: Mapping[str, Any], engine: str | None, base: Mapping[str, Any] | None
    ) -> Iterator[tuple[str, str, str]]:
        """What an engine would do with a LoRA adapter: findings of serve-check as (id, text, remedy).

        settings: the content of adapter_config.json. engine: None for the first that takes adapters. base: the config of its base.
        """
        return iter(())

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        """The files that hold `content` for `target`: names, fusions and framing, everything except the weights' bytes.

        Raises: RequestError if the model or the parallel sizes do not allow it, or if this format is only read.
        """
        do = "`reshard formats` lists the formats that are written"
        lay_out = self._needed(self.writer, "lay_out", "is read, not written", do)
        layout: Layout = lay_out(content, target, companions)
        return layout

    def lay_out_memory(self, content: Content, target: Target) -> Layout:
        """What the ranks of a run hold in memory, each as a file without framing: the weights of `content`, which have one element type.

        Raises: RequestError if the model or the parallel sizes do not allow it, or if the format does not tell what ranks hold.
        """
        lay_out_memory = self._needed(self.writer, "lay_out_memory", "does not tell what the ranks of a run hold")
        layout: Layout = lay_out_memory(content, target)
        return layout

    @property
    def can_write(self) -> bool:
        """Whether it can be a target."""
        return type(self).lay_out is not Format.lay_out or self._place(self.writer) is not None

    @property
    def tells_memory(self) -> bool:
        """Whether it tells what the ranks of a run hold in memory."""
        is_method = type(self).lay_out_memory is not Format.lay_out_memory
        return self.holds_rows or is_method or self._function(self.writer, "lay_out_memory") is not None

    def _needed(self, module: str, name: str, lacking: str, do: str | None = None) -> Callable[..., Any]:
        """As `_function`. Raises UnsupportedError, which says what the format lacks, if there is none."""
        function = self._function(module, name)
        if function is None:
            raise UnsupportedError(f"the format {self.name} {lacking}", do=do)
        return function

    def _function(self, module: str, name: str) -> Callable[..., Any] | None:
        """The function of that name in a module of the format's folder; None if there is no such module, or it has no such function."""
        place = self._place(module)
        return vars(import_module(place)).get(name) if place else None

    def _place(self, module: str) -> str | None:
        """The full name of a module of the format's folder, or of the folder of a format that it extends; None if there is none."""
        folders = (import_module(declared.__module__).__package__ for declared in type(self).__mro__ if issubclass(declared, Format))
        return next((name for folder in folders if folder and find_spec(name := f"{folder}.{module}")), None)

    def __repr__(self) -> str:
        return f"<format {self.name}: {self.summary}>"


@value
class Option:
    """A setting of a target format."""

    name: str
    """Keyword in Python. The flag on the command line is the same word with dashes: `stage_layers` is --stage-layers."""

    type: Literal["number", "numbers", "size", "path", "text", "choice", "switch"]
    """number: a positive integer; numbers: a list such as 7,8,8,7; size: bytes such as 5GB; path: a path; text: any text;
    choice: one of `choices`; switch: yes or no."""

    help: str
    """One imperative sentence for --help."""

    choices: tuple[str, ...] = ()
    """The words that a `choice` takes."""

    opposite: str | None = None
    """For a switch: the name of the flag that means no, such as `plain_optimizer` beside `distributed_optimizer`."""

    @property
    def keyword(self) -> str:
        """The option as messages spell it: `stage_layers=`, of which the command line makes --stage-layers."""
        return f"`{self.name}=`"

    def parse(self, value: Any) -> Any:
        """A value given in Python or on the command line, checked and in its own type.

        Raises: RequestError if it is of another type or not one of the choices.
        """
        match self.type:
            case "number" if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            case "number" if isinstance(value, str) and value.isdecimal() and int(value) > 0:
                return int(value)
            case "numbers" if isinstance(value, str) and re.fullmatch(r"\d+(,\d+)*", value):
                return tuple(map(int, value.split(",")))
            case "numbers" if isinstance(value, list | tuple) and all(type(number) is int and number >= 0 for number in value):
                return tuple(value)
            case "size":
                return parse_size(value, self.keyword)
            case "path" if isinstance(value, str | os.PathLike):
                return os.fspath(value)
            case "text" if isinstance(value, str | int | float) and not isinstance(value, bool):
                return str(value)
            case "choice" if value in self.choices:
                return value
            case "switch" if isinstance(value, bool):
                return value
        if self.type == "choice":
            raise RequestError(f"{self.keyword} {value}: unknown value", do=choices(str(value), self.choices))
        raise RequestError(f"{self.keyword} {value}: {self._expected()} is expected")

    def _expected(self) -> str:
        words = {
            "number": "a positive whole number",
            "numbers": "a list of whole numbers such as 7,8,8,7",
            "path": "a path",
            "text": "a word or a number",
            "switch": "yes or no (True or False)",
        }
        return words[self.type]


# Options that several formats understand, with one meaning everywhere.
MAX_SHARD_SIZE = Option("max_shard_size", "size", "Start a new file when one would grow beyond SIZE.")
ENGINE_VERSION = Option("engine_version", "text", "Write for this version of the serving engine (default: the newest known).")
# Layouts that were learned from an engine's own loader (adapter/serving_format/learned.py).
LEARNED_LAYOUTS = (
    Option("layout", "path", "Follow a layout file that `reshard learn` has written."),
    Option("learn", "switch", "Follow the layout that the engine's own loader makes: traced now, unless one fits that was learned before."),
    Option("layout_dir", "path", "Take learned layouts from this folder (default: RESHARD_LAYOUT_DIR, else the cache)."),
    Option("engine_python", "path", "With `learn=`: the Python that has the engine, if it is not this one."),
    Option("trust_remote_code", "switch", "With `learn=`: let the engine run Python code that lies beside the model."),
    Option("accept_platform", "switch", "Also write tensors whose shape depends on the platform that was traced."),
)
# How experts are stored: those of a model (Megatron), and those of a LoRA adapter (canonical/adapters/forms.py).
EXPERTS_OF_MODELS = ("sequential", "grouped", "te-grouped")
EXPERTS_OF_ADAPTERS = ("fused", "split", "shared", "tinker")
EXPERTS = Option("experts", "choice", "Set how experts are stored.", choices=(*EXPERTS_OF_MODELS, *EXPERTS_OF_ADAPTERS))


def check_experts(options: Mapping[str, Any], format: str, known: tuple[str, ...]) -> None:
    """Raises RequestError if `experts=` names what is no form of this format."""
    if options.get("experts") not in (None, *known):
        raise RequestError(f"`experts={options['experts']}` does not apply to {format}", do=choices(options["experts"], known))


# Which LoRA adapter of a checkpoint is written or merged, and with which settings.
ADAPTER = (
    Option("adapter", "text", "Take this adapter, if the checkpoint holds several."),
    Option("adapter_config", "path", "Take the settings from this adapter_config.json, or from that in this directory."),
    Option("lora_alpha", "text", "lora_alpha of the training, if the checkpoint has no adapter_config.json that gives it."),
)
