"""No option is ignored without a word: what matches nothing, names nothing or changes nothing is an error that says what was meant."""

import json
import shutil
from importlib import import_module

import click
import pytest
from helpers.fixture_places import DCP, FIXTURES, HF
from helpers.reshard_command import reshard, tree

import reshard as library
from reshard.canonical.content import Selection
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.quantities import parse_count, parse_size

COMMANDS, LazyGroup = (getattr(import_module("reshard.cli.main"), name) for name in ("COMMANDS", "LazyGroup"))
LLAMA = HF / "llama"
FSDP2, FSDP2_MODEL = DCP / "fsdp2" / "checkpoint", DCP / "fsdp2" / "model"
OUT = "no-such-target"


def refused(*arguments):
    """The message of a command line that is refused as wrong usage or as unsupported."""
    result = reshard(*arguments)
    assert result.code in (2, 6) and result.out == "" and "Traceback" not in result.err
    return result.err


def convert(*options, source=LLAMA, to="hf"):
    return refused("convert", source, OUT, "--to", to, *options)


# ---- globs ----


@pytest.mark.parametrize(
    "options, message",
    [
        (("--exclude", "*nrom*"), "--exclude '*nrom*' matches none of 21 tensor names. Did you mean '*norm*', which matches 5 names?"),
        (("--include", "q_proj"), "Did you mean '*q_proj*', which matches 2 names?"),
        (("--include", "*q_proj*", "--include", "*Embed_tokns*"), "Did you mean '*embed_tokens*', which matches 1 name?"),
        (("--dtype", "fp32", "--keep-dtype", "*nrom*"), "--keep-dtype '*nrom*' matches none"),
        (("--keep-dtype", "*norm*"), "--keep-dtype '*norm*' without --dtype"),
    ],
)
def test_a_glob_that_matches_nothing_is_an_error_with_the_nearest(options, message):
    assert message in convert(*options)


def test_globs_count_in_every_command_that_takes_them():
    for command in (("fingerprint", LLAMA), ("verify", LLAMA, LLAMA), ("plan", LLAMA, "--to", "hf"), ("roundtrip", LLAMA, "--to", "hf")):
        assert "--exclude '*nrom*' matches none" in refused(*command, "--exclude", "*nrom*")
    assert "'*norm*', which matches 5" in refused("inspect", LLAMA, "--tensor", "*nrom*")
    for source in (LLAMA, FSDP2):
        arguments = ("--model", FSDP2_MODEL) if source == FSDP2 else ()
        assert "--keep-dtype '*nrom*' matches" in refused("degrees", source, *arguments, "--dtype", "fp16", "--keep-dtype", "*nrom*")


def test_verify_accepts_a_glob_that_matches_one_side(tmp_path):
    assert reshard("convert", LLAMA, tmp_path / "out", "--to", "hf", "--exclude", "lm_head*").code == 0
    assert reshard("verify", LLAMA, tmp_path / "out", "--exclude", "lm_head*").code == 0


def test_one_glob_may_be_a_text_in_python():
    for options in ({"exclude": "*norm*"}, {"include": "*norm*"}):
        assert library.plan(LLAMA, to="hf", **options).content.names
    opened = library.open(LLAMA)
    assert {name for name in opened.tensors() if "norm" in name} == set(opened.tensors(Selection(include="*norm*")))
    assert library.verify(opened, opened, selection=Selection(exclude="*mlp*")).equal
    assert len(library.plan(LLAMA, to="hf", dtype="fp32", keep_dtype="*norm*").routes) == 21
    with pytest.raises(RequestError, match=r"'\*nrom\*', .*|`exclude=` '\*nrom\*' matches none"):
        opened.tensors(Selection(exclude="*nrom*"))


def test_a_bare_config_keeps_its_own_type_where_it_is_kept(tmp_path):
    shutil.copy(LLAMA / "config.json", tmp_path)
    weights = [
        library.degrees(tmp_path, to="vllm", tp=(1,), **options).rows[0].fullest.weights
        for options in ({}, {"dtype": "fp32", "keep_dtype": "*"}, {"dtype": "fp32", "keep_dtype": "*norm*"}, {"dtype": "fp32"})
    ]
    assert weights[0] == weights[1] < weights[2] < weights[3]


