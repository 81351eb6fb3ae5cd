"""The slow check of updates of real SGLang 0.5.23, whose servers run on a CPU here.

    python tests/live/on_sglang.py [--reshard PATH] [--python PATH] [--long]

Makes the environment (.venv-sglang) if there is none. Each as a check:
1. four ranks of FSDP2 train two steps and update a server by `Sender(model, engine=URL)`: its tokens, its log-probabilities and the digests
   that its own weight checker tells of every parameter are those of a server that was started from `convert --to hf` of the saved step;
2. a request that runs when an update begins ends with the old weights, if the sender waits; kept, it goes on with the new ones;
3. a trainer with another model is refused, and the server goes on;
4. `reshard push` and `reshard verify` of the saved step, and `--load-format reshard`, which loads it;
5. a LoRA adapter that is pushed by HTTP answers as one that the server reads from a folder; what stops the server is refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# This folder is a package here: tests/serving has files of its names.
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]

import torch  # noqa: E402
from helpers.framework_environments import LONG, Environment, installed, run_checks  # noqa: E402
from live.check import made, same  # noqa: E402
from live.pushed_adapters import adapter  # noqa: E402
from live.served import PROMPTS  # noqa: E402
from live.served_sglang import SglangServed, sglang_served  # noqa: E402
from live.trainers import EXAMPLES, RANKS, refused, train  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from reshard.live import Sender  # noqa: E402
from reshard.live.arrangement import Link  # noqa: E402

# As in tests/serving/learned_sglang.py.
SGLANG = Environment("SGLang", ROOT / "tests" / "serving" / "sglang_requirements.txt", options=("--no-deps",))
LONG_ANSWER = 400
Check = tuple[str, bool, str]


def checks(reshard: Path, python: Path, work: Path) -> Iterator[Check]:
    """Each check as (what, passed, detail)."""
    site = installed(python, work)
    yield from adapters(reshard, python, site, work)
    for model, tp in (("llama", 2), ("llama", 1), ("qwen3_moe-sparse", 2)) if LONG else (("llama", 2),):
        yield from trained(model, tp, reshard, python, site, work)


def adapters(reshard: Path, python: Path, site: Path, work: Path) -> Iterator[Check]:
    """What a server answers after pushes of adapters. With adapters, one at TP 2 does not get through its first request on a CPU."""
    base = work / "adapted"
    subprocess.run([python, HERE / "aligned_model.py", ROOT / "fixtures" / "hf" / "llama", base], check=True, stderr=subprocess.DEVNULL)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = ["--enable-lora", "--max-lora-rank", "8", "--lora-backend", "torch_native", "--lora-target-modules", *modules]
    with sglang_served(python, base, 1, site, work / "adapters.log", "--dtype", "float32", *lora) as server:
        first, second = adapter(base, work / "first", 1), adapter(base, work / "second", 2)

        def push(source: Path, *options: object) -> tuple[str, str]:
            command = [reshard, "push", source, server.address, "--adapter", "--json", *options]
            done = subprocess.run([*map(str, command)], capture_output=True, text=True)
            return (json.loads(done.stdout)["adapter"] if done.returncode == 0 else ""), done.stderr

        (tutor, said), (folder, _) = push(first, "--name", "tutor"), push(first, "--name", "of-folder", "--shared-dir", work / "shared")
        sent, read, plain = (server.answer(PROMPTS[0], lora=name) for name in (tutor, folder, None))
        yield "an adapter that SGLang gets by HTTP answers as one of a folder, and changes the answers", sent == read != plain, said
        newer, said = push(second, "--name", "tutor")
        listed = [card["id"] for card in server.asked("/v1/models")["data"][1:]]
        yield "it is replaced by its next version", sorted(listed) == sorted([folder, newer]), f"{listed} {said}"
        settings = json.loads((first / "adapter_config.json").read_text())
        (first / "adapter_config.json").write_text(json.dumps({**settings, "rank_pattern": {"o_proj": 2}}))
        refused = push(first)
        yield "what stops SGLang's server is refused", refused[0] == "" and "Nothing was sent" in refused[1], str(refused)
        goes_on = server.answer(PROMPTS[0], lora=folder)
        # A prompt that is in the prefix cache is computed in other steps, so its log-probabilities are rounded in another way.
        yield "the server goes on", goes_on[0] == read[0], f"{goes_on} against {read}"


def trained(model: str, tp: int, reshard: Path, python: Path, site: Path, work: Path) -> Iterator[Check]:
    """What a server answers after updates from FSDP2."""
    name, source = f"{model}-{tp}", work / f"{model}-{tp}"
    aligned = [python, HERE / "aligned_model.py", ROOT / "fixtures" / "hf" / model, source]
    subprocess.run(aligned, check=True, stderr=subprocess.DEVNULL)
    start, step, hf = made(python, source, work / f"{name}-start", 0), work / f"{name}-step", work / f"{name}-hf"
    with sglang_served(python, start, tp, site, work / f"{name}.log") as server:
        before = server.answers()
        said, code = train(python, RANKS, site, work, EXAMPLES / "fsdp2.py", start, server.address, "--save", step)
        yield f"{name}: {RANKS} ranks of FSDP2 train, and update the server twice", code == 0 and said.count(" bytes in ") == 2, said
        version = server.asked("/model_info")["weight_version"]
        yield f"{name}: the server has the version of the last update", code == 0 and f"version {version}" in said.splitlines()[-1], version
        found, digests = server.answers(), server.digests()
        if name == "llama-2":
            yield from refused(python, site, work, start, server, found)
            yield from paused(server, start, found)
            pushed = subprocess.run([reshard, "push", step, server.address, "--model", start], capture_output=True, text=True)
            yield f"{name}: push brings the saved step", *same(server, found, pushed.stderr)
            verified = subprocess.run([reshard, "verify", step, server.address, "--model", start], capture_output=True, text=True)
            yield f"{name}: verify finds the saved step in the server", verified.returncode == 0, verified.stdout + verified.stderr
    subprocess.run([reshard, "convert", step, hf, "--to", "hf", "--model", start], check=True, stdout=subprocess.DEVNULL)
    with sglang_served(python, hf, tp, site, work / "reference.log") as server:
        expected, theirs = server.answers(), server.digests()
    if name == "llama-2":
        trained_there = ["--load-format", "reshard", "--model-loader-extra-config", json.dumps({"checkpoint": str(step)})]
        with sglang_served(python, start, tp, site, work / "loaded.log", *trained_there) as server:
            what = f"{name}: --load-format reshard loads the saved step as SGLang loads `convert --to hf`"
            yield what, (server.answers(), server.digests()) == (expected, theirs), str(server.digests())
    yield f"{name}: training changes the answers", before != expected, str(before)
    yield f"{name}: the server answered as one that is started from the saved step", found == expected, f"{found} against {expected}"
    different = [key for ours, other in zip(digests, theirs, strict=True) for key in ours if ours[key] != other.get(key)]
    yield f"{name}: SGLang's weight checker tells the same of all parameters", not different and len(digests) == tp, str(different[:5])


def paused(server: SglangServed, first: Path, answers: object) -> Iterator[Check]:
    """What becomes of a request that runs when an update begins. The update brings the weights of `first`, and those that were there."""
    new = load_file(first / "model.safetensors")
    old, prompt = {name: torch.roll(weight, 1, 0) for name, weight in new.items()}, PROMPTS[0]
    for pause, weights in (("wait", new), ("keep", old), ("abort", new)):
        before = server.answer(prompt, LONG_ANSWER)
        sender = Sender(weights, engine=server.address, transport=Link(pause=pause))
        running = server.begin(prompt, LONG_ANSWER)
        time.sleep(0.3)
        was_running = running.is_running()
        sender.update()
        sender.close()
        tokens, numbers = running.end()
        after = server.answer(prompt, LONG_ANSWER)
        yield f"pause {pause}: a request runs, and the update changes the answer", was_running and after != before, str(was_running)
        same_start = tokens[:5] == before[0][:5]
        if pause == "wait":
            yield "pause wait: the request ends with the old weights", (tokens, numbers) == before, f"{tokens} against {before[0]}"
        elif pause == "keep":
            changes = tokens not in (before[0], after[0]) and len(tokens) == LONG_ANSWER
            yield "pause keep: the request begins with the old weights and ends with the new ones", same_start and changes, str(tokens)
        else:
            yield "pause abort: the request ends at once", same_start and len(tokens) < LONG_ANSWER, f"{len(tokens)} tokens"


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, SGLANG, __doc__))
