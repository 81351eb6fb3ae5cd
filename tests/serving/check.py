"""The slow check: real vLLM serves what reshard wrote, and its ranks hold what the references say.

    python tests/serving/check.py [--reshard PATH] [--python PATH]

Makes the vLLM environment (.venv-vllm) where there is none. Then, each as a check that is counted:
1. convert --to vllm, and real vLLM decodes the same tokens with the same log-probabilities as from the Hugging Face folder
   at the same degree; also for the bundled FSDP2 checkpoint;
2. two query heads exchanged in one rank's file change the tokens: the first check can fail;
3. the references in fixtures/vllm come from real vLLM: its ranks are asked again, and agree.
That converted files equal the references is tests/formats' part, which needs no vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from environments import Environment, run_checks  # noqa: E402

# Without dependencies: vLLM's own would replace torch.
VLLM = Environment("vLLM", HERE / "requirements.txt", options=("--no-deps",))
HF = ROOT / "fixtures" / "hf"
FSDP2 = ROOT / "fixtures" / "dcp" / "fsdp2"


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    for model, tp in (("llama", 1), ("llama", 2), ("llama-tied", 2), ("qwen2", 2), ("qwen3", 2)):
        sharded = converted(reshard, HF / model, work / f"{model}-tp{tp}", "--to", "vllm", "--tp", str(tp))
        whole = decode(python, HF / model, tp, "auto")
        found = decode(python, sharded, tp, "sharded_state")
        yield compared(f"{model} at TP {tp}: sharded_state decodes as the Hugging Face folder", found, whole)
        if (model, tp) == ("llama", 2):
            rank1 = sharded / "model-rank-1-part-0.safetensors"
            exchange_query_heads(rank1, "model.layers.1.self_attn.qkv_proj.weight", head_dim=32)
            wrong = decode(python, sharded, tp, "sharded_state")
            changed = isinstance(wrong, list) and tokens(wrong) != tokens(whole)
            yield "exchanging two query heads of rank 1 changes the tokens", changed, str(wrong)
    named = ("--model", str(FSDP2 / "model"))
    sharded = converted(reshard, FSDP2 / "checkpoint", work / "fsdp2-tp2", "--to", "vllm", "--tp", "2", *named)
    whole = decode(python, converted(reshard, FSDP2 / "checkpoint", work / "fsdp2-hf", "--to", "hf", *named), 2, "auto")
    found = decode(python, sharded, 2, "sharded_state")
    yield compared("FSDP2 checkpoint at TP 2: sharded_state decodes as its Hugging Face form", found, whole)
    _, output, messages = alone([python, ROOT / "fixtures" / "vllm" / "make.py", "--check"], dict(os.environ))
    lines = [line for line in output.splitlines() if line.startswith(("llama", "qwen", "mistral"))]
    for line in lines:
        yield f"real ranks hold what the reference says: {line.split(':')[0]}", line.endswith("the same"), line
    yield "all references were asked for", len(lines) == len(list((ROOT / "fixtures" / "vllm").glob("*/*.json"))), messages[-2000:]


def converted(reshard: Path, source: Path, target: Path, *options: str) -> Path:
    subprocess.run([reshard, "convert", source, target, *options], check=True, stdout=subprocess.DEVNULL)
    return target


def decode(python: Path, model: Path, tp: int, load_format: str) -> list[dict[str, list[object]]] | str:
    """What real vLLM answers; the end of its messages if it does not."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE / "startup"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    returncode, output, messages = alone([python, HERE / "decode.py", model, str(tp), load_format], environment)
    return json.loads(output) if returncode == 0 and output else f"vLLM failed: {messages[-2000:]}"


def alone(command: list[Path | str], environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in a session of its own, of which nothing is left running.

    Through files, not pipes: helpers that outlive their parent would keep a pipe open for ever.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=messages, start_new_session=True)
        try:
            returncode = process.wait(timeout=600)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0), messages.seek(0)
        return returncode, output.read(), messages.read()


def compared(what: str, found: list[dict[str, list[object]]] | str, expected: list[dict[str, list[object]]] | str) -> tuple[str, bool, str]:
    """Equal tokens and log-probabilities, and answers that are worth comparing: not one token over and over."""
    telling = isinstance(expected, list) and len({str(answer["tokens"]) for answer in expected}) == len(expected)
    return what, telling and found == expected, f"{found} against {expected}"


def tokens(answers: list[dict[str, list[object]]] | str) -> object:
    return [answer["tokens"] for answer in answers] if isinstance(answers, list) else None


def exchange_query_heads(path: Path, name: str, head_dim: int) -> None:
    """Exchange the first two query heads, the first 2 * head_dim rows, of a fused qkv_proj in place."""
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    entry = json.loads(raw[8 : 8 + length])[name]
    start = 8 + length + entry["data_offsets"][0]
    size = head_dim * entry["shape"][1] * 2
    first, second = raw[start : start + size], raw[start + size : start + 2 * size]
    raw[start : start + 2 * size] = second + first
    path.write_bytes(raw)


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, VLLM, __doc__))
