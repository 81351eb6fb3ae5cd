"""torch.distributed.checkpoint on safetensors: HuggingFaceStorageWriter(save_distributed=True).

    shard-{rank+1:05d}-model-{i:05d}-of-{n:05d}.safetensors    a rank's boxes, one per tensor: in the folder itself, or
    sharded/shard-...                                          in this folder below it, until they are consolidated

The header of every file says in its __metadata__ (DCP_SHARDING_INFO) at which offsets of the whole tensor its boxes start. No file states
the shape of the whole tensor: it is taken from the ends of the boxes. If the last box is missing, the tensor only looks smaller, and only
the model's config shows the difference. If a config is known, shapes are compared with it on opening.
Whole files (save_distributed=False, or consolidated) are Hugging Face's own form and are read as that.
Measured on torch 2.13 (fixtures/dcp_safetensors); source: torch/distributed/checkpoint/hf_storage.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.adapter.format import Format, Hints
from reshard.geometry.value import value

if TYPE_CHECKING:
    from reshard.index.index import Index
    from reshard.storage.files import Files

_NAME = re.compile(r"(?:.*/)?shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")
_SHARDED = "sharded/"


class DcpSafetensors(Format):
    name = "dcp-safetensors"
    summary = "torch.distributed.checkpoint on safetensors: one rank's boxes per file (HuggingFaceStorageWriter)"
    owns = ("shard-*-model-*-of-*.safetensors",)

    def detect(self, files: Files) -> str | None:
        return next((file.path for file in shard_files(files)), None)

    def read(self, files: Files, hints: Hints) -> Index:
        from .read import read

        return read(files, shard_files(files), hints)


@value
class ShardFile:
    """A file with some boxes of one rank."""

    path: str
    """Where it is."""
    rank: int
    """The rank that wrote it, from 0. The file name counts from 1."""
    part: int
    """Which of the model's parts it belongs to, from 1 on."""
    parts: int
    """The number of parts that the model is divided into."""


def shard_files(files: Files) -> list[ShardFile]:
    """The ranks' files of the folder, or else of sharded/ below it.

    sharded/ is ignored if whole files lie in the folder, because they hold the same values.
    """
    listing = files.list()
    shards = _shard_files_in(listing)
    has_whole_files = sum(path.endswith(".safetensors") for path in listing) > len(shards)
    if shards or has_whole_files or _SHARDED not in listing:
        return shards
    return _shard_files_in(files.list(_SHARDED))


def _shard_files_in(listing: tuple[str, ...]) -> list[ShardFile]:
    matches = ((path, match) for path in listing if (match := _NAME.fullmatch(path)))
    return [ShardFile(path, int(match[1]) - 1, int(match[2]), int(match[3])) for path, match in matches]


FORMAT = DcpSafetensors()
