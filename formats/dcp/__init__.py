"""torch.distributed.checkpoint: what FSDP1, FSDP2, accelerate and torchtitan write.

    .metadata                for each box of each tensor, the file and the byte range that hold it (a pickle; written last)
    __{rank}_{i}.distcp      the byte ranges, each a torch.save zip of one tensor, packed without padding
    pytorch_model_fsdp_0/, optimizer_0/     accelerate's save_state: two such directories in one
    step-{n}/                torchtitan: one such directory per step

A file's number is the rank that wrote it. Other ranks may hold the same tensor: torch lets the rank with the least to write store each
replicated entry. Names are flattened; the planner's data in .metadata holds their parts. An entry's own zip directory tells where
its bytes lie, and is read when that piece is needed. Measured on torch 2.13 (fixtures/dcp); earlier versions from their sources.
"""

from __future__ import annotations

import re

from reshard.adapter.format import MAX_SHARD_SIZE, Format
from reshard.adapter.save_folders import OPTIMIZERS, WEIGHTS, below, shards_of_ranks, whole_weights
from reshard.storage.files import Files

METADATA, DATA = ".metadata", ".distcp"
ANY_METADATA = re.compile(r"(__\d+)?\.metadata")


class Dcp(Format):
    name = "dcp"
    other_names = ("distcp",)
    framework = "torch"
    holds_rows = True
    summary = "torch.distributed.checkpoint: FSDP1, FSDP2, accelerate, torchtitan"
    owns = (".metadata", "__*.metadata", "*.distcp")
    options = (MAX_SHARD_SIZE,)
    keeps_names = True
    keeps_packed_states = True

    def detect(self, files: Files) -> str | None:
        here = (path for path in files.list() if ANY_METADATA.fullmatch(path) or path.endswith((DATA, DATA + "/")))
        if (path := next(here, None)) is not None:
            return path
        folders = folders_below(files)
        is_beside_weights = set(folders) <= set(OPTIMIZERS) and bool(shards_of_ranks(files) or whole_weights(files))
        return None if is_beside_weights else next((folder + METADATA for folder in folders), None)


def folders_below(files: Files) -> list[str]:
    """The folders in this one that are DCP directories."""
    direct = [path for path in files.list() if path.endswith("/") and files.size(path + METADATA) is not None]
    return list(dict.fromkeys([*direct, *below(files, (*WEIGHTS, *OPTIMIZERS), METADATA)]))


def weights_and_optimizer(folders: list[str]) -> list[str]:
    """Of such folders, that of the weights and that of their optimizer, which are one checkpoint; empty if they are anything else."""
    weights, optimizer = ([path for path in folders if path in names] for names in (WEIGHTS, OPTIMIZERS))
    return [*weights, *optimizer] if len(weights) == len(optimizer) == 1 and len(folders) == 2 else []


FORMAT = Dcp()
