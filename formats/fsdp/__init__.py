"""FSDP with one file per rank: torch.save of state dicts whose tensors are DTensors or ShardedTensors.

    model_world_size_{N}_rank_{r}.pt     verl (FSDP2: DTensors), optim_world_size_..., extra_state_...; new files have these names
    pytorch_model_fsdp_{i}_rank{r}.bin   accelerate without DCP; FSDP1: ShardedTensors, or DTensors if it was given a device mesh
    optimizer_{i}_rank{r}.bin, ...       the optimizer's state dict; parameters by name, or by number in their recorded order

DTensors say where they belong by mesh, placements and coordinates; ShardedTensors list their boxes (containers/distributed_tensors.py).
Plain tensors are whole on every rank. Files with any other name that ends in rank<r>.pt (.pth, .bin, .ckpt) are read the same way.
Measured on torch 2.13 (fixtures/fsdp) and on files of older versions (fixtures/torch_versions).
"""

from __future__ import annotations

from reshard.adapter.format import Format, Option
from reshard.adapter.rank_files import first_rank_file
from reshard.storage.files import Files

# choices: the versions of torch whose files are written, oldest first.
TORCH_VERSION = Option(
    "torch_version",
    "choice",
    "Write the files of this version of torch, which is the one that loads them (default: the installed one, or the newest).",
    choices=tuple(f"2.{minor}" for minor in range(6, 14)),
)


class Fsdp(Format):
    name = "fsdp"
    other_names = ("fsdp2", "verl")
    holds_rows = True
    summary = "FSDP, one file per rank (verl, accelerate): DTensor, ShardedTensor"
    owns = ("*_rank_*.pt", "*_rank[0-9]*.bin", "fsdp_config.json")
    keeps_names = True
    keeps_packed_states = True
    options = (TORCH_VERSION,)

    def detect(self, files: Files) -> str | None:
        path = first_rank_file(files)
        if path is None:
            return None
        from reshard.adapter.state_dicts import holds_flat_parameters

        return None if holds_flat_parameters(files, path) else path


FORMAT = Fsdp()
