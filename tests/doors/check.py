"""Real clients read checkpoints that do not exist as files, from `reshard hub`.

    python tests/doors/check.py [--reshard COMMAND] [--python INTERPRETER] [--vllm INTERPRETER]

huggingface_hub, transformers, boto3, obstore and Run:ai's streamer with its S3 client get what `reshard convert` writes, bit by bit; with
a token they are refused without it. Real vLLM, started with HF_ENDPOINT alone, decodes the same tokens as from the converted folder; the
same by `runai_streamer` where its environment has it. The clients' environment is made in .venv-hub, and vLLM's is that of tests/serving.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers.framework_environments import ROOT, Environment, run_checks

HERE = Path(__file__).resolve().parent
CLIENTS = Environment("hub", HERE / "requirements.txt")
VLLM = Environment("vLLM", ROOT / "tests" / "serving" / "requirements.txt", options=("--no-deps",))
FSDP2 = ROOT / "fixtures" / "dcp" / "fsdp2"
SECRET = "a secret that both know"
_DECODE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import decode
print("DECODED", json.dumps(decode.answer(*json.loads(sys.argv[2]))))
"""


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    options = ("--to", "hf", "--dtype", "bf16", "--model", str(FSDP2 / "model"))
    converted = work / "converted"
    subprocess.run([reshard, "convert", FSDP2 / "checkpoint", converted, *options, "--quiet"], check=True)
    with served(reshard, work, *options) as url:
        yield from told(python, "open", url, converted, work / "open", {})
        yield from decoded(url, converted, work)
    with served(reshard, work, *options, "--bind", "0.0.0.0", RESHARD_HUB_TOKEN=SECRET) as url:
        yield from told(python, "token", url, converted, work / "token", {"HF_TOKEN": SECRET, "SECRET": SECRET})


@contextmanager
def served(reshard: Path, work: Path, *options: str, **environment: str) -> Iterator[str]:
    """A server of the FSDP2 checkpoint as org/m; its address on the loopback. It ends by an interruption, without a traceback."""
    messages = (work / "messages").open("w+")
    command = [reshard, "hub", FSDP2 / "checkpoint", "--name", "org/m", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True, env={**os.environ, **environment}) as process:
        line = process.stdout.readline()
        port = re.search(r":(\d+) serves", line)[1]
        yield f"http://127.0.0.1:{port}"
        process.send_signal(2)
        assert process.wait(20) == 130
    messages.seek(0)
    assert "Traceback" not in messages.read()


def told(python: Path, what: str, url: str, converted: Path, work: Path, environment: dict[str, str]) -> Iterator[tuple[str, bool, str]]:
    """What clients.py says of each client."""
    work.mkdir()
    s3 = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": environment.get("SECRET", "none"),
          "AWS_REGION": "us-east-1", "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}  # fmt: skip
    own = {"HF_ENDPOINT": url, "HF_HOME": str(work / "hf"), **s3, **environment}
    done = subprocess.run([python, HERE / "clients.py", converted], env={**os.environ, **own}, capture_output=True, text=True, timeout=600)
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("client\t")]
    yield from ((f"{what}: {name}", result == "ok", result) for _, name, result in lines)
    yield f"{what}: all clients were asked", done.returncode == 0 and len(lines) >= 7, done.stderr[-2000:]


def decoded(url: str, converted: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """What real vLLM decodes from the server, and from the converted folder."""
    given = sys.argv[sys.argv.index("--vllm") + 1] if "--vllm" in sys.argv else None
    python = Path(given) if given else VLLM.python()

    def answer(model: str, load_format: str, **environment: str) -> str:
        command = [python, "-c", _DECODE, ROOT / "tests" / "serving", json.dumps([model, 1, load_format])]
        own = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "HF_HOME": str(work / "vllm")}
        done = subprocess.run(command, env={**os.environ, **own, **environment}, capture_output=True, text=True, timeout=900)
        found = next((line for line in done.stdout.splitlines() if line.startswith("DECODED ")), "")
        return found or f"nothing: {done.stderr[-1500:]}"

    whole = answer(str(converted), "auto")
    found = answer("org/m", "auto", HF_ENDPOINT=url)
    yield "vLLM with HF_ENDPOINT alone decodes as from the converted folder", found == whole and "tokens" in whole, f"{found} {whole}"
    if subprocess.run([python, "-c", "import runai_model_streamer"], capture_output=True).returncode == 0:
        s3 = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "none", "AWS_REGION": "us-east-1"}
        found = answer("s3://m", "runai_streamer", **s3, RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING="0")
        yield "vLLM by runai_streamer decodes the same", found == whole, found


def main() -> int:
    """Run the checks; --vllm is taken out of the command line, which the frame of all checks reads."""
    kept = list(sys.argv)
    if "--vllm" in sys.argv:
        at = sys.argv.index("--vllm")
        sys.argv = sys.argv[:at] + sys.argv[at + 2 :]
    return run_checks(lambda *given: _with(kept, *given), CLIENTS, __doc__ or "")


def _with(arguments: list[str], *given: Path) -> Iterator[tuple[str, bool, str]]:
    sys.argv = arguments
    return checks(*given)


if __name__ == "__main__":
    sys.exit(main())
