"""Rank processes of real torch on gloo for the tests of this folder. Each task prints one JSON document.

    ranks.py load MESH CHECKPOINT MODEL TRUTH             fill a model and its AdamW by Reader, compare with the truth
    ranks.py train MESH CHECKPOINT MODEL TRUTH DIRECT     two steps after the load; DIRECT: torch itself loads that
    ranks.py save MESH MODEL OUT TARGETS                  save the model of a Hugging Face folder: torch, and by Writer
    ranks.py die MESH MODEL OUT PHASE                     rank 1 is killed at a phase of a save

MESH: fsdp4, fsdp3, hsdp2x2, fsdp2xtp2. The model is a tree of empty modules with the weights as its parameters.
"""

import hashlib
import json
import os
import signal
import sys
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT / "fixtures")

import free_ports  # noqa: E402
from module_trees import tree  # noqa: E402

import reshard  # noqa: E402
from reshard.canonical.content import Selection  # noqa: E402
from reshard.torch import Reader, Writer  # noqa: E402

MESHES = {
    "fsdp4": ((4,), ("fsdp",)),
    "fsdp3": ((3,), ("fsdp",)),
    "fsdp2": ((2,), ("fsdp",)),
    "hsdp2x2": ((2, 2), ("copies", "fsdp")),
    "fsdp2xtp2": ((2, 2), ("fsdp", "tp")),
}
COLUMN, ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), ("o_proj", "down_proj")
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "I64": torch.int64}
KINDS = {"exp_avg": "moment1", "exp_avg_sq": "moment2", "step": "step"}


def digest(tensor):
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(full.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def placement(name):
    """How tensor parallelism splits a weight, as in a plan of llama."""
    dotted = f".{name}"
    return Shard(0) if any(f".{part}." in dotted for part in COLUMN) else Shard(1) if any(part in name for part in ROW) else Replicate()


def sharded(tensors, kind):
    """A module with these weights as its parameters, spread over the ranks."""
    mesh = init_device_mesh("cpu", MESHES[kind][0], mesh_dim_names=MESHES[kind][1])
    if "tp" in mesh.mesh_dim_names:
        tensors = {name: distribute_tensor(tensor, mesh["tp"], [placement(name)]) for name, tensor in tensors.items()}
        mesh = mesh["fsdp"]
    root = tree(tensors)
    fully_shard(root, mesh=mesh)
    return root


def opened(checkpoint, model):
    return reshard.open(checkpoint, **({"model": model} if model else {}))


def trainer(kind, checkpoint, model, truth):
    """A module of zeros, in float32 where the run had masters, and an AdamW with the groups of the run."""
    content = opened(checkpoint, model).content(Selection(optimizer=True, masters=True))
    tensors = {}
    for name, stored in content.weights.items():
        roles = truth.get(name, {})
        dtype = "F32" if "master" in roles else roles.get("weight", {}).get("dtype", "F32")
        tensors[name] = torch.zeros(stored.shape, dtype=DTYPES[dtype])
    module = sharded(tensors, kind)
    by_name = dict(module.named_parameters())
    groups = [{"params": [by_name[name] for name in group.names]} for group in content.param_groups()]
    listed = {name for group in content.param_groups() for name in group.names}
    for name in by_name.keys() - listed:
        by_name[name].requires_grad_(False)  # frozen
    return module, torch.optim.AdamW(groups, lr=0.5, foreach=False), content


def loaded(module, optimizer, reader):
    weights, states = get_state_dict(module, optimizer)
    dcp.load({"model": weights, "optim": states}, **reader)
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=states)


def load(kind, checkpoint, model, truth):
    """What differs from the truth, by name and role, and the settings of the first group."""
    expected = json.loads(Path(truth).read_text())["tensors"]
    module, optimizer, content = trainer(kind, checkpoint, model, expected)
    options = {"model": model} if model else {}
    loaded(module, optimizer, {"storage_reader": Reader(checkpoint, optimizer=True, **options)})
    found = {(name, "master" if "master" in expected[name] else "weight"): digest(each) for name, each in module.named_parameters()}
    for name, parameter in module.named_parameters():
        states = optimizer.state.get(parameter, {})
        found |= {(name, role): digest(states[kind]) for kind, role in KINDS.items() if kind in states and role in expected[name]}
    wrong = sorted(f"{name} {role}" for (name, role), value in found.items() if value != expected[name][role]["sha256"])
    settings = [{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} for group in optimizer.param_groups]
    steps = sorted({float(state["step"]) for state in optimizer.state.values()})
    same = [{key: group.settings[key] for key in settings[0] if key in group.settings} for group in content.param_groups()]
    return {"compared": len(found), "wrong": wrong, "settings": settings, "recorded": same, "steps": steps}


