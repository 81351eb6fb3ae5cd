"""Seconds and memory of `dcp.load` through Reader and `dcp.save` through Writer, beside torch's own, on ranks of gloo. Rounds are paired.

    python benchmarks/torch_load_save.py [--gb 1] [--ranks 2] [--rounds 3] [--folder /tmp]

A model of bf16 weights [n, 4096] is sharded by rows, as FSDP2 does. Files are in the page cache. Prints the median of each, its ratio to
torch's, and for loads the most memory that a rank took beyond its tensors. Source and targets are removed at the end.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fixtures"))

import free_ports

from reshard.torch import Reader, Writer

_WIDTH = 4096


def peak() -> int:
    """The most bytes of this process that were in memory since the last call of `forget_peak`."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def timed(work: Callable[[], object]) -> tuple[float, int]:
    """The seconds until the last rank has done the work, and the memory that this rank took for it."""
    dist.barrier()
    forget_peak()
    before, began = peak(), time.monotonic()
    work()
    dist.barrier()
    return time.monotonic() - began, peak() - before


def rank_process(rank: int, port: int, given: argparse.Namespace, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(given.ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(given.ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh, tensors = init_device_mesh("cpu", (given.ranks,)), 16
    rows = int(given.gb * 1e9) // (tensors * given.ranks * _WIDTH * 2)
    state: dict[str, Any] = {
        f"layers.{i}.weight": DTensor.from_local(torch.randn(rows, _WIDTH).bfloat16(), mesh, [Shard(0)]) for i in range(tensors)
    }
    source = f"{folder}/source"
    dcp.save(state, checkpoint_id=source)
    names = dict.fromkeys(state, 1)
    loads: dict[str, Callable[[], object]] = {
        "load, torch": lambda: dcp.load(state, checkpoint_id=source),
        "load, Reader": lambda: dcp.load(state, storage_reader=Reader(source)),
        "load, Reader without checksums": lambda: dcp.load(state, storage_reader=Reader(source, checksums=False)),
    }
    saves: dict[str, Callable[[str], object]] = {
        "save, torch": lambda out: dcp.save(state, checkpoint_id=out),
        "save to hf, Writer without digests": lambda out: dcp.save(state, storage_writer=Writer(out, to="hf", digests=False)),
        "save to hf, Writer": lambda out: dcp.save(state, storage_writer=Writer(out, to="hf")),
        "save to hf, torch with consolidation": lambda out: dcp.save(
            state, storage_writer=HuggingFaceStorageWriter(out, names, save_distributed=True, enable_consolidation=True)
        ),
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in (*loads, *saves)}
    for _ in range(given.rounds):
        for name, load in loads.items():
            found[name].append(timed(load))
        for name, save in saves.items():
            found[name].append(timed(lambda save=save: save(f"{folder}/out")))
            if rank == 0:
                shutil.rmtree(f"{folder}/out")
    if rank == 0:
        print(f"{given.gb:g} GB, {given.ranks} ranks, {given.rounds} rounds, load average {os.getloadavg()[0]:.1f}")
        for name, results in found.items():
            base = found["load, torch" if name.startswith("load") else "save, torch"]
            ratio = statistics.median(one[0] / other[0] for one, other in zip(results, base, strict=True))
            memory = f", {max(nbytes for _, nbytes in results) / 1e6:.0f} MB" if name.startswith("load") else ""
            print(f"{name:40} {statistics.median(seconds for seconds, _ in results):6.2f} s, {ratio:.2f} x torch{memory}")
    dist.destroy_process_group()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gb", type=float, default=1.0)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--folder", default=tempfile.gettempdir())
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        torch.multiprocessing.spawn(rank_process, (free_ports.free_port(), given, folder), nprocs=given.ranks)


if __name__ == "__main__":
    main()
