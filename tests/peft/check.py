"""Compares adapters and merges with PEFT itself: every kind of adapter, on models of transformers.

    python tests/peft/check.py [--reshard COMMAND] [--python INTERPRETER]

Of each adapter: reshard's merge is PEFT's in float32 within one unit in the last place of bfloat16; `--to peft` of a trainer's state
dict has the bits that PEFT saved, and PEFT loads it; `--to hf` of it is the base. An environment with PEFT is made in .venv-peft.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from environments import ROOT, Environment, run_checks

ENVIRONMENT = Environment("peft", ROOT / "tests" / "peft" / "requirements.txt")
HF = ROOT / "fixtures" / "hf"
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 6}
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 50,
    "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 64,
}  # fmt: skip
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
}
# What the state dict of a trainer whose biases were trained does not hold any more.
_BASE_CHANGES = {"trained biases", "all biases"}

COMPARE = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file

def load(folder):
    return {name: tensor for path in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(path).items()}

ours, theirs = load(sys.argv[1]), load(sys.argv[2])
assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())[:5]
one = more = elements = changed = 0
for name, tensor in ours.items():
    expected = theirs[name].to(tensor.dtype)
    assert tensor.shape == expected.shape, name
    if tensor.dtype == torch.bfloat16:
        steps = (tensor.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    else:
        steps = 2 * (tensor != expected).int()
    one, more, elements = one + int((steps == 1).sum()), more + int((steps > 1).sum()), elements + tensor.numel()
print(len(ours), elements, one, more)
"""


def compared(python: Path, ours: Path, theirs: Path | str) -> tuple[int, int, int, int]:
    """The number of tensors and elements, and of elements that differ by one unit in the last place and by more."""
    done = subprocess.run([python, "-c", COMPARE, ours, theirs], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    tensors, elements, one, more = map(int, done.stdout.split())
    return tensors, elements, one, more


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    for case, (base, settings) in CASES.items():
        folder = work / case.replace(" ", "-").replace(",", "")
        folder.mkdir()
        text = json.dumps(base) if isinstance(base, dict) else str(HF / base)
        made = subprocess.run(
            [python, ROOT / "tests/peft/merge.py", text, json.dumps({**LORA, **settings}), folder], capture_output=True, text=True
        )
        if made.returncode:
            yield case, False, made.stderr.strip()[-400:]
            continue
        root = (folder / "base.txt").read_text()

        def convert(name: str, source: str | Path, *options: str | Path, folder: Path = folder) -> Path:
            done = subprocess.run([reshard, "convert", source, folder / name, "-q", *options], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr.strip())
            return folder / name

        try:
            merged = convert("ours", root, "--to", "hf", "--merge-adapter", folder / "adapter", "--dtype", "bf16")
            tensors, elements, one, more = compared(python, merged, folder / "merged")
            name = base["model_type"] if isinstance(base, dict) else base
            row = f"| {case} | {name} | {tensors} | {elements:,} | {one} | {more} |"
            yield f"merge: {row}", not more and one <= 4, row
            model, given = ("--model", root), ("--adapter-config", folder / "adapter")
            written = convert("peft", folder / "trained.pt", "--to", "peft", *model, *given)
            yield f"--to peft: {case}", not any(compared(python, written, folder / "adapter")[2:]), "other bits"
            loaded = subprocess.run([python, ROOT / "tests/peft/merge.py", "--load", root, written], capture_output=True, text=True)
            yield f"PEFT loads it: {case}", loaded.returncode == 0, loaded.stderr.strip()[-400:]
            if case not in _BASE_CHANGES:
                plain = convert("plain", folder / "trained.pt", "--to", "hf", *model)
                yield f"--to hf: {case}", not any(compared(python, plain, root)[2:]), "other bits"
        except RuntimeError as error:
            yield case, False, str(error)[:400]


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, ENVIRONMENT, __doc__ or ""))
