"""What merging a LoRA adapter costs, against a plain conversion of the same bytes.

    python benchmarks/merging.py [--size 1] [--turns 3] [--work DIR]

Whole processes, starts included: hf -> hf of a llama in bf16, plain and with --merge-adapter of an adapter of every linear layer. An
adapter of rank 1 has almost no matrix products; what it costs is the rest of the merge. They take turns; the best of each counts, because
the machine only ever adds time.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from measuring import Conversion, compare_with_plain, given
from synthetic import llama, write_hugging_face

from reshard.containers import safetensors
from reshard.geometry.dtypes import F32
from reshard.models.model import Model

RANKS, HF = (1, 16, 64), ("--to", "hf")


def main() -> None:
    options = given(__doc__ or "", 1)
    with tempfile.TemporaryDirectory(prefix="reshard-merging-", dir=options.work) as folder:
        work, model = Path(folder), llama(options.size)
        base = work / "base"
        write_hugging_face(model, base)
        conversions = {"plain": Conversion(base, HF, "plain")}
        for rank in RANKS:
            _write_adapter(model, rank, work / f"rank-{rank}")
            conversions[f"rank {rank}"] = Conversion(base, [*HF, "--merge-adapter", work / f"rank-{rank}"], "plain")
        compare_with_plain(conversions, work / "out", options.turns)


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
