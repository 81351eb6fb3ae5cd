"""Megatron-Core's distributed checkpoints (--ckpt-format torch_dist, zarr or torch_dcp): boxes of whole tensors, from any rank.

This module is loaded for every checkpoint, to detect the format. So it imports its reader and its writer when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.adapter.format import Format, Hints
from reshard.errors import IncompleteError
from reshard.storage.files import Files

from .layout.save_folders import COMMON, DCP_METADATA, METADATA_JSON, TRACKER, find_distributed, find_save
from .options import OPTIONS

if TYPE_CHECKING:
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target


class MegatronDist(Format):
    name = "megatron-dist"
    summary = "Megatron-Core distributed checkpoints (torch_dist): iter_*/metadata.json, common.pt, *.distcp"
    owns = (METADATA_JSON, COMMON, DCP_METADATA, "*.distcp", TRACKER)
    refines = ("dcp", "pt")
    needs_vocabulary = True
    options = OPTIONS
    keeps_masters = True

    def detect(self, files: Files) -> str | None:
        return find_distributed(files)

    def read(self, files: Files, hints: Hints) -> Index:
        from .read.distributed import read_distributed

        folder = find_save(files)
        if folder is None:
            raise IncompleteError(f"there is no {METADATA_JSON} here, and no save, such as iter_0000001", where=files.root)
        return read_distributed(files, folder, hints)

    def check_values(self, files: Files, index: Index) -> Index:
        from .read.masters import without_wrong_masters

        return without_wrong_masters(files, index)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .write.distributed import lay_out_distributed

        return lay_out_distributed(content, target, companions)


FORMAT = MegatronDist()
