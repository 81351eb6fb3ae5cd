"""How planning grows: layers, experts and ranks are doubled in turn, and processor time and peak memory of the whole process are listed.

    python benchmarks/planning_growth.py [--work DIR]

The checkpoints are DeepSeek-V3 with other numbers of layers and experts, without data (sparse.py). Every row is a process of its own.
`grown` is its processor time over that of the row before it, less that of `reshard --version`. It stays at or below 2 where the cost is
linear; where ranks are alike, it stays near 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sparse import write_deepseek

RESHARD = [sys.executable, "-m", "reshard"]
LAYERS, EXPERTS, RANKS = (8, 16, 32, 64), (32, 64, 128, 256), (2, 4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=None)
    options = parser.parse_args()
    start = measured(["--version"])[0]
    print(f"start: {start:.2f} s\n")
    with tempfile.TemporaryDirectory(prefix="reshard-growth-", dir=options.work) as work:
        for what, values in {"layers": LAYERS, "experts": EXPERTS}.items():
            cases = []
            for value in values:
                folder = Path(work) / f"{what}-{value}"
                write_deepseek(folder, **{"layers": 16, "experts": 64, what: value})
                cases.append((value, ["plan", str(folder), "--to", "vllm", "--tp", "8"]))
            show(what, cases, start)
        source = str(Path(work) / "layers-16")
        show("vLLM ranks", [(tp, ["plan", source, "--to", "vllm", "--tp", str(tp)]) for tp in RANKS], start)
        show("FSDP ranks", [(dp, ["plan", source, "--to", "fsdp", "--dp", str(dp)]) for dp in (16, 32, 64, 128)], start)
        show("sizes", [(tp, ["degrees", source, "--to", "vllm", "--tp", str(tp)]) for tp in RANKS], start)


def show(what: str, cases: Sequence[tuple[int, list[str]]], start: float) -> None:
    """One table: processor time and memory at each value."""
    print(f"{what:>12} {'s':>7} {'MB':>6} {'grown':>6}")
    before = None
    for value, command in cases:
        seconds, megabytes = measured(command)
        grown = f"{(seconds - start) / (before - start):6.2f}" if before else ""
        print(f"{value:12} {seconds:7.2f} {megabytes:6.0f} {grown}", flush=True)
        before = seconds
    print()


def measured(arguments: list[str]) -> tuple[float, float]:
    """The processor time of a process in seconds, and its peak resident memory in MB."""
    process = subprocess.Popen([*RESHARD, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"reshard {' '.join(arguments)} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
