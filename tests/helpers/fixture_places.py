"""Where the fixtures lie, and what the tests need to know of them."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import reshard
from reshard.adapter import registry
from reshard.engine.views import LazyTensor
from reshard.geometry.sections import whole
from reshard.index.index import Tensor
from reshard.models.engine_rules import EngineRules
from reshard.models.model import Model
from reshard.plans.layout import Target

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
sys.path.insert(0, str(FIXTURES))
from engine_ranks import document_of  # noqa: E402

HF, DCP, VLLM = FIXTURES / "hf", FIXTURES / "dcp", FIXTURES / "vllm"
MODELS = ("llama", "llama-tied", "mistral", "qwen2", "qwen3")
# Real, but not to be read: its entries went through an extension that only its writer knows.
UNREADABLE = {"rot"}
CASES = sorted(path.parent.name for path in DCP.glob("*/checkpoint") if path.parent.name not in UNREADABLE)
# Every checkpoint with a truth that was gathered while training, whatever wrote it. The others have tests of their own.
_OTHER_TRUTHS = {"consolidated", "diffusers", "hf_library", "hf_packed", "nanotron", "peft", "trainer_names"}
TRUTHS = sorted(
    path.parent
    for path in FIXTURES.rglob("truth.json")
    if path.parent.name not in UNREADABLE and path.relative_to(FIXTURES).parts[0] not in _OTHER_TRUTHS
)
FSDP = FIXTURES / "fsdp"
OLDER = sorted((FIXTURES / "vllm_versions").glob("*/*.json"))
REFERENCES = sorted(VLLM.glob("*/*.json"))
assert len(CASES) >= 21 and len(TRUTHS) >= 60 and len(REFERENCES) >= 25, "without fixtures these tests would pass by testing nothing"

# By engine and model: the weights for which the engine's class has no place.
UNPLACED = {("vllm", "qwen3-biased"): ("model.layers.*.self_attn.o_proj.bias",), ("sglang", "llama-biased"): ("model.layers.*.mlp.*.bias",)}


def served(model: str) -> Path:
    """The Hugging Face folder of a reference's model."""
    return next(folder for folder in (HF / model, FIXTURES / "hf_fp8" / model) if folder.is_dir())


def read_reference(path: Path) -> dict[str, Any]:
    """What real ranks of a serving engine hold: under "ranks" rank -> key -> dtype, shape, sha256."""
    return document_of(path.read_text())


def digests_of(reference: dict[str, Any]) -> dict[str, str]:
    """The answer of the weight checker of these real ranks, as far as the fixture tells: each parameter and its SHA-256."""

    def numbers(rank: str) -> tuple[int, int]:
        words = [int(word) for word in rank.split("-") if word.isdecimal()]
        return (words[0], words[1]) if len(words) == 2 else divmod(words[0], reference["tp"])

    return {
        f"dp0:pp{numbers(rank)[0]}:pcp0:tp{numbers(rank)[1]}:{name}": tensor["sha256"]
        for rank, tensors in reference["ranks"].items()
        for name, tensor in tensors.items()
    }


def config_of(model: str, **said: object) -> dict[str, Any]:
    """The config of a reference's model, but for what is said."""
    return {**json.loads((served(model) / "config.json").read_text()), **said}


def has_a_layer_per_stage(reference: Path) -> bool:
    """Whether each pipeline stage of a reference has a layer. Real vLLM starts stages without one; reshard refuses to write them."""
    expected = json.loads(reference.read_text())
    config = config_of(expected["model"])
    return bool(expected["pp"] <= config.get("num_hidden_layers", config.get("n_layer", 0)))


def rules_of(engine: str, model: Model) -> EngineRules:
    return registry.serving_formats()[engine].engine_rules(model, Target(engine))


def open_case(case: str | Path) -> reshard.Checkpoint:
    """A fixture (of DCP, if only its name is given), with the config that it does not hold."""
    folder = DCP / case
    model = folder / "model"
    return reshard.open(folder / "checkpoint", model=model if model.exists() else None)


def truth(case: str | Path) -> dict[tuple[str, str], dict[str, Any]]:
    """(name, role) -> dtype, shape, sha256, gathered inside the training processes.

    The processes called everything a weight that was not in the optimizer's state dict.
    """
    tensors = json.loads((DCP / case / "truth.json").read_text())["tensors"]
    return {(name, _role(name, role, value)): value for name, roles in tensors.items() for role, value in roles.items()}


def _role(name: str, role: str, value: dict[str, Any]) -> str:
    if role != "weight" or value["dtype"].startswith(("F", "BF", "C")):
        return role
    return "state" if name == "extra.rng" else "buffer"


def described(tensor: Tensor, files: Any) -> dict[str, Any]:
    """A tensor as the truth describes it, read by the library."""
    words = LazyTensor(whole(tensor.name, tensor.dtype, tensor.shape), {tensor.name: tensor}, files).words()
    return {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "sha256": hashlib.sha256(words.tobytes()).hexdigest()}


def stored(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """A safetensors file by plain json and slicing: name -> dtype, shape, bytes."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: (entry["dtype"], entry["shape"], raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
        for name, entry in header.items()
    }


def ranks(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """A sharded_state folder in the form of the references: rank -> key -> dtype, shape, sha256."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("model-*-part-*.safetensors")):
        rank = path.name.removeprefix("model-").split("-part-")[0]
        for name, (dtype, shape, data) in stored(path).items():
            assert name not in found.setdefault(rank, {})
            found[rank][name] = {"dtype": dtype, "shape": shape, "sha256": hashlib.sha256(data).hexdigest()}
    return found


def patch_stored(path: Path, name: str, at: int = 0) -> None:
    """Flip one bit of one tensor of a safetensors file."""
    raw = bytearray(path.read_bytes())
    start, _, _ = _place(raw, name)
    raw[start + at] ^= 1
    path.write_bytes(bytes(raw))


def exchange_query_heads(path: Path, name: str, head_dim: int) -> None:
    """Exchange the first two query heads, the first 2 * head_dim rows, of one tensor of a safetensors file."""
    raw = bytearray(path.read_bytes())
    start, end, rows = _place(raw, name)
    size = (end - start) // rows * head_dim
    raw[start : start + 2 * size] = raw[start + size : start + 2 * size] + raw[start : start + size]
    path.write_bytes(bytes(raw))


def _place(raw: bytearray, name: str) -> tuple[int, int, int]:
    """Where one tensor of a safetensors file begins and ends, and how many rows it has."""
    (length,) = struct.unpack("<Q", raw[:8])
    entry = json.loads(raw[8 : 8 + length])[name]
    start, end = (8 + length + offset for offset in entry["data_offsets"])
    return start, end, entry["shape"][0] if entry["shape"] else 1
