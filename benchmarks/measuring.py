"""Measuring whole processes: seconds, processor time and peak memory, in pairs with `cp`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

RESHARD = [sys.executable, "-m", "reshard"]


@dataclass(frozen=True)
class Run:
    """One process: wall seconds, processor seconds, and its own or its largest child's peak resident memory in MB."""

    seconds: float
    processor: float
    megabytes: float


# A process's peak memory counts from before its exec, when it still was a copy of its parent: so a small parent starts it.
_MEASURE = """
import json, os, sys, time
began = time.monotonic()
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)])
_, status, usage = os.wait4(pid, 0)
seconds = time.monotonic() - began
print(json.dumps([os.waitstatus_to_exitcode(status), seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6]))
"""


def measured(command: Sequence[object], *, codes: Sequence[int] = (0,)) -> Run:
    """Run a process to its end; its times and memory as the operating system accounts for them. codes: the exit codes of success."""
    words = [sys.executable, "-S", "-E", "-c", _MEASURE, *map(str, command)]
    found = subprocess.run(words, capture_output=True, text=True, check=True, env=_environment())
    code, *numbers = json.loads(found.stdout)
    if code not in codes:
        raise SystemExit(f"{command} failed:\n{found.stderr[-3000:]}")
    return Run(*numbers)


def _environment() -> dict[str, str]:
    """Without the setting that makes Python compile its sources at every start. An installation has .pyc files."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def remove(*paths: Path) -> None:
    """Remove files or folders; what the next process finds does not depend on when the system notes that."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths}:
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def copy_of(source: Path, target: Path) -> list[object]:
    """`cp` and a `sync` of the copies."""
    return ["sh", "-c", 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +', source, target]


def drop_from_cache(folder: Path) -> None:
    """Remove the files of a folder from the page cache, as far as the system follows the advice."""
    for path in filter(Path.is_file, folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_into_cache(folder: Path) -> None:
    """Read all files of a folder, so that they are in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                while file.read(1 << 22):
                    pass


def in_turn(commands: dict[str, list[object]], out: Path, turns: int, *, cold: Path | None = None) -> dict[str, list[Run]]:
    """The runs of each command, which take turns; one turn before them is not counted.

    Who goes first takes turns, too: on a virtual machine the second finds memory that the first has just used.
    out: removed after each run, and so is a file of that name with .pt. cold: a folder that is removed from the page cache before each run.
    """
    found: dict[str, list[Run]] = {name: [] for name in commands}
    for turn in range(turns + 1):
        for name in commands if turn % 2 else reversed(commands):
            if cold:
                drop_from_cache(cold)
            run = measured(commands[name], codes=(0, 1) if "doctor" in commands[name] else (0,))
            remove(out, out.with_suffix(".pt"))
            if turn:
                found[name].append(run)
    return found


def given(about: str, size: float) -> argparse.Namespace:
    """The options --size, --turns and --work of a benchmark. about: its docstring. size: GB of the model, if the user gives none."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=size, help="GB of the model in bfloat16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", type=Path, default=None)
    return parser.parse_args()


@dataclass(frozen=True)
class Conversion:
    """A conversion that is compared with a plain one."""

    source: Path
    words: Sequence[object]
    """Its options."""
    plain: str
    """The name of the plain conversion."""


def compare_with_plain(conversions: Mapping[str, Conversion], out: Path, turns: int, *, bar: float = inf, megabytes: float = inf) -> None:
    """Run conversions in turns, and print the best time of each against its plain conversion. Marks what is above the bars."""
    runs: dict[str, list[Run]] = {name: [] for name in conversions}
    for _ in range(turns):
        for name, each in conversions.items():
            read_into_cache(each.source)
            runs[name].append(measured([*RESHARD, "convert", each.source, out, *each.words]))
            remove(out)
    best = {name: (min(run.seconds for run in found), min(run.processor for run in found)) for name, found in runs.items()}
    for name, each in conversions.items():
        by_time, by_processor = (ours / plain for ours, plain in zip(best[name], best[each.plain], strict=True))
        (seconds, in_processors), most = best[name], max(run.megabytes for run in runs[name])
        verdict = "" if max(by_time, by_processor) <= bar and most <= megabytes else "  above the bar"
        print(
            f"{name:24} {seconds:6.2f} s ({in_processors:.2f} s of processors)  {by_time:4.2f} ({by_processor:4.2f}) x plain  "
            f"{most:4.0f} MB{verdict}"
        )


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median, the smallest and the largest ratio of pairs."""
    each = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{statistics.median(each):.2f} ({each[0]:.2f}..{each[-1]:.2f})"


def seconds(runs: Sequence[Run]) -> float:
    return statistics.median(run.seconds for run in runs)


def processor(runs: Sequence[Run]) -> float:
    return statistics.median(run.processor for run in runs)


def row(name: str, ours: Sequence[Run], theirs: Sequence[Run]) -> None:
    """A row of a table: both medians and the ratios, of wall time and of processor time."""
    print(
        f"| {name} | {seconds(ours):.2f} | {seconds(theirs):.2f} | {ratios([r.seconds for r in ours], [r.seconds for r in theirs])} "
        f"| {processor(ours):.2f} | {processor(theirs):.2f} | {ratios([r.processor for r in ours], [r.processor for r in theirs])} "
        f"| {max(r.megabytes for r in ours):.0f} |",
        flush=True,
    )


def header(what: str, theirs: str = "cp + sync") -> None:
    print(f"\n| {what} | reshard s | {theirs} s | ratio (min..max) | reshard CPU s | {theirs} CPU s | ratio (min..max) | peak MB |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
