"""Which files of a folder hold its weights: those that the index names; without an index, those with the usual names.

If safetensors and pickles lie in one folder, the safetensors are read, as transformers does. If there is an index, only the files that it
names are read: a stale model.safetensors beside them is common.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from reshard.errors import CheckpointError, IncompleteError, MissingFile
from reshard.geometry.quantities import by_numbers
from reshard.geometry.value import value
from reshard.storage.files import Files

SAFETENSORS = ".safetensors"
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
"""The optimizer that transformers' Trainer and accelerate save beside the weights."""
_INDEX = re.compile(r"\.index(\.\w+)?\.json$")  # with a variant: model.safetensors.index.fp16.json
_INDEX_LIMIT = 1 << 28
# Weights that a serving engine or a distributed saver has sharded: they end in .safetensors, too, but hold parts of tensors. LeRobot's
# training state: neither is of a model.
_SHARDED = re.compile(r"(optimizer_state|rng_state|model-rank-\d+-part-|model-pp-\d+-tp-\d+-part-|shard-\d+-model-|rank\d+\.safetensors$)")
_PICKLE = re.compile(r"(pytorch_model|adapter_model|model)[-.\w]*\.bin$")
_STEMS = ("model", "diffusion_pytorch_model")
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.\w+)")


@value
class WeightFiles:
    """The files of a folder that are read."""

    paths: tuple[str, ...]
    """The files, in the order of the numbers in their names."""
    weight_map: Mapping[str, str]
    """Tensor -> its file, according to the index; empty without an index."""
    notes: tuple[str, ...]
    """Sentences about files that are not read."""


def weight_files(files: Files) -> list[str]:
    """The files of the folder whose names say that they hold whole tensors: safetensors if there are any, else pickles."""
    listing = [path for path in files.list() if not path.endswith("/")]
    whole = [path for path in listing if path.endswith(SAFETENSORS) and not _SHARDED.match(path)]
    return whole or [path for path in listing if _PICKLE.match(path) and "fsdp" not in path]


def files_to_read(files: Files) -> WeightFiles:
    """The files that hold the folder's weights.

    Raises: CheckpointError if a file that the index or the numbering names is missing, or if there is no file.
    """
    candidates, index = weight_files(files), _index_file(files)
    if index is not None:
        return _indexed_files(files, candidates, index)
    if not candidates:
        raise IncompleteError("no file here holds weights", where=files.root)
    notes: tuple[str, ...] = ()
    main = next((path for path in (f"{stem}{SAFETENSORS}" for stem in _STEMS) if path in candidates), None)
    if main and len(candidates) > 1:
        others = ", ".join(path for path in candidates if path != main)
        notes = (f"not read, because they lie beside {main} and no index names them: {others}",)
        candidates = [main]
    _check_numbering(files, candidates)
    return WeightFiles(tuple(sorted(candidates, key=by_numbers)), {}, notes)


def _index_file(files: Files) -> str | None:
    """The index of the folder's safetensors, or of its pickles if there are none. Raises CheckpointError if there are several."""
    indexes = {path: _INDEX.sub("", path) for path in files.list() if _INDEX.search(path)}
    ending = SAFETENSORS if any(path.endswith(SAFETENSORS) for path in (*weight_files(files), *indexes.values())) else ".bin"
    fitting = [path for path, indexed in indexes.items() if indexed.endswith(ending)]
    # Beside variants lie the weights that loaders take if none is asked for.
    fitting = [path for path in fitting if path.endswith(".index.json")] or fitting
    # Mistral's own form of the same weights lies beside the published one on the Hugging Face Hub.
    fitting = [path for path in fitting if not path.startswith("consolidated.")] or fitting
    if len(fitting) > 1:
        raise CheckpointError(
            f"there are {len(fitting)} indexes: {', '.join(fitting)}", where=files.root, do="Give one file instead of the folder"
        )
    return fitting[0] if fitting else None


def _indexed_files(files: Files, candidates: Sequence[str], index: str) -> WeightFiles:
    """The files that an index names."""
    weight_map = _weight_map(files, index)
    paths = sorted(set(weight_map.values()), key=by_numbers)
    for path in paths:
        if files.size(path) is None:
            raise MissingFile(
                f"the index {index} names {path}, which is not there",
                where=files.root,
                why=f"{sum(file == path for file in weight_map.values())} tensors would be missing",
                do="Copy that file from where the checkpoint came from",
            )
    ignored = [path for path in candidates if path not in paths]
    notes: tuple[str, ...] = (f"not read, because the index does not name them: {', '.join(ignored)}",) if ignored else ()
    if "model.safetensors" in ignored:
        notes += ("transformers looks for model.safetensors before the index, and loads it in place of the checkpoint's files",)
    return WeightFiles(tuple(paths), weight_map, notes)


def _weight_map(files: Files, path: str) -> dict[str, str]:
    from reshard.adapter.model_files import read_json
    from reshard.storage.files import inside

    value = read_json(files, path, limit=_INDEX_LIMIT).get("weight_map")
    if not isinstance(value, dict) or not all(isinstance(file, str) for file in value.values()) or not value:
        raise CheckpointError(
            "it has no weight_map from names to files", where=path, do="Get the index again, or remove it to read all files"
        )
    for file in dict.fromkeys(value.values()):
        inside(file, where=path)
    return value


def _check_numbering(files: Files, paths: Sequence[str]) -> None:
    """Raises CheckpointError if a file is missing according to the numbers in the names of the others."""
    from reshard.storage.files import missing

    for path in paths:
        match = _NUMBERED.fullmatch(path)
        if not match:
            continue
        for number in range(1, int(match["count"]) + 1):
            other = f"{match['stem']}-{number:05d}-of-{match['count']}{match['ending']}"
            if other not in paths:
                raise missing(files, other)
