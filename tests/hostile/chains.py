"""Chains of conversions: a model of random numbers goes through formats, degrees and options at random, with kills, parts and plan files in
between, and back to hf. Every bit is then compared with the numbers of the beginning, by numpy alone.

    .venv/bin/python tests/hostile/campaign.py --surface chains --inputs 1000 --seed 7 --jobs 2
    .venv/bin/python tests/hostile/campaign.py --surface chains --replay qwen3_moe weights 17

A recipe is a family (families.py), what is compared, and a seed:

    weights      of a Hugging Face folder; a vLLM folder on the way of a llama-like model is compared rank by rank, with the split of vLLM
                 in a few lines of numpy
    optimizer    weights, moments and step counts of a training checkpoint that torch's DCP wrote; torch's DCP reads the end
"""

from __future__ import annotations

import os
import random
import shutil
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from helpers.reshard_command import Result, reshard
from hostile.families import FAMILIES, TinyModel, Weights, difference, read_safetensors, tiny_model, write_hf
from hostile.interruptions import CHANGES, faulty

KINDS = ("weights", "weights", "weights", "optimizer")
TRAINED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt2", "gemma2")
"""Families of chains with an optimizer."""
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose split by vLLM is known here."""
LEGAL_REFUSALS = (2, 6)


class WrongError(AssertionError):
    """A conversion lost or changed something, or ended in a way that it must not."""


def recipes(chance: random.Random, only: str) -> tuple[str, str]:
    """A family and a kind."""
    kind = chance.choice(KINDS)
    known = [family for family in (TRAINED if kind == "optimizer" else FAMILIES) if only in ("*", family)]
    return chance.choice(known), kind


def run(family: str, kind: str, seed: int, folder: Path) -> tuple[str, str]:
    """The outcome, and what was done."""
    done: list[str] = []
    try:
        compared = (_weights if kind == "weights" else _optimizer)(family, random.Random(f"{family}|{kind}|{seed}"), folder, done)
    except WrongError as error:
        return "WRONG", f"{' > '.join(done)}\n{error}"
    except Exception:
        return "WRONG", f"{' > '.join(done)}\n{traceback.format_exc()}"
    return ("done" if compared else "refused"), " > ".join(done)


# ---------------------------------------------------------------- weights


def _weights(family: str, chance: random.Random, folder: Path, done: list[str]) -> bool:
    model = tiny_model(family, chance)
    write_hf(folder / "0", model, files=chance.choice((1, 1, 2)))
    source = folder / "0"
    for number in range(1, chance.choice((2, 3, 3, 4, 5))):
        words = _target(model, chance)
        if _converted(source, folder / str(number), words, chance, done):
            source = folder / str(number)
            if words[1] == "vllm" and model.family in LIKE_LLAMA:
                _compare_ranks(model, source)
    if source == folder / "0":
        return False
    if not _converted(source, folder / "end", ["--to", "hf", *_shards(chance)], chance, done, may_refuse=False):
        raise AssertionError
    if found := difference(model.weights, read_safetensors(*sorted((folder / "end").glob("*.safetensors")))):
        raise WrongError(f"weights: {found}")
    return True


def _target(model: TinyModel, chance: random.Random) -> list[str]:
    """Words of a target that can be written for a family."""
    names = ["hf", "dcp", "fsdp", "vllm", "vllm", "sglang", "megatron", "megatron-dist"]
    names += [] if _has_experts(model) else ["trtllm"]  # whose routers are always float32
    names += ["nanotron"] if model.family == "llama" else []
    names += ["consolidated"] if model.family in ("llama", "mistral", "mixtral") else []
    name = chance.choice(names)
    heads, layers = model.sizes["n"], model.sizes["layers"]
    tp = chance.choice([1, 2, *(each for each in (4, 8) if heads % each == 0), *chance.choice(([], [3]))])
    pp, ep = chance.choice([1, 1, *range(1, layers + 1)]), chance.choice((1, 2, 4)) if _has_experts(model) else 1
    words = {
        "hf": _shards(chance),
        "dcp": chance.choice(([], ["--dp", str(pp + ep)])) or _shards(chance),
        "fsdp": ["--dp", str(chance.choice((1, 2, 3, 5)))],
        "vllm": _sizes(tp=tp, pp=pp, ep=ep),
        "sglang": _sizes(tp=tp, ep=ep),
        "trtllm": _sizes(tp=tp, pp=pp),
        "megatron": _sizes(tp=tp, pp=pp, ep=ep),
        "megatron-dist": _sizes(tp=tp, pp=pp, ep=ep),
        "nanotron": _sizes(tp=tp, pp=pp) + chance.choice(([], ["--rotary-rows", "halves"])),
        "consolidated": _sizes(tp=tp),
    }[name]
    return ["--to", name, *words]


def _has_experts(model: TinyModel) -> bool:
    return any("expert" in name for name in model.weights)


def _sizes(**sizes: int) -> list[str]:
    return [word for name, size in sizes.items() if size > 1 for word in (f"--{name}", str(size))]


def _shards(chance: random.Random) -> list[str]:
    return chance.choice(([], ["--max-shard-size", f"{chance.choice((5, 20, 60))}kB"]))


# ---------------------------------------------------------------- one conversion, disturbed


def _converted(
    source: Path, target: Path, words: list[str], chance: random.Random, done: list[str], *, may_refuse: bool = True
) -> bool:  # fmt: skip
    """Whether the conversion was carried out; False if it was refused. Raises WrongError for any other end."""
    how = chance.choice((_plain, _plain, _killed, _in_parts, _by_plan_file))
    done.append(f"{' '.join(words[1:])} ({how.__name__.removeprefix('_')})")
    result = how(source, target, words, chance)
    if result.code in LEGAL_REFUSALS and may_refuse and not _visible(target):
        done[-1] += " refused"
        shutil.rmtree(target, ignore_errors=True)
        return False
    if result.code:
        raise WrongError(f"exit code {result.code}: {result.err[-2000:]}")
    if (target / ".reshard").exists():
        raise WrongError("the work folder is still there")
    if chance.random() < 0.3 and (found := reshard("verify", target, "-q")).code:
        raise WrongError(f"verify: exit code {found.code}: {found.out}{found.err}"[-2000:])
    return True


def _visible(target: Path) -> bool:
    """Whether something has a final name in a folder."""
    return target.exists() and any(path.name != ".reshard" for path in target.iterdir())


def _plain(source: Path, target: Path, words: list[str], chance: random.Random) -> Result:
    return reshard("convert", source, target, *words, "-q")


def _killed(source: Path, target: Path, words: list[str], chance: random.Random) -> Result:
    """Killed up to three times, each at a random call that changes the file system, and resumed."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.choice((chance.randrange(1, 60), chance.randrange(1, 300)))
        child = os.fork()
        if not child:
            code = 70
            try:
                faulty(CHANGES, at, "kill")
                code = reshard("convert", source, target, *words, "-q", "--resume").code
            finally:
                os._exit(code)
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            shutil.rmtree(target, ignore_errors=True)  # it ended before, or was refused: once more, to see what it says
            break
    return reshard("convert", source, target, *words, "-q", "--resume")


