"""torch.distributed.checkpoint: what FSDP1, FSDP2, accelerate and torchtitan write.

    .metadata                for each box of each tensor, the file and the byte range that hold it (a pickle; written last)
    __{rank}_{i}.distcp      the byte ranges, each a torch.save zip of one tensor, packed without padding
    pytorch_model_fsdp_0/, optimizer_0/     accelerate's save_state: two such directories in one
    step-{n}/                torchtitan: one such directory per step

files.py        which directories make up a checkpoint
keys.py         what the keys of the saved state dict mean; the optimizer's parameter names and param groups
read.py         the index
write.py        the layout of a new checkpoint

A file's number is the rank that wrote it. Other ranks may hold the same tensor: torch lets the rank with the least to write store each
replicated entry. Names are flattened; the planner's data in .metadata holds their parts. An entry's own zip directory tells where
its bytes lie, and is read when that piece is needed.
Measured on torch 2.13 (fixtures/dcp); earlier versions from their sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.adapter.format import MAX_SHARD_SIZE, Format, Hints

from .files import dcp_folders, first_dcp_path

if TYPE_CHECKING:
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target
    from reshard.storage.files import Files


class Dcp(Format):
    name = "dcp"
    summary = "torch.distributed.checkpoint: FSDP1, FSDP2, accelerate, torchtitan"
    owns = (".metadata", "__*.metadata", "*.distcp")
    options = (MAX_SHARD_SIZE,)
    keeps_names = True

    def detect(self, files: Files) -> str | None:
        return first_dcp_path(files)

    def read(self, files: Files, hints: Hints) -> Index:
        from .read import read

        return read(files, dcp_folders(files), hints)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .write import lay_out

        return lay_out(content, target, companions)


FORMAT = Dcp()
