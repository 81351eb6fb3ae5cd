"""What ranks of real torch say of their memory: FSDP2, FSDP2 with tensor parallelism, replicas.

    python tests/live/torch_memory.py MODEL FOLDER MESH      MESH: fsdp4, hsdp2x2, fsdp2xtp2, replicas3

MODEL is a Hugging Face folder; its tensors become the parameters of a tree of empty modules. Writes FOLDER/rank_N.pickle: the description
and the arrays that it names.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures"))

import free_ports
from module_trees import tree

from reshard.live.memory.describe import describe, local_of, local_tensors

MESHES = {
    "fsdp4": ((4,), ("fsdp",)),
    "hsdp2x2": ((2, 2), ("copies", "fsdp")),
    "fsdp2xtp2": ((2, 2), ("fsdp", "tp")),
    "replicas3": ((3,), ("copies",)),
}
COLUMN, ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), ("o_proj", "down_proj")


def placements(name: str) -> list:
    """The tensor-parallel placement of a weight, as in a parallelize plan of llama."""
    return [
        Shard(0) if any(f".{part}." in f".{name}" for part in COLUMN) else Shard(1) if any(part in name for part in ROW) else Replicate()
    ]


def sharded(tensors: dict[str, torch.Tensor], kind: str) -> torch.nn.Module:
    sizes, names = MESHES[kind]
    if kind.startswith("replicas"):
        return tree(tensors)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if "tp" in names:
        tensors = {name: distribute_tensor(tensor, mesh["tp"], placements(name)) for name, tensor in tensors.items()}
        mesh = mesh["fsdp"]
    model = tree(tensors)
    for layer in model.model.layers.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def rank_process(rank: int, model: str, folder: str, kind: str, port: int) -> None:
    world = torch.tensor(MESHES[kind][0]).prod().item()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = sharded(load_file(Path(model) / "model.safetensors"), kind)
    arrays = {name: local_of(tensor).clone(memory_format=torch.preserve_format) for name, tensor in local_tensors(module)}
    (Path(folder) / f"rank_{rank}.pickle").write_bytes(pickle.dumps((describe(module), arrays)))
    dist.barrier()
    os._exit(0)  # the ordinary way out sometimes aborts (torch 2.13, gloo)


if __name__ == "__main__":
    kind = sys.argv[3]
    ranks = int(torch.tensor(MESHES[kind][0]).prod())
    # Ranks are forked: importing torch takes longer than what they do.
    torch.multiprocessing.start_processes(rank_process, (*sys.argv[1:4], free_ports.free_port()), nprocs=ranks, start_method="fork")
