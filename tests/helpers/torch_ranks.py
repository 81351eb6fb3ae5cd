"""Real torch takes what reshard wrote: rank processes on gloo shard a model with FSDP2, load, and tell what they hold.

    python torch_ranks.py FOLDER KIND RANKS TRUTH      KIND: dcp, dcp-optimizer, fsdp, fsdp-optimizer

The model is a tree of empty modules with the truth's parameters in it, all zeros before it loads. Prints one JSON document: the SHA-256
of every full tensor that differs from the truth, the number of tensors, and the optimizer's learning rate.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures"))

import free_ports
from module_trees import tree

KINDS = {"exp_avg": "moment1", "exp_avg_sq": "moment2", "step": "step"}
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def digest(tensor):
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(full.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def load(model, optimizer, folder, kind, ranks):
    if kind == "dcp":
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state)
    elif kind == "dcp-optimizer":
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    else:
        own = f"world_size_{ranks}_rank_{dist.get_rank()}.pt"
        model.load_state_dict(torch.load(f"{folder}/model_{own}", weights_only=True))
        if kind == "fsdp-optimizer":
            optimizer.load_state_dict(torch.load(f"{folder}/optim_{own}", weights_only=True))


def in_trained_order(model, folder, ranks):
    """The parameters in the order in which the trainer's optimizer numbered them; the truth is sorted by name."""
    state = torch.load(f"{folder}/optim_world_size_{ranks}_rank_0.pt", weights_only=True)
    parameters = dict(model.named_parameters())
    return [parameters[name] for group in state["param_groups"] for name in group["param_names"]]


def rank_process(rank, folder, kind, ranks, truth, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensors = json.loads(Path(truth).read_text())["tensors"]
    weights = {name: roles["weight"] for name, roles in tensors.items()}
    model = tree({name: torch.zeros(weight["shape"], dtype=DTYPES[weight["dtype"]]) for name, weight in weights.items()})
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",)))
    parameters = in_trained_order(model, folder, ranks) if kind == "fsdp-optimizer" else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.5, foreach=False)
    load(model, optimizer, folder, kind, ranks)
    found = {(name, "weight"): digest(parameter) for name, parameter in model.named_parameters()}
    if kind.endswith("-optimizer"):
        states = ((name, optimizer.state[parameter]) for name, parameter in model.named_parameters())
        found |= {(name, role): digest(state[kind]) for name, state in states for kind, role in KINDS.items()}
    wrong = {f"{name} {role}": value for (name, role), value in found.items() if value != tensors[name][role]["sha256"]}
    if rank == 0:
        print(json.dumps({"tensors": len(found), "wrong": wrong, "lr": optimizer.param_groups[0]["lr"]}), flush=True)
    dist.barrier()
    os._exit(0)  # the ordinary way out sometimes aborts (torch 2.13, gloo)


def main(folder, kind, ranks, truth):
    port = free_ports.free_port()
    arguments = (folder, kind, int(ranks), truth, port)
    # Ranks are forked: importing torch takes longer than what they do.
    torch.multiprocessing.start_processes(rank_process, arguments, nprocs=int(ranks), start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
