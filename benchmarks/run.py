"""How fast and how small: reshard against `cp` of the same bytes, against `cmp`, and against what other tools offer, in one run.

    python benchmarks/run.py [--size 4] [--memory-sizes 1,4,8] [--pairs 5] [--work DIR] [--peers PYTHON] [--deepspeed PYTHON] [--only PART]

Every measurement is of a whole process, its start included. `cp` and reshard take turns, on a warm cache; `cp` is followed by a
`sync` of the copies, because reshard syncs what it writes. The ratio is taken pair by pair; its median counts. PYTHON is an interpreter
with torch, accelerate and verl, or with DeepSpeed (peers.py and deepspeed_peers.py say how to make them); without it the peers and
the cases that start from their files are left out. So is a peer whose package is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import RESHARD, Run, copy_of, header, in_turn, measured, processor, ratios, remove, row, seconds
from rival import compiled, write_ranges
from synthetic import llama, write_hugging_face

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=4, help="GB of the checkpoint that is timed")
    parser.add_argument("--memory-sizes", default="1,4,8", help="GB of the checkpoints whose peak memory is measured")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--peers", help="a Python with torch and accelerate")
    parser.add_argument("--deepspeed", help="a Python with DeepSpeed")
    parser.add_argument(
        "--only", choices=["speed", "peers", "casts", "workers", "reading", "serving", "rival", "megatron", "memory", "scale", "deepspeed"]
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reshard-benchmark-", dir=options.work) as work:
        parts = {
            "speed": lambda: speed(Path(work), options.size, options.pairs, options.peers),
            "peers": lambda: whole_files(Path(work), options.size, options.pairs, options.peers) if options.peers else None,
            "casts": lambda: casts(Path(work), options.size, options.pairs),
            "workers": lambda: workers(Path(work), options.size, options.pairs),
            "reading": lambda: reading(Path(work), options.size, options.pairs),
            "serving": lambda: serving(Path(work), options.size, options.pairs),
            "rival": lambda: rival(Path(work), options.size, options.pairs),
            "megatron": lambda: megatron(Path(work), options.size, options.pairs),
            "memory": lambda: memory(Path(work), [float(size) for size in options.memory_sizes.split(",")]),
            "scale": lambda: scale(Path(work), options.peers) if options.peers else None,
            "deepspeed": lambda: deepspeed(Path(work), options.pairs, options.deepspeed) if options.deepspeed else None,
        }
        for name in [options.only] if options.only else parts:
            parts[name]()


def speed(work: Path, gigabytes: float, pairs: int, peers: str | None) -> None:
    hf, sharded, dcp, verl, out = (work / name for name in ("hf", "tp8", "dcp", "verl", "out"))
    write_hugging_face(llama(gigabytes), hf)
    measured([*RESHARD, "convert", hf, sharded, "--to", "vllm", "--tp", "8"])
    if peers:
        measured([peers, HERE / "peers.py", "save-dcp", hf, dcp])
        measured([peers, HERE / "peers.py", "save-verl", hf, verl])
    else:  # reshard writes the same files
        measured([*RESHARD, "convert", hf, dcp, "--to", "dcp", "--dp", "4"])
    cases: list[tuple[str, Path, list[object]]] = [
        ("hf -> vllm tp8", hf, ["--to", "vllm", "--tp", "8"]),
        ("hf -> hf", hf, ["--to", "hf"]),
        ("dcp -> hf", dcp, ["--to", "hf", "--model", hf]),
        ("vllm tp8 -> vllm tp4", sharded, ["--to", "vllm", "--tp", "4"]),
    ]
    if peers:
        cases += [("fsdp -> hf", verl, ["--to", "hf"]), ("fsdp -> dcp", verl, ["--to", "dcp"])]
    compared(cases, out, gigabytes, pairs)
    remove(hf, sharded, dcp, verl)


def whole_files(work: Path, gigabytes: float, turns: int, peers: str) -> None:
    """The same weights into whole files, by reshard and by every peer whose packages are there; all take turns."""
    sources = {name: work / name for name in ("hf", "dcp", "parts", "verl")}
    out, target = work / "out", work / "out.pt"
    write_hugging_face(llama(gigabytes), sources["hf"])
    for job, name in (("save-dcp", "dcp"), ("save-hf-shards", "parts"), ("save-verl", "verl")):
        measured([peers, HERE / "peers.py", job, sources["hf"], sources[name]])
    commands: dict[str, list[object]] = {
        "reshard, dcp to hf": [*RESHARD, "convert", sources["dcp"], out, "--to", "hf", "--model", sources["hf"]],
        "reshard, hf to hf": [*RESHARD, "convert", sources["hf"], out, "--to", "hf"],
    }
    for name, job, source, written in (
        ("safetensors load and save, hf to hf", "safetensors", "hf", out),
        ("torch consolidation, 2 threads, hf shards to hf", "hf-consolidation", "parts", out),
        ("accelerate merge_fsdp_weights, dcp to hf", "accelerate-merge", "dcp", out),
        ("torch dcp_to_torch_save, dcp to .pt", "dcp_to_torch_save", "dcp", target),
        ("verl FSDPModelMerger", "verl-merge", "verl", out),
    ):
        command: list[object] = [peers, HERE / "peers.py", job, sources[source], written]
        if subprocess.run(list(map(str, command)), capture_output=True).returncode == 0:
            commands[name] = command
        remove(out, target)
    found = in_turn(commands, out, turns)
    ours = found["reshard, dcp to hf"]
    print("\n| the same weights into whole files | s | times reshard | CPU s | times reshard | peak MB |\n|---|---|---|---|---|---|")
    for name, runs in found.items():
        print(
            f"| {name} | {seconds(runs):.2f} | {ratios([r.seconds for r in runs], [r.seconds for r in ours])} | {processor(runs):.2f} "
            f"| {ratios([r.processor for r in runs], [r.processor for r in ours])} | {max(r.megabytes for r in runs):.0f} |",
            flush=True,
        )
    remove(*sources.values())


def compared(cases: list[tuple[str, Path, list[object]]], out: Path, gigabytes: float, pairs: int, *, cold: bool = False) -> None:
    """A row for each (name, source, arguments) of a conversion, in turn with `cp`. cold: the source is not in the page cache."""
    header(f"{gigabytes:g} GB, {pairs} pairs{', cold' if cold else ''}")
    for name, source, arguments in cases:
        commands = {"ours": [*RESHARD, "convert", source, out, *arguments], "cp": copy_of(source, out)}
        found = in_turn(commands, out, pairs, cold=source if cold else None)
        row(name, found["ours"], found["cp"])


def casts(work: Path, gigabytes: float, pairs: int) -> None:
    """A model in fp32 to narrower types. The copies are those of the source, which has more bytes than the result."""
    hf, fp32, out = work / "hf", work / "fp32", work / "out"
    write_hugging_face(llama(gigabytes / 2), hf)
    measured([*RESHARD, "convert", hf, fp32, "--to", "hf", "--dtype", "fp32"])
    remove(hf)
    compared([(f"fp32 to {dtype}", fp32, ["--to", "hf", "--dtype", dtype]) for dtype in ("bf16", "fp16", "fp8")], out, gigabytes, pairs)
    remove(fp32)


def workers(work: Path, gigabytes: float, pairs: int) -> None:
    """Conversions with 1, 2, 4 and 8 threads."""
    hf, out = work / "hf", work / "out"
    write_hugging_face(llama(gigabytes), hf)
    numbers = (1, 2, 4, 8)
    arguments = ["--to", "vllm", "--tp", "8"]
    compared([(f"hf to vllm tp8, --workers {n}", hf, [*arguments, "--workers", str(n)]) for n in numbers], out, gigabytes, pairs)
    compared([("hf to vllm tp8", hf, arguments)], out, gigabytes, pairs, cold=True)
    remove(hf)


def reading(work: Path, gigabytes: float, pairs: int) -> None:
    """What only reads, against `cmp` of two copies of the same bytes."""
    hf, copy, sharded, out = work / "hf", work / "copy", work / "tp8", work / "out"
    write_hugging_face(llama(gigabytes), hf)
    measured(["cp", "-r", hf, copy])
    measured([*RESHARD, "convert", hf, sharded, "--to", "vllm", "--tp", "8"])
    cmp: list[object] = ["cmp", hf / "model.safetensors", copy / "model.safetensors"]
    header(f"{gigabytes:g} GB, {pairs} pairs", "cmp")
    for name, arguments in (
        ("verify hf, copy", ["verify", hf, copy]),
        ("verify hf, vllm tp8", ["verify", hf, sharded]),
        ("verify vllm tp8 against its manifest", ["verify", sharded]),
        ("fingerprint hf", ["fingerprint", hf]),
        ("doctor --deep hf", ["doctor", "--deep", hf]),
    ):
        found = in_turn({"ours": [*RESHARD, *arguments], "cmp": cmp}, out, pairs)
        row(name, found["ours"], found["cmp"])
    remove(hf, copy, sharded)


def serving(work: Path, gigabytes: float, turns: int) -> None:
    """One rank's parameters at the start of a server, after the imports of torch: reshard's view and safetensors."""
    hf, found = work / "hf", {name: [] for name in ("reshard", "whole", "slices")}
    write_hugging_face(llama(gigabytes), hf)
    for turn in range(turns + 1):
        for name in found:
            command = [sys.executable, HERE / "serving_start.py", name, hf, "8", "3"]
            printed = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout
            if turn:
                found[name].append(json.loads(printed))
    print(f"\n| {gigabytes:g} GB, rank 3 of TP 8, {turns} turns | s | CPU s | MB of parameters |\n|---|---|---|---|")
    for name, runs in found.items():
        wall, used, megabytes = map(statistics.median, zip(*runs, strict=True))
        print(f"| {name} | {wall:.2f} | {used:.2f} | {megabytes:.0f} |", flush=True)
    remove(hf)


def rival(work: Path, gigabytes: float, pairs: int) -> None:
    """The emulated rival: a lower bound of a single-threaded program that neither syncs nor digests (rival.c)."""
    hf, out, program, ranges = work / "hf", work / "out", compiled(work), work / "ranges"
    write_hugging_face(llama(gigabytes), hf)
    for name, options, arguments in (
        ("hf to vllm tp8", {"to": "vllm", "tp": 8}, ["--to", "vllm", "--tp", "8"]),
        ("hf to hf", {"to": "hf"}, ["--to", "hf"]),
    ):
        write_ranges(hf, options, ranges)
        synced = ["sh", "-c", '"$0" "$1" "$2" && find "$2" -type f -exec sync {} +', program, ranges, out]
        commands: dict[str, list[object]] = {
            "ours": [*RESHARD, "convert", hf, out, *arguments],
            "emulation + sync": synced,
            "emulation, not synced": [program, ranges, out],
        }
        found = in_turn(commands, out, pairs)
        for other in ("emulation + sync", "emulation, not synced"):
            header(f"{gigabytes:g} GB, {pairs} pairs", other)
            row(name, found["ours"], found[other])
    remove(hf)


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
    remove(hf, legacy)


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
        found: dict[str, list[Run]] = in_turn(commands, out, turns)
        ours = statistics.median(run.seconds for run in found["reshard"])
        for who, runs in found.items():
            each = sorted(run.seconds for run in runs)
            middle = statistics.median(each)
            print(
                f"| {who} {name if who == 'reshard' else ''} | {middle:.2f} ({each[0]:.2f}..{each[-1]:.2f}) | {middle / ours:.1f} "
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
        remove(hf, tp8, tp4)


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
    remove(metadata, ranks)


if __name__ == "__main__":
    main()
