"""What merging a LoRA adapter costs, against a plain conversion of the same bytes.

    python benchmarks/merging.py [--size 1] [--turns 3] [--work DIR]

Whole processes, starts included: hf -> hf of a llama in bf16, plain and with --merge-adapter of an adapter of every linear layer. An
adapter of rank 1 has almost no matrix products; what it costs is the rest of the merge. They take turns; the best of each counts, because
the machine only ever adds time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from measuring import RESHARD, measured, read_into_cache, remove
from synthetic import llama, write_hugging_face

from reshard.containers import safetensors
from reshard.geometry.dtypes import F32
from reshard.models.model import Model

RANKS = (1, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1, help="GB of the model in bfloat16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reshard-merging-", dir=options.work) as folder:
        work, model = Path(folder), llama(options.size)
        write_hugging_face(model, work / "base")
        cases: dict[str, list[object]] = {"plain": []}
        for rank in RANKS:
            _write_adapter(model, rank, work / f"rank-{rank}")
            cases[f"rank {rank}"] = ["--merge-adapter", work / f"rank-{rank}"]
        runs = {name: [] for name in cases}
        for _ in range(options.turns):
            for name, words in cases.items():
                read_into_cache(work / "base")
                runs[name].append(measured([*RESHARD, "convert", work / "base", work / "out", "--to", "hf", *words]))
                remove(work / "out")
        best = {name: (min(run.seconds for run in of_case), min(run.processor for run in of_case)) for name, of_case in runs.items()}
        for name, of_case in runs.items():
            ratios = [ours / plain for ours, plain in zip(best[name], best["plain"], strict=True)]
            print(
                f"{name:8} {best[name][0]:6.2f} s ({best[name][1]:.2f} s of processors)  {ratios[0]:4.2f} ({ratios[1]:4.2f}) x plain  "
                f"{max(run.megabytes for run in of_case):4.0f} MB"
            )


def _write_adapter(model: Model, rank: int, folder: Path) -> None:
    """An adapter of all linear layers, as PEFT saves it."""
    draw, tensors = np.random.default_rng(rank), {}
    for name, weight in model.weights.items():
        if name.endswith("_proj.weight"):
            module, (rows, columns) = f"base_model.model.{name.removesuffix('.weight')}", weight.shape
            tensors[f"{module}.lora_A.weight"] = draw.standard_normal((rank, columns), np.float32)
            tensors[f"{module}.lora_B.weight"] = draw.standard_normal((rows, rank), np.float32)
    folder.mkdir()
    frame = safetensors.frame([(name, F32, tensor.shape) for name, tensor in tensors.items()], {"format": "pt"})
    (folder / "adapter_model.safetensors").write_bytes(frame.header + b"".join(tensor.tobytes() for tensor in tensors.values()))
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules, "bias": "none", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
