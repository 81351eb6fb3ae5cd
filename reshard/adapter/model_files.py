"""The files beside a model's weights (Hugging Face config, tokenizer) and their copies for a target.

Light: a format's `detect` may use it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from reshard.errors import CheckpointError, RequestError, ReshardError, SystemRefusal
from reshard.geometry.value import value
from reshard.models.config_values import component_class, stated_class, with_value
from reshard.models.quantization import SETTING, SETTINGS_FILES, quantization_settings, settings_key, settings_of_file
from reshard.storage.files import Files, LocalFiles, inside, leads_elsewhere, read_whole

if TYPE_CHECKING:
    from reshard.geometry.dtypes import DType
    from reshard.models.architecture import Architecture
    from reshard.models.model import Model
    from reshard.plans.layout import BesideWeights, LeftFile, Sidecar

CONFIG = "config.json"
PIPELINE = "model_index.json"
"""Names the components of a diffusers pipeline, which lie in folders beside it."""
ADAPTER_CONFIG = "adapter_config.json"
DECLARATION = "reshard.architecture.yaml"
"""Declares the architecture of a model that is not built in. reshard writes it beside config.json, and reads it there."""
TOKENIZERS = (
    ("tokenizer.json",),  # Hugging Face tokenizers
    ("*.model",),  # SentencePiece: tokenizer.model, spiece.model, sentencepiece.bpe.model; Kimi's tiktoken.model
    ("tokenizer.model.v*",),  # Mistral
    ("tekken.json",),  # Mistral
    ("vocab.json", "merges.txt"),  # GPT-2, Qwen
    ("vocab.txt",),  # WordPiece
    ("*.tiktoken",),  # Qwen 1
    ("*.spm",),  # Marian
    ("tokenization_*.py",),  # code of the model's own; some builds its vocabulary without a file (xGen)
)
"""Globs of the files in which tokenizers lie; all files of one row are one tokenizer."""
# Globs of the files beside the weights that --overwrite replaces even where no manifest says that reshard wrote them.
CARRIED = (
    *(glob for globs in TOKENIZERS for glob in globs), "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "preprocessor_config.json", "processor_config.json", "configuration_*.py", "modeling_*.py",
)  # fmt: skip
_MOST_DECLARED = 1 << 20
# Where trainers put the Hugging Face files of a run: in the checkpoint's folder, or in one below it (verl, AutoModel, NeMo RL, LeRobot).
_FOLDERS = ("", "huggingface/", ".hf_metadata/", "model/.hf_metadata/", "weights/model/.hf_metadata/", "pretrained_model/")
# Files and folders that are looked at by themselves, and the endings of files with tensors.
_LOOKED_AT_APART, _STORED_APART = (CONFIG, "huggingface/"), (".safetensors", ".bin", ".pt", ".pth", ".distcp")
# The modules of sentence-transformers 6, and the folder of further chat templates of transformers 5 (CHAT_TEMPLATE_DIR).
_MODULES, _CHAT_TEMPLATES = "modules.json", "additional_chat_templates/"
# A folder with more files, or below this depth, is not carried.
_MOST_FILES, _DEPTH = 1000, 3
# The number of labels where a config states none (transformers 5, PreTrainedConfig).
_USUAL_LABELS = 2
# Where trainers put the settings of a LoRA adapter (verl: lora_adapter/).
_ADAPTER_FOLDERS = ("", "lora_adapter/", "huggingface/")
# verl saves r, lora_alpha and task_type here, and trains with alpha / r (utils/checkpoint/fsdp_checkpoint_manager.py since 0.5).
_VERL_ADAPTER = "lora_train_meta.json"
# ms-swift saves the arguments of each run here; its names of an adapter's settings -> PEFT's (MegatronTunerMixin of ms-swift 4).
_SWIFT_ARGUMENTS = "args.json"
_OF_SWIFT = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "use_rslora": "use_rslora",
    "lora_bias": "bias",
    "model": "base_model_name_or_path",
}


_WRITTEN = re.compile(r"(?P<stem>model|diffusion_pytorch_model)(?P<variant>\.\w+)?(-\d{5}-of-\d{5})?\.safetensors")


@value
class FileNames:
    """How the files of weights of a folder are called."""

    stem: str = "model"
    """The word before the number of a file."""
    variant: str = ""
    """The name of a variant, such as "fp16", with a dot before it; empty for none."""
    most: int = 5_000_000_000
    """The most bytes of tensors in one file, unless the user names another limit."""

    @staticmethod
    def of(config: Mapping[str, Any] | None) -> FileNames:
        """The names by which the library that loads a model of this config looks for them: transformers, whose default before version 5
        was 5 GB, or diffusers (0.42, ModelMixin.save_pretrained)."""
        return FileNames("diffusion_pytorch_model", most=10_000_000_000) if component_class(config) else FileNames()

    @staticmethod
    def written(paths: Iterable[str]) -> FileNames | None:
        """The names of these files; None if they have other ones."""
        stems = {match.group("stem", "variant") if (match := _WRITTEN.fullmatch(path)) else None for path in paths}
        (only,) = stems if len(stems) == 1 else (None,)
        return FileNames(only[0], only[1] or "") if only else None

    def file(self, number: int, count: int) -> str:
        """The name of one of the files, counted from 1."""
        suffix = "" if count == 1 else f"-{number:05d}-of-{count:05d}"
        return f"{self.stem}{self.variant}{suffix}.safetensors"

    @property
    def index(self) -> str:
        """The name of the index of several files."""
        return f"{self.stem}.safetensors.index{self.variant}.json"


@value
class ModelFiles:
    """The config and the tokenizer files of a folder."""

    files: Files
    """The tree that they are read from."""
    folder: str
    """Their folder in that tree: empty, or with a slash at its end."""
    config: Mapping[str, Any] | None
    """The content of config.json, and in it the settings of a quantization that stand in another file; None if there is none."""
    settings_files: tuple[str, ...] = ()
    """The files beside config.json that describe how the weights are quantized."""
    settings_from: str | None = None
    """The one of them whose content stands in `config`; None: config.json has the settings itself, or nothing is quantized."""
    derived: bool = False
    """Whether `config` is in no file: it was derived from the checkpoint's own settings, or a stored config was changed."""
    changes: tuple[str, ...] = ()
    """Sentences on what was changed in it when the checkpoint was opened."""
    child: Files | None = None
    """The checkpoint's own files, if it has no config and this folder is the one that contains it."""
    wins_over: str | None = None
    """The checkpoint's own config, which this one contradicts, and how; None: there is none, or it agrees."""
    adapter_config: Mapping[str, Any] | None = None
    """The settings of the checkpoint's LoRA adapter: the content of its adapter_config.json; None if there is none."""
    carries_adapter: bool = False
    """Whether the target holds the adapter beside the weights, so that its settings are written too."""
    beside: Callable[[], BesideWeights] | None = None
    """Looks at what lies beside the weights, once; None: the checkpoint that it lies beside is not known."""
    declaration: bytes | None = None
    """The user's declaration of the architecture, which goes along with config.json; None: the model's architecture is not declared so."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user if the files are not the checkpoint's own, or if their config was changed."""
        if self.wins_over is not None:
            return (f"`model=` wins over the checkpoint's own {self.wins_over}", *self.changes)
        if self.child is None:
            return self.changes
        path = f"{self.files.root.rstrip('/')}/{self.folder}{CONFIG}"
        return (f"The checkpoint has no {CONFIG}, so {path} is used; `model=DIR` names another one", *self.changes)

    def completed(self, model: Model | None) -> tuple[ModelFiles, tuple[str, ...]]:
        """The files with a config that engines take: with the model's type and class, by which they choose theirs; and notes on what was
        changed. The class of a wrapper around the model, such as FSDP's, becomes that of the model."""
        config, named = self.config or {}, stated_class(self.config or {})
        if not config:
            return self, ()
        model_type = model.architecture.model_type if model else None
        its_class = model.class_name if model else None
        if model is None and named:
            from reshard.models.declared.heads import plain_class

            its_class = plain_class(named, None)
        added = {"model_type": model_type, "architectures": its_class and [its_class]}
        added = {key: value for key, value in added.items() if value and not config.get(key)}
        other_type = config.get("model_type", model_type) != model_type
        files, notes = self.with_keys({} if other_type else added, "as engines choose the class by it")
        if named and its_class and named != its_class:
            files, changed = files.with_keys({"architectures": [its_class]}, f"in place of {named}, as engines choose the class by it")
            notes += changed
        keys = {key for dimension in model.architecture.dimensions.values() for key in dimension.keys} if model else ()
        numbers = {key: int(text) for key in sorted(keys) if isinstance(text := config.get(key), str) and text.isdecimal()}
        files, changed = files.with_keys(numbers, "in place of a text, as engines take numbers alone")
        notes += changed
        head = model.architecture.head if model else None
        labels = model.dimensions["labels"] if model and head and head.module and not head.beside else _USUAL_LABELS
        if labels != _USUAL_LABELS and not config.get("id2label") and not config.get("num_labels"):
            files, changed = files.with_keys({"num_labels": labels}, f"as the head has {labels} rows, and {_USUAL_LABELS} are usual")
            notes += changed
        return files._without_dense_sparsity(notes)

    def _without_dense_sparsity(self, notes: tuple[str, ...]) -> tuple[ModelFiles, tuple[str, ...]]:
        """The files without settings of compressed-tensors that say that the weights are dense, which vLLM 0.32 and SGLang 0.5 refuse as
        sparse ones; and the notes with one on it."""
        config, place = self.config or {}, settings_key(self.config or {})
        settings = quantization_settings(config)
        sparsity = settings.get("sparsity_config") if isinstance(settings, Mapping) else None
        form = sparsity.get("format") if isinstance(sparsity, Mapping) else sparsity
        if place is None or self.settings_from or form != "dense":
            return self, notes
        changed = with_value(config, [*place.split("."), "sparsity_config"], None)
        note = f"left out of {CONFIG}, as engines refuse it: {place}.sparsity_config, which says that the weights are dense"
        return replace(self, config=changed, derived=True), (*notes, note)

    def states(self, key: str) -> bool:
        """Whether the config has a key, with a dot before that of an inner config."""
        inner: Any = self.config
        for word in key.split("."):
            if not isinstance(inner, Mapping) or word not in inner:
                return False
            inner = inner[word]
        return True

    def with_keys(self, added: Mapping[str, object], why: str) -> tuple[ModelFiles, tuple[str, ...]]:
        """The files with further keys of the config, and a note about them that says why. Inner configs are led into by dots."""
        if not added:
            return self, ()
        config = self.config or {}
        for key, value in added.items():
            config = with_value(config, key.split("."), value)
        settings = ", ".join(f"{key}: {value}" for key, value in added.items())
        # Engines look into config.json first: there all settings of a quantization stand, or none.
        settings_from = None if any(key.startswith(f"{SETTING}.") for key in added) else self.settings_from
        note = f"added to {CONFIG}, {why}: {settings if len(settings) < 160 else f'{settings[:157]}...'}"
        return replace(self, config=config, settings_from=settings_from, derived=True), (note,)

    def declared(self, named: Architecture | str | os.PathLike[str] | None = None) -> Architecture | None:
        """The architecture that the user names, or else that the declaration beside config.json declares; None if there is neither."""
        if named is not None:
            from reshard.models.lookup import named_architecture

            return named_architecture(named)
        if self.declaration is None:
            return None
        from reshard.models.lookup import declared_by

        return declared_by(self.declaration, f"{self.files.root.rstrip('/')}/{self.folder}{DECLARATION}")

    @property
    def path(self) -> str | None:
        """The directory that `--model` would name for this config; None without a config file."""
        return f"{self.files.root}/{self.folder}" if self.config is not None and not self.derived else None

    def contents(self) -> dict[str, bytes]:
        """The content of the files, by name: with them another machine does without this folder."""
        declared = {} if self.declaration is None else {DECLARATION: self.declaration}
        return self._with_settings(self.looked_beside(), CONFIG) | declared

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files in the folder, and of those in the checkpoint's own."""
        own = self.child.list() if self.child else ()
        return (*(path.removeprefix(self.folder) for path in self.files.list(self.folder)), *own)

    def looked_beside(self, checkpoint: Files | None = None, paths: Sequence[str] = (), owned: Sequence[str] = ()) -> BesideWeights:
        """What lies beside the weights: in this folder, and in the checkpoint's own. The content of what is carried is read.

        checkpoint: the tree of the checkpoint; None: only this folder is looked at, and it is not the checkpoint's. paths: its files that
        hold tensors. owned: globs of the files that its format owns; the small ones are read by its reader.
        """
        from reshard.plans.layout import BesideWeights

        if checkpoint is None:
            return _beside(self.files, self.folder, None)
        folders = {f"{folder}/" for path in paths for folder in PurePosixPath(path).parents}
        small = (path for folder in folders for path in checkpoint.list(folder.removeprefix("./")) if not path.endswith(_STORED_APART))
        used = {*paths, *folders, *(path for path in small if any(fnmatchcase(PurePosixPath(path).name, glob) for glob in owned))}
        beside = [_beside(self.files, self.folder, used if self.files is checkpoint else None)]
        if self.files is not checkpoint or self.folder:  # where both have a file of one name, the last one's is carried
            beside.insert(1 if self.child else 0, _beside(checkpoint, "", used))
        carried = {name: content for of_folder in beside for name, content in of_folder.carried.items()}
        return BesideWeights(carried, tuple(file for of_folder in beside for file in of_folder.left))

    def _with_settings(self, beside: BesideWeights, *names: str) -> dict[str, bytes]:
        """The files that go along, with those that describe a quantization, and further ones."""
        places = {name: self.folder + name for name in (*self.settings_files, *names)}
        return {**beside.carried, **{name: read_whole(self.files, path, limit=1 << 28) for name, path in places.items()}}

    def with_settings_of(self, config: Mapping[str, Any]) -> ModelFiles:
        """The files for weights that are another way quantized or have another number of tokens than before, as the config says."""
        return replace(self, config=config, settings_files=(), settings_from=None, derived=True)

    def sidecars(self, dtypes: Iterable[DType], main: DType | None = None, *, weights: bool = False) -> tuple[Sidecar, ...]:
        """The files to put beside weights of these element types. config.json comes last, so it completes the directory.

        config.json is copied byte for byte if the element type in it is right. Otherwise it is written with the weights' new type.
        main: the floating-point type to name if the weights have several. weights: whether the target also holds files of weights that
        the checkpoint's index does not name.
        """
        from reshard.plans.layout import Sidecar

        carried = self._with_settings((self.beside or self.looked_beside)())
        sidecars = [Sidecar(*item) for item in sorted(carried.items()) if weights or "/" in item[0] or not item[0].endswith(".safetensors")]
        if self.carries_adapter and self.adapter_config is not None:
            sidecars.append(Sidecar(ADAPTER_CONFIG, (json.dumps(self.adapter_config, indent=2) + "\n").encode()))
        if self.declaration is not None:
            sidecars.append(Sidecar(DECLARATION, self.declaration))
        if self.config is not None:
            sidecars.append(Sidecar(CONFIG, self._config_for(dtypes, main)))
        return tuple(sidecars)

    def _config_for(self, dtypes: Iterable[DType], main: DType | None) -> bytes:
        assert self.config is not None
        floating = {dtype for dtype in dtypes if dtype.floating}
        named = next(iter(floating)) if len(floating) == 1 else main
        # transformers 5 writes the key dtype, earlier versions torch_dtype. A config with both gets the same value in both.
        keys = [key for key in ("dtype", "torch_dtype") if key in self.config] or ["torch_dtype"]
        changes = dict.fromkeys(keys, named.torch) if named and not ("_class_name" in self.config and component_class(self.config)) else {}
        if self.derived or any(self.config.get(key) != value for key, value in changes.items()):
            in_other_file = {SETTING} if self.settings_from else set()
            config = {key: value for key, value in self.config.items() if key not in in_other_file}
            return (json.dumps({**config, **changes}, indent=2) + "\n").encode()
        return read_whole(self.files, self.folder + CONFIG, limit=1 << 24)


