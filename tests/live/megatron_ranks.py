"""What ranks of real megatron-core say of their memory, after two steps of training.

    python tests/live/megatron_ranks.py FOLDER CASE...

Writes FOLDER/CASE/: rank_N.pickle (the description and the arrays that it names), truth.safetensors (every full tensor under its Hugging
Face name, gathered from the live model), config.json.

Environment: that of tests/megatron/requirements.txt.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "fixtures"), str(ROOT / "fixtures" / "megatron")]

import makers  # noqa: E402

make = makers.load("megatron")

import run  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from reshard.live.memory.describe import describe  # noqa: E402
from reshard.live.memory.describe_megatron import megatron_tensors  # noqa: E402


def describe_ranks(ranks: object, folder: Path, chunks: list, optimizer: object, scheduler: object) -> None:
    """Saves what this rank says, in place of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    said = describe(chunks), {name: tensor.clone() for name, tensor in megatron_tensors(chunks).items()}
    (folder / f"rank_{dist.get_rank()}.pickle").write_bytes(pickle.dumps(said))


run.WRITERS["described"] = describe_ranks


def worker(rank: int, case: object, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=case.world)
    described = replace(case.save, save="described", args={**case.save.args, "no_save_optim": True})
    config, tensors = described(folder)
    if rank == 0:
        save_file({name: roles["weight"].contiguous() for name, roles in tensors.items()}, folder / "truth.safetensors")
        config.save_pretrained(folder)
    dist.barrier()


if __name__ == "__main__":
    start = partial(torch.multiprocessing.start_processes, start_method="fork")
    for name in sys.argv[2:]:
        from free_ports import free_port

        case = make.CASES[name]
        start(worker, (case, Path(sys.argv[1]) / name, free_port()), nprocs=case.world)
        print(name, flush=True)
