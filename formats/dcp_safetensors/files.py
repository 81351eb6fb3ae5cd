"""Which files hold the boxes of ranks."""

from __future__ import annotations

from reshard.adapter.save_folders import shards_of_ranks
from reshard.geometry.value import value
from reshard.storage.files import Files

_SHARDED = ("sharded/",)


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
    """The ranks' files of the folder, or else of sharded/ or a trainer's folder of weights below it.

    sharded/ is ignored if whole files lie in the folder, because they hold the same values.
    """
    names = shards_of_ranks(files)
    if not names or "/" in names[0][0]:
        has_whole_files = any(path.endswith(".safetensors") for path in files.list())
        names = [] if has_whole_files else shards_of_ranks(files, _SHARDED) or names
    return [ShardFile(match[0], int(match[1]) - 1, int(match[2]), int(match[3])) for match in names]