def has_tokenizer(names: Iterable[str]) -> bool:
    """Whether one of these file names, or several of them together, are a tokenizer."""
    listed = tuple(names)
    return any(all(any(fnmatchcase(name, glob) for name in listed) for glob in globs) for globs in TOKENIZERS)


def is_in_pipeline(files: Files) -> bool:
    """Whether a folder is one of a diffusers pipeline, whose tokenizers lie in other folders."""
    above = None if files.is_file else files.parent()
    with suppress(SystemRefusal):  # who may read a folder may not read the one above
        return above is not None and above.size(PIPELINE) is not None
    return False


def _beside(files: Files, folder: str, used: Collection[str] | None) -> BesideWeights:
    """What lies in a folder beside the weights. folder: empty, or with a slash at its end.

    used: the files and folders that the reader of the checkpoint uses; None: the folder is the model's and not the checkpoint's, so that
    its own weights and state are not looked at.
    """
    from reshard.adapter.file_kinds import HEADS, MOST_BYTES, kinds, left
    from reshard.plans.layout import BesideWeights

    carried: dict[str, bytes] = {}
    others: list[LeftFile] = []
    for name, kind in _entries(files, folder, used):
        if not kind:
            try:
                inside(name, where=files.root).encode()  # or no file of a target can be called so
                size = files.size(folder + name)
                kind = "link" if size is None else "large-file" if size > MOST_BYTES else ""
                content = b"" if kind else read_whole(files, folder + name, limit=MOST_BYTES)
                kind = "pickle" if content.startswith(HEADS) else kind
            except (ReshardError, UnicodeError):
                kind = "unreadable-file"
        if not kind:
            carried[name] = content
        elif used is not None or kinds()[kind].get("of_model"):
            others.append(left(name, kind))
    return BesideWeights(carried, tuple(others))


