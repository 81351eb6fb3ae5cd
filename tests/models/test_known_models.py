"""Well-known models by name: their shapes give the published numbers of parameters, and plans need no file."""

import json
import re
from pathlib import Path

import pytest
from helpers.fixture_places import FIXTURES
from helpers.reshard_command import reshard as command

import reshard
from reshard.models.known_models import known_config, known_names
from reshard.models.lookup import find_model
from reshard.models.model import Model
from reshard.models.quantization import without_quantization
from reshard.training.parameter_counts import parameters

GB, GIB = 10**9, 1 << 30
# Billions of parameters as the publishers state them in their papers and model cards, without layers for multi-token prediction.
STATED = {
    "llama-2-7b": 6.74, "llama-2-70b": 69, "llama-3-8b": 8.03, "llama-3-70b": 70.6, "llama-3.1-405b": 405, "llama-3.2-1b": 1.23,
    "llama-3.2-3b": 3.21, "mistral-7b": 7.25, "mixtral-8x7b": 46.7, "mixtral-8x22b": 141, "qwen2.5-7b": 7.61, "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.6, "qwen3-8b": 8.2, "qwen3-14b": 14.8, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235, "deepseek-v3": 671, "deepseek-v2-lite": 15.7, "kimi-k2": 1026, "gemma-2-9b": 9.24, "gemma-2-27b": 27.2,
    "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "phi-4": 14.7, "glm-4.5": 355, "glm-4.5-air": 106, "minimax-m2": 230,
    "llama-4-scout": 109, "llama-4-maverick": 400, "gemma-3-27b": 27.4, "gemma-3-4b": 4.3, "mistral-small-3.2-24b": 24, "olmo-2-13b": 13.7,
}  # fmt: skip


def test_every_model_is_checked_against_its_publisher():
    assert STATED.keys() == set(known_names()) and len(STATED) >= 30
    assert list(known_names()) == sorted(known_names())


@pytest.mark.parametrize("name", STATED)
def test_the_shapes_give_the_stated_number_of_parameters(name):
    model = find_model(known_config(name))
    assert parameters(Model(model.architecture, without_quantization(model.config))) / 1e9 == pytest.approx(STATED[name], rel=0.01)


@pytest.mark.parametrize("name", STATED)
def test_each_is_planned_for_an_engine_and_for_training(name):
    assert any(row.problem is None for row in reshard.degrees(name, to="vllm", gpu_memory=80 * GIB).rows)
    assert reshard.estimate(name, zero=3, gpus=64, seq_len=4096).strategies[0].fullest.total > 0


def test_the_first_question_of_a_planner_is_answered_without_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "fits       TP 2: the fewest GPUs" in command("degrees", "llama-3-70b", "--gpu-memory", "80GiB").out
    said = [command("degrees", name).out.partition(",") for name in ("meta-llama/Meta-Llama-3-70B", "LLAMA-3-70b")]
    assert said[0][2] == said[1][2] and said[0][0] == "meta-llama/Meta-Llama-3-70B"
    assert "671 B parameters (37.6 B active; 256 experts, top 8)" in command("inspect", "deepseek-v3").out
    assert re.search(r"Did you mean llama-3-70b\?", command("degrees", "lama-3-70b").err)
    assert "Did you mean" not in command("degrees", "my-own-run").err


def test_python_takes_sizes_as_the_command_line_does():
    """Messages say `gpu_memory=`, such as 80GiB."""
    asked = reshard.degrees("llama-3-70b", to="vllm", gpu_memory="80GiB", reserve="2GB")
    assert asked.rows == reshard.degrees("llama-3-70b", to="vllm", gpu_memory=80 * GIB, reserve=2 * GB).rows
    with pytest.raises(reshard.RequestError, match=r"`gpu_memory=` 80: the unit is missing\. Did you mean 80GB"):
        reshard.degrees("llama-3-70b", to="vllm", gpu_memory="80")


def test_a_folder_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3-8b").mkdir()
    (tmp_path / "llama-3-8b" / "config.json").write_bytes((FIXTURES / "hf" / "llama" / "config.json").read_bytes())
    assert reshard.estimate("llama-3-8b").parameters == 74_016


def test_the_cache_has_the_models_type_unless_told():
    """In 8 bits are the weights, not the KV cache: 2 x 8 heads x 128 x 80 layers x 2 bytes."""
    fp8 = reshard.degrees("llama-3-70b", to="vllm", tp=(1,), dtype="fp8", gpu_memory=80 * GIB)
    assert fp8.cache_dtype.name == "BF16" and fp8.rows[0].cache_per_token == 2 * 8 * 128 * 80 * 2
    told = reshard.degrees("llama-3-70b", to="vllm", tp=(1,), dtype="fp8", kv_dtype="fp8", gpu_memory=80 * GIB)
    assert told.rows[0].cache_per_token == 8 * 128 * 80 * 2
    assert reshard.degrees("deepseek-v3", to="vllm", tp=(8,)).cache_dtype.name == "BF16"


def test_training_counts_what_people_train_with():
    """The case of the third user review: 71.9 GB with the paper's formula, stored scores and no sequence parallelism."""
    usual = {"tp": 8, "pp": 4, "gpus": 64, "seq_len": 8192, "zero": 1}

    def most(**options):
        return max(rank.activations for rank in reshard.estimate("llama-3-70b", **usual, **options).strategies[0].stages)

    assert 6 * GB < most() < 6.5 * GB
    assert most() == most(flash_attention=True, sequence_parallel=True, activations="itemised")
    assert most(flash_attention=False, sequence_parallel=False, activations="published") == pytest.approx(71.9 * GB, rel=0.01)
    assert most() < most(sequence_parallel=False) < most(sequence_parallel=False, flash_attention=False)
    shown = command("estimate", "llama-3-70b", "--tp", 8, "--pp", 4, "--seq-len", 8192).out
    assert all(f"--{option}" in shown for option in ("activations published", "no-flash-attention", "no-sequence-parallel"))
    assert "without sequence parallelism" in command("estimate", "llama-3-70b", "--tp", 8, "--seq-len", 8192, "--no-sequence-parallel").out


@pytest.mark.parametrize(("layers", "expected"), [(1, 1), (2, 2), (4, 4), (16, 16), (72, None)])
def test_inspect_proposes_the_smallest_size_that_fits_80_gb_or_nothing(layers, expected, tmp_path):
    """Headers alone, with weights of 69 GB per layer that are holes in a file. Its 8 KV heads allow TP 1, 2, 4, 8 and more."""
    config = {
        **known_config("llama-3-8b"),
        "num_hidden_layers": layers,
        "hidden_size": 65536,
        "intermediate_size": 65536 * 2,
        "head_dim": 128,
    }
    model = find_model(config | {"num_attention_heads": 512, "num_key_value_heads": 8, "vocab_size": 8192})
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    header, at = {}, 0
    for name, weight in model.weights.items():
        header[name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [at, at := at + 2 * weight.elements]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    out = command("inspect", tmp_path).out
    assert f"--to vllm --tp {expected}" in out if expected else "  next " not in out


def test_the_list_of_known_models_in_the_docs_is_complete():
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "recipes" / "degrees.md").read_text()
    assert all(f"`{name}`" in page for name in known_names())