def _in_parts(source: Path, target: Path, words: list[str], chance: random.Random) -> Result:
    """In parts, in any order, one of them perhaps twice."""
    count = chance.choice((2, 3, 4))
    parts = [*range(count), *chance.choice(([], [0]))]
    chance.shuffle(parts)
    for number, part in enumerate(parts):
        result = reshard("convert", source, target, *words, "-q", "--part", f"{part}/{count}")
        if result.code:
            return result
        if not set(range(count)) - set(parts[: number + 1]):
            return result
    raise AssertionError


def _by_plan_file(source: Path, target: Path, words: list[str], chance: random.Random) -> Result:
    plan = target.with_name(f"{target.name}.plan")
    planned = reshard("plan", source, *words, "-q", "--plan-out", plan)
    return planned if planned.code else reshard("convert", source, target, "--plan", plan, "-q")


# ---------------------------------------------------------------- what vLLM's ranks hold


def _compare_ranks(model: TinyModel, folder: Path) -> None:
    """Compares the files of vLLM's ranks, which hold all layers, with the split of vLLM by hand."""
    tp = len(list(folder.glob("model-rank-*-part-0.safetensors")))
    if not tp:  # stages have other names
        return
    for rank in range(tp):
        found = read_safetensors(*sorted(folder.glob(f"model-rank-{rank}-part-*.safetensors")))
        for name, expected in rank_of_vllm(model, tp, rank).items():
            if name not in found and "embed_tokens" in name and model.config["tie_word_embeddings"]:
                name = "lm_head.weight"  # of two names of one tensor, vLLM saves one
            if name not in found or found[name].shape != expected.shape or found[name].tobytes() != expected.tobytes():
                raise WrongError(f"rank {rank} of {tp}: {name} is not what vLLM holds")


