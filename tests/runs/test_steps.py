"""`reshard inspect RUN`: the steps of a run, at any depth and in any format, and which of them are complete."""

import json
import os
import shutil

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard

from reshard.requests.run_folders import find_steps

DCP = FIXTURES / "dcp" / "fsdp2" / "checkpoint"
MEGATRON = FIXTURES / "megatron" / "llama-tied-pp2" / "checkpoint"
DEEPSPEED = FIXTURES / "deepspeed" / "z3-bf16" / "checkpoint"
VERL = FIXTURES / "fsdp" / "verl" / "checkpoint"


def aged(folder, seconds):
    """Let all files of a folder be as old as this."""
    import time

    then = time.time() - seconds
    for path in folder.rglob("*"):
        os.utime(path, (then, then))
    return folder


def copy(source, target, seconds=0):
    shutil.copytree(source, target)
    return aged(target, seconds)


def found(run, **options):
    return [(step.number, step.part, step.format, step.complete) for step in find_steps(run, **options)]


def test_torchtitan_writes_its_metadata_last(tmp_path):
    for step in (10, 20, 30):
        copy(DCP, tmp_path / "outputs" / "checkpoint" / f"step-{step}")
    (tmp_path / "outputs" / "checkpoint" / "step-30" / ".metadata").unlink()
    aged(tmp_path / "outputs" / "checkpoint" / "step-30", 1000)
    assert found(tmp_path) == [(10, "", "dcp", True), (20, "", "dcp", True), (30, "", "dcp", False)]


def test_megatrons_tracker_names_the_newest(tmp_path):
    for step in (2, 4, 6):
        copy(MEGATRON / "iter_0000002", tmp_path / "a" / f"iter_{step:07}")
    (tmp_path / "a" / "latest_checkpointed_iteration.txt").write_text("4")
    assert found(tmp_path) == [(2, "", "megatron", True), (4, "", "megatron", True), (6, "", "megatron", False)]
    assert "names 4" in find_steps(tmp_path)[0].completeness.reason


def test_deepspeeds_latest_names_the_newest(tmp_path):
    for step in (2, 4):
        copy(DEEPSPEED / "global_step2", tmp_path / f"global_step{step}")
    (tmp_path / "latest").write_text("global_step2")
    assert found(tmp_path) == [(2, "", "deepspeed", True), (4, "", "deepspeed", False)]
    (tmp_path / "latest").write_text("global_step4")
    assert found(tmp_path)[1] == (4, "", "deepspeed", True)


def test_actor_and_critic_are_parts_of_a_step(tmp_path):
    for part in ("actor", "critic"):
        copy(VERL, tmp_path / "global_step_7" / part)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert found(tmp_path) == [(7, "actor", "fsdp", True), (7, "critic", "fsdp", True)]


def test_without_a_marker_nothing_may_have_changed_for_a_while(tmp_path):
    copy(HF / "llama", tmp_path / "checkpoint-5", seconds=100)
    copy(HF / "llama", tmp_path / "checkpoint-6", seconds=5)
    assert found(tmp_path) == [(5, "", "hf", True), (6, "", "hf", False)]
    assert found(tmp_path, quiet=1) == [(5, "", "hf", True), (6, "", "hf", True)]


def test_a_link_and_what_reshard_is_writing_are_no_further_steps(tmp_path):
    copy(HF / "llama", tmp_path / "step-5", seconds=100)
    (tmp_path / "step-9").symlink_to("step-5")
    (tmp_path / "step-7" / ".reshard").mkdir(parents=True)
    copy(HF / "llama", tmp_path / "step-6", seconds=100)
    (tmp_path / "step-6" / ".reshard").mkdir()
    assert found(tmp_path) == [(5, "", "hf", True), (6, "", "hf", False), (7, "", None, False)]


def test_a_tracker_that_names_nothing_is_not_believed(tmp_path):
    copy(HF / "llama", tmp_path / "step-5", seconds=100)
    (tmp_path / "latest").write_bytes(b"\xff\x00 what" * 10)
    assert found(tmp_path) == [(5, "", "hf", True)]
    (tmp_path / "latest").write_text("9" * 5000)
    assert found(tmp_path) == [(5, "", "hf", True)]


def test_formats_may_be_mixed(tmp_path):
    copy(DCP, tmp_path / "pretrain" / "step-10")
    copy(HF / "llama", tmp_path / "sft" / "deep" / "checkpoint-3", seconds=100)
    assert found(tmp_path) == [(3, "", "hf", True), (10, "", "dcp", True)]


def test_the_table_and_the_document(tmp_path):
    copy(DCP, tmp_path / "step-10", seconds=7200)
    copy(DCP, tmp_path / "step-20")
    (tmp_path / "step-20" / ".metadata").unlink()
    out = reshard("inspect", tmp_path).out
    assert "2 checkpoints of 2 steps, 1 complete" in out and "2 h" in out and f"reshard inspect {tmp_path}/step-10" in out
    document = reshard("inspect", tmp_path, "--json").document
    assert [(each["step"], each["complete"]) for each in document["steps"]] == [(10, True), (20, False)]
    json.dumps(document)


@pytest.mark.parametrize("path", [DCP, MEGATRON, DEEPSPEED, HF / "llama", MEGATRON / "iter_0000002"], ids=lambda path: path.name)
def test_a_checkpoint_is_not_a_run(path):
    assert reshard("inspect", path).out.split("\n")[0].find("checkpoints of") == -1


def test_a_folder_of_nothing_is_refused_as_before(tmp_path):
    (tmp_path / "a").mkdir()
    assert "no known format" in reshard("inspect", tmp_path).err.lower()
    assert reshard("inspect", tmp_path / "none").code == 2


def test_zarr_with_its_common_file_is_one_checkpoint():
    (step,) = find_steps(FIXTURES / "megatron_versions" / "zarr-bf16")
    assert (step.part, step.format, step.complete) == ("", "megatron-dist", True)