# ---- sizes ----


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("convert", LLAMA, OUT, "--to", "hf", "--max-shard-size", "5"), "Did you mean 5GB? To mean that many bytes, write 5B."),
        (("convert", LLAMA, OUT, "--to", "hf", "--memory", "3"), "--memory 3: the unit is missing. Did you mean 3GB?"),
        (("degrees", LLAMA, "--gpu-memory", "80"), "Did you mean 80GB?"),
        (("degrees", LLAMA, "--gpu-memory", "81559"), "Did you mean 81559MB?"),
        (("degrees", LLAMA, "--gpu-memory", "80GiB", "--reserve", "4"), "Did you mean 4GB?"),
        (("degrees", LLAMA, "--gpu-memory", "0"), "--gpu-memory 0"),
        (("estimate", "--parameters", "7"), "Did you mean 7B?"),
        (("estimate", "--parameters", "7B", "--link", "50"), "Did you mean 50GB?"),
        (("convert", LLAMA, OUT, "--to", "hf", "--memory", "0"), "--memory of 0 bytes is too little"),
        (("convert", LLAMA, OUT, "--to", "hf", "--workers", "0"), "--workers"),
    ],
)
def test_a_size_that_makes_no_sense_is_an_error(arguments, message):
    assert message in refused(*arguments)


def test_sizes_with_a_unit_and_large_ones_are_taken():
    assert [parse_size(text, "--x") for text in ("5B", "20kB", "0", "1048576", "1.5GiB")] == [5, 20_000, 0, 1 << 20, 3 << 29]
    assert [parse_count(text, "--x") for text in ("7B", "61728", 7)] == [7_000_000_000, 61_728, 7]
    with pytest.raises(RequestError, match="at least one thread"):
        library.fingerprint(LLAMA, workers=0)


# ---- stages ----


@pytest.mark.parametrize("to", ["vllm", "trtllm", "megatron", "megatron-dist"])
def test_more_stages_than_layers_are_refused(to):
    message = convert("--pp", "9", to=to)
    assert "2 layers" in message and "9" in message


def test_a_stage_without_layers_is_listed_as_refused():
    assert "2 layers on 9 stages" in reshard("degrees", LLAMA, "--tp", "1", "--pp", "1,9").out
    with pytest.raises(RequestError, match="1 layer on 2 stages"):
        library.plan(HF / "qwen2", to="vllm", pp=2)


# ---- options that change nothing ----


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("verify", LLAMA, LLAMA, "--model", "nosuch"), "--model nosuch is not used"),
        (("verify", LLAMA, LLAMA, "--vocab-size", "5"), "--vocab-size does not apply"),
        (("verify", FSDP2, LLAMA, "--model", "nosuch"), "There is no file or directory 'nosuch'"),
        (("convert", LLAMA, OUT, "--to", "hf", "--vocab-size", "5", "--dry-run"), "Only fsdp-dtensor, megatron, megatron-dist need it"),
        (("convert", LLAMA, OUT, "--to", "megatron", "--plain-optimizer"), "--plain-optimizer without --optimizer"),
        (("convert", LLAMA, OUT, "--to", "megatron", "--experts", "grouped"), "a llama model has no experts"),
        (("convert", LLAMA, OUT, "--to", "megatron", "--etp", "1"), "a llama model has no experts"),
        (("degrees", LLAMA, "--gpu-memory-utilization", "0.5"), "Add --gpu-memory"),
        (("estimate", LLAMA, "--flash-attention"), "--flash-attention changes nothing here"),
        (("estimate", LLAMA, "--recompute", "full"), "Add --seq-len N"),
        (("estimate", "--parameters", "7B", "--architecture", "llama"), "--architecture changes nothing here"),
        (("estimate", "--parameters", "7B", "--gpus", "6", "--tp", "4"), "Use a multiple of 4 GPUs"),
        (("roundtrip", LLAMA, "--to", "hf", "--work", "nosuch"), "Add --materialize"),
        (("architectures", "llama", "--format", "hf"), "Add --start CKPT"),
    ],
)
def test_an_option_that_changes_nothing_is_an_error(arguments, message):
    assert message in refused(*arguments)


