"""Which files of a folder hold its weights, and which tensors are in them.

Where safetensors and pickles lie in a folder the safetensors are read, as transformers does; with an index, only the files that it
names (a stale model.safetensors beside them is common).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from reshard.adapter.model_files import read_json
from reshard.containers import safetensors, torch_zip
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Extent, Piece
from reshard.index.index import Tensor
from reshard.index.shards import Shards
from reshard.storage.files import Files, inside, missing

SAFETENSORS = ".safetensors"
# Pre-sharded weights of a serving engine and of distributed savers end in .safetensors, too, but hold parts of tensors.
_NOT_OURS = re.compile(r"(model-rank-\d+-part-|model-pp-\d+-tp-\d+-part-|shard-\d+-model-|rank\d+\.safetensors$)")
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.\w+)")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a folder holds: its files of weights, their tensors, the names of what is no tensor, notes for a reader."""

    paths: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    objects: tuple[str, ...]
    notes: tuple[str, ...]


def read(files: Files, *, headers: bool = False) -> Reading:
    """The tensors of a folder. headers: those are enough, safetensors files may end anywhere after them.

    Raises: CheckpointError if the files and their index do not say the same.
    """
    paths, named, notes = _files_to_read(files)
    found: dict[str, Tensor] = {}
    objects: list[str] = []
    extra: list[str] = []
    for path in paths:
        for tensor in _tensors(files, path, objects, headers):
            if named and named.get(tensor.name, path) != path:
                continue
            if named and tensor.name not in named:
                extra.append(tensor.name)
            if tensor.name in found:
                raise CheckpointError(
                    f"two files hold it: {found[tensor.name].shards.path(0)} and {path}",
                    where=tensor.name,
                    why="No index says which one counts, and loaders take whichever comes last",
                    do="Remove the file that does not belong to this model",
                )
            found[tensor.name] = tensor
    if lost := [name for name in named if name not in found]:
        raise CheckpointError(
            f"the index places it in {named[lost[0]]}, which does not hold it"
            + (f" (nor {len(lost) - 1} others)" if len(lost) > 1 else ""),
            where=lost[0],
            why="The index and the files are from different saves, or a file was replaced",
            do="Get the index and the files from the same save",
        )
    if extra:
        notes.append(f"{len(extra)} tensors are in the files but not in the index, such as {extra[0]}; they are read")
    return Reading(tuple(paths), tuple(found.values()), tuple(objects), tuple(notes))


def weight_files(files: Files) -> list[str]:
    """The files of the folder that may hold whole tensors; safetensors if there are any, else pickles."""
    listing = [path for path in files.list() if not path.endswith("/")]
    found = [path for path in listing if path.endswith(SAFETENSORS) and not _NOT_OURS.match(path)]
    return found or [
        path
        for path in listing
        if path.endswith(".bin") and re.match(r"(pytorch_model|adapter_model|model)[-.\w]*\.bin$", path) and "fsdp" not in path
    ]


def _files_to_read(files: Files) -> tuple[list[str], Mapping[str, str], list[str]]:
    """The files to read, in order; which file an index assigns to each name (empty without one); notes for a reader."""
    found, notes = weight_files(files), list[str]()
    indexes = [path for path in files.list() if path.endswith(".index.json")]
    kind = (
        SAFETENSORS if any(path.endswith(SAFETENSORS) for path in [*found, *(p.removesuffix(".index.json") for p in indexes)]) else ".bin"
    )
    fitting = [path for path in indexes if path.endswith(kind + ".index.json")]
    if len(fitting) > 1:
        raise CheckpointError(
            f"there are {len(fitting)} indexes: {', '.join(fitting)}", where=files.root, do="Give one file instead of the folder"
        )
    if fitting:
        named = _weight_map(files, fitting[0])
        paths = sorted(set(named.values()), key=_natural)
        for path in paths:
            if files.size(path) is None:
                raise CheckpointError(
                    f"the index {fitting[0]} names {path}, which is not there",
                    where=files.root,
                    why=f"{sum(p == path for p in named.values())} tensors would be missing",
                    do="Copy that file from where the checkpoint came from",
                )
        if ignored := [path for path in found if path not in paths]:
            notes.append(f"not named by the index, so not read: {', '.join(ignored)}")
        return paths, named, notes
    if not found:
        raise CheckpointError("no file here holds weights", where=files.root)
    if "model.safetensors" in found and len(found) > 1:
        notes.append(f"beside model.safetensors and in no index, so not read: {', '.join(p for p in found if p != 'model.safetensors')}")
        found = ["model.safetensors"]
    _check_numbering(files, found)
    return sorted(found, key=_natural), {}, notes


def _weight_map(files: Files, path: str) -> dict[str, str]:
    value = read_json(files, path, limit=1 << 28).get("weight_map")
    if not isinstance(value, dict) or not all(isinstance(file, str) for file in value.values()) or not value:
        raise CheckpointError(
            "it has no weight_map from names to files", where=path, do="Get the index again, or remove it to read all files"
        )
    return {name: inside(file, where=path) for name, file in value.items()}


def _check_numbering(files: Files, found: list[str]) -> None:
    """Without an index the names still say how many files there are."""
    for path in found:
        match = _NUMBERED.fullmatch(path)
        if not match:
            continue
        for number in range(1, int(match["count"]) + 1):
            other = f"{match['stem']}-{number:05d}-of-{match['count']}{match['ending']}"
            if other not in found:
                raise missing(files, other)


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdigit() else (0, word) for word in re.split(r"(\d+)", path)]


def _tensors(files: Files, path: str, objects: list[str], headers: bool) -> Iterator[Tensor]:
    if path.endswith(SAFETENSORS):
        header = safetensors.read_header(files, path, alone=headers)
        if "DCP_SHARDING_INFO" in header.metadata and len(files.list()) > 1 and re.match(r"shard-", path):
            raise CheckpointError("it is one rank's part of a distributed save, not a Hugging Face checkpoint", where=path)
        for entry in header.entries:
            yield _tensor(entry.name, path, entry.byte_offset, entry.dtype, entry.shape, row_major(entry.shape))
        return
    for name, stored in _state_dict(files, path, objects):
        yield _tensor(name, path, stored.byte_offset, stored.dtype, stored.shape, stored.strides)


def _tensor(name: str, path: str, byte_offset: int, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    piece = Piece(Box.whole(shape), Extent(path, byte_offset, strides, dtype))
    return Tensor(name, dtype, shape, "weight", Shards.of([piece]))


def _state_dict(files: Files, path: str, objects: list[str]) -> Iterator[tuple[str, torch_zip.StoredTensor]]:
    root = torch_zip.read(files, path)
    if not isinstance(root, Mapping):
        raise CheckpointError("it does not hold a dict of tensors", where=path, do="Give the file that holds the model's state dict")
    for wrapper in ("state_dict", "model", "module"):
        if isinstance(root.get(wrapper), Mapping):
            objects.extend(str(key) for key in root if key != wrapper)
            root = root[wrapper]
            break
    for name, value in root.items():
        if isinstance(value, torch_zip.StoredTensor):
            yield str(name), value
        else:
            objects.append(str(name))
