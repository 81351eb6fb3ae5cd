"""The slow check of quantized engines: real vLLM on the CPU serves a llama in FP8 blocks, and FSDP2 trains the same llama in bfloat16.

    python tests/live/quantized.py [--reshard PATH] [--python PATH] [--long]

Makes the vLLM environment (.venv-vllm, which has torch and transformers, too) where there is none. vLLM's kernel for FP8 blocks on a CPU
needs AMX, and without it vLLM does not start. So plain torch computes these layers (COMPUTE_FP8_BLOCKS in tests/serving/startup); loading,
the load form and layerwise reload are vLLM's own. The checks:
1. four ranks of FSDP2, which hold some blocks whole and share others, train two steps and update the server at TP 2 by `Sender`: tokens
   and log-probabilities are those of a server that was started from `convert --to hf --quantize fp8-block` of the step that was saved;
2. the same for a server whose config is of the kind of DeepSeek's, with weight_scale_inv (--long);
3. without that kernel vLLM says why it does not start (--long).
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
# This folder is a package here: tests/serving has a file of its name.
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]

from helpers.framework_environments import LONG, installed, run_checks  # noqa: E402
from live.check import BACKEND, TP, VLLM, made, same  # noqa: E402
from live.served import served  # noqa: E402
from live.trainers import EXAMPLES, RANKS, train  # noqa: E402

Check = tuple[str, bool, str]
COMPUTE = "COMPUTE_FP8_BLOCKS"
# 64 rows of a weight of attention on each of four ranks, and 192 of one of the MLP: blocks of 128 that two ranks share, and whole ones.
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}


def checks(reshard: Path, python: Path, work: Path) -> Iterator[Check]:
    """Each check as (what, passed, detail)."""
    site = installed(python, work)
    start = made(python, random_model(python, "llama", SIZES, work / "plain"), work / "start", 0)
    os.environ[COMPUTE] = "1"
    yield from trained("compressed-tensors", quantized(reshard, start, work / "served"), start, reshard, python, site, work)
    if LONG:
        folder = renamed(python, work / "served", work / "renamed")
        yield from trained("DeepSeek's settings", folder, start, reshard, python, site, work)
        del os.environ[COMPUTE]
        log = work / "without.log"
        try:
            with served(python, work / "served", TP, site, log, *BACKEND):
                pass
        except (Exception, SystemExit):
            said = log.read_text()
            yield "without AMX, vLLM's own kernel is what is missing", "requires AMX tile support" in said, said[-2000:]
        else:
            yield "vLLM's own kernel works here: drop the plain one", "amx" not in Path("/proc/cpuinfo").read_text(), ""


def trained(what: str, folder: Path, start: Path, reshard: Path, python: Path, site: Path, work: Path) -> Iterator[Check]:
    """What a server in FP8 blocks answers after updates from FSDP2."""
    name = what.split()[0].lower().strip("'s")
    step, hf = work / f"{name}-step", work / f"{name}-hf"
    with served(python, folder, TP, site, work / f"{name}.log", *BACKEND) as server:
        before = server.answers()
        said, code = train(python, RANKS, site, work, EXAMPLES / "fsdp2.py", start, server.address, "--save", step)
        yield (
            f"{what}: {RANKS} ranks of FSDP2 train, and update the server twice",
            code == 0 and said.count(" bytes in ") == 2,
            said[-2000:],
        )
        found = server.answers()
    convert = [reshard, "convert", step, hf, "--to", "hf", "--model", start, "--quantize", "fp8-block"]
    subprocess.run(convert, check=True, stdout=subprocess.DEVNULL)
    reference = with_tokenizer(hf, start)
    if folder.name == "renamed":
        reference = renamed(python, hf, work / "renamed-reference")
    with served(python, reference, TP, site, work / "reference.log") as server:
        yield f"{what}: training changes the answers", before != found, str(before)
        yield f"{what}: the server answered as one that is started from the quantized step", *same(server, found)


def random_model(python: Path, like: str, sizes: dict[str, int], folder: Path) -> Path:
    """A model like a fixture, of other sizes and with random weights."""
    config = json.loads((ROOT / "fixtures" / "hf" / like / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | sizes))
    script = (
        "import sys, torch; from transformers import AutoConfig, AutoModelForCausalLM; torch.manual_seed(0);"
        "c = AutoConfig.from_pretrained(sys.argv[1]); c.initializer_range = 0.2;"
        "AutoModelForCausalLM.from_config(c, dtype=torch.bfloat16).save_pretrained(sys.argv[1])"
    )
    subprocess.run([python, "-c", script, folder], check=True, stderr=subprocess.DEVNULL)
    return folder


def quantized(reshard: Path, start: Path, folder: Path) -> Path:
    """A folder in FP8 blocks."""
    subprocess.run([reshard, "convert", start, folder, "--to", "hf", "--quantize", "fp8-block"], check=True, stdout=subprocess.DEVNULL)
    return with_tokenizer(folder, start)


def with_tokenizer(folder: Path, start: Path) -> Path:
    for path in start.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def renamed(python: Path, source: Path, folder: Path) -> Path:
    """The same codes and scales under the names and with the settings of DeepSeek's models."""
    folder.mkdir()
    for path in source.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": DEEPSEEK}))
    script = (
        "import sys; from safetensors.torch import load_file, save_file; found = load_file(sys.argv[1]);"
        "end = 'weight_scale';"
        "found = {n.replace(end, end + '_inv'): t.float() if n.endswith(end) else t for n, t in found.items()};"
        "save_file(found, sys.argv[2], metadata={'format': 'pt'})"
    )
    subprocess.run([python, "-c", script, source / "model.safetensors", folder / "model.safetensors"], check=True)
    return folder


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, VLLM, __doc__))
