"""The slow check of trainers: FSDP2 and Megatron-Core train as examples/live do, and real vLLM on the CPU answers with what was trained.

    python tests/live/trainers.py [--reshard PATH] [--python PATH] [--long]

Makes the environments (.venv-vllm, which has torch and transformers, too, and .venv-megatron) where there are none. For each model, each as
a check:
1. four ranks of FSDP2 train two steps and update a server at TP 2 by `Sender(model, engine=URL)`: its tokens and log-probabilities are
   those of a server that was started from `convert --to hf` of the step that the trainer saved;
2. `reshard verify STEP URL` finds no parameter that differs, and the server's version is the one that the trainer was told;
3. a trainer with another model is refused, and the server goes on (llama alone);
4. a LoRA adapter alone is pushed (pushed_adapters.py);
5. two ranks of Megatron-Core train a llama; a run that starts again and learns nothing brings the first answers back.
With --long also: a LoRA adapter of PEFT, of which the factors alone travel after the first update, and whose step `verify` merges; FSDP2
with tensor parallelism; servers at TP 1 and TP 4; deepseek_v3; Megatron-Core at TP 2 x PP 2, and with experts over two ranks: the server
answers as one that was started from the weights that the fixtures' own mapping gathered from the live model, and the bytes that the
transport counts are those of the plan.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# This folder is a package here: tests/serving has a file of its name.
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]

from helpers.framework_environments import LONG, Environment, installed, pip_for, run_checks  # noqa: E402
from live.check import BACKEND, TP, VLLM, made, same  # noqa: E402
from live.pushed_adapters import pushed_adapters  # noqa: E402
from live.served import served  # noqa: E402

EXAMPLES = ROOT / "examples" / "live"
# As in tests/megatron/check.py.
MEGATRON = Environment("Megatron", ROOT / "tests" / "megatron" / "requirements.txt", options=("--no-deps",))
# As in tests/peft/check.py.
PEFT = Environment("peft", ROOT / "tests" / "peft" / "requirements.txt")
RANKS = 4
Check = tuple[str, bool, str]


# Model, tensor-parallel size of the server, options of examples/live/fsdp2.py. vLLM 0.32 on a CPU starts with two stages, and with experts
# whole on each rank, and fails at the first request: the second stage asserts that `intermediate_tensors` is not None.
FSDP2: list[tuple[str, int, tuple[str, ...]]] = [("llama", TP, ()), ("qwen3_moe", TP, ())]
FSDP2_LONG = [("deepseek_v3", TP, ()), ("llama", TP, ("--tp", "2")), ("llama", 1, ()), ("llama", 4, ())]
# Model, sizes of the run.
MEGATRON_LONG = [("llama", "tp=2,pp=2"), ("qwen3_moe", "dp=2,ep=2")]


def checks(reshard: Path, python: Path, work: Path) -> Iterator[Check]:
    """Each check as (what, passed, detail)."""
    site = installed(python, work)
    yield from trained_by_megatron(reshard, python, site, work)
    llama = made(python, ROOT / "fixtures" / "hf" / "llama", work / "adapters-base", 0)
    yield from pushed_adapters(reshard, python, llama, site, work)
    for case in [*FSDP2, *FSDP2_LONG] if LONG else FSDP2:
        yield from trained(*case, reshard, python, site, work)
    if LONG:
        yield from trained_adapter(reshard, python, site, work)
    for model, sizes in MEGATRON_LONG if LONG else []:
        yield from trained_in_parts(model, sizes, reshard, python, site, work / f"megatron-{model}")


def trained(model: str, tp: int, options: tuple[str, ...], reshard: Path, python: Path, site: Path, work: Path) -> Iterator[Check]:
    """What a server answers after updates from FSDP2."""
    name = " ".join([model, *options, f"-> TP {tp}"])
    folder = work / name.replace(" ", "-").replace(">", "")
    start, step, hf = made(python, source_of(model, python, folder), folder / "start", 0), folder / "step", folder / "hf"
    with served(python, start, tp, site, folder / "server.log", *BACKEND) as server:
        before = server.answers()
        said, code = train(python, RANKS, site, work, EXAMPLES / "fsdp2.py", start, server.address, "--save", step, *options)
        yield f"{name}: {RANKS} ranks of FSDP2 train, and update the server twice", code == 0 and said.count(" bytes in ") == 2, said
        found, version = server.answers(), server.asked("/weight_info")["weight_version"]
        yield f"{name}: the server has the version of the last update", f"version {version}" in said.splitlines()[-1], f"{version} {said}"
        yield f"{name}: verify finds nothing that differs", *verified(reshard, step, server, "--model", start)
        if (model, tp, options) == FSDP2[0]:
            yield from refused(python, site, work, start, server, found)
    subprocess.run([reshard, "convert", step, hf, "--to", "hf", "--model", start], check=True, stdout=subprocess.DEVNULL)
    with served(python, hf, tp, site, folder / "reference.log") as server:
        expected = server.answers()
    yield f"{name}: training changes the answers", before != expected, str(before)
    yield f"{name}: the server answered as one that is started from the saved step", found == expected, f"{found} against {expected}"


def source_of(model: str, python: Path, folder: Path, changed: str = "{}") -> Path:
    """The folder of a model at sizes that vLLM can decode on a CPU."""
    if model == "llama":
        return ROOT / "fixtures" / "hf" / model
    command = [python, ROOT / "fixtures" / "models.py", model, folder / "model", changed]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return folder / "model"


def verified(reshard: Path, folder: Path, server: Any, *options: Path | str) -> tuple[bool, str]:
    """Whether `verify` finds that a server holds the weights of a folder."""
    command = [reshard, "verify", folder, server.address, *options, "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True).stdout or "{}")
    return told.get("differences") == [] and told.get("equal") is not False, str(told)


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
    install_beside(megatron, work)
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


def install_beside(python: Path, work: Path) -> None:
    """What plans and digests need, beside what a trainer's environment has."""
    command = [*pip_for(python), "--no-deps", "--upgrade", "--target", work / "beside", "-c", ROOT / "constraints.txt"]
    subprocess.run([*command, "ml_dtypes", "blake3"], check=True)