@pytest.mark.parametrize("options", [("--weights", "master"), ("--vocab-size", "5"), ("--model", "x")])
def test_a_bare_config_has_no_weights_to_choose(options, tmp_path):
    shutil.copy(LLAMA / "config.json", tmp_path)
    assert f"{options[0]} does not apply" in refused("degrees", tmp_path, *options)


# ---- did you mean ----


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("inspct", LLAMA), "Did you mean 'inspect'? `reshard --help`"),
        (("convert", LLAMA, OUT, "--to", "hf", "--weigths", "model"), "Did you mean '--weights'? `reshard convert --help`"),
        (("convert", LLAMA, OUT, "--to", "vlm"), "Unknown format 'vlm'. Did you mean vllm? Known: consolidated, dcp, deepspeed, "),
        (("inspect", LLAMA, "--format", "safetensor"), "Known: consolidated, dcp, dcp-safetensors,"),
        (("convert", LLAMA, OUT, "--to", "hf", "--dtype", "bfloat"), "Did you mean bfloat16? Known: bf16, fp16, fp32, fp64, fp8 and "),
        (("convert", LLAMA, OUT, "--to", "hf", "--architecture", "lama"), "Did you mean llama?"),
        (("completion",), "Choose from: bash, zsh, fish."),
    ],
)
def test_the_nearest_known_word_is_named(arguments, message):
    assert message in refused(*arguments)


def test_only_what_works_is_proposed():
    message = convert(to="pt2")
    assert "fsdp-local" not in message and "dcp-safetensors" not in message
    message = convert("--dtype", "int8")
    assert "int" not in message.replace("int8", "", 1).replace("floating-point", "") and "complex" not in message


def test_python_names_the_nearest_keyword_and_tensor():
    with pytest.raises(RequestError, match=r"no option 'max_shard_sise'. Did you mean max_shard_size"):
        library.plan(LLAMA, to="hf", max_shard_sise=5)
    view = library.open(LLAMA).tensors()
    with pytest.raises(KeyError, match=r"Did you mean model.norm.weight"):
        view["model.norm.wieght"]
    assert "model.norm.wieght" not in view and view.get("model.norm.wieght") is None


def test_the_help_is_shown_line_by_line_without_a_command():
    shown = reshard()
    assert shown.code == 2 and shown.err.startswith("Usage: reshard") and max(map(len, shown.err.splitlines())) < 100


def test_help_says_what_the_command_does_with_tensors():
    assert "Also compare the optimizer state." in reshard("verify", "--help").out
    assert "Digest only tensors whose names match." in reshard("fingerprint", "--help").out


def test_a_range_is_a_list_of_sizes():
    assert reshard("degrees", LLAMA, "--tp", "2-4", "--pp", "1", "--json").document["degrees"][0]["tp"] == 2
    assert "this command lays out one size" in convert("--tp", "2-4", to="vllm")


# ---- paths ----


@pytest.mark.parametrize(
    "path, message",
    [
        ("nonsense://bucket/step-10", "nonsense:// is not a known kind of path"),
        ("file:///data/x", "Give the path /data/x"),
        ("meta-llama/Llama-3.1-8B", "`hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B`"),
        (HF / "lama", f"Did you mean {HF / 'llama'}?"),
        (LLAMA / "config.json", f"Give the directory {LLAMA}"),
        (FSDP2 / "__0_0.distcp", f"Give the directory {FSDP2}"),
    ],
)
def test_a_path_that_is_no_checkpoint_leads_to_one(path, message):
    assert message in refused("inspect", path)


def test_nothing_is_written_to_a_web_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "can be read, and not written" in refused("convert", LLAMA, "https://host/out", "--to", "hf")
    assert list(tmp_path.iterdir()) == []


# ---- the config ----


