"""The slow check of whole tensors: the model classes of real vLLM on the CPU, at TP 1, take what no plan cuts.

    python tests/live/whole.py [--reshard PATH] [--python PATH] [--long]

Makes the vLLM environment (.venv-vllm) where there is none. In one process, without a server, a model that was loaded from old weights gets
new ones (whole_in_vllm.py); what its layers compute is compared with a model that was loaded from the new weights. The checks: all weights
whole; some whole and the others in the load form; five requests that vLLM's loader must refuse, which change nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# This folder is a package here: tests/serving has a file of its name.
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]

from helpers.framework_environments import installed, run_checks  # noqa: E402
from live.check import VLLM, made  # noqa: E402

COUNT = 9


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    site = installed(python, work)
    folders = [made(python, ROOT / "fixtures" / "hf" / "llama", work / name, turns) for name, turns in (("old", 0), ("new", 1))]
    path = os.pathsep.join([str(site), str(ROOT / "tests" / "serving" / "startup")])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    command = [python, HERE / "whole_in_vllm.py", *folders]
    found = subprocess.run([*map(str, command)], env={**os.environ, **own}, cwd=work, capture_output=True, text=True, timeout=600)
    lines = [line.split("\t") for line in found.stdout.splitlines() if line.startswith("CHECK\t")]
    yield "all checks were made", len(lines) == COUNT, found.stderr[-2000:]
    for _, passed, what, detail in lines:
        yield what, passed == "True", detail


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, VLLM, __doc__))
