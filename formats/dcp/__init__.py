"""torch.distributed.checkpoint: what FSDP1, FSDP2, accelerate and torchtitan write.

    .metadata                for each box of each tensor, the file and the byte range that hold it (a pickle; written last)
    __{rank}_{i}.distcp      the byte ranges, each a torch.save zip of one tensor, packed without padding
    pytorch_model_fsdp_0/, optimizer_0/     accelerate's save_state: two such directories in one
    step-{n}/                torchtitan: one such directory per step

keys.py         what the keys of the saved state dict mean; the optimizer's parameter names and param groups
read.py         the index
write.py        the layout of a new checkpoint

A file's number is the rank that wrote it. Other ranks may hold the same tensor: torch lets the rank with the least to write store each
replicated entry. Names are flattened; the planner's data in .metadata holds their parts. An entry's own zip directory tells where
its bytes lie, and is read when that piece is needed.
Measured on torch 2.13 (fixtures/dcp); earlier versions from their sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reshard.adapter.format import MAX_SHARD_SIZE, Format, Hints
from reshard.adapter.save_folders import the_one_save
from reshard.errors import CheckpointError, IncompleteError

if TYPE_CHECKING:
    from reshard.adapter.dcp_reader import KeyedFolder
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target
    from reshard.storage.files import Files

METADATA, DATA = ".metadata", ".distcp"
_ANY_METADATA = re.compile(r"(__\d+)?\.metadata")
_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+/")


class Dcp(Format):
    name = "dcp"
    other_names = ("distcp",)
    framework = "torch"
    holds_rows = True
    summary = "torch.distributed.checkpoint: FSDP1, FSDP2, accelerate, torchtitan"
    owns = (".metadata", "__*.metadata", "*.distcp")
    options = (MAX_SHARD_SIZE,)
    keeps_names = True

    def detect(self, files: Files) -> str | None:
        return first_dcp_path(files)

    def read(self, files: Files, hints: Hints) -> Index:
        from .read import read

        return read(files, dcp_folders(files), hints)

    def read_memory(self, memory: KeyedFolder, settings: Mapping[str, Any], hints: Hints) -> Index:
        from .read import read_memory

        return read_memory(memory, hints)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .write import lay_out

        return lay_out(content, target, companions)


def first_dcp_path(files: Files) -> str | None:
    """A path that shows a DCP directory, here or one folder below; None if there is none."""
    here = (path for path in files.list() if _ANY_METADATA.fullmatch(path) or path.endswith((DATA, DATA + "/")))
    return next(here, None) or next((folder + METADATA for folder in _folders_below(files)), None)


def dcp_folders(files: Files) -> list[str]:
    """The DCP directories that make up this checkpoint: "" is the directory itself, others have a slash at their end.

    Raises: CheckpointError if the save was not finished, or there is no save; RequestError for several saves.
    """
    listing = files.list()
    if any(_ANY_METADATA.fullmatch(path) for path in listing):
        return [""]
    if any(path.endswith(DATA) for path in listing):
        raise CheckpointError(
            f"there are {DATA} files and no {METADATA}" + (" but .metadata.tmp" if ".metadata.tmp" in listing else ""),
            where=files.root,
            why=f"torch writes {METADATA} last, so this save was not finished, or a copy skipped files that start with a dot",
            do=f"Copy {METADATA} from where the checkpoint was written, or take an earlier checkpoint",
        )
    below = _folders_below(files)
    # accelerate: the model before the optimizer, whose numbers count the model's parameters.
    if accelerate := [folder for folder in below if _ACCELERATE.fullmatch(folder)]:
        return sorted(accelerate, reverse=True)
    folder = the_one_save(files, below)
    if folder is None:
        raise IncompleteError(f"there is no {METADATA}", where=files.root, do="Give the directory that holds it, or another `format=`")
    return [folder]


def _folders_below(files: Files) -> list[str]:
    return [path for path in files.list() if path.endswith("/") and files.size(path + METADATA) is not None]


FORMAT = Dcp()
