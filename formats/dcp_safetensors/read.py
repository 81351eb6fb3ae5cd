"""torch.distributed.checkpoint on safetensors: HuggingFaceStorageWriter(save_distributed=True).

    shard-{rank+1:05d}-model-{i:05d}-of-{n:05d}.safetensors    a rank's boxes, one per tensor; alone in the folder, or
    sharded/shard-...                                          below it, until they are consolidated

Every file's header says, in its __metadata__, at which offsets of the whole tensor its boxes start (DCP_SHARDING_INFO), but not how
large the whole is: that is as far as any box reaches. So a lost last box looks like a smaller tensor; only the model's config tells
the difference, and where one is known shapes are compared with it on opening.
Whole files (save_distributed=False, or consolidated) are Hugging Face's own form and read as that.
Measured on torch 2.13 (fixtures/dcp_safetensors); source: torch/distributed/checkpoint/hf_storage.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from reshard.adapter.format import Format, Hints
from reshard.adapter.rank_files import step_of
from reshard.containers import safetensors
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.extents import Extent, Piece
from reshard.index.index import Index, RunFacts, StoredFile, Tensor, check_coverage
from reshard.index.shards import Shards
from reshard.storage.files import Files

_NAME = re.compile(r"(?:.*/)?shard-(?P<rank>\d{5})-model-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_INFO = "DCP_SHARDING_INFO"
_SHARDED = "sharded/"


class DcpSafetensors(Format):
    name = "dcp-safetensors"
    summary = "torch.distributed.checkpoint on safetensors: one rank's boxes per file (HuggingFaceStorageWriter)"
    owns = ("shard-*-model-*-of-*.safetensors",)

    def detect(self, files: Files) -> str | None:
        return next(iter(_shards(files)), None)

    def read(self, files: Files, hints: Hints) -> Index:
        paths = _shards(files)
        if not paths:
            raise CheckpointError("there is no shard-<rank>-model-<i>-of-<n>.safetensors", where=files.root)
        pieces: dict[str, list[Piece]] = {}
        for path in paths:
            header = safetensors.read_header(files, path)
            offsets = _offsets(header, path)
            for entry in header.entries:
                extent = Extent(path, entry.byte_offset, row_major(entry.shape), entry.dtype)
                pieces.setdefault(entry.name, []).append(Piece(_box(entry, offsets, path), extent))
        tensors = tuple(_tensor(name, found) for name, found in pieces.items())
        _check_files(files, paths, tensors)
        _check_shapes(tensors, hints)
        ranks = {_number(path, "rank") for path in paths}
        note = "shapes are as far as the stored boxes reach: the files do not tell them"
        facts = RunFacts(
            producer="torch.distributed.checkpoint (HuggingFaceStorageWriter)",
            step=step_of(files.root),
            parallel={"writing ranks": len(ranks)},
            config=hints.config,
            notes=() if hints.model else (f"{note}; with --model they are compared with the config",),
        )
        return Index(self.name, tensors, tuple(StoredFile(path, files.size(path) or 0) for path in paths), facts)


def _shards(files: Files) -> list[str]:
    """The ranks' files, here or in sharded/; none where whole files lie beside them, which hold the same."""
    listing = files.list()
    found = [path for path in listing if _NAME.fullmatch(path)]
    whole = [path for path in listing if path.endswith(".safetensors") and path not in found]
    if found or whole or _SHARDED not in listing:
        return found
    return [path for path in files.list(_SHARDED) if _NAME.fullmatch(path)]


def _number(path: str, which: str) -> int:
    match = _NAME.fullmatch(path)
    assert match
    return int(match[which])


def _offsets(header: safetensors.Header, path: str) -> Mapping[str, object]:
    """Where the boxes of a file start, by tensor."""
    try:
        info = json.loads(header.metadata[_INFO])
        return {name: value["saved_offsets"] for name, value in info.items()}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"its header has no {_INFO} that could be read",
            where=path,
            why="Where a rank's boxes belong is written there only",
            do="Copy the file again",
        ) from None


def _box(entry: safetensors.Entry, offsets: Mapping[str, object], path: str) -> Box:
    found = offsets.get(entry.name)
    if not isinstance(found, list) or len(found) != len(entry.shape) or not all(type(at) is int and 0 <= at < 1 << 40 for at in found):
        raise CheckpointError(f"the box of shape {list(entry.shape)} is said to start at {found!r:.80}", where=f"{entry.name} in {path}")
    return Box(tuple(found), entry.shape)


def _tensor(name: str, pieces: list[Piece]) -> Tensor:
    first = pieces[0].extent
    for piece in pieces:
        if piece.extent.dtype != first.dtype or len(piece.box.sizes) != len(pieces[0].box.sizes):
            raise CheckpointError(
                f"{first.path} holds {first.dtype} with {len(pieces[0].box.sizes)} axes, "
                f"{piece.extent.path} {piece.extent.dtype} with {len(piece.box.sizes)}",
                where=name,
                why="The files are from different saves",
                do="Keep the files of one save only",
            )
    shape = tuple(max(stops) for stops in zip(*(piece.box.stops for piece in pieces), strict=True))
    ranks = np.array([_number(piece.extent.path, "rank") - 1 for piece in pieces], np.int64)
    return Tensor(name, first.dtype, shape, "weight", replace(Shards.of(pieces), ranks=ranks))


def _check_files(files: Files, paths: list[str], tensors: tuple[Tensor, ...]) -> None:
    """Raises CheckpointError if the names tell of files that are not there, and boxes are missing with them."""
    counts = {_number(path, "count") for path in paths}
    if len(counts) > 1:
        raise CheckpointError(
            f"there are files of saves in {' and '.join(map(str, sorted(counts)))} parts",
            where=files.root,
            do="Keep the files of one save only",
        )
    numbers, ranks = {_number(path, "number") for path in paths}, {_number(path, "rank") for path in paths}
    lost = [f"shard-*-model-{i:05d}-of-{min(counts):05d}.safetensors" for i in range(1, min(counts) + 1) if i not in numbers]
    absent = [f"shard-{rank:05d}-model-*.safetensors" for rank in range(1, max(ranks)) if rank not in ranks]
    if lost:
        raise CheckpointError(
            f"no file is called {lost[0]}", where=files.root, why="The names of the others say that there is one", do="Copy it again"
        )
    for tensor in tensors if absent else ():
        try:
            check_coverage(tensor)
        except CheckpointError as error:
            raise CheckpointError(
                f"no file is called {absent[0]}", where=tensor.name, why=error.what, do="Copy it from where the checkpoint was written"
            ) from None


def _check_shapes(tensors: tuple[Tensor, ...], hints: Hints) -> None:
    """Raises CheckpointError if a tensor ends before the config's shape does: then its last box is lost."""
    model = hints.model
    for tensor in tensors if model else ():
        weight = model.weights.get(tensor.name) if model else None
        if weight and len(weight.shape) == len(tensor.shape) and any(a < b for a, b in zip(tensor.shape, weight.shape, strict=True)):
            raise CheckpointError(
                f"the stored boxes reach to {list(tensor.shape)}, the config says {list(weight.shape)}",
                where=tensor.name,
                why="The files do not tell how large a tensor is, so this is how a lost last rank's file looks; or the config is another's",
                do="Copy the missing shard-<rank>-... file from where the checkpoint was written",
            )


FORMAT = DcpSafetensors()
