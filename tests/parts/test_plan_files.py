"""Plan files: what is read back runs as the plan does; and whatever a plan file holds, it is refused in one paragraph or harmless."""

import json
import os
import shutil
import struct
import sys
import tracemalloc
from pathlib import Path

import pytest
from helpers.fixture_places import DCP, FIXTURES, HF
from helpers.reshard_command import reshard as run
from helpers.reshard_command import result_tree

import reshard
from reshard.errors import CheckpointError, UnsupportedError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hostile"))

from plan_files import Experiment, campaign, put_together, taken_apart

PLANS = {
    "columns and rows": (HF / "llama", None, {"to": "vllm", "tp": 4}),
    "padded vocabulary": (FIXTURES / "dcp" / "fsdp2" / "checkpoint", DCP / "fsdp2" / "model", {"to": "vllm", "tp": 2}),
    "cast and sharded": (HF / "qwen2", None, {"to": "hf", "dtype": "fp16", "max_shard_size": 100_000}),
    "tied, optimizer, lazy framing": (FIXTURES / "dcp" / "fsdp2" / "checkpoint", None, {"to": "fsdp", "dp": 2, "optimizer": True}),
}


@pytest.fixture(params=PLANS)
def case(request):
    source, model, options = PLANS[request.param]
    return source, reshard.plan(reshard.open(source, model=model), **options)


def test_a_plan_file_runs_as_the_plan(case, tmp_path):
    source, plan = case
    reshard.save_plan(plan, tmp_path / "plan")
    found = reshard.load_plan(tmp_path / "plan", source)
    assert found.identity() == plan.identity() and found.totals() == plan.totals() and found.drops == plan.drops
    assert reshard.save_plan(found, tmp_path / "again") and (tmp_path / "again").read_bytes() == (tmp_path / "plan").read_bytes()
    assert found.tasks() == plan.tasks()
    reshard.convert(plan, tmp_path / "one")
    for part in ("0/2", "1/2"):
        reshard.convert_part(found, tmp_path / "two", part)
    assert result_tree(tmp_path / "one") == result_tree(tmp_path / "two")
    one, two = (json.loads((tmp_path / name / "reshard.json").read_text()) for name in ("one", "two"))
    assert {key for key in one if one[key] != two[key]} <= {"time", "digest"}


