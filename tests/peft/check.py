"""Compares adapters and merges with PEFT itself: every kind of adapter, on models of transformers.

    python tests/peft/check.py [--reshard COMMAND] [--python INTERPRETER]

Of each adapter: reshard's merge is PEFT's in float32 within one unit in the last place of bfloat16, and `--merge-adapter self` of a
trainer's state dict has the same bits; `--to peft` of it has the bits that PEFT saved, and PEFT loads it; `--to hf --drop-adapter` of it is
the base. An environment with PEFT is made in .venv-peft.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from families import FAMILIES, VARIANTS, settings_of
from helpers.framework_environments import LONG, ROOT, Environment, installed, run_checks

ENVIRONMENT = Environment("peft", ROOT / "tests" / "peft" / "requirements.txt", variables={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"})
HF = ROOT / "fixtures" / "hf"
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 6}
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 50,
    "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 64,
}  # fmt: skip
LLAMA4 = {
    "model_type": "llama4_text", "hidden_size": 32, "intermediate_size": 16, "intermediate_size_mlp": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1, "vocab_size": 50,
    "interleave_moe_layer_step": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "shared_expert_intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 50, "layer_types": ["linear_attention", "full_attention"], "max_position_embeddings": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
# The largest difference of two merges in float32, in parts of the largest element of a weight: two units of its last place.
FLOAT32_ROUNDING = 2.4e-7
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
CASES: dict[str, tuple[str | dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "all linear, rank 64": ("llama", {"r": 64, "target_modules": "all-linear"}),
    "rsLoRA": ("llama", {"use_rslora": True, "target_modules": ["q_proj", "k_proj", "o_proj", "gate_proj"]}),
    "rank and alpha patterns": (
        "llama",
        {
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8},
            "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 3},
            "target_modules": ["q_proj", "v_proj", "up_proj"],
        },
    ),
    "DoRA": ("llama", {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "tied embedding": ("llama-tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "modules_to_save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "trained biases": ("qwen2", {"bias": "lora_only", "target_modules": ["q_proj", "o_proj"]}),
    "all biases": ("qwen2", {"bias": "all", "target_modules": ["q_proj"]}),
    "lora_bias": ("qwen2", {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}),
    "Conv1D": ("gpt2", {"fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "fused modules": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "query_key_value": ("gpt_neox", {"target_modules": ["query_key_value", "dense"]}),
    "experts": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts of mixtral": ("mixtral", {"target_modules": ["v_proj"], "target_parameters": EXPERTS[:1]}),
    "MLA and experts": ("deepseek_v3", {"target_modules": ["q_b_proj", "o_proj"], "target_parameters": EXPERTS[1:]}),
    "transposed, square experts": (GPT_OSS, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts by modules": ("deepseek_v3", {"target_modules": ["q_b_proj", *MLP]}),
    "experts by modules, and shared ones": (QWEN3_NEXT, {"target_modules": ["in_proj_qkvz", *MLP]}),
    "all linear, experts and router": ("deepseek_v3", {"target_modules": "all-linear"}),
    "exchanged factors of experts": (
        LLAMA4,
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "saved embeddings": ("llama", {"target_modules": ["q_proj"], "save_embedding_layers": True}),
    "trained tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}),
}
# Which reshard refuses to merge.
_NOT_MERGED = {"trained tokens"}
# PEFT saves the base's embeddings beside these adapters; in a trainer's state dict they are the base's.
_WITH_EMBEDDINGS = {"saved embeddings"}
# The families that ZeRO-3 trains where the time is short: experts [out, in] and [in, out].
_WITH_ZERO = {"qwen3_moe", "gpt_oss"}
# What the state dict of a trainer whose biases were trained does not hold any more.
_BASE_CHANGES = {"trained biases", "all biases"}


class Peft:
    """The process with PEFT, which merge.py describes."""

    def __init__(self, python: Path) -> None:
        command = [python, "-W", "ignore", ROOT / "tests/peft/merge.py"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def __enter__(self) -> Peft:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, *request: object) -> Any:
        """The result of a request. Raises RuntimeError if it failed."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps(request, default=str), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process with PEFT has ended"}
        if "error" in answer:
            raise RuntimeError(f"{request[0]}: {answer['error']}")
        return answer["result"]


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    site = installed(python, work)
    with Peft(python) as peft:
        for case, (base, settings) in CASES.items():
            folder = work / case.replace(" ", "-").replace(",", "")
            folder.mkdir()
            try:
                yield from checks_of_case(case, base, settings, reshard, peft, folder)
            except RuntimeError as error:
                yield case, False, str(error)[:400]
        yield from checks_of_combinations(reshard, peft, work / "combined")
        for family, config in FAMILIES.items():
            for variant in _variants(family):
                folder = work / f"{family}-{variant.replace(' ', '-')}"
                folder.mkdir()
                try:
                    yield from checks_of_forms(f"{family}, {variant}", config, settings_of(family, variant), reshard, peft, folder)
                    if variant == "two parameters" and "vision_config" not in config:
                        yield from checks_of_ranks(family, settings_of(family, variant), reshard, python, site, peft, folder)
                except RuntimeError as error:
                    yield f"{family}, {variant}", False, str(error)[:400]


