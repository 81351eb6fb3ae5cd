"""-h is one screen; --help shows all, with --to X what X takes; options and formats have the names that other programs gave them."""

import re
from importlib import import_module

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard

from reshard.adapter import registry

COMMANDS = import_module("reshard.cli.main").COMMANDS
LLAMA = HF / "llama"


@pytest.mark.parametrize("name", ["convert", "plan", "watch", "roundtrip", "digests"])
def test_the_short_help_of_a_command_with_many_options_is_one_screen(name):
    done = reshard(name, "-h")
    lines = done.out.rstrip("\n").split("\n")
    assert done.code == 0 and len(lines) <= 24 and max(map(len, lines)) <= 80
    assert "--to FORMAT" in done.out and re.search(r"--help shows all \d\d options", done.out)
    full = reshard(name, "--help").out
    assert len(full.split("\n")) > 90 and "--exclude" in full and "--exclude" not in done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_both(name):
    short, full = reshard(name, "-h"), reshard(name, "--help")
    assert short.code == full.code == 0
    assert short.out.count("\n") <= 40 and " ..." not in re.sub(r"fp16 \.\.\.|fp8 \.\.\.|// \.\.\.", "", short.out)


def test_every_command_stands_in_one_group():
    groups = import_module("reshard.cli.main").GROUPS
    assert sorted(name for names in groups.values() for name in names) == sorted(COMMANDS)
    shown = reshard("--help").out
    assert all(f"{title}:\n" in shown for title in groups)


def test_a_missing_target_is_named_with_the_likeliest_command():
    lost = reshard("convert", LLAMA)
    assert lost.code == 2 and "TARGET is missing" in lost.err and f"reshard convert {LLAMA} out --to hf" in lost.err
    asked = reshard("convert", LLAMA, "out")
    assert asked.code == 2 and f"`reshard convert {LLAMA} out --to hf`" in asked.err
    assert "no file or directory 'nosuch'" in reshard("convert", "nosuch", "mean", "--to", "hf", "--last", "5", "--average").err


def test_plan_takes_the_usual_names_of_an_output(tmp_path):
    for number, option in enumerate(("-o", "--out", "--output", "--plan-out")):
        assert reshard("plan", LLAMA, "--to", "vllm", option, tmp_path / str(number)).code == 0
        assert (tmp_path / str(number)).stat().st_size > 100
    assert "--plan-out FILE" in reshard("plan", "-h").out


def test_help_with_a_format_shows_what_it_takes():
    of_vllm = reshard("convert", "--to", "vllm", "--help").out
    assert "--engine-version" in of_vllm and "--max-shard-size" in of_vllm
    assert not re.search(r"--(vp|etp|lora-alpha|rotary-rows|torch-version)\b", of_vllm)
    of_megatron = reshard("convert", "--to=torch_dist", "--help").out
    assert "--vp" in of_megatron and "--engine-version" not in of_megatron
    everything = reshard("convert", "--to", "nonsense", "--help").out
    assert "--vp" in everything and "--engine-version" in everything


def test_a_command_shows_no_option_that_cannot_apply():
    shown = reshard("digests", "--help").out
    assert "--engine-version" in shown and not re.search(r"--(vp|etp|lora-alpha|rotary-rows|torch-version|like)\b", shown)
    assert not re.search(r"--(dp|max-shard-size)\b", shown), "what ranks hold has neither data-parallel ranks nor files"
    assert "--lora-alpha" in reshard("roundtrip", "--help").out


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--tensor-parallel-size", 2), ("--tensor-parallel", 2), ("--tensor-model-parallel-size", 2), ("-tp", 2),
    ],
)  # fmt: skip
def test_names_of_vllm_and_megatron(option, value):
    expected = reshard("plan", LLAMA, "--to", "vllm", "--tp", value).out
    assert reshard("plan", LLAMA, "--to", "vllm", option, value).out == expected
    assert reshard("plan", LLAMA, "--to", "vllm", f"{option}={value}").out == expected
    assert option not in reshard("plan", "--help").out.split()


def test_pipeline_and_expert_sizes_have_other_names_too():
    expected = reshard("plan", LLAMA, "--to", "vllm", "--pp", 2).out
    assert reshard("plan", LLAMA, "--to", "vllm", "--pipeline-parallel-size", 2).out == expected
    assert "for TP 2" not in expected and expected.startswith("hf -> vllm for ")


