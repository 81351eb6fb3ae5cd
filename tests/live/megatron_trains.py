"""Ranks of real megatron-core train two steps and update a running server: tensor, pipeline and expert parallelism.

    python tests/live/megatron_trains.py MODEL ADDRESS FOLDER SIZES      SIZES: tp=2,pp=2

FOLDER gets a Hugging Face folder of the trained weights, gathered from the live model by the mapping of fixtures/megatron, which knows
nothing of reshard. The model is that of `python fixtures/models.py MODEL`, where it has experts with experts in every layer.

Environment: that of tests/megatron/requirements.txt, in which reshard is installed.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
sys.path[:0] = [str(FIXTURES), str(FIXTURES / "megatron")]

import models  # noqa: E402
import run  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from free_ports import free_port  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from reshard.live import Sender  # noqa: E402

# The mapping of the fixtures knows no dense layers between sparse ones.
CHANGED = {"qwen3_moe": {"mlp_only_layers": []}}


def update(address: str, ranks: object, folder: Path, chunks: list, optimizer: object, scheduler: object) -> None:
    """Sends what this rank holds, where a run of the fixtures saves it."""
    sender = Sender(chunks, engine=address, verify=True)
    report = sender.update()
    planned = sender.plan and sender.plan.nbytes
    sent = torch.tensor(sender.transport.nbytes_sent)
    dist.all_reduce(sent)
    if dist.get_rank() == 0:
        print(f"{report.nbytes} bytes sent, {planned} planned, {int(sent)} counted, version {report.version}", flush=True)
    sender.close()


def rank_process(rank: int, model: str, address: str, folder: str, layout: run.Layout, port: int) -> None:
    torch.set_num_threads(1)
    run.WRITERS["updated"] = partial(update, address)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=layout.world)
    trained = run.Run(
        model, layout, sizes=models.DECODED.get(model, {}) | CHANGED.get(model, {}), args={"no_save_optim": True}, save="updated"
    )
    config, tensors = trained(Path(folder))
    if rank == 0:
        config.save_pretrained(folder)
        weights = {name: roles["weight"].contiguous() for name, roles in tensors.items()}
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()


if __name__ == "__main__":
    sizes = {axis: int(size) for axis, size in (each.split("=") for each in sys.argv[4].split(","))}
    layout = run.Layout(**sizes)
    start = partial(torch.multiprocessing.start_processes, start_method="fork")
    start(rank_process, (*sys.argv[1:4], layout, free_port()), nprocs=layout.world)
