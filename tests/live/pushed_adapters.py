"""A LoRA adapter alone is pushed into a running server of real vLLM. trainers.py runs these checks.

One server in float32, started with the adapter under the name `reference` (--lora-modules) and a key, is pushed the same adapter and the
next version, under requests. With --long a server of the merged folder answers too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from helpers.framework_environments import LONG
from live.served import served
from safetensors.numpy import save_file

KEY, LONG_ANSWER = "a-key-that-is-never-shown", 120
Check = tuple[str, bool, str]


def pushed_adapters(reshard: Path, python: Path, base: Path, site: Path, work: Path) -> Iterator[Check]:
    """Each check as (what, passed, detail). base: the folder of a llama."""
    first, second = adapter(base, work / "first", 1), adapter(base, work / "second", 2)

    def run(*words: Any, key: str | None = KEY) -> tuple[int, str]:
        environment = {**os.environ, "RESHARD_SERVER_KEY": key or ""}
        done = subprocess.run([reshard, *map(str, words)], capture_output=True, text=True, env=environment)
        return done.returncode, done.stdout + done.stderr

    options = ["--dtype", "float32", "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"reference={first}", "--api-key", KEY]
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    try:
        with served(python, base, 1, site, work / "adapters.log", *options, key=KEY) as server:
            push = ["push", first, server.address, "--adapter", "--name", "tutor"]
            code, said = run(*push, key=None)
            yield "an adapter: without its key the server is not asked", code == 2 and "RESHARD_SERVER_KEY" in said, said
            code, said = run(*push, "--json")
            tutor = json.loads(said)["adapter"] if code == 0 else said
            expected = server.answers("reference")
            yield "an adapter that is pushed answers as one of --lora-modules, bit by bit", server.answers(tutor) == expected, tutor
            yield "an adapter changes the answers", expected != server.answers(), str(expected)
            code, said = run("verify", first, server.address)
            yield "an adapter: verify finds its name", code == 0 and tutor in said, said
            code, said = run("push", adapter(base, work / "large", 3, rank=16), server.address, "--adapter", "--name", "tutor")
            yield "an adapter of too large a rank is refused", code == 5 and "goes on with the adapters that it had" in said, said
            code, said = run("push", adapter(base, work / "wide", 3, wrong=8), server.address, "--adapter", "--name", "tutor")
            yield "an adapter of another base is refused", code == 3 and "nothing was sent" in said, said
            quiet, under_way = server.answer(tutor, LONG_ANSWER), []
            requests = [threading.Thread(target=lambda: under_way.append(server.answer(tutor, LONG_ANSWER))) for _ in range(3)]
            for request in requests:
                request.start()
            code, said = run("push", second, server.address, "--adapter", "--name", "tutor", "--json")
            for request in requests:
                request.join()
            made = json.loads(said) if code == 0 else {}
            yield "requests that run during a push keep their version", under_way == [quiet] * 3, f"{under_way} against {quiet}"
            replaced = made.get("unloaded") == [tutor] and server.answers(made["adapter"]) not in (expected, server.answers())
            yield "an adapter is replaced by its next version", replaced, said
    finally:
        del os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
    if LONG:
        subprocess.run([reshard, "convert", base, work / "merged", "--to", "hf", "--merge-adapter", first, "--dtype", "fp32"], check=True)
        with served(python, work / "merged", 1, site, work / "merged.log", "--dtype", "float32") as server:
            merged = server.answers()
        tokens = [answer[0] for answer in merged] == [answer[0] for answer in expected]
        apart = max(abs(a - b) for ours, theirs in zip(merged, expected, strict=True) for a, b in zip(ours[1], theirs[1], strict=True))
        print(f"largest difference of log-probabilities of the adapter and the merged folder: {apart:.1g}", file=sys.stderr)
        yield "an adapter that is pushed gives the tokens of the merged folder", tokens and apart < 1e-4, f"{merged} against {expected}"


def adapter(base: Path, folder: Path, seed: int, rank: int = 4, wrong: int = 0) -> Path:
    """A folder with an adapter of a llama's linear layers. wrong: how much wider its matrices are than those of the base."""
    config, random = json.loads((base / "config.json").read_text()), np.random.default_rng(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes = {"self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    sizes |= {"self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (out, into) in {**sizes, "mlp.down_proj": (hidden, inner)}.items():
            for factor, shape in (("A", (rank, into + wrong)), ("B", (out, rank))):
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight"
                tensors[name] = random.normal(0, 0.3, shape).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "use_rslora": False, "target_modules": targets, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(base)}))
    return folder
