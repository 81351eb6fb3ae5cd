"""The slow check of placements: Mooncake's own reader accepts them, and its own plan brings each rank's boxes.

    python tests/live/on_mooncake.py [--reshard PATH] [--python PATH]

Makes the environment (.venv-mooncake) if there is none. Each as a check: the copies that Mooncake plans are carried out on bytes, from what
torch.chunk gives each rank of FSDP. The target's fragments then are those boxes of the weights that tensor parallelism asks for, byte for
byte, and the bytes between two ranks are those of reshard's own plan.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# This folder is a package here: tests/serving has files of its names.
sys.path[:] = [str(HERE.parent), str(ROOT / "examples" / "live"), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]

import torch  # noqa: E402
from helpers.framework_environments import Environment, run_checks  # noqa: E402
from mooncake_placements import mooncake_placements  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import reshard  # noqa: E402
from reshard.live.memory.computed import computed_memory  # noqa: E402

MOONCAKE = Environment("Mooncake", HERE / "mooncake_requirements.txt", options=("--no-deps",), with_torch=False)
ROWS, COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")
_PADDED = 64  # vLLM pads the vocabulary to a multiple of it


def checks(_: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    for model, ranks, tp in (("llama", 2, 2), ("llama", 3, 2), ("qwen3_moe-sparse", 2, 2)):
        hf, what = ROOT / "fixtures" / "hf" / model, f"{model} from {ranks} ranks to TP {tp}"
        config, weights = json.loads((hf / "config.json").read_text()), load_file(hf / "model.safetensors")
        run: dict[str, Any] = {"of": "fsdp", "degrees": {"dp": ranks}}
        checkpoint, _ = computed_memory(config, run["of"], run["degrees"])
        paths = work / "source.json", work / "target.json"
        for path, text in zip(paths, mooncake_placements(reshard.plan(checkpoint, to="vllm", tp=tp), resource=model), strict=True):
            path.write_text(text)
        found = subprocess.run([python, HERE / "mooncake_plan.py", *paths], capture_output=True, text=True, check=False)
        yield f"{what}: Mooncake reads the placements, and plans", found.returncode == 0, found.stderr[-2000:]
        if found.returncode:
            continue
        told, plan = json.loads(found.stdout), reshard.transfers(config, to="vllm", tp=tp, **run)
        memory = {(name, rank): part for name, whole in weights.items() for rank, part in enumerate(torch.chunk(whole, ranks))}
        brought, traffic = carried_out(told["copies"], memory, ranks, tp)
        wanted = {(name, rank): part for name, whole in weights.items() for rank, part in enumerate(parts(name, whole, tp))}
        wrong = [key for key in wanted if brought.get(key) != bytes_of(wanted[key])]
        yield (
            f"{what}: each rank has its boxes",
            not wrong and brought.keys() == wanted.keys(),
            str(wrong[:5] or brought.keys() ^ wanted.keys()),
        )
        yield (
            f"{what}: the bytes are those of the plan",
            traffic == plan.report.traffic.tolist() and told["bytes"] == plan.nbytes,
            str(traffic),
        )


def parts(name: str, whole: torch.Tensor, tp: int) -> list[torch.Tensor]:
    """What each tensor-parallel rank of vLLM holds of a weight."""
    if any(word in name for word in VOCABULARY):
        rows = -(-len(whole) // _PADDED) * _PADDED // tp
        return [whole[rank * rows : (rank + 1) * rows] for rank in range(tp)]
    axis = 0 if any(word in name for word in ROWS) else 1 if any(word in name for word in COLUMNS) else None
    return [whole] * tp if axis is None or "norm" in name else list(torch.chunk(whole, tp, axis))


def carried_out(
    copies: list[dict[str, Any]], memory: dict[Any, torch.Tensor], ranks: int, tp: int
) -> tuple[dict[Any, bytes], list[list[int]]]:
    """(name, rank) -> the bytes of its fragment after all copies; and the bytes from each source to each target."""
    found: dict[Any, bytearray] = {}
    traffic = [[0] * tp for _ in range(ranks)]
    for copy in copies:
        (name, source, _, _), (_, target, _, shape) = copy["source"], copy["target"]
        own, length = bytes_of(memory[name, source]), copy["bytes"]
        into = found.setdefault((name, target), bytearray(torch.Size(shape).numel() * memory[name, source].element_size()))
        for at in product(*map(range, copy["counts"])):
            a, b = (start + sum(map(int.__mul__, at, strides)) for start, strides in zip(copy["starts"], copy["strides"], strict=True))
            into[b : b + length] = own[a : a + length]
            traffic[source][target] += length
    return {key: bytes(data) for key, data in found.items()}, traffic


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, MOONCAKE, __doc__))
