"""A real vLLM server with the backend `reshard`, and what it answers to token ids: tokens and log-probabilities."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[len(sys.path) :] = [str(ROOT / "fixtures")]

import free_ports  # noqa: E402
import makers  # noqa: E402
from serving import sessions  # noqa: E402

# The last ones are longer than a cache block of a CPU, which has 128 positions, and begin with the same block.
_LONG = [(7 * i * i + 3 * i) % 250 for i in range(150)]
PROMPTS = ([3, 17, 91, 200, 45], [7, 7, 12, 133, 240, 5, 66], [101, 22], _LONG, [*_LONG[:140], 9, 8])
TOKENS = 8


class ServedModel:
    """A server at an address."""

    def __init__(self, address: str, process: subprocess.Popen[bytes], key: str = "") -> None:
        self.address, self._process, self._key = address, process, key
        self._model = self.asked("/v1/models")["data"][0]["id"]

    def asked(self, path: str, question: dict[str, Any] | None = None) -> Any:
        data = None if question is None else json.dumps(question).encode()
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self._key}"} if self._key else {})}
        request = urllib.request.Request(self.address + path, data, headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read() or b"null")

    def answers(self, model: str | None = None) -> list[tuple[list[str], list[float]]]:
        """Of each prompt its continuation. model: the name of an adapter; None: the base."""
        return [self.answer(model, TOKENS, prompt) for prompt in PROMPTS]

    def answer(self, model: str | None, tokens: int, prompt: list[int] = PROMPTS[0]) -> tuple[list[str], list[float]]:
        """The continuation of a prompt: tokens and log-probabilities."""
        how = {"max_tokens": tokens, "temperature": 0.0, "logprobs": 1, "return_tokens_as_token_ids": True, "ignore_eos": True}
        told = self.asked("/v1/completions", {"model": model or self._model, "prompt": prompt, **how})["choices"][0]["logprobs"]
        return told["tokens"], told["token_logprobs"]

    def memory(self) -> int:
        """Bytes of the server's processes in memory that they share with no file."""
        pids = subprocess.run(["ps", "-o", "pid=", "-g", str(self._process.pid)], capture_output=True, text=True).stdout.split()
        return sum(_anonymous(pid) for pid in pids)


def _anonymous(pid: str) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


@contextmanager
def served(
    python: Path, model: Path, tp: int, site: Path, log: Path, *options: str, development: str = "1", key: str = ""
) -> Iterator[ServedModel]:
    """A server of a model. site: the folder in which reshard is importable, with its entry points. key: what its requests need."""
    port, folder = free_ports.free_port(), log.parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "serving" / "startup"), str(site)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TMPDIR": str(folder),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(tp)),
        "VLLM_SERVER_DEV_MODE": development,
    }
    where = ["--model", model, "--tensor-parallel-size", tp, "--host", "127.0.0.1", "--port", port]
    small = ["--enforce-eager", "--kv-cache-memory-bytes", 64 << 20, "--max-model-len", 256, "--max-num-seqs", 4]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *where, *small, *options]
    with log.open("w") as messages:
        # In another folder than the tree, whose `reshard` would come before the installed one.
        process = subprocess.Popen(
            [*map(str, command)], env=environment, cwd=folder, stdout=messages, stderr=messages, start_new_session=True
        )
        try:
            sessions.wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield ServedModel(f"http://127.0.0.1:{port}", process, key)
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            sessions.end(process.pid)
            process.wait()
            # Ranks on a CPU leave shared memory, named as the file by which they met.
            for meeting in folder.glob("vllm_dist_*"):
                makers.load("vllm").remove_shared_memory(meeting.name)
