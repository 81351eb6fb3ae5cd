"""What it costs to keep every step of a run as full checkpoints and deltas, and to get a step back.

    python fixtures/delta/make.py --hidden 768 --layers 6 --vocabulary 32000 --steps 12 --into RUN
    python benchmarks/kept_runs.py RUN [--turns 3] [--work DIR]

Whole processes, starts included, on a warm cache: their processor time on all cores. Every kept step is compared, byte by byte, with a
conversion of the step itself. The table of docs/recipes/deltas.md is what this prints.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from filecmp import cmp
from pathlib import Path

from measuring import RESHARD, Run, measured, read_into_cache, remove

BF16 = ["--to", "hf", "--dtype", "bf16"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", type=Path, default=None)
    options = parser.parse_args()
    steps = sorted(int(path.name.removeprefix("step-")) for path in options.run.glob("step-*"))
    read_into_cache(options.run)
    with tempfile.TemporaryDirectory(prefix="reshard-kept-", dir=options.work) as folder:
        work = Path(folder)
        whole, out = work / "whole", work / "out"
        print("\n| what | bytes | of all steps in bf16 | processor time | memory |\n| --- | --- | --- | --- | --- |")
        converted = _best([*RESHARD, "convert", options.run, whole, "--step", steps[0], *BF16], whole, options.turns, keep=True)
        one = _bytes(whole)
        _row("one step as the run saves it, fp32", _bytes(options.run / f"step-{steps[0]}"), one * len(steps), None)
        _row("one step in bf16 (`convert`)", one, one * len(steps), converted)
        for every in sorted({1, 4, len(steps)}):
            kept = work / f"kept-{every}"
            found = _best([*RESHARD, "delta", "--of", options.run, kept, "--dtype", "bf16", "--full-every", every], kept, 1, keep=True)
            _row(f"{len(steps)} steps, `--full-every {every}`", _bytes(kept), one * len(steps), found)
        deltas = [_bytes(kept / f"step-{step}") for step in steps[1:]]
        print(
            f"\nthe delta of a step: {min(deltas):,} to {max(deltas):,} bytes, {statistics.mean(deltas) / one:.2%} of the bf16 checkpoint"
        )
        print("\n| step that is restored (`convert --step`) | processor time | memory |\n| --- | --- | --- |")
        for number in sorted({0, 1, 3, 7, len(steps) - 1} & {*range(len(steps))}):
            restored = _best([*RESHARD, "convert", kept, out, "--step", steps[number], "--to", "hf"], out, options.turns)
            print(f"| base and {number} deltas | {restored.processor:.1f} s | {restored.megabytes:.0f} MB |")
        for step in steps:
            measured([*RESHARD, "convert", kept, out, "--step", step, "--to", "hf"])
            measured([*RESHARD, "convert", options.run, work / "expected", "--step", step, *BF16])
            files = [path.name for path in out.glob("*.safetensors")]
            assert files and all(cmp(out / name, work / "expected" / name, shallow=False) for name in files), step
            remove(out, work / "expected")
        print(f"\nall {len(steps)} steps are restored bit for bit")


def _best(command: list[object], out: Path, turns: int, *, keep: bool = False) -> Run:
    """The run with the least processor time. keep: leave what the last one wrote."""
    runs = []
    for _ in range(turns):
        remove(out)
        runs.append(measured(command))
    if not keep:
        remove(out)
    return min(runs, key=lambda run: run.processor)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _row(what: str, nbytes: int, of_all: int, run: Run | None) -> None:
    times = (f"{run.processor:.1f} s", f"{run.megabytes:.0f} MB") if run else ("", "")
    print(f"| {what} | {nbytes / 1e6:,.1f} MB | {nbytes / of_all:.1%} | {times[0]} | {times[1]} |")


if __name__ == "__main__":
    main()
