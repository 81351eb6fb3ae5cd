"""Hugging Face: one safetensors file, or several with an index; or the torch pickles that came before.

    config.json                        what the model is (generation_config.json, tokenizer files beside it)
    model.safetensors                  one file, or
    model-00001-of-00003.safetensors   several, with
    model.safetensors.index.json       {"metadata": {"total_size": bytes}, "weight_map": {name: file}}
    pytorch_model.bin                  the same as torch.save of a dict, or pytorch_model-0000i-of-0000n.bin + its index

Names and shapes are canonical by definition. Where both kinds lie in a folder the safetensors are read, as transformers does;
with an index, only the files that it names (a stale model.safetensors beside them is common).
Measured on transformers 5.23 and safetensors 0.8; index rules: transformers, modeling_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from reshard.adapter import Hints
from reshard.boxes import Box, row_major
from reshard.canonical import Canonical
from reshard.containers import safetensors, torch_zip
from reshard.dtypes import DType
from reshard.errors import CheckpointError, RequestError
from reshard.extents import Extent, Piece
from reshard.files import Files, inside, missing
from reshard.index import Index, RunFacts, StoredFile, Tensor
from reshard.layout import Layout, Placed, Sidecar, TargetFile
from reshard.model_files import ModelFiles, read_json
from reshard.plans import Target
from reshard.shards import Shards
from reshard.stored import StoredTensor, whole

_SAFETENSORS = ".safetensors"
_INDEX = "model.safetensors.index.json"
# Pre-sharded weights of a serving engine and of distributed savers end in .safetensors, too, but hold parts of tensors.
_NOT_OURS = re.compile(r"(model-rank-\d+-part-|model-pp-\d+-tp-\d+-part-|shard-\d+-model-|rank\d+\.safetensors$)")
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.\w+)")
# transformers' own default: files of at most 5 GB.
_MAX_SHARD_BYTES = 5_000_000_000


class HuggingFace:
    name = "hf"
    summary = "Hugging Face: safetensors (single or with an index), pytorch_model*.bin"
    owns = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")

    def detect(self, files: Files) -> str | None:
        found = _weight_files(files)
        return f"{found[0]}" if found else None

    def read(self, files: Files, hints: Hints) -> Index:
        paths, named, notes = _files_to_read(files)
        found: dict[str, Tensor] = {}
        objects: list[str] = []
        extra: list[str] = []
        for path in paths:
            for tensor in _tensors(files, path, objects):
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
        stored = tuple(StoredFile(path, files.size(path) or 0) for path in paths)
        facts = RunFacts(
            producer="safetensors" if paths[0].endswith(_SAFETENSORS) else "torch.save", config=hints.config, notes=tuple(notes)
        )
        return Index(self.name, tuple(found.values()), stored, facts, objects=tuple(objects))

    def lay_out(self, content: Canonical, target: Target, companions: ModelFiles) -> Layout:
        target.parallel.allow(what="a Hugging Face checkpoint, which is whole")
        target.refuse_engine_version("a Hugging Face checkpoint")
        if content.states:
            raise RequestError("a Hugging Face checkpoint holds weights, no optimizer state", do="Leave out --optimizer")
        dtypes = {name: target.dtype_of(tensor) for name, tensor in content.tensors.items()}
        order = _in_model_order(content)
        stored = [whole(name, dtypes[name], content.tensors[name].shape) for name in order]
        # Wide elements first keeps every tensor aligned to its element size (what the safetensors library does as well).
        shards = list(_cut(sorted(stored, key=lambda s: -s.dtype.itemsize), target.max_shard_bytes or _MAX_SHARD_BYTES))
        paths = (
            ["model.safetensors"]
            if len(shards) == 1
            else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        )
        files = tuple(_framed(path, shard) for path, shard in zip(paths, shards, strict=True))
        sidecars = companions.sidecars(dtypes.values())
        notes = [] if companions.config is not None else ["no config.json is known: give one with --model DIR, engines need it"]
        if len(shards) > 1:
            sidecars = (*sidecars, _index_sidecar(files))
        return Layout(self.name, files, sidecars, notes=tuple(notes))


def _weight_files(files: Files) -> list[str]:
    """The files of the folder that may hold whole tensors; safetensors if there are any, else pickles."""
    listing = [path for path in files.list() if not path.endswith("/")]
    found = [path for path in listing if path.endswith(_SAFETENSORS) and not _NOT_OURS.match(path)]
    return found or [
        path
        for path in listing
        if path.endswith(".bin") and re.match(r"(pytorch_model|adapter_model|model)[-.\w]*\.bin$", path) and "fsdp" not in path
    ]


def _files_to_read(files: Files) -> tuple[list[str], Mapping[str, str], list[str]]:
    """The files to read, in order; which file an index assigns to each name (empty without one); notes for a reader."""
    found, notes = _weight_files(files), list[str]()
    indexes = [path for path in files.list() if path.endswith(".index.json")]
    kind = (
        _SAFETENSORS if any(path.endswith(_SAFETENSORS) for path in [*found, *(p.removesuffix(".index.json") for p in indexes)]) else ".bin"
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


def _tensors(files: Files, path: str, objects: list[str]) -> Iterator[Tensor]:
    if path.endswith(_SAFETENSORS):
        header = safetensors.read_header(files, path)
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


def _in_model_order(content: Canonical) -> list[str]:
    """The names in the order of the model's own declaration, where it is known; otherwise as in the source."""
    declared = [name for name in content.model.weights if name in content.tensors] if content.model else []
    known = set(declared)
    return declared + [name for name in content.tensors if name not in known]


def _cut(stored: Iterable[StoredTensor], most: int) -> Iterator[list[StoredTensor]]:
    """Runs of tensors of at most `most` bytes; a larger tensor has a file of its own."""
    run: list[StoredTensor] = []
    size = 0
    for tensor in stored:
        if run and size + tensor.nbytes > most:
            yield run
            run, size = [], 0
        run.append(tensor)
        size += tensor.nbytes
    yield run


def _framed(path: str, stored: list[StoredTensor]) -> TargetFile:
    frame = safetensors.frame(((s.name, s.dtype, s.shape) for s in stored), {"format": "pt"})
    placed = tuple(Placed(s, entry.byte_offset) for s, entry in zip(stored, frame.entries, strict=True))
    return TargetFile(path, frame.nbytes, ((0, frame.header),), placed)


def _index_sidecar(files: tuple[TargetFile, ...]) -> Sidecar:
    import json

    weight_map = {item.tensor.name: file.path for file in files for item in file.tensors}
    total = sum(item.tensor.nbytes for file in files for item in file.tensors)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return Sidecar(_INDEX, (json.dumps(document, indent=2) + "\n").encode())


FORMAT = HuggingFace()