def train(kind, checkpoint, model, truth, direct):
    """The digests of all weights and moments after two steps with gradients that follow from the names."""
    module, optimizer, _ = trainer(kind, checkpoint, model, json.loads(Path(truth).read_text())["tensors"])
    options = {"model": model} if model else {}
    loaded(module, optimizer, {"checkpoint_id": direct} if direct else {"storage_reader": Reader(checkpoint, optimizer=True, **options)})
    for step in range(2):
        for name, parameter in module.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
            whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim).redistribute(
                placements=parameter.placements
            )
        optimizer.step()
    states = {name: optimizer.state[parameter] for name, parameter in module.named_parameters() if parameter in optimizer.state}
    moments = {f"{name} {kind}": digest(each[kind]) for name, each in states.items() for kind in KINDS}
    return {name: digest(parameter) for name, parameter in module.named_parameters()} | moments


def save(kind, model, out, targets):
    """Save what a Hugging Face folder holds: by torch into OUT/dcp, and by Writer as each target asks, with AdamW's state for dcp."""
    module = sharded(load_file(Path(model) / "model.safetensors"), kind)
    weights = get_model_state_dict(module)
    dcp.save({"model": weights}, checkpoint_id=f"{out}/dcp")
    for name, options in json.loads(targets).items():
        dcp.save({"model": weights}, storage_writer=Writer(f"{out}/{name}", model=model, **options))
    group = dist.new_group(backend="gloo")
    writer = Writer(f"{out}/async", to="hf", model=model)
    dcp.async_save({"model": weights}, storage_writer=writer, process_group=group).result()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False)
    for name, parameter in module.named_parameters():
        parameter.grad = torch.full_like(parameter, 0.5 + len(name))
    optimizer.step()
    weights, states = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{out}/trained")
    dcp.save({"model": weights, "optim": states}, storage_writer=Writer(f"{out}/trained-dcp", to="dcp", model=model, optimizer=True))
    return {}


def die(kind, model, out, phase):
    """Rank 1 is killed: before it writes, between two tensors, after its part is written, or the coordinator before it completes."""
    from reshard.torch import waiting, writer

    module = sharded(load_file(Path(model) / "model.safetensors"), kind)
    rank = dist.get_rank()

    def killed(*args, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    if phase == "complete" and rank == 0:
        writer._Save.complete = killed
    elif phase == "write" and rank == 1:
        writer._Save.write = killed
    elif phase == "between" and rank == 1:
        real, calls = writer._Save._write_rows, []

        def between(*args):
            calls.append(1)
            return killed() if len(calls) == 4 else real(*args)

        writer._Save._write_rows = between
    elif phase == "meet" and rank == 1:
        waiting.Waiting.meet = killed
    elif phase == "digests" and rank == 1:
        writer._Save.digests = killed
    try:
        dcp.save(get_model_state_dict(module), storage_writer=Writer(out, to="hf", model=model, seconds=20))
    except BaseException as error:
        return {"error": str(error)}
    return {}


def rank_process(rank, port, task, kind, arguments):
    world = torch.tensor(MESHES[kind][0]).prod().item()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30 if task == "die" else 300))
    document = {"load": load, "train": train, "save": save, "die": die}[task](kind, *arguments)
    if rank == 0:
        print("DOCUMENT", json.dumps(document), flush=True)
    if task != "die":
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads of a rank that leaves its groups while others still use them end the process with SIGABRT


if __name__ == "__main__":
    task, kind, *arguments = sys.argv[1:]
    world = torch.tensor(MESHES[kind][0]).prod().item()
    torch.multiprocessing.start_processes(rank_process, (free_ports.free_port(), task, kind, arguments), nprocs=world, start_method="fork")
