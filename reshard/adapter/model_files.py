"""What lies beside a model's weights: its Hugging Face config and tokenizer files, and how they go along."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from reshard.errors import CheckpointError
from reshard.geometry.dtypes import DType
from reshard.plans.layout import Sidecar
from reshard.storage.files import Files, read_whole

CONFIG = "config.json"
# What an engine or a user of the model reads beside the weights. Anything else in a folder stays where it is.
CARRIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "*.model", "*.tiktoken", "chat_template*", "preprocessor_config.json", "processor_config.json",
    "configuration_*.py", "modeling_*.py", "tokenization_*.py",
)  # fmt: skip
# Where trainers put the Hugging Face files of a run: beside the checkpoint, or in this folder of it (verl).
_FOLDERS = ("", "huggingface/")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A folder's config (None if it has none) and the paths of the files that go along with the weights.

    derived: the config is in no file; the checkpoint's own settings say the same.
    """

    files: Files
    folder: str
    config: Mapping[str, Any] | None
    derived: bool = False

    @property
    def path(self) -> str | None:
        """The directory that `--model` would name to get this config; None without a config."""
        return f"{self.files.root}/{self.folder}" if self.config is not None and not self.derived else None

    def sidecars(self, dtypes: Iterable[DType], main: DType | None = None) -> tuple[Sidecar, ...]:
        """The files to put beside weights of those element types; config.json comes last, so that it completes the directory.

        The config keeps its bytes, unless it names another element type than the floating-point weights have now; main: the one to name
        where they have several.
        """
        names = [path.removeprefix(self.folder) for path in self.files.list(self.folder)]
        kept = [name for name in names if not name.endswith("/") and any(fnmatchcase(name, glob) for glob in CARRIED)]
        found = [Sidecar(name, content=read_whole(self.files, self.folder + name, limit=1 << 28)) for name in kept]
        if self.config is not None:
            found.append(Sidecar(CONFIG, self._config_for(dtypes, main)))
        return tuple(found)

    def _config_for(self, dtypes: Iterable[DType], main: DType | None) -> bytes:
        assert self.config is not None
        stored = {dtype for dtype in dtypes if dtype.floating}
        said = next(iter(stored)) if len(stored) == 1 else main
        # transformers 5 says dtype, those before torch_dtype; a config with both has to say one thing.
        keys = [key for key in ("dtype", "torch_dtype") if key in self.config] or ["torch_dtype"]
        own = dict.fromkeys(keys, said.torch) if said else {}
        if self.derived or any(self.config.get(key) != value for key, value in own.items()):
            return (json.dumps({**self.config, **own}, indent=2) + "\n").encode()
        return read_whole(self.files, self.folder + CONFIG, limit=1 << 24)


def find_model_files(files: Files) -> ModelFiles:
    """The config and its companions in a folder, or where trainers put them inside it."""
    for folder in _FOLDERS:
        if files.size(folder + CONFIG) is not None:
            return ModelFiles(files, folder, read_json(files, folder + CONFIG))
    return ModelFiles(files, "", None)


def read_json(files: Files, path: str, *, limit: int = 1 << 24) -> dict[str, Any]:
    """A JSON file that holds one object. Raises CheckpointError if it does not."""
    try:
        value = json.loads(read_whole(files, path, limit=limit))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not valid JSON: {error}", where=path, do="Copy the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"it holds a {type(value).__name__}, an object was expected", where=path)
    return value
