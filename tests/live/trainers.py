"""The slow check of trainers: FSDP2 and Megatron-Core train as examples/live do, and real vLLM on the CPU answers with what was trained.

    python tests/live/trainers.py [--reshard PATH] [--python PATH] [--long]

Makes the environments (.venv-vllm, which has torch and transformers, too, and .venv-megatron) where there are none. For each model, each as
a check:
1. four ranks of FSDP2 train two steps and update a server at TP 2 by `Sender(model, engine=URL)`: its tokens and log-probabilities are
   those of a server that was started from `convert --to hf` of the step that the trainer saved;
2. `reshard verify STEP URL` finds no parameter that differs, and the server's version is the one that the trainer was told;
3. a trainer with another model is refused, and the server goes on (llama alone);
4. two ranks of Megatron-Core train a llama; a run that starts again and learns nothing brings the first answers back.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# This folder is a package here: tests/serving has a file of its name.
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]

from helpers.framework_environments import LONG, Environment, installed, run_checks  # noqa: E402
from live.check import BACKEND, TP, VLLM, made, same  # noqa: E402
from live.served import served  # noqa: E402

EXAMPLES = ROOT / "examples" / "live"
# As in tests/megatron/check.py.
MEGATRON = Environment("Megatron", ROOT / "tests" / "megatron" / "requirements.txt", options=("--no-deps",))
RANKS = 4
Check = tuple[str, bool, str]


def checks(reshard: Path, python: Path, work: Path) -> Iterator[Check]:
    """Each check as (what, passed, detail)."""
    site = installed(python, work)
    yield from trained_by_megatron(reshard, python, site, work)
    for model in ("llama", "qwen3_moe", "deepseek_v3") if LONG else ("llama", "qwen3_moe"):
        yield from trained(model, reshard, python, site, work)


def trained(model: str, reshard: Path, python: Path, site: Path, work: Path) -> Iterator[Check]:
    """What a server answers after updates from FSDP2."""
    source = ROOT / "fixtures" / "hf" / model
    if model != "llama":
        source = work / model
        subprocess.run([python, ROOT / "fixtures" / "models.py", model, source], check=True, stderr=subprocess.DEVNULL)
    start, step, hf = made(python, source, work / f"{model}-start", 0), work / f"{model}-step", work / f"{model}-hf"
    with served(python, start, TP, site, work / f"{model}.log", *BACKEND) as server:
        before = server.answers()
        said, code = train(python, RANKS, site, work, EXAMPLES / "fsdp2.py", start, server.address, "--save", step)
        yield f"{model}: {RANKS} ranks of FSDP2 train, and update the server twice", code == 0 and said.count(" bytes in ") == 2, said
        found, version = server.answers(), server.asked("/weight_info")["weight_version"]
        yield f"{model}: the server has the version of the last update", f"version {version}" in said.splitlines()[-1], f"{version} {said}"
        verified = [reshard, "verify", step, server.address, "--model", start, "--json"]
        told = json.loads(subprocess.run(verified, capture_output=True, text=True).stdout or "{}")
        yield f"{model}: verify finds nothing that differs", told.get("differences") == [] and told.get("equal") is not False, str(told)
        if model == "llama":
            yield from refused(python, site, work, start, server, found)
    subprocess.run([reshard, "convert", step, hf, "--to", "hf", "--model", start], check=True, stdout=subprocess.DEVNULL)
    with served(python, hf, TP, site, work / "reference.log") as server:
        expected = server.answers()
    yield f"{model}: training changes the answers", before != expected, str(before)
    yield f"{model}: the server answered as one that is started from the saved step", found == expected, f"{found} against {expected}"


def refused(python: Path, site: Path, work: Path, start: Path, server: Any, answers: object) -> Iterator[Check]:
    """A trainer with other heads than the server's: the shapes of all weights are the same."""
    other = work / "other-heads"
    other.mkdir()
    for path in start.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    config = json.loads((start / "config.json").read_text())
    changed = {"num_attention_heads": config["num_attention_heads"] * 2, "num_key_value_heads": config["num_key_value_heads"] * 2}
    (other / "config.json").write_text(json.dumps({**config, **changed, "head_dim": config["head_dim"] // 2}))
    said, code = train(python, RANKS, site, work, EXAMPLES / "fsdp2.py", other, server.address)
    yield "a trainer with other heads is refused by their names", code != 0 and "num_attention_heads" in said, said[-2000:]
    yield "a trainer with other heads: the server goes on", *same(server, answers)


def trained_by_megatron(reshard: Path, python: Path, site: Path, work: Path) -> Iterator[Check]:
    """What a server answers after updates from Megatron-Core at TP 2."""
    megatron = MEGATRON.python()
    # What plans and digests need, beside what Megatron's environment has.
    pip = [megatron, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", work / "beside"]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", "ml_dtypes", "blake3"], check=True)
    start, saved = made(python, ROOT / "fixtures" / "hf" / "llama", work / "megatron-start", 0), work / "megatron-saved"
    subprocess.run([reshard, "convert", start, saved, "--to", "megatron-dist", "--tp", "2"], check=True, stdout=subprocess.DEVNULL)
    script = [HERE / "pretended_cuda.py", EXAMPLES / "megatron.py", start, saved]
    with served(python, start, TP, site, work / "megatron.log", *BACKEND) as server:
        before = server.answers()
        said, code = train(megatron, 2, site, work, *script, server.address)
        yield "Megatron-Core at TP 2 trains, and updates the server twice", code == 0 and said.count(" bytes in ") == 2, said[-2000:]
        yield "training with Megatron-Core changes the answers", server.answers() != before, str(before)
        said, code = train(megatron, 2, site, work, *script, server.address, "--steps", "1", "--lr", "0")
        yield "Megatron-Core's first weights bring the first answers back", *same(server, before, said[-2000:])


def train(python: Path, ranks: int, site: Path, work: Path, *script: Path | str) -> tuple[str, int]:
    """What a script prints, and its exit code."""
    path = os.pathsep.join([str(site), str(work / "beside")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *script]
    found = subprocess.run([*map(str, command)], env=environment, cwd=work, capture_output=True, text=True, timeout=900)
    lines = found.stdout if found.returncode == 0 else found.stdout + re.sub(r"(?m)^\s*$\n", "", found.stderr)
    return lines, found.returncode


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, VLLM, __doc__))