def _entries(files: Files, folder: str, used: Collection[str] | None, inner: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
    """The name and the kind of each file, and of each folder that is not looked into; no kind if nothing but its content may be against
    a file. Beside modules.json (sentence-transformers) folders are modules, and their safetensors belong to the model."""
    from reshard.adapter.file_kinds import kind_of

    has_modules = files.size(f"{folder}{_MODULES}") is not None
    for path in files.list(folder + inner) if not files.is_file else ():
        name, is_folder, is_used = path.removeprefix(folder), path.endswith("/"), path in (used or ())
        is_weights = name.endswith(".safetensors")
        if name in _LOOKED_AT_APART or (is_used and not is_folder) or (is_weights and not inner and used is None):
            continue
        kind = "link" if files.store is None and leads_elsewhere(files.root, path) else kind_of(name)
        kind = "" if is_weights and kind == "weight-file" and inner and has_modules else kind
        if is_used:  # a folder of the training framework
            yield from ((name, kind or "trainer-state") for name, kind in _entries(files, folder, used, name, depth))
        elif kind or not is_folder:
            yield name, kind
        elif used is not None or has_modules or name == _CHAT_TEMPLATES:
            below = [*_entries(files, folder, used, name, depth - 1)] if depth else []
            is_apart = not has_modules and any(kind.endswith("weight-file") or name.endswith(".safetensors") for name, kind in below)
            yield from below if depth and len(below) <= _MOST_FILES and not is_apart else [(name, "weight-folder")]


def find_model_files(files: Files) -> ModelFiles:
    """The model files of a folder, or of the folder below it where verl puts them. A JSON file that names a model is a config by itself."""
    if files.is_file and (name := files.list()[0]).endswith(".json") and name != CONFIG:
        config = read_json(files, name)
        return ModelFiles(files, "", config if names_a_model(config) else None)
    entries = {"", *files.list()}
    folders = [folder for folder in _FOLDERS if folder[: folder.find("/") + 1] in entries]
    folder = next((folder for folder in folders if files.size(folder + CONFIG) is not None), None)
    if folder is None:
        return ModelFiles(files, "", None)
    config = read_json(files, folder + CONFIG)
    declared = files.size(folder + DECLARATION) is not None
    declaration = read_whole(files, folder + DECLARATION, limit=_MOST_DECLARED) if declared else None
    names = tuple(name for name in SETTINGS_FILES if files.size(folder + name) is not None)
    if not names or quantization_settings(config):
        return ModelFiles(files, folder, config, names, declaration=declaration)
    # The settings of a quantization stand beside config.json.
    settings = settings_of_file(names[0], read_json(files, folder + names[0]))
    return ModelFiles(files, folder, {**config, SETTING: settings}, names, settings_from=names[0], declaration=declaration)


def find_adapter_config(files: Files) -> dict[str, Any] | None:
    """The settings of a checkpoint's LoRA adapter, as PEFT's adapter_config.json names them; None if no file has them."""
    paths = [*(folder + ADAPTER_CONFIG for folder in _ADAPTER_FOLDERS), _VERL_ADAPTER]
    path = next((path for path in paths if files.size(path) is not None), None)
    if path is None:
        return _settings_of_swift(files)
    settings = _checked_settings(read_json(files, path), path)
    return {**settings, "use_rslora": False} if path == _VERL_ADAPTER else settings


def _settings_of_swift(files: Files) -> dict[str, Any] | None:
    """The settings of an adapter that ms-swift trained with Megatron, from the arguments of its run; None if there are none."""
    if files.size(_SWIFT_ARGUMENTS) is None:
        return None
    arguments = read_json(files, _SWIFT_ARGUMENTS)
    if str(arguments.get("tuner_type", arguments.get("train_type"))) != "lora" or "lora_alpha" not in arguments:
        return None
    settings = {name: arguments[key] for key, name in _OF_SWIFT.items() if arguments.get(key) is not None}
    return _checked_settings({**settings, "use_rslora": bool(arguments.get("use_rslora"))}, _SWIFT_ARGUMENTS)


# The settings of an adapter that are read, and the types that they have in PEFT.
_SETTINGS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "r": ((int,), "a whole number"),
    "lora_alpha": ((int, float), "a number"),
    "rank_pattern": ((dict,), "an object"),
    "alpha_pattern": ((dict,), "an object"),
    "target_modules": ((str, list), "a text or a list"),
    "target_parameters": ((list,), "a list"),
    "modules_to_save": ((list,), "a list"),
    "bias": ((str,), "a text"),
}


