"""Parts of a conversion: killed, restarted, run twice, run with another number of parts; always what one process writes."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.fixture_places import DCP, HF
from helpers.reshard_command import command, result_tree, tree
from helpers.reshard_command import reshard as run

import reshard
from reshard.engine.conversion import Conversion, destination_at
from reshard.engine.destinations.journal import read_journal
from reshard.errors import CheckpointError, RequestError, TargetError, TargetInUse
from reshard.plans.tasks import PartNumber
from reshard.storage.lock import Lock
from reshard.storage.staging import Staging
from reshard.verbs.convert import Sharing, conversion

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hostile"))

from interruptions import child, ended
from kills import experiment


@pytest.fixture
def plan():
    return reshard.plan(HF / "llama", to="vllm", tp=2)


@pytest.fixture
def whole(plan, tmp_path):
    reshard.convert(plan, tmp_path / "whole")
    return tmp_path / "whole"


def parts(plan, target, of, order=None):
    return [reshard.convert_part(plan, target, f"{i}/{of}") for i in order or range(of)]


@pytest.mark.parametrize("of", [1, 2, 3, 8, 40])
def test_the_last_part_completes_what_one_process_writes(plan, whole, tmp_path, of):
    found = parts(plan, tmp_path / "out", of, random.Random(of).sample(range(of), of))
    assert [each.complete for each in found] == [False] * (of - 1) + [True]
    assert result_tree(tmp_path / "out") == result_tree(whole)
    assert found[-1].result.fingerprint == reshard.fingerprint(HF / "llama")


def test_the_manifest_differs_in_time_and_command_only(plan, whole, tmp_path):
    parts(plan, tmp_path / "out", 3)
    one, many = (json.loads((folder / "reshard.json").read_text()) for folder in (whole, tmp_path / "out"))
    assert {key for key in one if one[key] != many[key]} <= {"time", "command", "digest"} and one.keys() == many.keys()


def test_nothing_has_its_final_name_before_all_parts_are_done(plan, tmp_path):
    parts(plan, tmp_path / "out", 3, [0, 2])
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".reshard"]
    with pytest.raises(CheckpointError, match=r"interrupted conversion to vllm, \d\d % done"):
        reshard.open(tmp_path / "out")


def test_a_part_that_runs_again_converts_nothing_again(plan, tmp_path, monkeypatch):
    from reshard.storage.files import LocalFiles

    first = reshard.convert_part(plan, tmp_path / "out", "0/3")
    reads = []
    monkeypatch.setattr(LocalFiles, "read_into", lambda *arguments: reads.append(arguments))
    again = reshard.convert_part(plan, tmp_path / "out", "0/3")
    assert first.resumed_bytes == 0 and again.resumed_bytes == again.nbytes == first.nbytes and reads == []


def test_another_number_of_parts_finishes_what_some_parts_have_begun(plan, whole, tmp_path):
    parts(plan, tmp_path / "out", 8, [1, 4, 6])
    found = parts(plan, tmp_path / "out", 3)
    assert found[-1].complete and sum(each.resumed_bytes for each in found) > 0
    assert result_tree(tmp_path / "out") == result_tree(whole)


def test_one_process_resumes_what_parts_have_begun_and_parts_what_one_has(plan, whole, tmp_path):
    parts(plan, tmp_path / "a", 4, [0, 3])
    reshard.convert(plan, tmp_path / "a", resume=True)
    from reshard.engine.pool import Effort

    running = conversion(plan, tmp_path / "b", effort=Effort(workers=1)).run()
    for _ in range(6):
        next(running)
    running.close()
    found = parts(plan, tmp_path / "b", 2)
    assert sum(each.resumed_bytes for each in found) > 0
    assert result_tree(tmp_path / "a") == result_tree(tmp_path / "b") == result_tree(whole)


def test_a_part_of_a_finished_conversion_has_nothing_to_do(plan, whole):
    before = {path: os.stat(whole / path).st_mtime_ns for path in tree(whole)}
    found = reshard.convert_part(plan, whole, "2/8", overwrite=True)
    assert found.complete and found.result.fingerprint.root == reshard.fingerprint(HF / "llama").root
    assert before == {path: os.stat(whole / path).st_mtime_ns for path in tree(whole)}


def test_a_part_removes_what_a_run_has_left_that_was_stopped_at_its_very_end(plan, whole):
    """The journal goes first, and then the rest of the work folder."""
    work = whole / ".reshard"
    (work / "parts").mkdir(parents=True)
    (work / "parts" / "x.jsonl").write_text("")
    (work / "lock").write_text(json.dumps({"pid": 1, "host": "node7", "started": "yesterday", "plan": plan.identity()}))
    assert reshard.convert_part(plan, whole, "0/2").complete
    assert not work.exists()


def test_parts_replace_an_older_checkpoint_when_all_are_done(plan, whole, tmp_path):
    reshard.convert(reshard.plan(HF / "qwen2", to="vllm", tp=4), tmp_path / "out")
    old = tree(tmp_path / "out")
    with pytest.raises(TargetError, match="exists"):
        reshard.convert_part(plan, tmp_path / "out", "0/2")
    assert tree(tmp_path / "out") == old
    reshard.convert_part(plan, tmp_path / "out", "0/2", overwrite=True)
    assert {path: data for path, data in tree(tmp_path / "out").items() if not path.startswith(".reshard")} == old
    reshard.convert_part(plan, tmp_path / "out", "1/2", overwrite=True)
    assert result_tree(tmp_path / "out") == result_tree(whole)


def test_another_plan_is_refused_while_parts_run(plan, tmp_path):
    running = conversion(plan, tmp_path / "out", sharing=Sharing(PartNumber(0, 2))).run()
    next(running)
    other = reshard.plan(HF / "llama", to="vllm", tp=4)
    for attempt in (
        lambda: reshard.convert_part(other, tmp_path / "out", "0/2", overwrite=True),
        lambda: reshard.convert(other, tmp_path / "out", overwrite=True),
        lambda: reshard.convert(plan, tmp_path / "out", overwrite=True),
    ):
        with pytest.raises(TargetInUse, match="another reshard is writing here: process"):
            attempt()
    running.close()
    assert reshard.convert_part(plan, tmp_path / "out", "1/2").complete is False


def test_a_part_waits_for_one_process_with_the_same_plan(plan, whole, tmp_path):
    lock = Lock(tmp_path / "out", plan.identity(), lambda: "")
    lock.acquire()
    pid = child(lambda: reshard.convert_part(plan, tmp_path / "out", "0/1"))
    time.sleep(1.2)  # longer than a run of another plan waits
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    lock.release()
    assert ended(pid) == 0 and result_tree(tmp_path / "out") == result_tree(whole)


def test_no_part_completes_the_target_while_another_one_still_writes(plan, whole, tmp_path):
    """The second run of a part may be slow: the files get their final names when it has left."""
    slow = conversion(plan, tmp_path / "out", sharing=Sharing(PartNumber(0, 2))).run()
    next(slow)
    assert not any(each.complete for each in parts(plan, tmp_path / "out", 2))
    assert not (tmp_path / "out" / "reshard.json").exists()
    for _ in slow:
        pass
    assert result_tree(tmp_path / "out") == result_tree(whole)


def test_finish_names_what_is_missing_and_completes_what_is_all_there(whole, tmp_path, monkeypatch):
    arguments = ["convert", HF / "llama", tmp_path / "out", "--to", "vllm", "--tp", 2]
    found = run(*arguments, "--finish")
    assert found.code == 4 and "no conversion with these options has begun here" in found.err
    assert run(*arguments, "--part", "0/2").out.endswith("not complete yet\n")
    found = run(*arguments, "--finish")
    assert found.code == 4 and "of 21 tasks are missing" in found.err and "model.layers" in found.err and "No part is running" in found.err
    monkeypatch.setattr(Conversion, "_complete", lambda self: None)  # as a part that is killed before it completes
    run(*arguments, "--part", "1/2")
    monkeypatch.undo()
    assert not (tmp_path / "out" / "reshard.json").exists()
    assert run(*arguments, "--finish").code == 0
    assert result_tree(tmp_path / "out") == result_tree(whole)
    assert run(*arguments, "--finish").code == 0, "it may be repeated"


def replaced(path, change):
    """A file that is copied over itself, in a new inode, with its time and length. change: whether a byte of each tensor changes."""
    stamps, content = os.stat(path), bytearray(path.read_bytes())
    for at in range(8000, len(content), 60):
        content[at] ^= change
    path.with_name("new").write_bytes(content)
    os.replace(path.with_name("new"), path)
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))


def test_a_source_that_changes_between_the_parts_and_keeps_its_time_is_not_mixed(tmp_path):
    """Whichever part runs last finds it, also where it has other blocks than the first."""
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    reshard.convert_part(reshard.plan(source, to="vllm", tp=2), tmp_path / "out", "0/2")
    replaced(source / "model.safetensors", 1)
    for part in ("1/2", "0/2", "0/1"):
        with pytest.raises(TargetError, match="although the lengths and times of its files are the same"):
            reshard.convert_part(reshard.plan(source, to="vllm", tp=2), tmp_path / "out", part)
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".reshard"]


def test_parts_that_see_other_inodes_of_the_same_bytes_share_a_conversion(whole, tmp_path):
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    for part in range(4):
        found = reshard.convert_part(reshard.plan(source, to="vllm", tp=2), tmp_path / "out", f"{part}/4")
        replaced(source / "model.safetensors", 0)
    assert found.complete and result_tree(tmp_path / "out") == result_tree(whole)


def test_a_source_that_changes_between_the_parts_is_refused(tmp_path):
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    plan = reshard.plan(source, to="vllm", tp=2)
    reshard.convert_part(plan, tmp_path / "out", "0/2")
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="was written while"):
        reshard.convert_part(plan, tmp_path / "out", "1/2")
    with pytest.raises(TargetError):
        reshard.convert_part(reshard.plan(source, to="vllm", tp=2), tmp_path / "out", "1/2")
    assert not (tmp_path / "out" / "reshard.json").exists()


def test_the_command_that_finishes_parts_names_no_part(tmp_path):
    run("convert", HF / "llama", tmp_path / "out", "--to", "vllm", "--part", "0/2")
    assert read_journal(tmp_path / "out").header.command().endswith("--to vllm --resume`")
    plan = reshard.plan(HF / "llama", to="vllm")
    assert sum(destination_at(str(tmp_path / "none")).missing(plan, plan.identity()).values()) == plan.totals().copied


def test_the_command_line_takes_the_part_from_the_launcher(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        found = run("convert", HF / "llama", tmp_path / "out", "--to", "vllm", "--tp", 2, "--part", "auto", "--json")
        assert found.code == 0 and found.document["part"] == f"{rank}/2" and found.document["complete"] == (rank == "1")
    assert result_tree(tmp_path / "out") == result_tree(whole)
    assert run("convert", HF / "llama", tmp_path / "out", "--to", "vllm", "--part", "0/2", "--finish").code == 2


def test_eight_processes_at_once(whole, tmp_path):
    arguments = ("convert", HF / "llama", tmp_path / "out", "--to", "vllm", "--tp", 2)
    running = [subprocess.Popen(command(*arguments, "--part", f"{i}/8"), stdout=-1, stderr=-1, text=True) for i in range(8)]
    ended_ = [(process.communicate(), process.returncode) for process in running]
    assert [code for _, code in ended_] == [0] * 8, ended_
    assert result_tree(tmp_path / "out") == result_tree(whole)


@pytest.mark.parametrize("seed", [0, 1])
def test_parts_that_are_killed_at_random_moments_never_leave_a_wrong_byte(plan, whole, tmp_path, seed):
    """tests/parts/kills.py is the long form."""
    old = reshard.plan(HF / "qwen2", to="vllm", tp=4) if seed else None
    randomness, kills = random.Random(seed), 0
    for attempt in range(20):  # on a busy machine the parts may end before the first kill
        kills += experiment(plan, result_tree(whole), tmp_path / f"out-{attempt}", randomness, kills=5, old=old).total()
        if kills:
            break
    assert kills >= 1


def test_a_journal_that_claims_a_block_of_another_plan_is_not_believed(plan, tmp_path):
    """The header says which plan the journals of parts belong to; without it, none counts."""
    reshard.convert_part(plan, tmp_path / "out", "0/2")
    (tmp_path / "out" / ".reshard" / "journal.jsonl").unlink()
    assert read_journal(tmp_path / "out") is None
    found = reshard.convert_part(plan, tmp_path / "out", "0/2")
    assert found.resumed_bytes == 0
    assert reshard.convert_part(plan, tmp_path / "out", "1/2").complete


def test_a_share_of_the_lock_shows_as_a_running_conversion(plan, tmp_path):
    running = conversion(plan, tmp_path / "out", sharing=Sharing(PartNumber(0, 2))).run()
    next(running)
    assert "a conversion is running here" in str(read_journal(tmp_path / "out").refusal())
    running.close()
    assert "an interrupted conversion" in str(read_journal(tmp_path / "out").refusal())


def test_parts_of_a_checkpoint_with_replicas_compare_them(tmp_path):
    source = reshard.open(DCP / "fsdp2" / "checkpoint", model=DCP / "fsdp2" / "model")
    plan = reshard.plan(source, to="dcp", dp=2, optimizer=True)
    reshard.convert(plan, tmp_path / "one")
    parts(plan, tmp_path / "parts", 5)
    assert result_tree(tmp_path / "one") == result_tree(tmp_path / "parts")


def test_a_staged_file_is_never_read_by_its_writers(plan, tmp_path, monkeypatch):
    """On NFS, a client that may read a file writes whole pages, also the bytes of others on them."""
    seen = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *rest, **named: (seen.append((str(path), flags)), real(path, flags, *rest, **named))[1]
    )
    reshard.convert_part(plan, tmp_path / "out", "0/2")
    flags = [flags for path, flags in seen if path.endswith(".safetensors") and str(tmp_path) in path]
    assert flags and all(each & os.O_ACCMODE == os.O_WRONLY for each in flags)


def test_usage_of_parts_in_python(plan, tmp_path):
    with pytest.raises(RequestError, match="I/N"):
        reshard.convert_part(plan, tmp_path / "out", "first")
    with pytest.raises(RequestError, match="alone"):
        reshard.convert_part(reshard.plan(HF / "llama", to="vllm", tp=2, only={"tp": 1}), tmp_path / "out", "0/2")
    assert not (tmp_path / "out").exists() and Staging(tmp_path / "out").journal.exists() is False and signal.SIGKILL == 9


def test_a_part_waits_for_an_owner_that_has_not_said_yet_who_it_is(tmp_path):
    """On a busy machine a part may take the whole lock, and be stopped before it has written its name into the file."""
    (tmp_path / ".reshard").mkdir()
    descriptor = os.open(tmp_path / ".reshard" / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    threading.Timer(1.0, os.close, (descriptor,)).start()
    lock = Lock(tmp_path, "the plan", str)
    lock.acquire_share()
    assert json.loads((tmp_path / ".reshard" / "lock").read_bytes())["plan"] == "the plan"
    lock.give_up()