def rank_of_vllm(model: TinyModel, tp: int, rank: int) -> Weights:
    """The tensors of one tensor-parallel rank of a llama-like model in vLLM.

    Source: vllm/model_executor/layers/linear.py and vocab_parallel_embedding.py of 0.32.
    """
    weights, head = model.weights, model.sizes["h"]
    kv_heads = model.sizes["k"] // head
    first = rank * kv_heads // tp
    kv_rows = slice(first * head, (first + max(1, kv_heads // tp)) * head)

    def part(array: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.ascontiguousarray(np.split(array, tp, axis)[rank])

    held = {}
    for name, array in weights.items():
        prefix = name.rpartition("self_attn.")[0] if "self_attn" in name else name.rpartition("mlp.")[0]
        kind = name.rpartition(".")[2]
        if "q_proj" in name:
            keys = (weights[f"{prefix}self_attn.{each}_proj.{kind}"][kv_rows] for each in "kv")
            held[f"{prefix}self_attn.qkv_proj.{kind}"] = np.concatenate([part(array), *keys])
        elif "gate_proj" in name:
            held[f"{prefix}mlp.gate_up_proj.weight"] = np.concatenate([part(array), part(weights[f"{prefix}mlp.up_proj.weight"])])
        elif "o_proj" in name or "down_proj" in name:
            held[name] = part(array, 1)
        elif "embed_tokens" in name or "lm_head" in name:
            padded = -(-len(array) // 64) * 64  # a multiple of 64, padded with zeros
            held[name] = part(np.concatenate([array, np.zeros((padded - len(array), array.shape[1]), array.dtype)]))
        elif "norm" in name:
            held[name] = array
    return held


# ---------------------------------------------------------------- optimizer state


def _optimizer(family: str, chance: random.Random, folder: Path, done: list[str]) -> bool:
    model = tiny_model(family, chance, dtype="F32")
    write_hf(folder / "model", model)
    numbers = np.random.default_rng(chance.getrandbits(64))
    step = float(chance.randrange(1, 5000))
    state = {
        "exp_avg": {name: numbers.standard_normal(array.shape).astype(np.float32) for name, array in model.weights.items()},
        "exp_avg_sq": {name: numbers.random(array.shape, np.float32) for name, array in model.weights.items()},
    }
    source = folder / "0"
    _save_dcp(source, model.weights, state, step)
    shutil.copy(folder / "model" / "config.json", source)
    for number in range(1, chance.choice((2, 2, 3, 4))):
        words = _training_target(chance)
        if _converted(source, folder / str(number), [*words, "--optimizer"], chance, done):
            source = folder / str(number)
    if source == folder / "0":
        return False
    _converted(source, folder / "end", ["--to", "dcp", "--optimizer"], chance, done, may_refuse=False)
    _compare_dcp(folder / "end", model.weights, state, step)
    return True


def _training_target(chance: random.Random) -> list[str]:
    name = chance.choice(("dcp", "fsdp", "deepspeed", "universal", "megatron", "megatron-dist"))
    tp, pp, dp = chance.choice((1, 1, 2, 4)), chance.choice((1, 1, 2)), chance.choice((1, 2, 3))
    words = {"dcp": _sizes(dp=dp), "fsdp": _sizes(dp=dp), "deepspeed": _sizes(dp=dp), "universal": []}.get(name, _sizes(tp=tp, pp=pp))
    if name in ("megatron", "megatron-dist"):
        words += chance.choice(([], ["--distributed-optimizer"], ["--plain-optimizer"]))
    return ["--to", name, *words]


def _save_dcp(folder: Path, weights: Weights, state: dict[str, Weights], step: float) -> None:
    """A training checkpoint as torch writes it: one process, names as FSDP2 has them."""
    import torch
    import torch.distributed.checkpoint as dcp

    def tensors(arrays: Weights) -> dict[str, Any]:
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    moments = {kind: tensors(arrays) for kind, arrays in state.items()}
    per_name = {name: {kind: moments[kind][name] for kind in moments} | {"step": torch.tensor(step)} for name in weights}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": list(weights)}
    optim = {"state": per_name, "param_groups": [group]}
    dcp.save({"model": tensors(weights), "optim": optim}, checkpoint_id=folder, no_dist=True)


def _compare_dcp(folder: Path, weights: Weights, state: dict[str, Weights], step: float) -> None:
    """Reads a checkpoint with torch, and compares all values and step counts. Raises WrongError."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in stored.items() if isinstance(each, TensorStorageMetadata)
    }
    load(found, checkpoint_id=folder, no_dist=True)
    expected = {f"model.{name}": array for name, array in weights.items()}
    expected |= {f"optim.state.{name}.{kind}": array for kind, arrays in state.items() for name, array in arrays.items()}
    expected |= {f"optim.state.{name}.step": np.float32(step) for name in weights}
    for key, array in expected.items():
        if key not in found:
            raise WrongError(f"{key} is missing")
        if found[key].numpy().tobytes() != np.asarray(array).tobytes():
            raise WrongError(f"{key} is not equal: {found[key].flatten()[:3].tolist()}, expected {np.ravel(array)[:3].tolist()}")