@pytest.fixture
def run(tmp_path):
    """A run as trainers write it: the config and the tokenizer once, beside the checkpoints."""
    shutil.copytree(FSDP2, tmp_path / "step-2")
    shutil.copy(FSDP2_MODEL / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_the_config_of_the_parent_directory_is_used_and_named(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    done = reshard("convert", run / "step-2", out, "--to", "vllm", "--tp", "2")
    assert done.code == 0 and f"so {run}/config.json is used; --model DIR names another one" in done.out
    assert (out / "tokenizer.json").read_text() == "{}"
    assert reshard("convert", FSDP2, tmp_path / "same", "--to", "vllm", "--tp", "2", "--model", run).code == 0
    written = [{name: data for name, data in tree(folder).items() if "reshard." not in name} for folder in (out, tmp_path / "same")]
    assert written[0] == written[1]
    for command in (("inspect", run / "step-2"), ("degrees", run / "step-2", "--tp", "1", "--pp", "1")):
        assert "config.json is used" in reshard(*command).out
    monkeypatch.chdir(run / "step-2")
    assert "so ../config.json is used" in reshard("inspect", ".").out


def test_only_a_models_config_counts_and_a_wrong_one_is_named(run):
    (run / "config.json").write_text('{"lr": 0.1}')
    assert "is used" not in reshard("inspect", run / "step-2").out
    message = refused("convert", run / "step-2", OUT, "--to", "vllm")
    assert "in the checkpoint or in its parent directory" in message
    (run / "config.json").write_text("[")
    assert reshard("inspect", run / "step-2").code == 0
    shutil.copy(HF / "qwen3" / "config.json", run)
    result = reshard("convert", run / "step-2", OUT, "--to", "vllm")
    assert result.code != 0 and f"so {run}/config.json is used; --model DIR names another one" in result.err


def test_architectures_stand_in_for_the_model_type_and_both_are_filled_in(tmp_path):
    config = json.loads((LLAMA / "config.json").read_text())
    for missing, kept in (("model_type", "architectures"), ("architectures", "model_type")):
        folder = tmp_path / missing
        shutil.copytree(LLAMA, folder)
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != missing}))
        for to in ("hf", "vllm"):
            done = reshard("convert", folder, folder / ".." / f"{missing}-{to}", "--to", to)
            assert done.code == 0 and "added to config.json" in done.out and missing in done.out
            written = json.loads((tmp_path / f"{missing}-{to}" / "config.json").read_text())
            assert written[missing] == config[missing] and written[kept] == config[kept]
    assert "llama, 74,016 parameters: 2 layers" in reshard("inspect", tmp_path / "model_type").out
    assert library.fingerprint(tmp_path / "model_type").root == library.fingerprint(LLAMA).root


def test_every_built_in_declaration_names_the_class_of_its_fixture():
    from reshard.models.lookup import built_in_model_types, find_architecture

    for folder in sorted(path for path in HF.iterdir() if path.name in built_in_model_types()):
        named = json.loads((folder / "config.json").read_text())["architectures"]
        assert [find_architecture(folder.name).class_name] == named
    assert all(find_architecture(model_type).class_name for model_type in built_in_model_types())


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path):
    shutil.copytree(LLAMA, tmp_path / "m")
    config = json.loads((LLAMA / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "model_type": "llama9"}))
    message = convert(source=tmp_path / "m", to="vllm")
    assert "'llama9' is not declared" in message and "Did you mean llama?" in message
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "model_type": None, "architectures": None}))
    for message in (convert(source=tmp_path / "m", to="vllm"), refused("estimate", tmp_path / "m")):
        assert "no model_type" in message and "--architecture NAME" in message and "The architecture None" not in message


# ---- what a target cannot take ----


def test_a_cast_to_fp8_makes_no_scales():
    for to in ("vllm", "sglang", "trtllm"):
        assert "needs a scale for each FP8 weight" in convert("--dtype", "fp8", to=to)
    assert "without scales" in reshard("convert", LLAMA, OUT, "--to", "hf", "--dtype", "fp8", "--dry-run").out


@pytest.mark.parametrize("to", ["deepspeed", "universal"])
def test_a_format_with_optimizer_state_names_those_without(to):
    message = convert(to=to)
    assert f"--to {to} always writes optimizer state" in message and "--optimizer:" not in message
    assert "dcp, fsdp, fsdp-dtensor, hf, megatron" in message


def test_drops_name_the_kind_of_their_example():
    out = reshard("convert", FSDP2, OUT, "--model", FSDP2_MODEL, "--to", "hf", "--dry-run").out
    assert "for example moment1 of model.embed_tokens.weight" in out


