"""`reshard verify CKPT http://HOST:PORT` against a model that real vLLM serves: part of check.py.

The FSDP2 checkpoint of the fixtures is converted to Hugging Face files, and vLLM serves these. It is compared with the FSDP2 checkpoint
(right), with one in which every weight is a little different (stale), with one that has a single wrong bit, with one whose gate and up
matrices are exchanged, and with another model. A model with experts shows how a CPU arranges these.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[len(sys.path) :] = [str(HERE.parent), str(ROOT / "fixtures")]

import free_ports  # noqa: E402
import makers  # noqa: E402
import numpy as np  # noqa: E402
import sessions  # noqa: E402

vllm_make = makers.load("vllm")
FSDP2 = ROOT / "fixtures" / "dcp" / "fsdp2"


def live_checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    served = work / "served"
    convert = [reshard, "convert", FSDP2 / "checkpoint", served, "--to", "hf", "--model", FSDP2 / "model"]
    subprocess.run(convert, check=True, stdout=subprocess.DEVNULL)
    right = ["--model", FSDP2 / "model", FSDP2 / "checkpoint"]
    stale, wrong = altered(served, work / "stale", every=True), altered(served, work / "wrong", every=False)
    exchanged = with_gate_and_up_exchanged(served, work / "exchanged")
    other = ROOT / "fixtures" / "hf" / "qwen3"
    for tp, keep in ((1, True), (2, False)):
        name = f"a live server at TP {tp}, {'weights kept' if keep else 'linear layers repacked'}"
        with running(python, served, tp, work / "server.log", keep=keep) as address:
            code, document, messages = verified(reshard, *right, address)
            about = document.get("server") or {}
            named = f"TP {tp}" if tp > 1 else "one rank"
            learned = any(note.endswith(f"vllm on {named}") for note in document.get("notes", ()))
            verdict = (code, document.get("equal")) == ((0, True) if keep else (1, None))
            yield (
                f"{name}: the right checkpoint is {'equal' if keep else 'not told from others'}, degrees learned",
                verdict and learned,
                messages,
            )
            share = about["compared_bytes"] / about["bytes"] if about else 0
            yield f"{name}: {share:.0%} of the bytes are compared", (share == 1) == keep and share > 0.2, str(about)
            code, document, _ = verified(reshard, *right, address, "--allow-not-comparable")
            yield f"{name}: who accepts what is hidden gets 0", (code, document.get("equal")) == (0, True if keep else None), str(document)
            code, document, messages = verified(reshard, exchanged, address)
            verdict = (code, document.get("equal")) == (1, False if keep else None)
            yield f"{name}: gate and up exchanged are never held", verdict, f"{document} {messages}"
            # Of 2 layers, qkv, o, gate and up, and down.
            repacked = [key for key in about.get("not_comparable", ()) if "_proj.weight" in key]
            expected = 0 if keep else 8 * tp
            yield f"{name}: what is repacked is not comparable", len(repacked) == expected, str(about)
            whole = about.get("matching", 0) + len(about.get("renamed", ())) == (15 * tp if keep else 7 * tp)
            yield f"{name}: everything else is equal by its digest", whole, str(about)
            code, document, messages = verified(reshard, stale, address)
            compared = [each["name"] for each in document.get("differences", ())]
            yield (
                f"{name}: a stale checkpoint is different",
                code == 1 and len(compared) == (15 * tp if keep else 7 * tp),
                str(document),
            )
            code, document, messages = verified(reshard, wrong, address)
            names = {each["name"].rpartition(":")[2] for each in document.get("differences", ())}
            yield f"{name}: one wrong bit is named", code == 1 and names == {"model.layers.1.input_layernorm.weight"}, str(document)
            code, document, messages = verified(reshard, other, address)
            yield f"{name}: another model is different", code == 1, f"{document} {messages}"
    mixture = with_wide_experts(ROOT / "fixtures" / "hf" / "mixtral", work / "mixture")
    with running(python, mixture, 1, work / "server.log", keep=False) as address:
        code, document, messages = verified(reshard, mixture, address)
        hidden = {key.rpartition(".layers.")[2][2:] for key in (document.get("server") or {}).get("not_comparable", ["none"])}
        linear = {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "block_sparse_moe.gate.weight"}
        whole = document.get("equal") is None and not document["differences"] and hidden == linear
        yield "experts of a CPU are equal in the kernel's form, only linear layers are hidden", whole, f"{document} {messages}"
    with running(python, served, 1, work / "server.log", keep=False, development="0") as address:
        code, document, messages = verified(reshard, *right, address)
        text = json.dumps(document) + messages
        yield "a server without development mode: one sentence says how to start one", code == 3 and "VLLM_SERVER_DEV_MODE=1" in text, text


def verified(reshard: Path, *arguments: Path | str) -> tuple[int, dict[str, Any], str]:
    """The exit code of `reshard verify`, its document, and its messages."""
    found = subprocess.run([reshard, "verify", *arguments, "--json"], capture_output=True, text=True)
    return found.returncode, json.loads(found.stdout or "{}"), found.stderr


def altered(model: Path, target: Path, *, every: bool) -> Path:
    """A copy of Hugging Face files in which one bit of every tensor, or of one norm, is another."""
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("reshard.*"))
    path = target / "model.safetensors"
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        # In every rank's part, whether rows or columns are cut.
        if name != "__metadata__" and (every or name == "model.layers.1.input_layernorm.weight"):
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            for at in range(start, stop, 2) if every else [start]:
                raw[at] ^= 1
    path.write_bytes(raw)
    return target


def with_gate_and_up_exchanged(model: Path, target: Path) -> Path:
    """A copy of Hugging Face files in which gate and up of each layer have each other's bytes."""
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("reshard.*"))
    path = target / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    header = json.loads(raw[8 : 8 + length])
    exchanged = {re.sub("gate_proj|up_proj", lambda match: swap[match[0]], name): entry for name, entry in header.items()}
    text = json.dumps(exchanged).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return target


