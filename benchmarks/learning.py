"""`reshard learn` of published sizes: processor time of each rank, and the memory of everything that runs.

    python benchmarks/learning.py ENGINE_PYTHON [--tp N] [--published FOLDER] [model ...]

The models are those of tests/serving/published_sizes.py, and, with --published, folders with a published config.json. Their tensors have
the names and shapes of the declaration, which the tracer does not read. Each run traces the first and the last rank.
docs/reference/traced-models.md has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "serving")]

import published_sizes  # noqa: E402

from reshard.models.lookup import find_model  # noqa: E402
from reshard.serving.learned.learn import learned_layout, traced_rank  # noqa: E402
from reshard.verbs.look.learn import config_of, tracer_of  # noqa: E402

MOST_SECONDS, MOST_MB = 60, 3000


def main() -> int:
    """Print a row for each model. The exit code is 1 if a rank takes more than a minute, or everything more than 3 GB."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine_python")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--published", type=Path, help="the folder with the folders of published configs")
    parser.add_argument("models", nargs="*", help="models of published_sizes.py, or folders of --published; default: the former")
    options = parser.parse_intermixed_args()
    print(f"| model at TP {options.tp} | seconds | tensors | boxes | memory |\n| --- | --- | --- | --- | --- |")
    is_fast = True
    with tempfile.TemporaryDirectory() as work:
        for name in options.models or published_sizes.MODELS:
            folder = Path(work, name)
            config = written(folder, name, options.published)
            seconds, megabytes, answer = traced(folder, config, options.engine_python, options.tp)
            print(f"| {name} | {seconds:.1f} | {answer} | {megabytes / 1000:.1f} GB |", flush=True)
            is_fast &= seconds < MOST_SECONDS and megabytes < MOST_MB
    return 0 if is_fast else 1


def written(folder: Path, name: str, published: Path | None) -> dict[str, Any]:
    """The folder of a model, its tensors a hole. Returns its config."""
    if name in published_sizes.MODELS:
        published_sizes.main(folder.parent, [name])
    else:
        assert published is not None, f"{name} is not in published_sizes.py: --published must name the folder that holds it"
        config = json.loads((published / name / "config.json").read_text())
        model = find_model(config)
        assert model is not None, f"{name} is of a type that is not declared"
        shapes = {weight.name: ("BF16", weight.shape) for weight in model.weights.values() if not weight.optional}
        published_sizes.write(folder, config, shapes)
    return config_of(folder)


def traced(folder: Path, config: dict[str, Any], python: str, tp: int) -> tuple[float, float, str]:
    """Processor seconds of a rank, MB of all processes at the most, and what the layout holds."""
    request: dict[str, Any] = {
        "model": str(folder),
        "cases": [{"tp": tp, "pp": 1, "ep": 1}],
        "ranks": sorted({0, tp - 1}),
        "trust_remote_code": False,
    }
    before, memory = _processor_seconds(), _Watched()
    lines = list(tracer_of("vllm", python).answers([request]))
    seconds = (_processor_seconds() - before) / len(request["ranks"])
    about, *ranks = lines
    found = learned_layout(about, map(traced_rank, ranks[:1]), config) if "failed" not in ranks[0] else None
    boxes = sum(len(tensor.get("parts", ())) for tensor in ranks[0].get("tensors", {}).values())
    text = f"{len(ranks[0]['tensors'])} | {boxes:,}" if found else f"{ranks[0]['failed'][:80]} | -"
    return seconds, memory.most(), text


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Watched:
    """The largest proportional set size of the children of this process and theirs, looked at ten times a second."""

    def __init__(self) -> None:
        self._most, self._done = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def most(self) -> float:
        self._done.set()
        self._thread.join()
        return self._most

    def _watch(self) -> None:
        while not self._done.is_set():
            self._most = max(self._most, sum(map(_megabytes, _descendants())))
            time.sleep(0.1)


def _descendants() -> Sequence[int]:
    lines = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.split("\n")
    parents = {int(pid): int(parent) for pid, parent in (line.split() for line in lines if line.strip())}
    return [pid for pid in parents if os.getpid() in _ancestors(pid, parents)]


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid in parents and pid > 1:
        pid = parents[pid]
        yield pid


def _megabytes(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in text.splitlines() if line.startswith("Pss:")), 0.0)


if __name__ == "__main__":
    raise SystemExit(main())
