"""Megatron-Core's distributed checkpoints (--ckpt-format torch_dist, zarr or torch_dcp): boxes of whole tensors, from any rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reshard.adapter.format import Hints
from reshard.storage.files import Files

from . import Megatron
from .layout.save_folders import COMMON, DCP_METADATA, METADATA_JSON, TRACKER, find_distributed, folder_of_save

if TYPE_CHECKING:
    from reshard.adapter.dcp_reader import KeyedFolder
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target


class MegatronDist(Megatron):
    name = "megatron-dist"
    other_names = ("torch_dist", "torch-dist", "mcore", "megatron-core", "nemo")
    framework = "megatron-core"
    summary = "Megatron-Core distributed checkpoints (torch_dist): iter_*/metadata.json, common.pt, *.distcp"
    owns = (METADATA_JSON, COMMON, DCP_METADATA, "*.distcp", TRACKER)
    refines = ("dcp", "pt")

    def detect(self, files: Files) -> str | None:
        return find_distributed(files)

    def read(self, files: Files, hints: Hints) -> Index:
        from .read.distributed import read_distributed

        return read_distributed(files, folder_of_save(files, METADATA_JSON), hints)

    def read_memory(self, memory: KeyedFolder, settings: Mapping[str, Any], hints: Hints) -> Index:
        from .read.distributed import read_memory

        return read_memory(memory, settings, hints)

    def check_values(self, files: Files, index: Index) -> Index:
        from .read.run_model import without_wrong_masters

        return without_wrong_masters(files, index)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .write.distributed import lay_out_distributed

        return lay_out_distributed(content, target, companions)


FORMAT = MegatronDist()
