"""A checkpoint of any size without its data: the framing of a planned conversion in sparse files. What is measured on it is metadata.

python benchmarks/sparse.py hf DIR [--layers N] [--experts N]                      DeepSeek-V3's config and sparse safetensors files
python benchmarks/sparse.py plan SOURCE DIR FORMAT [NAME=NUMBER[,NUMBER...] ...]   the target of that plan

python benchmarks/sparse.py plan deepseek dist megatron-dist pp=16 ep=64 stage_layers=4,4,4,4,4,4,4,4,4,4,4,4,4,3,3,3
python benchmarks/sparse.py plan deepseek ranks megatron pp=16 ep=64 stage_layers=4,4,4,4,4,4,4,4,4,4,4,4,4,3,3,3
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import reshard
from reshard.containers import safetensors
from reshard.geometry.dtypes import from_safetensors
from reshard.models.lookup import find_model
from reshard.plans.plan import Plan

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}
WEIGHTS_PER_FILE = 288


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    hf = commands.add_parser("hf")
    hf.add_argument("folder", type=Path)
    hf.add_argument("--layers", type=int, default=DEEPSEEK["num_hidden_layers"])
    hf.add_argument("--experts", type=int, default=DEEPSEEK["n_routed_experts"])
    plan = commands.add_parser("plan")
    plan.add_argument("source", type=Path)
    plan.add_argument("folder", type=Path)
    plan.add_argument("format")
    plan.add_argument("options", nargs="*", help="options of the conversion, such as pp=16")
    given = parser.parse_args()
    if given.what == "hf":
        write_deepseek(given.folder, layers=given.layers, experts=given.experts)
        return
    options = {name: numbers(value) for name, value in (option.split("=") for option in given.options)}
    write_target(reshard.plan(reshard.open(given.source), to=given.format, **options), given.folder)


def numbers(text: str) -> int | list[int]:
    found = [int(number) for number in text.split(",")]
    return found if len(found) > 1 else found[0]


def write_deepseek(folder: Path, **sizes: int) -> None:
    """A Hugging Face folder of DeepSeek-V3, with other numbers of layers or experts if they are given."""
    config: dict[str, Any] = {**DEEPSEEK, "num_hidden_layers": sizes["layers"], "n_routed_experts": sizes["experts"]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = find_model(config)
    assert model is not None
    weights, dtype = list(model.weights.values()), from_safetensors("BF16", where="the config")
    files = -(-len(weights) // WEIGHTS_PER_FILE)
    places: dict[str, str] = {}
    total = 0
    for number in range(files):
        part = weights[number * WEIGHTS_PER_FILE : (number + 1) * WEIGHTS_PER_FILE]
        frame = safetensors.frame([(weight.name, dtype, weight.shape) for weight in part], {"format": "pt"})
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        write_sparse(folder / name, frame.nbytes, [(0, frame.header)])
        places |= dict.fromkeys((weight.name for weight in part), name)
        total += frame.nbytes
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_target(plan: Plan, folder: Path) -> None:
    """The files of a plan: their framing, their sidecars and holes in place of the weights."""
    for file in plan.layout.files:
        write_sparse(folder / file.path, file.nbytes, file.literals)
    for sidecar in plan.layout.sidecars:
        write_sparse(folder / sidecar.path, len(sidecar.content), [(0, sidecar.content)])


def write_sparse(path: Path, nbytes: int, literals: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        for offset, content in literals:
            file.seek(offset)
            file.write(content)
        file.truncate(nbytes)


if __name__ == "__main__":
    main()