def _checked_settings(config: dict[str, Any], path: str) -> dict[str, Any]:
    """The settings of an adapter. Raises CheckpointError if one has another type than PEFT gives it."""
    settings = [(key, config.get(key), *types) for key, types in _SETTINGS.items()]
    for pattern, key in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        values = config.get(pattern)
        settings += [(f"{pattern}.{name}", value, *_SETTINGS[key]) for name, value in values.items()] if isinstance(values, dict) else []
    for key, value, types, expected in settings:
        if value is not None and (not isinstance(value, types) or isinstance(value, bool)):
            raise CheckpointError(
                f"it gives {str(value)[:60]!r} for {key}; {expected} is expected",
                where=path,
                why="The scale of the adapter, or the modules that it changes, depend on it",
                do="Copy the file again from where the adapter was saved, or give another one with `adapter_config=`",
            )
    return config


def adapter_config_at(path: str) -> dict[str, Any]:
    """The content of the adapter_config.json at a path, or in the directory at a path. Raises RequestError if there is none."""
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    settings = find_adapter_config(LocalFiles(folder)) if os.path.basename(path) == ADAPTER_CONFIG or folder == path else None
    if settings is None:
        raise RequestError(f"`adapter_config={path}`: there is no {ADAPTER_CONFIG}", do="Name the file, or the directory that holds it")
    return settings


