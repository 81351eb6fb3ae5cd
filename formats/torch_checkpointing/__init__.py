"""torch_checkpointing, the planned successor of torch.distributed.checkpoint (before its version 1.0).

    <item>_<rank>.pt    torch.save of an item ("model", "optimizer", ...) on a rank, or another path and format that its layout names:
                        safetensors (local tensors under dotted names), JSON, raw bytes
    metadata.pkl        written if any item can be resharded: {"version", "world_size", "metadata": {item: {
                            "nested_path_to_metadata": {path as JSON: [{"sharding_metadata": {"type", "data"}, "ranks"}]},
                            "rank_to_layout_info": {rank: None or {"file_path", "serialization_format"}}}}}

files.py       an item's files, by name
metadata.py    what metadata.pkl says
read.py        the index

If there is metadata, it says which box of which tensor each rank holds, and the DTensors in the files have to agree. Without it, only the
DTensors say so.
Source: torch_checkpointing 0.1.1 (distributed_metadata.py, dtensor_metadata.py, checkpoint_layout.py); measured on its files
(fixtures/torch_checkpointing).
"""

from __future__ import annotations

from reshard.adapter.format import Format
from reshard.storage.files import Files

from .files import METADATA, numbered_items


class TorchCheckpointing(Format):
    name = "torch-checkpointing"
    summary = "torch_checkpointing (before 1.0): a file per item and rank, and metadata.pkl"
    owns = (METADATA, "model_[0-9]*.pt", "optimizer_[0-9]*.pt")

    def detect(self, files: Files) -> str | None:
        if files.size(METADATA) is not None:
            return METADATA
        first_files = {name: item[0].path for name, item in numbered_items(files).items() if 0 in item}
        if not first_files:
            return None
        from reshard.adapter.state_dicts import holds_sharded_tensors
        from reshard.canonical.tensor_classes import MODEL_ROOTS

        first = next((path for name, path in first_files.items() if name in MODEL_ROOTS), None)
        return first if first and holds_sharded_tensors(files, first) else None


FORMAT = TorchCheckpointing()
