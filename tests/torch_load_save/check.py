"""Runs examples/torch with transformers on gloo: a Megatron run goes on in FSDP2, and each step is saved as shards for vLLM.

    python tests/torch_load_save/check.py [--reshard COMMAND] [--python INTERPRETER]

The environment is that of tests/peft/check.py, .venv-peft, which has transformers and what reshard needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from helpers.framework_environments import ROOT, Environment, installed, run_checks  # noqa: E402

ENVIRONMENT = Environment("peft", ROOT / "tests" / "peft" / "requirements.txt")
RUN = ROOT / "fixtures" / "megatron" / "llama-tp2-pp2-dp2"
LLAMA = ROOT / "fixtures" / "hf" / "llama"


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    site = installed(python, work)

    def example(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", ROOT / "examples" / "torch" / name]
        environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=600, cwd=work)

    done = example("resume_megatron.py", RUN / "checkpoint", RUN / "model")
    # The run was saved after two steps, at the learning rate 0.001.
    goes_on = re.search(r"^loss \d\.\d{4}, learning rate 0\.001, step 3$", done.stdout, re.MULTILINE)
    yield "a Megatron run goes on in FSDP2 on three ranks", done.returncode == 0 and goes_on is not None, done.stdout + done.stderr[-2000:]

    done = example("save_for_vllm.py", LLAMA, work / "out")
    yield "two steps are saved while the next one is computed", done.returncode == 0, done.stderr[-2000:]
    for step in ("step-1", "step-2"):
        verified = subprocess.run([reshard, "verify", work / "out" / step], capture_output=True, text=True)
        yield f"{step} is whole, and its digests are those of its files", verified.returncode == 0, verified.stdout + verified.stderr
    differs = subprocess.run([reshard, "verify", work / "out" / "step-1", work / "out" / "step-2"], capture_output=True, text=True)
    yield "the two steps differ", differs.returncode == 1, differs.stdout + differs.stderr


if __name__ == "__main__":
    sys.exit(run_checks(checks, ENVIRONMENT, __doc__ or ""))
