"""Models that nobody has declared: inspect leads to a declaration, and what is made with one stays readable without it."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.fixture_places import HF
from helpers.reshard_command import reshard

LLAMA = HF / "llama"
DECLARATION = "reshard.architecture.yaml"


@pytest.fixture
def nova(tmp_path):
    """A folder of a model that nobody has declared, and the user's declaration of it."""
    folder, declared = tmp_path / "nova", tmp_path / "my.yaml"
    shutil.copytree(LLAMA, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nova", "architectures": ["NovaForCausalLM"]}))
    drafted = reshard("architectures", "--start", folder)
    assert drafted.code == 0
    declared.write_text(drafted.out)
    return folder, declared


def test_an_undeclared_model_leads_to_a_declaration(nova):
    folder, _ = nova
    assert f"next      reshard architectures --start {folder} > my.yaml" in reshard("inspect", folder).out


def test_an_undeclared_model_in_training_leads_to_the_folder_that_needs_none(nova, tmp_path):
    folder, declared = nova
    assert reshard("convert", folder, tmp_path / "run", "--to", "dcp", "--architecture", declared).code == 0
    (tmp_path / "run" / DECLARATION).unlink()
    assert f"next      reshard convert {tmp_path / 'run'} out --to hf" in reshard("inspect", tmp_path / "run").out


@pytest.mark.parametrize("target", [("vllm", "--tp", 2), ("hf",), ("fsdp", "--dp", 2)])
def test_the_output_of_a_declared_model_is_read_without_its_declaration(nova, tmp_path, target):
    folder, declared = nova
    out = tmp_path / "out"
    assert reshard("convert", folder, out, "--architecture", declared, "--to", *target).code == 0
    (kept,) = out.rglob(DECLARATION)
    assert kept.read_text() == declared.read_text()
    declared.unlink()
    inspected = reshard("inspect", out, "--json").document
    assert (inspected["model_type"], inspected["architecture_known"]) == ("nova", True)
    assert reshard("verify", folder, out).code == 0 and reshard("verify", out).code == 0
    assert reshard("convert", out, tmp_path / "served", "--to", "vllm", "--tp", 4).code == 0, "it goes on to the next output"
    assert (tmp_path / "served" / DECLARATION).is_file()


def test_the_output_of_a_model_that_is_read_as_another_one_says_so(nova, tmp_path):
    folder, _ = nova
    assert reshard("convert", folder, tmp_path / "out", "--to", "vllm", "--tp", 2, "--architecture", "llama").code == 0
    assert reshard("verify", folder, tmp_path / "out").code == 0 and reshard("verify", tmp_path / "out").code == 0
    assert reshard("convert", LLAMA, tmp_path / "plain", "--to", "vllm", "--architecture", "llama").code == 0
    assert not (tmp_path / "plain" / DECLARATION).exists(), "its config.json is enough"


def test_an_own_declaration_wins_over_the_one_that_lies_there(nova, tmp_path):
    folder, declared = nova
    shutil.copy(declared, folder / DECLARATION)
    assert reshard("inspect", folder, "--json").document["architecture_known"]
    (folder / DECLARATION).write_text("language: 2\nmodel_type: nova\nextends: nothing\n")
    broken = reshard("inspect", folder)
    assert broken.code == 2 and f"{folder / DECLARATION}, line 3" in broken.err
    assert reshard("inspect", folder, "--architecture", declared).code == 0


@pytest.mark.parametrize("way", ["--overwrite", "--if-changed"])
def test_another_model_in_the_same_place_has_no_old_declaration(nova, tmp_path, way):
    folder, declared = nova
    out = tmp_path / "out"
    assert reshard("convert", folder, out, "--to", "fsdp", "--dp", 2, "--architecture", declared).code == 0
    assert reshard("convert", LLAMA, out, "--to", "fsdp", "--dp", 2, way).code == 0
    assert not list(out.rglob(DECLARATION))


def test_a_plan_file_of_a_declared_model_is_planned_again_elsewhere(nova, tmp_path):
    folder, declared = nova
    shutil.move(declared, folder / DECLARATION)
    plan = tmp_path / "plan"
    assert reshard("plan", folder, "--to", "vllm", "--tp", 2, "--plan-out", plan).code == 0
    assert reshard("convert", folder, tmp_path / "out", "--plan", plan).code == 0