def trained_adapter(reshard: Path, python: Path, site: Path, work: Path) -> Iterator[Check]:
    """What a server answers after updates from FSDP2 with a LoRA adapter of PEFT."""
    peft = PEFT.python()
    install_beside(peft, work)
    start, adapter, merged = made(python, ROOT / "fixtures" / "hf" / "llama", work / "adapted-start", 0), work / "adapter", work / "merged"
    step = work / "step-3"
    with served(python, start, TP, site, work / "adapted.log", *BACKEND) as server:
        before = server.answers()
        said, code = train(peft, RANKS, site, work, HERE / "adapted_ranks.py", start, server.address, adapter, step)
        counted = [[*map(int, each)] for each in re.findall(r"(\d+) bytes sent, (\d+) planned", said)]
        yield "a LoRA adapter of PEFT on FSDP2 trains, and updates the server three times", code == 0 and len(counted) == 3, said[-2000:]
        if code:
            return
        (first, planned), *others = counted
        only = planned <= first and all(sent < planned / 2 for sent, _ in others)
        yield "of the adapter's updates the first one sends the base, the others do not", only, said
        found = server.answers()
        shutil.copy(adapter / "adapter_config.json", step)
        passed, told = verified(reshard, step, server, "--model", start)
        yield "of a LoRA adapter: verify finds nothing that differs, and the step", passed and "is of step 3" in told, told
        older = shutil.copytree(step, work / "step-2")
        passed, told = verified(reshard, older, server, "--model", start)
        yield "of a LoRA adapter: verify names the other step", not passed and "this checkpoint is of step 2" in told, told
    command = [reshard, "convert", start, merged, "--to", "hf", "--merge-adapter", adapter]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with served(python, merged, TP, site, work / "reference.log") as server:
        expected = server.answers()
    yield "training an adapter changes the answers", before != expected, str(before)
    yield "the server answered as one that is started from `convert --merge-adapter`", found == expected, f"{found} against {expected}"


def trained_in_parts(model: str, sizes: str, reshard: Path, python: Path, site: Path, work: Path) -> Iterator[Check]:
    """What a server answers after an update from Megatron-Core with several kinds of parallelism."""
    name = f"{model}, Megatron-Core {sizes}"
    # As in megatron_trains.py.
    source = source_of(model, python, work, '{"mlp_only_layers": []}')
    start, trained = made(python, source, work / "start", 0), work / "trained"
    with served(python, start, TP, site, work / "server.log", *BACKEND) as server:
        before = server.answers()
        said, code = ran([MEGATRON.python(), HERE / "megatron_trains.py", model, server.address, trained, sizes], site, work.parent)
        counted = re.findall(r"(\d+) bytes sent, (\d+) planned, (\d+) counted", said)
        yield f"{name}: the bytes sent are those of the plan", code == 0 and len(counted) == 1 and len({*counted[0]}) == 1, said[-2000:]
        if code:
            return
        found = server.answers()
        yield f"{name}: verify finds nothing that differs", *verified(reshard, trained, server)
    with served(python, made(python, trained, work / "hf", 0), TP, site, work / "reference.log") as server:
        expected = server.answers()
    yield f"{name}: training changes the answers", before != expected, str(before)
    yield f"{name}: the server answered as one that is started from the gathered weights", found == expected, f"{found} {expected}"


def train(python: Path, ranks: int, site: Path, work: Path, *script: Path | str) -> tuple[str, int]:
    """What a script prints, and its exit code."""
    return ran([python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *script], site, work)


def ran(command: Sequence[object], site: Path, work: Path) -> tuple[str, int]:
    """What a command prints that finds reshard in `site`, and its exit code."""
    path = os.pathsep.join([str(site), str(work / "beside")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([*map(str, command)], env=environment, cwd=work, capture_output=True, text=True, timeout=900)
    lines = found.stdout if found.returncode == 0 else found.stdout + re.sub(r"(?m)^\s*$\n", "", found.stderr)
    return lines, found.returncode


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, VLLM, __doc__))
