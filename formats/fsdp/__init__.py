"""FSDP with one file per rank: torch.save of state dicts whose tensors are DTensors or ShardedTensors.

    model_world_size_{N}_rank_{r}.pt     verl (FSDP2: DTensors), with optim_world_size_..., extra_state_world_size_...
    pytorch_model_fsdp_{i}_rank{r}.bin   accelerate without DCP; FSDP1: ShardedTensors, or DTensors if it was given a device mesh
    optimizer_{i}_rank{r}.bin, ...       the optimizer's state dict; parameters by name, or by number in their recorded order

read.py     the index
write.py    the layout of new files, as verl names them

DTensors say where they belong by mesh, placements and coordinates; ShardedTensors list their boxes (containers/distributed_tensors.py).
Plain tensors are whole on every rank. Files with any other name that ends in rank<r>.pt (.pth, .bin, .ckpt) are read the same way.
Measured on torch 2.13 (fixtures/fsdp) and on files of older versions (fixtures/torch_versions).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.adapter.format import Format, Hints, Option
from reshard.adapter.rank_files import first_rank_file

if TYPE_CHECKING:
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target
    from reshard.storage.files import Files


TORCH_VERSIONS = tuple(f"2.{minor}" for minor in range(6, 14))
"""The versions of torch whose files are written, oldest first."""
TORCH_VERSION = Option(
    "torch_version",
    "choice",
    "Write the files of this version of torch, which is the one that loads them (default: the installed one, or the newest).",
    choices=TORCH_VERSIONS,
)


class Fsdp(Format):
    name = "fsdp"
    other_names = ("fsdp2", "verl")
    holds_rows = True
    summary = "FSDP, one file per rank (verl, accelerate): DTensor, ShardedTensor"
    owns = ("*_rank_*.pt", "*_rank[0-9]*.bin", "fsdp_config.json")
    keeps_names = True
    options = (TORCH_VERSION,)

    def detect(self, files: Files) -> str | None:
        path = first_rank_file(files)
        if path is None:
            return None
        from reshard.adapter.state_dicts import holds_flat_parameters

        return None if holds_flat_parameters(files, path) else path

    def read(self, files: Files, hints: Hints) -> Index:
        from .read import read

        return read(files, hints)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .write import lay_out

        return lay_out(content, target, companions)


FORMAT = Fsdp()