def test_an_option_of_another_command_is_not_guessed():
    assert "No such option '--tp'. `reshard verify --help`" in reshard("verify", "--tp", 2, "a", "b").err
    assert "Did you mean '--include'?" in reshard("verify", "--inclde", 2, "a", "b").err


@pytest.mark.parametrize(
    ("name", "format"),
    [("huggingface", "hf"), ("safetensors", "hf"), ("torch_dist", "megatron-dist"), ("tensorrt-llm", "trtllm"), ("nemo", "megatron-dist")],
)
def test_formats_have_other_names(name, format):
    done = reshard("plan", LLAMA, "--to", name, "--json")
    assert done.code == 0, done.err
    assert done.document["target"]["format"] == format
    assert name in reshard("formats", format).out


def test_a_format_that_is_only_read_is_found_by_its_other_name():
    refused = reshard("plan", LLAMA, "--to", "pytorch")
    assert refused.code == 2 and "--to pytorch: the format pt is read, not written. Formats that are written: " in refused.err


def test_no_other_name_is_used_twice():
    every = [name for found in registry.formats().values() for name in (found.name, *found.other_names)]
    assert len(every) == len(set(every))


def test_a_missing_format_is_asked_for_with_examples():
    for words in (("convert", LLAMA, "out"), ("roundtrip", LLAMA), ("digests", LLAMA)):
        done = reshard(*words)
        assert done.code == 2 and "such as --to vllm, --to hf or --to megatron; `reshard formats` lists all" in done.err


def test_ls_and_info_are_inspect():
    assert reshard("ls", LLAMA).out == reshard("info", LLAMA).out == reshard("inspect", LLAMA).out


def test_several_checkpoints():
    one, two = reshard("inspect", LLAMA).out, reshard("inspect", HF / "gpt2").out
    assert reshard("inspect", LLAMA, HF / "gpt2").out == f"{one}\n{two}"
    document = reshard("inspect", LLAMA, HF / "gpt2", "--json").document
    assert [each["path"] for each in document["checkpoints"]] == [str(LLAMA), str(HF / "gpt2")]
    assert reshard("inspect", LLAMA, HF / "gpt2", "--html", "x.html").code == 2
    prints = [reshard("fingerprint", path).out for path in (LLAMA, HF / "gpt2")]
    assert reshard("fingerprint", LLAMA, HF / "gpt2").out == "".join(prints)
    document = reshard("fingerprint", LLAMA, HF / "gpt2", "--json").document
    assert [each["fingerprint"][:19] for each in document["checkpoints"]] == [line.split()[0] for line in prints]


def test_fingerprints_have_12_digits_unless_asked():
    short = reshard("fingerprint", LLAMA).out.split()[0]
    assert len(short.partition(":")[2]) == 12
    for flag in ("-v", "-q"):
        full = reshard("fingerprint", LLAMA, flag).out.split()[0]
        assert full.startswith(short) and len(full.partition(":")[2]) == 64
    assert reshard("fingerprint", LLAMA, "--json").document["fingerprint"] == full


def test_no_error_lists_more_than_five_names():
    for words in (
        ("convert", LLAMA, "out", "--to", "zzz"),
        ("convert", LLAMA, "out", "--to", "fsdp-local"),
        ("convert", LLAMA, "out", "--to", "hf", "--architecture", "zzz"),
        ("architectures", "zzz"),
        ("plan", LLAMA, "--to", "hf", "--dtype", "zzz"),
    ):
        err = reshard(*words).err
        assert re.search(r"\w and \d+ more", err) and len(err) < 500, err


def test_an_interrupted_inspection_does_not_speak_of_resume():
    interrupted = import_module("reshard.cli.main")._is_resumable
    assert interrupted(["convert", "a", "b", "--to", "hf"])
    assert not interrupted(["inspect", "a"]) and not interrupted(["convert", "a", "b", "--to", "hf", "--dry-run"])


def test_a_dcp_run_is_still_found_by_its_first_word():
    assert reshard("formats", "torch_distt").err.count("Did you mean torch_dist?") == 1
    assert reshard("inspect", FIXTURES / "dcp" / "fsdp2" / "checkpoint", "--format", "distcp").code == 0