def checks_of_combinations(reshard: Path, peft: Peft, folder: Path) -> Iterator[tuple[str, bool, str]]:
    """Three adapters become one with the bits of PEFT, and its settings. (The zeros that fill PEFT's cat have signs at random.)"""
    weights = (0.7, -0.3, 1.1)
    peft.ask("combine", HF / "llama", weights, folder)
    adapters = [option for name in ("self", folder / "1", folder / "2") for option in ("--merge-adapter", name)]
    factors = [option for weight in weights for option in ("--adapter-weight", str(weight))]
    for how in ("cat", "linear"):
        _run(reshard, "convert", folder / "0", folder / f"our-{how}", "--to", "peft", *adapters, *factors, "--combine", how, "-q")
        differ = peft.ask("compare", folder / f"our-{how}", folder / how / how)[2:]
        yield f"three adapters, {how}", not any(differ), "other bits"
        settings, expected = (
            json.loads((place / "adapter_config.json").read_text()) | {"target_modules": None}
            for place in (folder / f"our-{how}", folder / how / how)
        )
        yield f"three adapters, {how}: settings", settings == expected, f"{settings} {expected}"


def _variants(family: str) -> tuple[str, ...]:
    """The settings that a family is checked with: of those for which CI has the time, patterns change the most."""
    if family == "llama":
        return ("two parameters", "rsLoRA")
    return tuple(VARIANTS) if LONG else ("two parameters", "patterns")


def checks_of_ranks(
    family: str, settings: dict[str, Any], reshard: Path, python: Path, site: Path, peft: Peft, folder: Path
) -> Iterator[tuple[str, bool, str]]:
    """What FSDP2 and ZeRO-3 save on two ranks becomes, bit by bit, the adapter that PEFT saves after a gather."""
    for program, saves in (("dcp_ranks.py", ("checkpoint",)), ("zero_ranks.py", ("checkpoint", "excluded"))):
        if program == "zero_ranks.py" and not (LONG or family in _WITH_ZERO):
            continue
        of_program = folder / program.removesuffix(".py")
        of_program.mkdir()
        _run(python, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", ROOT / "tests/peft" / program,
             folder / "base", json.dumps(settings), of_program, site=site)  # fmt: skip
        if program == "dcp_ranks.py":
            (pushed,) = (of_program / "pushed").iterdir()
            _run(reshard, "convert", of_program / "gathered", of_program / "for-vllm", "--to", "peft", "--engine", "vllm", "--model",
                 folder / "base", "-q")  # fmt: skip
            differ = peft.ask("compare", pushed, of_program / "for-vllm")[2:]
            yield f"two ranks send the adapter alone: {family}", not any(differ), "other bits than those gathered"
        for save in saves:
            _run(reshard, "convert", of_program / save, of_program / f"of-{save}", "--to", "peft", "--model", folder / "base",
                 "--adapter-config", of_program / "gathered/adapter_config.json", "-q")  # fmt: skip
            differ = peft.ask("compare", of_program / f"of-{save}", of_program / "gathered")[2:]
            yield f"two ranks of {program}, {save}: {family}", not any(differ), "other bits than those gathered"