def find_model_files_near(files: Files) -> ModelFiles:
    """The model files of a checkpoint. Without a config of its own, those of the directory that contains it, if there is one of a model:
    trainers write it once for all checkpoints of a run."""
    own = ModelFiles(files, "", None) if files.is_file else find_model_files(files)
    parent = files.parent() if own.config is None else None
    if parent is None:
        return own
    try:
        above = find_model_files(parent)
    except CheckpointError:
        return own
    # Other programs have files of this name, too.
    return replace(above, child=files) if above.config and names_a_model(above.config) else own


def names_a_model(config: Mapping[str, Any]) -> bool:
    """Whether a config says of which type its model is."""
    return bool(config.get("model_type") or config.get("architectures"))


@contextmanager
def blaming_the_parent(model_files: ModelFiles) -> Iterator[None]:
    """Errors that are raised inside say that the config is not the checkpoint's own, if so."""
    try:
        yield
    except ReshardError as error:
        if model_files.notes:
            error.why = ". ".join(part.rstrip(".") for part in (error.why, *model_files.notes) if part)
        raise


def read_json(files: Files, path: str, *, limit: int = 1 << 24) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if the file holds anything else."""
    from reshard.storage.json_input import parsed

    try:
        value = parsed(read_whole(files, path, limit=limit))
    except ValueError as error:
        raise CheckpointError(f"it cannot be read as JSON: {error}", where=path, do="Copy the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"it holds a {type(value).__name__}, an object was expected", where=path)
    return value
