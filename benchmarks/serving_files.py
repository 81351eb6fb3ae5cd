"""How fast `reshard hub` sends files that do not exist, beside `python -m http.server` with the converted files; and how long 8 bytes take.

    python benchmarks/serving_files.py [--gigabytes 4] [--folder DIR] [--rounds 3]

A checkpoint of random bfloat16 weights is made in DIR and converted to hf. Then one client reads it whole from each server, by turns; the
best round of each counts. Then 8 bytes at random places are read on a connection that is kept: stored as they are, cast and quantized.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import reshard
from reshard.containers import safetensors
from reshard.geometry.dtypes import BF16

_SIZE, _READS = 4096, 200
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": _SIZE, "intermediate_size": _SIZE, "vocab_size": _SIZE,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "max_position_embeddings": 4096, "hidden_act": "silu",
}  # fmt: skip
_LINEAR = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]


def made(folder: Path, gigabytes: float) -> Path:
    """A Llama whose weights are [4096, 4096], 32 MB each. They hold the same random values, moved."""
    folder.mkdir(parents=True)
    layers = max(1, round((gigabytes * 1e9 / (_SIZE * _SIZE * 2) - 2) / len(_LINEAR)))
    (folder / "config.json").write_text(json.dumps({**_CONFIG, "num_hidden_layers": layers}))
    names = ["model.embed_tokens", "lm_head", *(f"model.layers.{i}.{name}" for i in range(layers) for name in _LINEAR)]
    norms = ["model.norm", *(f"model.layers.{i}.{name}_layernorm" for i in range(layers) for name in ("input", "post_attention"))]
    shapes = {f"{name}.weight": (_SIZE, _SIZE) for name in names} | {f"{name}.weight": (_SIZE,) for name in norms}
    values = (np.random.default_rng(0).standard_normal(_SIZE * _SIZE).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    frame = safetensors.frame(((name, BF16, shape) for name, shape in shapes.items()), {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(frame.header)
        for i, shape in enumerate(shapes.values()):
            file.write(np.roll(values, i)[: int(np.prod(shape))].tobytes())
    return folder


def rate(port: int, path: str) -> float:
    """GB/s at which one client reads a file."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    began = time.perf_counter()
    connection.request("GET", path)
    answer, total, buffer = connection.getresponse(), 0, bytearray(1 << 20)
    while count := answer.readinto(buffer):
        total += count
    assert total == int(answer.headers["Content-Length"])
    return total / (time.perf_counter() - began) / 1e9


def small_reads(port: int, path: str, size: int) -> tuple[float, float]:
    """(median, longest) milliseconds of 8 bytes at random places, after the first request."""
    connection, chosen, took = http.client.HTTPConnection("127.0.0.1", port), random.Random(0), []
    for _ in range(_READS + 1):
        at = chosen.randrange(100_000, size - 8)
        began = time.perf_counter()
        connection.request("GET", path, headers={"Range": f"bytes={at}-{at + 7}"})
        assert len(connection.getresponse().read()) == 8
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took[1:]), max(took[1:])


def main() -> None:
    """Make the checkpoint, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "serving-files")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    try:
        source = made(options.folder / "source", options.gigabytes)
        reshard.convert(reshard.plan(source, to="hf"), options.folder / "converted")
        measure(source, options.folder / "converted", options.rounds)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


def measure(source: Path, converted: Path, rounds: int) -> None:
    """Both servers by turns, then small reads."""
    path, load = "model.safetensors", os.getloadavg()[0]
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--protocol", "HTTP/1.1", "--directory", str(converted), "8971"]
    hub = [str(Path(sys.executable).with_name("reshard")), "hub", str(source), "--port", "8972", "--name", "org/m"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as plain, subprocess.Popen(hub, **quiet) as ours:
        time.sleep(3)
        rates: dict[str, list[float]] = {"http.server": [], "reshard hub": []}
        for _ in range(rounds):
            rates["http.server"].append(rate(8971, f"/{path}"))
            rates["reshard hub"].append(rate(8972, f"/m/{path}"))
        memory = Path(f"/proc/{ours.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
        for server in (plain, ours):
            server.terminate()
    best = {name: max(each) for name, each in rates.items()}
    print(f"load before: {load:.1f}")
    print(*(f"{name}: {value:.2f} GB/s" for name, value in best.items()), sep="; ", end="; ")
    print(f"{best['reshard hub'] / best['http.server']:.2f} of http.server; peak memory of the hub {int(memory) / 1000:.0f} MB")
    for name, given in (("stored", {}), ("cast", {"dtype": "fp16"}), ("quantized", {"quantize": "fp8-block"})):
        with reshard.hub(source, port=0, name="org/m", allow_overflow=True, **given) as served:
            size = reshard.folder(source, to="hf", **given)[path].size
            median, longest = small_reads(served.port, f"/m/{path}", size)
        print(f"8 bytes of a {name} weight: {median:.1f} ms (median), {longest:.1f} ms (longest of {_READS})")


if __name__ == "__main__":
    main()
