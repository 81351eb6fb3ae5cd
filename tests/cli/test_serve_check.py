"""`reshard serve-check`: every way in which an engine would refuse a folder, or serve it wrongly, is a finding before it starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.fixture_places import HF
from helpers.reshard_command import reshard

import reshard as library
from reshard.health.findings import KINDS


def ids(result):
    return {each["id"] for each in result.document["findings"] if each["severity"] != "info"}


@pytest.fixture
def served(tmp_path):
    """A folder for vLLM at TP 2, with a tokenizer."""
    shutil.copytree(HF / "llama", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    library.convert(library.plan(tmp_path / "model", to="vllm", tp=2), tmp_path / "out")
    return tmp_path / "out"


def test_a_folder_that_an_engine_takes_has_no_findings(served):
    result = reshard("serve-check", served, "--tp", 2, "--json")
    assert result.code == 0 and not ids(result)
    assert reshard("serve-check", served).code == 0


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3", "gpt2", "gemma2", "phi3"])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_models_of_all_kinds_are_as_their_engine_asks(model, sizes, tmp_path):
    library.convert(library.plan(HF / model, to="vllm", **sizes), tmp_path / "out")
    assert ids(reshard("serve-check", tmp_path / "out", "--json")) <= {"missing-tokenizer"}


def test_other_sizes_and_engines(served):
    assert ids(reshard("serve-check", served, "--tp", 4, "--json")) == {"other-sizes"}
    assert ids(reshard("serve-check", served, "--pp", 2, "--json")) == {"other-sizes"}
    assert ids(reshard("serve-check", served, "--engine", "sglang", "--json")) == {"other-engine"}


def test_an_engine_of_another_version_asks_for_other_names(served, tmp_path):
    result = reshard("serve-check", served, "--engine-version", "0.11.0", "--json")
    assert result.code == 1 and ids(result) == {"unknown-on-rank"}
    library.convert(library.plan(tmp_path / "model", to="vllm", tp=2, engine_version="0.11.0"), tmp_path / "old")
    assert ids(reshard("serve-check", tmp_path / "old", "--json")) == {"missing-on-rank"}
    assert not ids(reshard("serve-check", tmp_path / "old", "--engine-version", "0.11.0", "--json"))


def test_a_tensor_of_another_type_than_this_version_asks_for(tmp_path):
    """vLLM before 0.10.2 held the router's correction bias in the model's type."""
    library.convert(library.plan(HF / "deepseek_v3", to="vllm", tp=2, engine_version="0.10.1"), tmp_path / "old")
    result = reshard("serve-check", tmp_path / "old", "--engine-version", "0.10.2", "--json")
    unlike = [each for each in result.document["findings"] if each["id"] == "unlike-on-rank"]
    assert unlike and all(each["tensor"].endswith("e_score_correction_bias") and "F32" in each["detail"] for each in unlike)
    assert len(unlike) == 2 * len({each["tensor"] for each in unlike}), "both ranks"


def test_every_finding_of_the_check_is_tested():
    text = Path(__file__).read_text()
    assert all(f'"{kind.id}"' in text for kind in KINDS.values() if kind.needs == "serve-check")


@pytest.mark.parametrize(("key", "value", "found"), [("architectures", None, "no-class"), ("hidden_size", 128, "inconsistent")])
def test_a_config_of_another_model(key, value, found, served):
    (served / "reshard.json").unlink()
    config = json.loads((served / "config.json").read_text())
    (served / "config.json").write_text(json.dumps({**config, key: value}))
    assert ids(reshard("serve-check", served, "--json")) == {found}
    (served / "config.json").write_text(json.dumps({**config, "model_type": "nonsense"}))
    assert reshard("serve-check", served).code == 6


def test_files_that_are_not_there_or_not_as_written(served):
    (served / "tokenizer.json").unlink()
    assert "missing-tokenizer" in ids(reshard("serve-check", served, "--json"))
    file = served / "model-rank-1-part-0.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "changed" in ids(reshard("serve-check", served, "--json"))
    file.unlink()
    result = reshard("serve-check", served, "--json")
    assert result.code == 1 and ids(result) & {"missing-file", "inconsistent", "incomplete-tensor"}


def test_a_hugging_face_folder_at_sizes_that_it_cannot_have():
    assert "not-served" in ids(reshard("serve-check", HF / "llama", "--tp", 3, "--json"))
    assert "not-served" not in ids(reshard("serve-check", HF / "llama", "--tp", 4, "--engine", "sglang", "--json"))


def test_the_page_and_the_text_say_the_same(served, tmp_path):
    result = reshard("serve-check", served, "--tp", 4, "--html", tmp_path / "page.html")
    assert result.code == 1 and "other-sizes" in result.out and "other-sizes" in (tmp_path / "page.html").read_text()


def test_a_warning_alone_fails_only_if_it_is_asked_for_and_the_change_is_announced(tmp_path):
    library.convert(library.plan(HF / "llama", to="vllm", tp=2), tmp_path / "out")
    for command in ("doctor", "serve-check"):
        done = reshard(command, tmp_path / "out")
        assert done.code == 0 and "missing-tokenizer" in done.out
        assert ("--fail-on warning asks for that" in done.err) == (command == "serve-check")
        for words in ("warning", "missing-tokenizer"):
            failed = reshard(command, tmp_path / "out", "--fail-on", words)
            assert failed.code == 1 and "asks for that" not in failed.err
        assert reshard(command, tmp_path / "out", "--fail-on", "warnings").code == 2
    assert reshard("serve-check", tmp_path / "out", "--tp", 4).code == 1, "an error fails without being asked for"
