"""The slow check of heads: classifiers, reward models, critics and embedding models as reshard writes them, against real vLLM's ranks.

    python tests/serving/head_ranks.py [--reshard PATH] [case ...]

A case is a fixture of fixtures/hf with the head of another class in place of its own, or a folder. Each is written for every degree, and
real ranks load its Hugging Face folder: every name, shape, element type and bit must be the same, also after vLLM's own loader for such
files, and the load format `reshard`, have loaded them; or both refuse it. A line for each; the exit code is 0 if all agree.

Environment: that of fixtures/vllm.
"""

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from random_models import RankFailed, State, vllm_make, written
from ranks import poison
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers.framework_environments import installed

ROOT = Path(__file__).resolve().parents[2]
HF = ROOT / "fixtures" / "hf"
ONE, THREE = {"id2label": {"0": "a"}, "label2id": {"a": 0}}, {"num_labels": 3}
MLP = {"score.0.weight": ("hidden", "hidden"), "score.0.bias": ("hidden",), "score.2.weight": (1, "hidden"), "score.2.bias": (1,)}
# Fixture, class, further keys of the config, the tensors of its head, and the words at the front of names that are taken off.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, tuple[Any, ...]], str]] = {
    "reward": ("llama", "LlamaForSequenceClassification", ONE, {"score.weight": (1, "hidden")}, ""),
    "classifier": ("llama", "LlamaForSequenceClassification", THREE, {"score.weight": (3, "hidden")}, ""),
    "reward-tied": ("llama-tied", "LlamaForSequenceClassification", ONE, {"score.weight": (1, "hidden")}, ""),
    "tokens": ("qwen2", "Qwen2ForTokenClassification", THREE, {"score.weight": (3, "hidden"), "score.bias": (3,)}, ""),
    "critic-of-verl": ("qwen2", "Qwen2ForCausalLM", {}, {"score.weight": (1, "hidden"), "score.bias": (1,)}, ""),
    "biased-sequence": ("qwen3", "Qwen3ForSequenceClassification", ONE, {"score.weight": (1, "hidden"), "score.bias": (1,)}, ""),
    "reranker": ("qwen3", "Qwen3ForSequenceClassification", {"num_labels": 2}, {"score.weight": (2, "hidden")}, ""),
    "experts": ("mixtral", "MixtralForSequenceClassification", ONE, {"score.weight": (1, "hidden")}, ""),
    "gpt_neox": ("gpt_neox", "GPTNeoXForSequenceClassification", ONE, {"score.weight": (1, "hidden")}, ""),
    "gpt2": ("gpt2", "GPT2ForSequenceClassification", ONE, {"score.weight": (1, "hidden")}, ""),
    "gpt2-tokens": ("gpt2", "GPT2ForTokenClassification", THREE, {"classifier.weight": (3, "hidden"), "classifier.bias": (3,)}, ""),
    "gemma2": ("gemma2", "Gemma2ForSequenceClassification", ONE, {"score.weight": (1, "hidden")}, ""),
    "gemma2-untied": ("gemma2", "Gemma2ForSequenceClassification", {"tie_word_embeddings": False} | ONE,
                      {"score.weight": (1, "hidden")}, ""),
    "mlp": ("qwen2", "Qwen2ForRewardModel", ONE, MLP, ""),
    "mlp-llama": ("llama", "LlamaForRewardModel", ONE, MLP, ""),
    "process": ("qwen2", "Qwen2ForProcessRewardModel", {"num_labels": 2},
                MLP | {"score.2.weight": (2, "hidden"), "score.2.bias": (2,)}, ""),
    "openrlhf": ("llama", "RewardModel", {"value_head_prefix": "score"}, {"score.weight": (1, "hidden")}, ""),
    "embedding": ("llama", "LlamaModel", {}, {}, ""),
    "embedding-bare": ("mistral", "MistralModel", {}, {}, "model."),
    "embedding-tied": ("llama-tied", "LlamaModel", {}, {}, "model."),
    "one-matrix": ("qwen2", "Qwen2ForRewardModel", ONE, {"score.weight": (1, "hidden")}, ""),
    "embedding-qwen2": ("qwen2", "Qwen2Model", {}, {}, "model."),
    "embedding-qwen3": ("qwen3", "Qwen3Model", {}, {}, "model."),
    "embedding-named": ("qwen3", "Qwen3ForEmbedding", {}, {}, ""),
    "embedding-experts": ("qwen3_moe", "Qwen3MoeModel", {}, {}, "model."),
    "embedding-gemma2": ("gemma2", "Gemma2Model", {}, {}, "model."),
    "embedding-phi3": ("phi3", "Phi3Model", {}, {}, "model."),
    "embedding-gpt2": ("gpt2", "GPT2Model", {}, {}, "transformer."),
    "embedding-gpt_neox": ("gpt_neox", "GPTNeoXModel", {}, {}, "gpt_neox."),
    "embedding-deepseek": ("deepseek_v2", "DeepseekV2Model", {}, {}, "model."),
    "answers": ("llama", "LlamaForQuestionAnswering", {}, {"qa_outputs.weight": (2, "hidden"), "qa_outputs.bias": (2,)}, ""),
}  # fmt: skip
OF_TRAINER = "of-trainer"
PAIR, STAGES = (vllm_make.Degree(1), vllm_make.Degree(2)), (vllm_make.Degree(1, 2),)


