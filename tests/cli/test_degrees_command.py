"""`reshard degrees`: the table of parallel sizes, with the reason where an engine would refuse one."""

import json

import pytest
from helpers.fixture_places import HF
from helpers.published_configs import LLAMA_70B
from helpers.reshard_command import reshard

GPU = ("--gpu-memory", "80GiB", "--reserve", 0)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_70B, "torch_dtype": "bfloat16"}))
    return tmp_path


def test_the_table_says_what_each_gpu_holds_and_why_not(folder):
    shown = reshard("degrees", folder, "--to", "vllm", "--tp", "2,3,16", "--pp", "1", *GPU, "--max-model-len", 8192)
    assert shown.code == 0
    rows = [" ".join(line.split()) for line in shown.out.splitlines() if line[:4].strip().isdigit()]
    assert rows == [
        "2 1 2 70.56 GB 2.639 MB 163.8 kB 6.754 GB 41,225 5",
        "16 1 16 8.989 GB 338.2 MB 40.96 kB 68.32 GB 1,667,967 203",
    ]
    assert "refused    TP 3: 3 ranks do not divide its 64 attention heads (model.layers.0.self_attn.q_proj.weight)" in shown.out
    assert "uses 90% of a GPU's 85,899,345,920 bytes" in shown.out


def test_what_does_not_fit_is_said(folder):
    shown = reshard("degrees", folder, "--to", "vllm", "--tp", "1", *GPU)
    assert "lacks 63.8 GB" in shown.out


def test_three_percent_are_kept_unless_the_caller_says_how_much(folder):
    kept = {}
    for more in ((), ("--reserve", 0), ("--reserve", "5GB")):
        memory = reshard("degrees", folder, "--tp", "2", "--gpu-memory", "100GB", *more, "--json").document["memory"]
        kept[more] = memory["reserve"], memory["usable"]
    assert [*kept.values()] == [(3 * 10**9, 87 * 10**9), (0, 90 * 10**9), (5 * 10**9, 85 * 10**9)]


def test_the_document_has_stable_keys():
    arguments = ("--tp", "2,3", "--pp", "1,2", "--gpu-memory", "1GB", "--max-model-len", 64, "--reserve", "1MB")
    document = reshard("degrees", HF / "llama", "--to", "vllm", *arguments, "--json").document
    assert list(document) == ["schema_version", "model_type", "kv_dtype", "memory", "degrees", "assumptions"]
    assert document["memory"] == {
        "gpu_memory": 10**9, "gpu_memory_utilization": 0.9, "reserve": 10**6, "usable": 899 * 10**6, "max_model_len": 64,
    }  # fmt: skip
    assert [(row["tp"], row["pp"], row["legal"]) for row in document["degrees"]] == [
        (2, 1, True),
        (3, 1, False),
        (2, 2, True),
        (3, 2, False),
    ]
    for row in document["degrees"]:
        assert list(row) == [
            "tp", "pp", "ep", "gpus", "legal", "problem", "weights", "replicated", "kv_bytes_per_token", "room", "stages",
        ]  # fmt: skip
        if not row["legal"]:
            assert row["weights"] is None and row["room"] is None and row["stages"] == [] and "3 ranks" in row["problem"]
            continue
        assert list(row["room"]) == ["fits", "kv_bytes", "tokens", "sequences"] and row["room"]["fits"]
        for stage in row["stages"]:
            assert list(stage) == ["layers", "weights", "replicated", "kv_bytes_per_token", "kv_bytes_per_sequence"]
    # One KV head of 32 per rank, k and v in bf16, two layers.
    assert document["degrees"][0]["kv_bytes_per_token"] == 2 * 2 * 32 * 2
    without = reshard("degrees", HF / "llama", "--to", "vllm", "--json").document
    assert without["memory"] is None and all(row["room"] is None for row in without["degrees"])


def test_without_a_word_it_is_vllm_at_the_usual_degrees():
    shown = reshard("degrees", HF / "llama").out
    rows = [tuple(map(int, line.split()[:2])) for line in shown.splitlines() if line[:4].strip().isdigit()]
    assert rows == [(tp, pp) for pp in (1, 2) for tp in (1, 2, 4, 8)]


def test_experts_shared_by_ranks_have_a_column_of_their_own():
    assert "EP" in reshard("degrees", HF / "mixtral", "--to", "vllm", "--tp", "2", "--ep").out
    assert "EP" not in reshard("degrees", HF / "mixtral", "--to", "vllm", "--tp", "2").out


@pytest.mark.parametrize("arguments", [("--to", "hf"), ("--to", "vllm", "--tp", "two"), ("--to", "vllm", "--gpu-memory", "much")])
def test_what_cannot_be_answered_is_bad_usage(arguments):
    result = reshard("degrees", HF / "llama", *arguments)
    assert result.code == 2 and result.out == "" and result.err
