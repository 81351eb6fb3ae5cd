"""A real SGLang server on a CPU, and what it answers to token ids: tokens and log-probabilities.

SGLang's kernels for CPUs are in no package index. Without them, and on a device that has no AMX, SGLang's layers compute in torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[len(sys.path) :] = [str(ROOT / "fixtures")]

import free_ports  # noqa: E402
from live.served import PROMPTS, TOKENS  # noqa: E402
from serving import sessions  # noqa: E402

Answer = tuple[list[int], list[float]]


class SglangServed:
    """A server at an address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def asked(self, path: str, question: dict[str, Any] | None = None) -> Any:
        data = None if question is None else json.dumps(question).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read() or b"null")

    def answers(self) -> list[Answer]:
        """Of each prompt its continuation."""
        return [self.answer(prompt) for prompt in PROMPTS]

    def answer(self, prompt: list[int], tokens: int = TOKENS, lora: str | None = None) -> Answer:
        how = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        told = self.asked("/generate", {"input_ids": prompt, "sampling_params": how, "return_logprob": True, "lora_path": lora})
        return told["output_ids"], [number for number, *_ in told["meta_info"]["output_token_logprobs"]]

    def begin(self, prompt: list[int], tokens: int) -> Running:
        """Ask, without waiting for the answer."""
        return Running(lambda: self.answer(prompt, tokens))

    def digests(self) -> Any:
        """What SGLang's own weight checker tells of every parameter of every rank."""
        return [each["checksums"] for each in self.asked("/weights_checker", {"action": "checksum"})["ranks"]]


class Running:
    """A request that runs."""

    def __init__(self, ask: Any) -> None:
        self._found: list[Answer] = []
        self._thread = threading.Thread(target=lambda: self._found.append(ask()), daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> Answer:
        self._thread.join(300)
        return self._found[0]


@contextmanager
def sglang_served(python: Path, model: Path, tp: int, site: Path, log: Path, *options: str, plugins: str = "") -> Iterator[SglangServed]:
    """A server of a model. site: the folder in which reshard is importable, with its entry points."""
    port = free_ports.free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "sglang_startup"), str(site)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # Without it, SGLang takes a machine that has no GPU for one whose GPU it does not know.
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(tp)),
        "SGLANG_PLUGINS": plugins,
    }
    where = ["--model-path", model, "--tp", tp, "--device", "cpu", "--host", "127.0.0.1", "--port", port, "--skip-tokenizer-init"]
    kernels = ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-cuda-graph"]
    small = ["--mem-fraction-static", "0.1", "--max-total-tokens", "4096", "--skip-server-warmup"]
    command = [python, "-m", "sglang.launch_server", *where, *kernels, *small, *options]
    with log.open("w") as messages:
        # In another folder than the tree, whose `reshard` would come before the installed one.
        process = subprocess.Popen(
            [*map(str, command)], env=environment, cwd=log.parent, stdout=messages, stderr=messages, start_new_session=True
        )
        try:
            sessions.wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield SglangServed(f"http://127.0.0.1:{port}")
        finally:
            sessions.end(process.pid)
            process.wait()