def made(case: str, folder: Path) -> Path:
    """The Hugging Face folder of a case."""
    if (named := Path(case)).is_dir():
        return named
    fixture, class_name, keys, head, front = CASES[case]
    folder.mkdir()
    config = json.loads((HF / fixture / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [class_name], **keys}))
    tensors = load_file(HF / fixture / "model.safetensors")
    table = next(tensor for name, tensor in tensors.items() if name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight")))
    kept = {name: tensor for name, tensor in tensors.items() if name in head or not name.startswith(("lm_head.", "embed_out."))}
    named_tensors = {name.removeprefix(front): tensor for name, tensor in kept.items()}
    torch.manual_seed(5)
    for name, shape in head.items():
        if shape:
            sizes = [table.shape[1] if size == "hidden" else size for size in shape]
            named_tensors[name] = torch.randn(sizes).to(table.dtype)
    save_file(named_tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if not head:  # without modules.json vLLM takes some of these classes for language models
        pooling = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
        transformer = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
        (folder / "1_Pooling").mkdir()
        (folder / "modules.json").write_text(json.dumps([transformer, pooling]))
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


def degrees_of(folder: Path) -> tuple[Any, ...]:
    """The degrees of a case. On stages, reshard refuses a model of one layer, which vLLM starts, and tied tables."""
    config = json.loads((folder / "config.json").read_text())
    tied = config.get("tie_word_embeddings", config["model_type"] in ("gpt2", "gemma2"))
    return PAIR if tied or config.get("num_hidden_layers", 2) < 2 else (*PAIR, *STAGES)


def loaded(target: Path, degrees: Any, load_format: str) -> dict[str, State] | str:
    """What real ranks hold after a loader of files of ranks, with the class that the written config names."""
    try:
        return vllm_make.all_ranks(vllm_make.options_of(target, degrees, {}) | {"load_format": load_format}, poison)
    except RankFailed as refused:
        return str(refused)


def loads_differently(target: Path, degrees: Any, real: dict[str, State]) -> str | None:
    """How the loaders differ from what is expected; None if they do not: vLLM's own has no place for a bias, that of reshard makes one."""
    has_bias = any("score.bias" in state and "score.weight" in state for state in real.values())
    answers = {name: loaded(target, degrees, name) for name in ("sharded_state", "reshard")}
    if has_bias and "KeyError: 'score.bias'" in str(answers["sharded_state"]):
        del answers["sharded_state"]
    return next((f"{name}: {answer}"[-600:] for name, answer in answers.items() if answer != real), None)


def outcome(reshard: Path, folder: Path, degrees: Any, target: Path) -> str:
    """What came of a case at these degrees; begins with DIFFERENT if the two do not agree."""
    ours, told = written(reshard, folder, target, degrees)
    if folder.name == OF_TRAINER and ours:  # vLLM's class is the one that the conversion names
        subprocess.run([reshard, "convert", folder, folder := target.with_name(f"{target.name}-hf"), "--to=hf"], check=True)
    try:
        real, says = vllm_make.all_ranks(vllm_make.options_of(folder, degrees, {})), ""
    except RankFailed as refused:
        real, says = None, refused.facts.get("says") or str(refused)
    if ours == real and real:
        different = loads_differently(target, degrees, real) if degrees.tp > 1 else None
        return f"DIFFERENT: loaded from the files of ranks by {different}" if different else "the same"
    if ours == real:
        return f"refused by both: {told} vLLM: {says}"
    if ours is None or real is None:
        return f"DIFFERENT: reshard: {told or 'writes it'} vLLM: {says or 'loads it'}"
    lines = [f"{rank} {name}: {ours.get(rank, {}).get(name)} here, {state.get(name)} in vLLM" for rank, state in real.items()
             for name in sorted({*state, *ours.get(rank, {})}) if ours.get(rank, {}).get(name) != state.get(name)]  # fmt: skip
    return f"DIFFERENT: {len(lines)} tensors: {'; '.join(lines[:4])}"


def main() -> int:
    """Each case at each degree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reshard", type=Path, default=ROOT / ".venv" / "bin" / "reshard")
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    vllm_make.arrange()
    site = Path(tempfile.mkdtemp())
    sys.path.insert(0, str(installed(Path(sys.executable), site)))
    importlib.import_module("reshard.plugins.vllm").register()
    outcomes: list[str] = []
    for case in options.cases:
        with tempfile.TemporaryDirectory() as work:
            folder = made(case, Path(work) / (OF_TRAINER if case in ("critic-of-verl", "openrlhf") else "source"))
            for degrees in degrees_of(folder):
                outcomes.append(outcome(options.reshard, folder, degrees, Path(work) / str(degrees)))
                print(f"{case} {degrees}: {outcomes[-1]}", flush=True)
    shutil.rmtree(site)
    return int(any(text.startswith("DIFFERENT") for text in outcomes))


if __name__ == "__main__":
    sys.exit(main())
