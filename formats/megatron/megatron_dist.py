"""Megatron-Core's distributed checkpoints (--ckpt-format torch_dist, zarr or torch_dcp): boxes of whole tensors, from any rank."""

from __future__ import annotations

from reshard.storage.files import Files

from . import Megatron
from .layout.save_folders import COMMON, DCP_METADATA, METADATA_JSON, TRACKER, find_distributed


class MegatronDist(Megatron):
    name = "megatron-dist"
    other_names = ("torch_dist", "torch-dist", "mcore", "megatron-core", "nemo")
    framework = "megatron-core"
    summary = "Megatron-Core distributed checkpoints (torch_dist): iter_*/metadata.json, common.pt, *.distcp"
    owns = (METADATA_JSON, COMMON, DCP_METADATA, "*.distcp", TRACKER)
    refines = ("dcp", "pt")
    reader, writer = "read.distributed", "write.distributed"

    def detect(self, files: Files) -> str | None:
        return find_distributed(files)


FORMAT = MegatronDist()
