"""The slow check of descriptor lists: real NIXL writes what a plan says from a trainer's memory into an engine's, over UCX on a CPU.

    python tests/live/on_nixl.py [--reshard PATH] [--python PATH]

Makes the environment (.venv-nixl) if there is none. Each as a check: sources and targets are processes with a NIXL agent each, whose memory
is registered; the sources write by the descriptor lists of examples/live/nixl_descriptors.py. Each target then holds, byte for byte, what
`convert --to vllm` writes for it, and as many bytes were written as the plan says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# This folder is a package here: tests/serving has files of its names.
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]

from helpers.framework_environments import Environment, installed, run_checks  # noqa: E402

NIXL = Environment("NIXL", HERE / "nixl_requirements.txt", options=("--no-deps",))


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    site = installed(python, work)
    for model, sources, tp in (("llama", 2, 2), ("qwen3_moe-sparse", 3, 2)):
        hf, files, what = ROOT / "fixtures" / "hf" / model, work / f"{model}-files", f"{model} from {sources} ranks to TP {tp}"
        subprocess.run([reshard, "convert", hf, files, "--to", "vllm", "--tp", str(tp)], check=True, stdout=subprocess.DEVNULL)
        command = [python, HERE / "nixl_ranks.py", hf, files, str(sources), str(tp)]
        # In another folder than the tree, whose `reshard` would come before the installed one.
        found = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(site)}, cwd=work, capture_output=True, text=True, timeout=300, check=False
        )
        yield f"{what}: NIXL writes it", found.returncode == 0, found.stderr[-2000:]
        if found.returncode == 0:
            told = json.loads(found.stdout.splitlines()[-1])
            yield f"{what}: each rank holds what convert writes for it", told["wrong"] == [[]] * tp, found.stdout
            yield f"{what}: the bytes are those of the plan", told["bytes"] == told["planned"] > 0, found.stdout


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, NIXL, __doc__))
