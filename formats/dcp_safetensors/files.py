"""Which files hold the boxes of ranks."""

from __future__ import annotations

import re

from reshard.geometry.value import value
from reshard.storage.files import Files

_NAME = re.compile(r"(?:.*/)?shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")
_SHARDED = "sharded/"


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
