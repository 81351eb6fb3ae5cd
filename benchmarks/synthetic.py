"""Large checkpoints to measure on: real formats and shapes, random values, made without holding a model in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from reshard.containers import safetensors
from reshard.geometry.dtypes import BF16, F16, I32, DType
from reshard.models.lookup import find_model
from reshard.models.model import Model

_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_NARROW = {"vocab_size": 8000, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64}
_POOL, _GROUP = 64 << 20, 128


def llama(gigabytes: float) -> Model:
    """A model of about this size in bfloat16. Its layers are those of Llama-3.1-8B; below 1 GB, those of Llama-3.2-1B."""
    width = {} if gigabytes > 0.9 else _NARROW
    sizes = [_nbytes(_model(layers, width)) for layers in (1, 2)]
    layer = sizes[1] - sizes[0]
    return _model(max(1, round((gigabytes * 1e9 - sizes[0] + layer) / layer)), width)


def write_hugging_face(model: Model, folder: Path) -> None:
    """One safetensors file and its config."""
    _write({w.name: (BF16, w.shape) for w in model.weights.values()}, dict(model.config), folder)


def write_packed(model: Model, folder: Path, method: str) -> None:
    """The same with all linear layers in 4 bits, in groups of 128. method: "awq" or "gptq"."""
    tensors: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for weight in model.weights.values():
        name = weight.name.removesuffix("weight")
        if not name.endswith("_proj."):
            tensors[weight.name] = (F16, weight.shape)
            continue
        height, width = weight.shape
        tensors[f"{name}qweight"] = (I32, (width, height // 8) if method == "awq" else (width // 8, height))
        tensors[f"{name}qzeros"] = (I32, (width // _GROUP, height // 8))
        tensors[f"{name}scales"] = (F16, (width // _GROUP, height))
    settings = {"quant_method": method, "bits": 4, "group_size": _GROUP}
    more = {"version": "gemm", "zero_point": True} if method == "awq" else {"desc_act": False, "sym": False}
    _write(tensors, {**model.config, "torch_dtype": "float16", "quantization_config": settings | more}, folder)


def _write(tensors: Mapping[str, tuple[DType, tuple[int, ...]]], config: Mapping[str, object], folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    frame = safetensors.frame([(name, *tensor) for name, tensor in tensors.items()], {"format": "pt"})
    # Values as in a trained model: what looks at them (doctor, casts) would meet NaN everywhere in random bits.
    values = np.random.default_rng(0).standard_normal(_POOL // 2 + 8192, np.float32) * np.float32(0.02)
    pool = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(frame.header)
        left, turn = frame.nbytes - len(frame.header), 0
        while left:
            start = (turn * 997) % 8191 * 2  # every stretch is another one, so that no tensor equals another
            file.write(pool[start : start + min(left, _POOL)])
            left, turn = left - min(left, _POOL), turn + 1


def _model(layers: int, width: dict[str, int]) -> Model:
    model = find_model({**_CONFIG, **width, "num_hidden_layers": layers})
    assert model is not None
    return model


def _nbytes(model: Model) -> int:
    return sum(2 * int(np.prod(weight.shape)) for weight in model.weights.values())