def with_wide_experts(model: Path, target: Path) -> Path:
    """A model of random weights whose experts are 32 wide: a CPU pads narrower ones before it arranges them."""
    shutil.copytree(model, target)
    config = json.loads((model / "config.json").read_text())
    narrow, wide = config["intermediate_size"], 32
    (target / "config.json").write_text(json.dumps({**config, "intermediate_size": wide}))
    raw = (model / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, body, random = json.loads(raw[8 : 8 + length]), bytearray(), np.random.default_rng(1)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        entry["shape"] = [wide if size == narrow and ".experts." in name else size for size in entry["shape"]]
        start = len(body)
        body += (random.normal(0, 0.02, entry["shape"]).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        entry["data_offsets"] = [start, len(body)]
    text = json.dumps(header).encode()
    (target / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    return target


@contextmanager
def running(python: Path, model: Path, tp: int, log: Path, *, keep: bool, development: str = "1") -> Iterator[str]:
    """The address of a server of a model."""
    port = free_ports.free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE / "startup"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **({"KEEP_REPACKED_WEIGHTS": "1"} if keep else {}),
        "TMPDIR": str(log.parent),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp))),
        "VLLM_SERVER_DEV_MODE": development,
    }
    options = ["--model", model, "--tensor-parallel-size", tp, "--host", "127.0.0.1", "--port", port]
    small = ["--skip-tokenizer-init", "--enforce-eager", "--kv-cache-memory-bytes", 64 << 20, "--max-model-len", 64, "--max-num-seqs", 4]
    with log.open("w") as messages:
        command = [python, "-m", "vllm.entrypoints.openai.api_server", *options, *small]
        process = subprocess.Popen([*map(str, command)], env=environment, stdout=messages, stderr=messages, start_new_session=True)
        try:
            sessions.wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            sessions.end(process.pid)
            process.wait()
            # Ranks on a CPU leave shared memory, named as the file by which they met.
            for meeting in log.parent.glob("vllm_dist_*"):
                vllm_make.remove_shared_memory(meeting.name)