def _run(*command: object, site: Path | None = None) -> None:
    """Run a command. site: a folder with modules that it imports. Raises RuntimeError, with the end of what it says, if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(site)} if site else None
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-400:])


def checks_of_forms(
    case: str, config: dict[str, Any], settings: dict[str, Any], reshard: Path, peft: Peft, folder: Path
) -> Iterator[tuple[str, bool, str]]:
    """The merge of each form is PEFT's within float32's rounding; fused to split and back has the bits of PEFT's file."""

    def convert(source: Path, name: str, *options: str | Path) -> Path:
        done = subprocess.run([reshard, "convert", source, folder / name, "-q", *options], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        return folder / name

    root = Path(peft.ask("merge_exactly", config, settings, folder))
    forms = {"PEFT's": folder / "adapter"}
    if "target_parameters" in settings:
        about = ("--to", "peft", "--model", root)
        forms["split"] = convert(folder / "adapter", "split", *about, "--experts", "split")
        forms["fused again"] = convert(folder / "split", "fused", *about, "--experts", "fused")
        yield f"fused to split and back: {case}", not any(peft.ask("compare", folder / "fused", folder / "adapter")[2:]), "other bits"
        if not {"use_rslora", "rank_pattern"} & settings.keys():
            forms["stacked"] = convert(folder / "adapter", "tinker", *about, "--experts", "tinker")
    for form, adapter in forms.items():
        merged = convert(root, f"merged-{adapter.name}", "--to", "hf", "--merge-adapter", adapter)
        far = peft.ask("distance", merged, folder / "merged")
        yield f"merge of the form {form}: {case}", far <= FLOAT32_ROUNDING, f"{far:.1e} of the largest element"


def checks_of_case(
    case: str, base: str | dict[str, Any], settings: dict[str, Any], reshard: Path, peft: Peft, folder: Path
) -> Iterator[tuple[str, bool, str]]:
    def convert(name: str, source: str | Path, *options: str | Path) -> Path:
        done = subprocess.run([reshard, "convert", source, folder / name, "-q", *options], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        return folder / name

    root = peft.ask("merge", json.dumps(base) if isinstance(base, dict) else HF / base, {**LORA, **settings}, folder)
    if case not in _NOT_MERGED:
        merged = convert("ours", root, "--to", "hf", "--merge-adapter", folder / "adapter", "--dtype", "bf16")
        tensors, elements, one, more = peft.ask("compare", merged, folder / "merged")
        name = base["model_type"] if isinstance(base, dict) else base
        row = f"| {case} | {name} | {tensors} | {elements:,} | {one} | {more} |"
        yield f"merge: {row}", not more and one <= 4, row
        own = ("--merge-adapter", "self", "--adapter-config", folder / "adapter")
        again = convert("self", folder / "trained.pt", "--to", "hf", "--model", root, *own, "--dtype", "bf16")
        yield f"--merge-adapter self: {case}", peft.ask("compare", again, folder / "merged")[2:] == [one, more], "another merge"
    source = folder / ("adapter" if case in _WITH_EMBEDDINGS else "trained.pt")
    written = convert("peft", source, "--to", "peft", "--model", root, "--adapter-config", folder / "adapter")
    yield f"--to peft: {case}", not any(peft.ask("compare", written, folder / "adapter")[2:]), "other bits"
    settings, expected = (json.loads((place / "adapter_config.json").read_text()) for place in (written, folder / "adapter"))
    yield f"its settings: {case}", settings == expected, f"{settings} {expected}"
    peft.ask("load", root, written)
    yield f"PEFT loads it: {case}", True, ""
    if case not in _BASE_CHANGES:
        plain = convert("plain", folder / "trained.pt", "--to", "hf", "--model", root, "--drop-adapter")
        yield f"--to hf: {case}", not any(peft.ask("compare", plain, root)[2:]), "other bits"


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, ENVIRONMENT, __doc__ or ""))