def test_formats_in_one_folder_are_chosen_by_latest_or_asked_for_with_the_commands(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / "deepspeed" / "z2-tied" / "checkpoint", run)
    tag = (run / "latest").read_text().strip()
    universal = FIXTURES / "universal" / "z2-tied" / "checkpoint"
    shutil.copytree(next(path.parent for path in universal.rglob("zero") if path.is_dir()), run / f"{tag}_universal")
    (run / "latest_universal").write_text(f"{tag}_universal")
    shown = reshard("inspect", run).out
    assert (
        "format    deepspeed" in shown and f"{tag}_universal beside it is a universal checkpoint, which --format universal reads" in shown
    )
    assert "format    universal" in reshard("inspect", run, "--format", "universal").out
    assert "recognized by --format" in reshard("inspect", run, "--format", "universal").out
    shutil.copytree(LLAMA, run, dirs_exist_ok=True)
    assert "--component . is the model in the folder itself" in refused("fingerprint", run)
    (run / "latest").unlink()
    shutil.rmtree(run / tag)
    message = refused("inspect", run)
    assert f"`reshard inspect {run} --format hf` or `reshard inspect {run} --format universal`" in message


def test_files_of_a_rank_without_a_manifest_are_vllms_with_a_note(tmp_path):
    assert reshard("convert", LLAMA, tmp_path / "out", "--to", "sglang", "--tp", "2").code == 0
    assert "format    sglang" in reshard("inspect", tmp_path / "out").out
    for path in tmp_path.glob("out/reshard.*"):
        path.unlink()
    assert "If SGLang wrote them, use --format sglang" in reshard("inspect", tmp_path / "out").out


def test_a_folder_of_one_file_is_described_in_the_singular(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    assert "its only entry is notes.txt" in refused("inspect", tmp_path)


def test_errors_of_what_is_not_supported_have_their_own_class():
    with pytest.raises(UnsupportedError):
        library.open("nonsense://bucket/x")


# ---- options that are given twice ----


def test_an_option_that_takes_one_value_is_refused_twice_in_every_command():
    tried = 0
    for name in COMMANDS:
        command = LazyGroup().get_command(None, name)
        for option in command.params:
            if isinstance(option, click.Option) and not (option.is_flag or option.multiple or option.count):
                flag = max(option.opts, key=len)
                with pytest.raises(click.UsageError, match=f"Option '{option.opts[0]}' takes one value, and is given 2 times: 1, 2"):
                    command.make_context(name, [flag, "1", "SOURCE", f"{flag}=2", "TARGET"])
                tried += 1
    assert tried > 200


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("verify", LLAMA, "--step", "100", LLAMA, "--step", "200"), "'--step' takes one value, and is given 2 times: 100, 200"),
        (("diff", LLAMA, "--step", "100", LLAMA, "--step", "200"), "Two paths and two steps are given. Write RUN@A RUN@B"),
        (("diff", LLAMA, "--step", "1", "--step", "2", "--step", "3"), "1, 2, 3: two steps are compared"),
        (("diff", LLAMA), "Missing argument 'RIGHT'. Write RUN@A RUN@B"),
        (("diff", LLAMA, "--step", "1"), "--step 1 chooses a checkpoint, and no step or model lies below this place"),
        (("convert", LLAMA, OUT, "--to", "hf", "--adapter-config", "a", "--adapter-config", "b"), "'--adapter-config' takes one"),
        (
            ("convert", LLAMA, OUT, "--to", "vllm", "-tp", "2", "--tensor-parallel-size=4"),
            "'--tp' takes one value, and is given 2 times: 2, 4",
        ),
        (
            ("convert", LLAMA, OUT, "--to", "hf", "--average", "0.5,0.5", "--average"),
            "'--average' takes one value, and is given 2 times: 0.5,",
        ),
    ],
)
def test_what_is_given_twice_is_named_with_both_values(arguments, message):
    assert message in refused(*arguments)


def test_globs_are_given_twice_and_of_a_switch_the_last_word_counts(tmp_path):
    switches = ("--overwrite", "--overwrite", "--progress", "--no-progress")
    assert reshard("convert", LLAMA, tmp_path / "out", "--to", "hf", "--include", "*norm*", "--include", "*embed*", *switches).code == 0
    assert reshard("convert", "--to", "hf", "--to", "vllm", "--help").code == 0