def test_the_source_is_checked_with_what_reshard_recorded_about_it(tmp_path):
    """A change between the samples of a plan file, of which a source of reshard's own has the digests."""
    reshard.convert(reshard.plan(HF / "llama", to="hf"), tmp_path / "source")
    reshard.save_plan(reshard.plan(tmp_path / "source", to="vllm", tp=2), tmp_path / "plan")
    path = tmp_path / "source" / "model.safetensors"
    stamps, content = os.stat(path), bytearray(path.read_bytes())
    content[6000] ^= 1  # 16 times 4,096 of 126,000 bytes are sampled, the first up to 4,096 and the second from about 8,100
    path.write_bytes(content)
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"does not match reshard\.json"):
        reshard.convert(reshard.load_plan(tmp_path / "plan", tmp_path / "source"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_line_plans_once(tmp_path):
    assert run("plan", HF / "llama", "--to", "vllm", "--tp", 2, "--plan-out", tmp_path / "plan").code == 0
    assert run("convert", HF / "llama", tmp_path / "one", "--to", "vllm", "--tp", 2).code == 0
    for part in ("0/2", "1/2"):
        assert run("convert", HF / "llama", tmp_path / "two", "--plan", tmp_path / "plan", "--part", part).code == 0
    assert result_tree(tmp_path / "one") == result_tree(tmp_path / "two")
    assert run("convert", HF / "llama", tmp_path / "one", "--plan", tmp_path / "plan", "--if-changed").out.count("unchanged")
    shown = run("convert", HF / "llama", tmp_path / "three", "--plan", tmp_path / "plan", "--dry-run")
    assert shown.code == 0 and "hf -> vllm for TP 2" in shown.out and not (tmp_path / "three").exists()
    for wrong in (["--to", "vllm"], ["--tp", "2"], ["--include", "*"]):
        found = run("convert", HF / "llama", tmp_path / "three", "--plan", tmp_path / "plan", *wrong)
        assert found.code == 2 and wrong[0] in found.err and not (tmp_path / "three").exists()
    os.mkfifo(tmp_path / "fifo")
    for wrong, code in (("nothing", 2), ("one", 2), ("fifo", 3)):
        assert run("convert", HF / "llama", tmp_path / "three", "--plan", tmp_path / wrong).code == code, wrong


def test_another_source_and_a_changed_one_are_refused(tmp_path):
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    reshard.save_plan(reshard.plan(source, to="hf"), tmp_path / "plan")
    with pytest.raises(CheckpointError, match="were planned"):
        reshard.load_plan(tmp_path / "plan", HF / "qwen2")
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="was written since"):
        reshard.load_plan(tmp_path / "plan", source)
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        reshard.load_plan(tmp_path / "plan", source)


def test_a_source_with_other_bytes_and_the_same_length_and_time_is_refused(tmp_path):
    """As after a copy that keeps times. In a file of up to 64 KiB every byte is sampled."""
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    reshard.save_plan(reshard.plan(source, to="hf"), tmp_path / "plan")
    shutil.copytree(source, tmp_path / "copy")
    assert reshard.load_plan(tmp_path / "plan", tmp_path / "copy"), "another place, other inodes, the same bytes"
    path = source / "model.safetensors"
    stamps, content = os.stat(path), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    with pytest.raises(CheckpointError, match="other content, although its length and time are the same"):
        reshard.load_plan(tmp_path / "plan", source)


DECLARED = """language: 2
model_type: llama
extends: llama
"""


def test_the_small_files_that_options_name_need_not_be_on_the_other_machine(tmp_path):
    """The model's folder and the declaration are gone when the plan is run."""
    model = shutil.copytree(DCP / "fsdp2" / "model", tmp_path / "model")
    (tmp_path / "mine.yaml").write_text(DECLARED)
    options = ("--to", "vllm", "--tp", 2, "--model", model, "--architecture", tmp_path / "mine.yaml")
    assert run("plan", PLANS["padded vocabulary"][0], *options, "--plan-out", tmp_path / "plan").code == 0
    assert run("convert", PLANS["padded vocabulary"][0], tmp_path / "one", *options).code == 0
    shutil.rmtree(model)
    (tmp_path / "mine.yaml").unlink()
    result = run("convert", PLANS["padded vocabulary"][0], tmp_path / "two", "--plan", tmp_path / "plan")
    assert result.code == 0, result.err
    assert result_tree(tmp_path / "one") == result_tree(tmp_path / "two")


@pytest.mark.parametrize("option", ["like", "adapter_config"])
def test_an_option_that_names_another_folder_is_refused_as_such(option, tmp_path):
    """Otherwise each machine would read what has that name there."""
    content = put_together(*with_keyword(tmp_path, option, str(HF / "llama")))
    (tmp_path / "plan").write_bytes(content)
    with pytest.raises(UnsupportedError, match=f"`{option}=` names a folder"):
        reshard.load_plan(tmp_path / "plan", HF / "llama")


def with_keyword(tmp_path, key, value):
    reshard.save_plan(reshard.plan(HF / "llama", to="hf"), tmp_path / "plan")
    metadata, order, attached = taken_apart((tmp_path / "plan").read_bytes())
    return metadata, {**order, "plan": {**order["plan"], key: value}}, attached


# ---- hostile plan files ----


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A plan file with attached files, and its source."""
    path = tmp_path_factory.mktemp("plan") / "plan"
    source, model = FIXTURES / "dcp" / "fsdp2" / "checkpoint", DCP / "fsdp2" / "model"
    reshard.save_plan(reshard.plan(reshard.open(source, model=model), to="vllm", tp=2), path)
    return path.read_bytes(), source


def test_forged_plan_files_are_refused_or_write_the_same_bytes(tmp_path):
    """tests/hostile/plan_files.py runs any number; docs/verification.md has the figures."""
    seen, bad = campaign(60, 29, tmp_path)
    assert not bad, bad
    assert seen["refused"] > 40 and seen["same bytes"]


def test_the_forgery_of_the_tests_is_accepted_when_nothing_is_changed(tmp_path):
    experiment = Experiment(tmp_path)
    for content, source, expected in experiment.honest:
        assert experiment.outcome(put_together(*taken_apart(content)), source, expected) == "same bytes"


def test_every_flipped_byte_is_found(written, tmp_path):
    content, source = written
    for at in [*range(60), *range(60, len(content), 31), len(content) - 1]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "plan").write_bytes(damaged)
        with pytest.raises((CheckpointError, UnsupportedError)):
            reshard.load_plan(tmp_path / "plan", source)


def test_every_truncation_is_found(written, tmp_path):
    content, source = written
    for length in [*range(0, 80, 7), *range(80, len(content), 101), len(content) - 1]:
        (tmp_path / "plan").write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            reshard.load_plan(tmp_path / "plan", source)
    (tmp_path / "plan").write_bytes(content + b"\0")
    with pytest.raises(CheckpointError):
        reshard.load_plan(tmp_path / "plan", source)


@pytest.mark.parametrize("change", [{"version": "1"}, {"version": "3"}, {"version": ""}])
def test_another_version_is_refused_as_such(written, tmp_path, change):
    content, source = written
    metadata, order, attached = taken_apart(content)
    (tmp_path / "plan").write_bytes(put_together({**metadata, **change}, order, attached))
    with pytest.raises(UnsupportedError, match="version"):
        reshard.load_plan(tmp_path / "plan", source)


def test_a_plan_of_another_version_of_reshard_that_plans_otherwise_is_refused_as_such(written, tmp_path):
    content, source = written
    metadata, order, attached = taken_apart(content)
    (tmp_path / "plan").write_bytes(put_together(metadata, {**order, "reshard": "0.0.1", "identity": "0" * 64}, attached))
    with pytest.raises(UnsupportedError, match=r"reshard 0\.0\.1 wrote it"):
        reshard.load_plan(tmp_path / "plan", source)


def test_what_a_plan_file_asks_for_takes_no_memory_out_of_proportion(tmp_path):
    """A target of many ranks in the order, and a header that claims what is not there."""
    source, (metadata, order, attached) = HF / "llama", with_keyword(tmp_path, "dp", 1 << 22)
    huge = {"__metadata__": {"kind": "reshard plan"}, "x": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}
    head = json.dumps(huge).encode()
    tracemalloc.start()
    order = {**order, "plan": {**order["plan"], "to": "fsdp"}}
    for forged in (put_together(metadata, order, attached), struct.pack("<Q", len(head)) + head):
        (tmp_path / "plan").write_bytes(forged)
        with pytest.raises(CheckpointError):
            reshard.load_plan(tmp_path / "plan", source)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["../x", "/tmp/reshard-x", "model/../../x", "model/a\0b", "model", "model/", "\ud800/x"])
def test_a_small_file_that_escapes_is_refused(written, tmp_path, name):
    content, source = written
    metadata, order, attached = taken_apart(content)
    (tmp_path / "plan").write_bytes(put_together(metadata, order, {**attached, name: b"x"}))
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError):
        reshard.load_plan(tmp_path / "plan", source)
    assert {path.name for path in tmp_path.iterdir()} == before
