"""torch.distributed.checkpoint on safetensors: HuggingFaceStorageWriter(save_distributed=True).

    shard-{rank+1:05d}-model-{i:05d}-of-{n:05d}.safetensors    a rank's boxes, one per tensor: in the folder itself, or
    sharded/shard-...                                          in this folder below it, until they are consolidated

The header of every file says in its __metadata__ (DCP_SHARDING_INFO) at which offsets of the whole tensor its boxes start. No file states
the shape of the whole tensor: it is taken from the ends of the boxes. If the last box is missing, the tensor only looks smaller, and only
the model's config shows the difference. If a config is known, shapes are compared with it on opening.
Whole files (save_distributed=False, or consolidated) are Hugging Face's own form and are read as that.

files.py    which files hold boxes
read.py     the index

Measured on torch 2.13 (fixtures/dcp_safetensors); source: torch/distributed/checkpoint/hf_storage.py.
"""

from __future__ import annotations

from reshard.adapter.format import Format
from reshard.storage.files import Files

from .files import shard_files


class DcpSafetensors(Format):
    name = "dcp-safetensors"
    summary = "torch.distributed.checkpoint on safetensors: one rank's boxes per file (HuggingFaceStorageWriter)"
    owns = ("shard-*-model-*-of-*.safetensors",)

    def detect(self, files: Files) -> str | None:
        return next((file.path for file in shard_files(files)), None)


FORMAT = DcpSafetensors()
