"""`reshard inspect RUN`: the steps of a run, at any depth and in any format, and which of them are complete."""

import json
import os
import shutil

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard

from reshard.opening.run_folders import find_steps

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


LOST = [
    (VERL, "global_step_{}", ("latest_checkpointed_iteration.txt", "300"), "model_world_size_5_rank_1.pt", "file is not there"),
    (
        MEGATRON / "iter_0000002",
        "iter_{:07}",
        ("latest_checkpointed_iteration.txt", "300"),
        "mp_rank_00_001",
        "folder of tensor-parallel rank",
    ),
    (
        DEEPSPEED / "global_step2",
        "global_step{}",
        ("latest", "global_step300"),
        "*_0_mp_rank_00_optim_states.pt",
        "of 2 data-parallel ranks, 0 has no file",
    ),
    (DCP, "step-{}", ("", ""), "__1_0.distcp", "__1_0.distcp"),
    (HF / "llama-sharded", "checkpoint-{}", ("", ""), "model-00001-of-*.safetensors", "model-00001-of-0000"),
]


@pytest.mark.parametrize(("source", "folder", "tracker", "lost", "words"), LOST, ids=[row[1] for row in LOST])
def test_a_file_that_was_lost_after_the_save_is_named(tmp_path, monkeypatch, source, folder, tracker, lost, words):
    for step in (100, 200, 300):
        copy(source, tmp_path / folder.format(step), seconds=1000)
    if tracker[0]:
        (tmp_path / tracker[0]).write_text(tracker[1])
    assert "3 checkpoints of 3 steps, 3 complete" in reshard("inspect", tmp_path).out
    (path,) = (tmp_path / folder.format(200)).glob(lost)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    out = reshard("inspect", tmp_path).out
    row, note = (line for line in out.splitlines() if line.endswith("  incomplete") or line.startswith("  note  "))
    assert "3 checkpoints of 3 steps, 2 complete" in out and folder.format(200) in row and words in note, out
    monkeypatch.setenv("COLUMNS", "80")
    assert words in " ".join(reshard("inspect", tmp_path).out.split()), "a narrow terminal has no room for the column, and says it, too"
    reason = reshard("inspect", tmp_path, "--json").document["steps"][1]["reason"]
    assert words in reason and str(tmp_path) not in reason


def test_names_that_count_their_files_tell_what_the_only_step_has_lost(tmp_path):
    for part in ("actor", "critic"):
        copy(VERL, tmp_path / "rl" / "global_step_7" / part, seconds=1000)
    copy(HF / "llama-sharded", tmp_path / "sft" / "checkpoint-9", seconds=1000)
    lost = ("rl/global_step_7/critic/model_world_size_5_rank_4.pt", "sft/checkpoint-9/model-00003-of-00003.safetensors")
    for path in lost:
        (tmp_path / path).unlink()
    listed = reshard("inspect", tmp_path, "--json").document["steps"]
    assert [each["complete"] for each in listed] == [True, False, False]
    assert all(path.rpartition("/")[2] in each["reason"] for path, each in zip(lost, listed[1:], strict=True))


def test_the_newest_step_is_chosen_even_if_it_has_lost_a_file(tmp_path):
    """To convert the step before it in silence would be worse than an error."""
    for step in (1, 2):
        copy(VERL, tmp_path / f"global_step_{step}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "global_step_2" / "model_world_size_5_rank_4.pt").unlink()
    refused = reshard("convert", tmp_path, tmp_path / "out", "--to", "hf", "--step", "latest")
    assert refused.code == 3 and "model_world_size_5_rank_4.pt: the file is not there" in refused.err
    assert "2 steps, 1 complete" in reshard("convert", tmp_path, tmp_path / "out", "--to", "hf").err


def test_a_run_that_has_lost_nothing_is_not_opened(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        copy(VERL, tmp_path / f"global_step_{step}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    monkeypatch.setattr("reshard.opening.open.open", None)
    assert "3 complete" in reshard("inspect", tmp_path).out


def test_ranks_whose_data_replicas_hold_may_be_missing(tmp_path):
    """The run went on with fewer files, which hold all of the data."""
    hsdp = FIXTURES / "fsdp" / "hsdp" / "checkpoint"
    for step in (1, 2, 3):
        copy(hsdp, tmp_path / f"global_step_{step}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    last = max((tmp_path / "global_step_3").glob("model_world_size_*_rank_*.pt"))
    last.unlink()
    assert "3 complete" in reshard("inspect", tmp_path).out


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
