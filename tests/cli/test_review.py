"""What users ran into, command by command: the tables n1 to n24 and U1 to U12 of the third user review, where no other file tests them.

Each story is one line of such a table. Others are tested beside what they are about: names of vLLM and Megatron (test_help.py), a store
that does not answer (tests/cloud/test_lies.py), a missing rank (tests/formats/test_fsdp.py), folders of runs (tests/runs/test_choice.py).
"""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from helpers.fixture_places import DCP, FIXTURES, FSDP, HF
from helpers.reshard_command import reshard

LLAMA = HF / "llama"
TRAINED = FIXTURES / "megatron_dist" / "llama-tp2-pp2"
OF_TRAINED = ("--model", TRAINED / "model")
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


# ---- n5, n6: training state on its way between formats ----


def test_the_step_goes_through_formats_that_have_no_place_for_it(tmp_path):
    assert reshard("convert", TRAINED / "checkpoint", tmp_path / "fsdp", "--to", "fsdp", "--optimizer", "--dp", 2, *OF_TRAINED).code == 0
    assert reshard("inspect", tmp_path / "fsdp", "--json").document["step"] == 2
    back = reshard("convert", tmp_path / "fsdp", tmp_path / "back", "--to", "megatron-dist", "--optimizer", "--tp", 2)
    assert back.code == 0 and (tmp_path / "back" / "iter_0000002").is_dir()
    alone = reshard("convert", TRAINED / "checkpoint", tmp_path / "alone", "--to", "megatron", *OF_TRAINED)
    assert "weights alone are a `release`: Megatron starts a new run from them, at iteration 0" in alone.out


@pytest.mark.parametrize("target", [("dcp",), ("fsdp", "--dp", 2)])
def test_a_resumed_run_gets_the_masters(tmp_path, target):
    shown = reshard("convert", TRAINED / "checkpoint", tmp_path / "out", "--optimizer", *OF_TRAINED, "--to", *target)
    assert "the weights are the optimizer's full-precision masters" in shown.out
    kinds = {row["kind"]: row for row in reshard("inspect", tmp_path / "out", "--json").document["kinds"]}
    assert kinds["weight"]["dtype"] == "F32" and "master" not in kinds
    assert reshard("verify", TRAINED / "checkpoint", tmp_path / "out", "--optimizer", *OF_TRAINED).code == 0


# ---- n8: a declared model stays readable ----


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


# ---- n18, n17, polish: what inspect counts and says ----


def test_the_tree_counts_weights_and_says_what_each_has_besides():
    rows = {line.split()[0]: line for line in reshard("inspect", DCP / "fsdp2" / "checkpoint").out.splitlines() if " x4" in line}
    assert "  1 x4 " in rows["embed_tokens.weight"] and "  2 x4 " in rows["q_proj.weight"], "one weight, two moments, a step count"
    plain = next(line for line in reshard("inspect", LLAMA).out.splitlines() if "q_proj.weight" in line)
    assert plain.split()[1] == "2"


def test_copies_are_counted_as_copies():
    line = next(line for line in reshard("inspect", FSDP / "hsdp" / "checkpoint").out.splitlines() if "q_proj" in line)
    assert "2 along axis 0, 2 copies" in line, "two replicas of two shards: four pieces"


def test_the_first_line_says_experts_and_quantization():
    assert "(25,476 active; 8 experts, top 2)" in reshard("inspect", HF / "qwen3_moe").out.splitlines()[0]
    assert "GPTQ" in reshard("inspect", FIXTURES / "hf_packed" / "llama-gptq").out.splitlines()[0]


# ---- n19: a model that nobody has declared ----


def test_an_undeclared_model_leads_to_a_declaration(nova):
    folder, _ = nova
    assert f"next      reshard architectures --start {folder} > my.yaml" in reshard("inspect", folder).out


def test_an_undeclared_model_in_training_leads_to_the_folder_that_needs_none(nova, tmp_path):
    folder, declared = nova
    assert reshard("convert", folder, tmp_path / "run", "--to", "dcp", "--architecture", declared).code == 0
    (tmp_path / "run" / DECLARATION).unlink()
    assert f"next      reshard convert {tmp_path / 'run'} out --to hf" in reshard("inspect", tmp_path / "run").out


# ---- n20, n23: places ----


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("inspect", "https://huggingface.co/ORG/NAME"), 6, "Give hf://ORG/NAME, or the folder that `hf download ORG/NAME"),
        (("inspect", "https://huggingface.co/ORG/NAME/tree/v2/sub"), 6, "Give hf://ORG/NAME@v2,"),
        (("inspect", "https://hf.co/ORG/NAME/blob/main/config.json"), 6, "Give hf://ORG/NAME,"),
        (("convert", LLAMA, "/proc/out", "--to", "hf"), 5, "/proc/out: cannot be created: /proc takes no new files"),
    ],
)
def test_a_place_that_cannot_be_read_or_written_is_named(arguments, code, told):
    shown = reshard(*arguments)
    assert shown.code == code and told in shown.err


def test_what_hub_addresses_need_is_one_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    shown = reshard("inspect", "hf://ORG/NAME")
    assert shown.code == 6 and "hf:// paths need fsspec and huggingface_hub" in shown.err and "pip install 'reshard[hub]'" in shown.err


# ---- polish ----


def test_numbers_are_said_once(tmp_path):
    shutil.copy(LLAMA / "config.json", tmp_path / "70b.json")
    assert reshard("estimate", tmp_path / "70b.json").out.splitlines()[0] == "74,016 parameters on 1 GPU: one rank"
    assert "lacks 58.83 kB" in reshard("degrees", LLAMA / "config.json", "--gpu-memory", "100KB", "--tp", 1).out
    assert "  format " in reshard("formats").out.splitlines()[0]


# ---- U1 to U12: the rows of the tables ----


def test_a_keyword_with_a_slip_and_a_comparison_as_a_truth_value():
    import reshard as library

    for verb, given in (("open", {"modle": "x"}), ("doctor", {"deap": True}), ("stats", {"optimiser": True}), ("degrees", {"gpu_mem": 5})):
        with pytest.raises((TypeError, library.RequestError), match=r"did you mean|no option"):
            getattr(library, verb)(LLAMA, **given)
    for verb in (library.verify, library.diff):
        with pytest.raises(TypeError, match=r"\.equal"):
            bool(verb(LLAMA, LLAMA))


@pytest.mark.parametrize("command", ["inspect", "doctor", "convert"])
def test_a_missing_tokenizer_is_said(tmp_path, command):
    folder = tmp_path / "bare"
    folder.mkdir()
    for path in (*LLAMA.glob("*.safetensors"), LLAMA / "config.json"):
        shutil.copy(path, folder)
    more = (tmp_path / "out", "--to", "vllm", "--dry-run") if command == "convert" else ()
    assert "tokenizer (tokenizer.json, tokenizer.model, ...)" in reshard(command, folder, *more).out


def test_another_config_than_the_checkpoints_own_is_refused(tmp_path):
    config = json.loads((LLAMA / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}))
    shown = reshard("convert", LLAMA, tmp_path / "out", "--to", "vllm", "--tp", 2, "--model", tmp_path)
    assert shown.code == 2 and "num_attention_heads" in shown.err and not (tmp_path / "out").exists()
