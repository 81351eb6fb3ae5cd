"""How fast and how small: reshard against `cp` of the same bytes, and against what torch and accelerate offer, in one run.

    python benchmarks/run.py [--size 4] [--memory-sizes 1,4,8] [--pairs 5] [--work DIR] [--peers PYTHON] [--deepspeed PYTHON] [--only PART]

Every measurement is of a whole process, its start included. `cp` and reshard take turns, on a warm cache; `cp` is followed by a
`sync` of the copies, because reshard syncs what it writes. The ratio is taken pair by pair; its median counts. PYTHON is an interpreter
with torch, accelerate and verl, or with DeepSpeed (peers.py and deepspeed_peers.py say how to make them); without it the peers and
the cases that start from their files are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from synthetic import llama, write_hugging_face

HERE = Path(__file__).resolve().parent
RESHARD = [sys.executable, "-m", "reshard"]


@dataclass(frozen=True)
class Run:
    """One process: wall seconds, and its own or its largest child's peak resident memory in MB."""

    seconds: float
    megabytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=4, help="GB of the checkpoint that is timed")
    parser.add_argument("--memory-sizes", default="1,4,8", help="GB of the checkpoints whose peak memory is measured")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--peers", help="a Python with torch and accelerate")
    parser.add_argument("--deepspeed", help="a Python with DeepSpeed")
    parser.add_argument("--only", choices=["speed", "megatron", "memory", "scale", "deepspeed"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reshard-benchmark-", dir=options.work) as work:
        parts = {
            "speed": lambda: speed(Path(work), options.size, options.pairs, options.peers),
            "megatron": lambda: megatron(Path(work), options.size, options.pairs),
            "memory": lambda: memory(Path(work), [float(size) for size in options.memory_sizes.split(",")]),
            "scale": lambda: scale(Path(work), options.peers) if options.peers else None,
            "deepspeed": lambda: deepspeed(Path(work), options.pairs, options.deepspeed) if options.deepspeed else None,
        }
        for name in [options.only] if options.only else parts:
            parts[name]()


def speed(work: Path, gigabytes: float, pairs: int, peers: str | None) -> None:
    hf, sharded, dcp, parts, verl, out = (work / name for name in ("hf", "tp8", "dcp", "parts", "verl", "out"))
    write_hugging_face(llama(gigabytes), hf)
    measured([*RESHARD, "convert", hf, sharded, "--to", "vllm", "--tp", "8"])
    cases = [("hf -> vllm tp8", hf, ["--to", "vllm", "--tp", "8"]), ("vllm tp8 -> vllm tp4", sharded, ["--to", "vllm", "--tp", "4"])]
    if peers:
        measured([peers, HERE / "peers.py", "save-dcp", hf, dcp])
        cases.append(("dcp -> hf", dcp, ["--to", "hf", "--model", hf]))
        measured([peers, HERE / "peers.py", "save-verl", hf, verl])
        cases.append(("fsdp -> hf", verl, ["--to", "hf"]))
        cases.append(("fsdp -> dcp", verl, ["--to", "dcp"]))
    medians = compared(cases, out, gigabytes, pairs)
    if peers:
        measured([peers, HERE / "peers.py", "save-hf-shards", hf, parts])
        print("\n| the same weights into whole files | s | x reshard | peak MB |\n|---|---|---|---|")
        print(f"| reshard (dcp -> hf) | {medians['dcp -> hf']:.2f} | 1.0 | |", flush=True)
        print(f"| reshard (fsdp -> hf) | {medians['fsdp -> hf']:.2f} | {medians['fsdp -> hf'] / medians['dcp -> hf']:.1f} | |", flush=True)
        for job, source in (("hf-consolidation", parts), ("dcp_to_torch_save", dcp), ("accelerate-merge", dcp), ("verl-merge", verl)):
            found = []
            for _ in range(3):
                found.append(
                    measured([peers, HERE / "peers.py", job, source, out if job != "dcp_to_torch_save" else out.with_suffix(".pt")])
                )
                remove(out)
                out.with_suffix(".pt").unlink(missing_ok=True)
            best = min(run.seconds for run in found)
            print(f"| {job} | {best:.2f} | {best / medians['dcp -> hf']:.1f} | {max(run.megabytes for run in found):.0f} |", flush=True)
    for folder in (hf, sharded, dcp, parts, verl):
        remove(folder)


def compared(cases: list[tuple[str, Path, list[object]]], out: Path, gigabytes: float, pairs: int) -> dict[str, float]:
    """A row for each (name, source, arguments) of a conversion; its median seconds by name."""
    print(
        f"\n| {gigabytes:g} GB, {pairs} pairs | reshard s | cp + sync s | ratio (min..max) | peak MB |\n|---|---|---|---|---|", flush=True
    )
    medians = {}
    for name, source, arguments in cases:
        found = in_turn(source, out, [*RESHARD, "convert", source, out, *arguments], pairs)
        ratios = sorted(ours.seconds / copied.seconds for ours, copied in found)
        medians[name] = statistics.median(ours.seconds for ours, _ in found)
        print(
            f"| {name} | {medians[name]:.2f} | {statistics.median(copied.seconds for _, copied in found):.2f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f}) | {max(ours.megabytes for ours, _ in found):.0f} |",
            flush=True,
        )
    return medians


def megatron(work: Path, gigabytes: float, pairs: int) -> None:
    """A legacy checkpoint of TP 4 x PP 2, as Megatron writes it (tests/megatron/check.py: real Megatron loads these files)."""
    hf, legacy, out = (work / name for name in ("hf", "tp4-pp2", "out"))
    model = llama(gigabytes)
    first = model.dimensions["layers"] // 2
    stages = f"{model.dimensions['layers'] - first},{first}"
    write_hugging_face(model, hf)
    measured([*RESHARD, "convert", hf, legacy, "--to", "megatron", "--tp", "4", "--pp", "2", "--stage-layers", stages])
    cases: list[tuple[str, Path, list[object]]] = [
        ("megatron tp4 pp2 -> hf", legacy, ["--to", "hf"]),
        ("megatron tp4 pp2 -> vllm tp8", legacy, ["--to", "vllm", "--tp", "8"]),
        ("megatron tp4 pp2 -> megatron-dist", legacy, ["--to", "megatron-dist", "--tp", "4"]),
        ("hf -> megatron tp4 pp2", hf, ["--to", "megatron", "--tp", "4", "--pp", "2", "--stage-layers", stages]),
    ]
    compared(cases, out, gigabytes, pairs)
    for folder in (hf, legacy):
        remove(folder)


def in_turn(source: Path, out: Path, command: list[object], pairs: int) -> list[tuple[Run, Run]]:
    """Pairs of (reshard, cp + sync) on a warm cache; one pair before them is not counted."""
    found = []
    for turn in range(pairs + 1):
        pair = {}
        # Who goes first takes turns, too: on a virtual machine the second finds memory that the first has just used.
        for who in ("ours", "cp") if turn % 2 else ("cp", "ours"):
            pair[who] = measured(
                command if who == "ours" else ["sh", "-c", 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +', source, out]
            )
            remove(out)
        found.append((pair["ours"], pair["cp"]))
    return found[1:]


def deepspeed(work: Path, turns: int, peers: str) -> None:
    """2 GB of ZeRO-3 by real DeepSpeed: reshard and DeepSpeed's own tools take turns."""
    saved, out, script = work / "zero3", work / "out", HERE / "deepspeed_peers.py"
    measured([peers, script, "save", 2, saved])
    print(f"\n| 2 GB of ZeRO-3 (4 ranks), {turns} turns | s (min..max) | x reshard | peak MB |\n|---|---|---|---|", flush=True)
    jobs = [
        ("-> hf, fp32", [*RESHARD, "convert", saved, out, "--to", "hf"], "zero_to_fp32"),
        ("-> hf, bf16", [*RESHARD, "convert", saved, out, "--to", "hf", "--dtype", "bf16"], None),
        ("-> universal", [*RESHARD, "convert", saved, out, "--to", "universal"], "ds_to_universal"),
    ]
    for name, command, job in jobs:
        commands = {"reshard": command} | ({job: [peers, script, job, saved, out]} if job else {})
        found: dict[str, list[Run]] = {who: [] for who in commands}
        for turn in range(turns + 1):
            for who in commands if turn % 2 else reversed(commands):
                run = measured(commands[who])
                remove(out)
                if turn:
                    found[who].append(run)
        ours = statistics.median(run.seconds for run in found["reshard"])
        for who, runs in found.items():
            seconds = sorted(run.seconds for run in runs)
            middle = statistics.median(seconds)
            print(
                f"| {who} {name if who == 'reshard' else ''} | {middle:.2f} ({seconds[0]:.2f}..{seconds[-1]:.2f}) | {middle / ours:.1f} "
                f"| {max(run.megabytes for run in runs):.0f} |",
                flush=True,
            )
    remove(saved)


def memory(work: Path, sizes: list[float]) -> None:
    print("\n| peak MB, torch not imported | hf -> vllm tp8 | vllm tp8 -> tp4 | fingerprint |\n|---|---|---|---|", flush=True)
    for gigabytes in sizes:
        hf, tp8, tp4 = (work / name for name in ("hf", "tp8", "tp4"))
        write_hugging_face(llama(gigabytes), hf)
        runs = [
            measured([*RESHARD, "convert", hf, tp8, "--to", "vllm", "--tp", "8"]),
            measured([*RESHARD, "convert", tp8, tp4, "--to", "vllm", "--tp", "4"]),
            measured([*RESHARD, "fingerprint", tp4]),
        ]
        print(f"| {gigabytes:g} GB | " + " | ".join(f"{run.megabytes:.0f}" for run in runs) + " |", flush=True)
        for folder in (hf, tp8, tp4):
            remove(folder)


def scale(work: Path, peers: str) -> None:
    """What it takes to understand very many parts; the files are sparse (scale.py)."""
    metadata, ranks, out = work / "metadata", work / "ranks", work / "out"
    measured([peers, HERE / "scale.py", "metadata", metadata])
    measured([peers, HERE / "scale.py", "ranks", ranks])
    print("\n| metadata alone | s | peak MB |\n|---|---|---|", flush=True)
    cases = [
        ("inspect a DCP of 126,000 entries", ["inspect", metadata]),
        ("inspect 1,024 FSDP2 files of a 405B model", ["inspect", ranks]),
        ("the same, planned to vllm tp8", ["convert", ranks, out, "--to", "vllm", "--tp", "8", "--dry-run"]),
    ]
    for name, arguments in cases:
        found = [measured([*RESHARD, *arguments]) for _ in range(2)]
        print(f"| {name} | {min(run.seconds for run in found):.1f} | {max(run.megabytes for run in found):.0f} |", flush=True)
    for folder in (metadata, ranks):
        remove(folder)


# A process's peak memory counts from before its exec, when it still was a copy of its parent: so a small parent starts it.
_MEASURE = """
import json, os, sys, time
began = time.monotonic()
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)])
_, status, usage = os.wait4(pid, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - began, usage.ru_maxrss * 1024 / 1e6]))
"""


def measured(command: list[object]) -> Run:
    """Run a process to its end; its time and memory as the operating system accounts for them."""
    words = [sys.executable, "-S", "-E", "-c", _MEASURE, *map(str, command)]
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    code, seconds, megabytes = json.loads(found.stdout)
    if code:
        raise SystemExit(f"{command} failed:\n{found.stderr[-3000:]}")
    return Run(seconds, megabytes)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()


if __name__ == "__main__":
    main()
