"""Distributed checkpoints (--ckpt-format torch_dist): the format."""

from __future__ import annotations

from reshard.adapter.format import Format, Hints
from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content
from reshard.errors import CheckpointError
from reshard.index.index import Index
from reshard.plans.layout import Layout
from reshard.plans.target import Target
from reshard.storage.files import Files

from .layout.save_folders import COMMON, METADATA, PLAIN, save_folder
from .options import OPTIONS
from .read import distributed, plain_dcp
from .read.check_masters import without_strange_masters
from .write.distributed import lay_out


class MegatronDist(Format):
    name = "megatron-dist"
    summary = "Megatron-Core distributed checkpoints (torch_dist): iter_*/metadata.json, common.pt, *.distcp"
    owns = (METADATA, "common.pt", ".metadata", "*.distcp", "latest_checkpointed_iteration.txt")
    refines = ("dcp",)
    options = OPTIONS
    keeps_masters = True

    def detect(self, files: Files) -> str | None:
        folder = save_folder(files)
        listing = files.list(folder) if folder is not None else ()
        if f"{folder}{METADATA}" in listing:
            return f"{folder}{METADATA}"
        path = f"{folder}{PLAIN}"
        if path in listing and f"{folder}{COMMON}" in listing:
            return path
        return path if path in listing and plain_dcp.is_megatrons(files, path) else None

    def read(self, files: Files, hints: Hints) -> Index:
        folder = save_folder(files)
        if folder is None:
            raise CheckpointError(f"there is no {METADATA} here, and no iter_0000001", where=files.root)
        return distributed.read(files, folder, hints)

    def check_values(self, files: Files, index: Index) -> Index:
        return without_strange_masters(files, index)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        return lay_out(content, target, companions)


FORMAT = MegatronDist()
