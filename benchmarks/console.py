"""What starting costs, and what colour and wrapping add to it, in processor time.

    python benchmarks/console.py [--pairs N] [--against FOLDER]

`reshard --help`, `reshard inspect` and `reshard convert --dry-run` of the bundled FSDP2 checkpoint run in turn into a pipe, and on a
pseudo-terminal of 80 columns, where lines are wrapped, tables fitted and coloured. Then the lines that `inspect` prints are wrapped and
coloured alone, in this process. --against: a folder with another version (`pip install --no-deps --target FOLDER TREE`), whose runs
take turns with the others. It prints medians in milliseconds, with the fastest run in brackets.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FSDP2 = ROOT / "fixtures" / "dcp" / "fsdp2"
COMMANDS = {
    "--help": ("--help",),
    "inspect": ("inspect", FSDP2 / "checkpoint", "--model", FSDP2 / "model"),
    "convert --dry-run": ("convert", FSDP2 / "checkpoint", "out", "--to", "vllm", "--tp", "2", "--model", FSDP2 / "model", "--dry-run"),
}
COLUMNS = 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="runs of each kind (default: 30)")
    parser.add_argument("--against", type=Path, help="a folder with an installation of another version")
    given = parser.parse_args()
    for name, words in COMMANDS.items():
        kinds = {"pipe": ({}, False), "terminal": ({}, True)}
        if given.against:
            kinds["against"] = ({"PYTHONPATH": str(given.against)}, False)
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(given.pairs + 1):
            for kind, (variables, on_terminal) in kinds.items():
                seconds = processor_seconds(words, variables, on_terminal=on_terminal)
                if number:  # the first one compiles
                    times[kind].append(seconds)
        print(f"{name:18}", *(f"{kind} {told(each)}" for kind, each in times.items()))
        print(f"{'':18} the terminal adds", told([b - a for a, b in zip(times["pipe"], times["terminal"], strict=True)]))
    lines = printed()
    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    os.environ.pop("NO_COLOR", None)
    print("the lines of inspect, wrapped and coloured:", told([of_lines(lines) for _ in range(given.pairs)]))


def processor_seconds(words: Sequence[object], variables: Mapping[str, str], *, on_terminal: bool) -> float:
    """The processor time of one command, from an empty folder, so that the tree here does not hide what is installed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "COLUMNS", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", **({"COLUMNS": str(COLUMNS)} if on_terminal else {}), **variables}
    inside, outside = pty.openpty() if on_terminal else os.pipe()
    drain = threading.Thread(target=_read, args=(inside,))
    drain.start()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "reshard", *map(str, words)], cwd=folder, env=environment, stdout=outside, stderr=outside
        )
        os.close(outside)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, words
    drain.join()
    os.close(inside)
    return usage.ru_utime + usage.ru_stime


def _read(end: int) -> None:
    try:
        while os.read(end, 1 << 16):
            pass
    except OSError:  # how Linux says that the other end is closed
        pass


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def of_lines(lines: Sequence[str]) -> float:
    """The processor time to wrap and colour lines."""
    shown_on = import_module("reshard.cli.console").shown_on
    terminal, before = _Terminal(), time.process_time()
    found = [shown_on(terminal, line) for line in lines]
    seconds = time.process_time() - before
    assert any("\x1b[" in line for line in found) and any("\n" in line for line in found)
    return seconds


def printed() -> list[str]:
    """The lines that `inspect` prints into a pipe."""
    words = [sys.executable, "-m", "reshard", *map(str, COMMANDS["inspect"])]
    return subprocess.run(words, cwd=FSDP2, capture_output=True, text=True, check=True).stdout.splitlines()


def told(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.1f} [{min(seconds) * 1000:.1f}] ms"


if __name__ == "__main__":
    main()
