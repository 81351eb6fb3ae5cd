"""A conversion that is stopped, at any moment and in any way, leaves no half file and goes on where it was."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import command, result_tree, tree
from helpers.sampled import sampled

import reshard
from reshard.containers import safetensors
from reshard.engine.pool import Effort
from reshard.errors import CheckpointError, RequestError, TargetError
from reshard.geometry.dtypes import from_safetensors
from reshard.verbs.convert import conversion

MEGABYTES = 96


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint that takes a moment: some tensors of random bytes, in the container's own framing."""
    folder = tmp_path_factory.mktemp("large")
    dtype = from_safetensors("BF16", where="test")
    shapes = [(f"layer.{i}.weight", dtype, (2048, 1024)) for i in range(MEGABYTES // 4)]
    frame = safetensors.frame(shapes, {"format": "pt"})
    data = np.random.default_rng(0).integers(0, 256, frame.nbytes - len(frame.header), dtype=np.uint8)
    (folder / "model.safetensors").write_bytes(frame.header + data.tobytes())
    return folder


OPTIONS = ("--to", "hf", "--max-shard-size", "20MB", "--workers", "1")


@pytest.fixture(scope="module")
def expected(large, tmp_path_factory):
    """What an undisturbed run writes."""
    target = tmp_path_factory.mktemp("expected") / "out"
    subprocess.run(command("convert", large, target, *OPTIONS), check=True, capture_output=True)
    return result_tree(target)


def final_names(target):
    return [path.name for path in target.iterdir() if path.name != ".reshard"] if target.exists() else []


@pytest.mark.parametrize("seed", sampled(range(8), 4))
def test_killed_at_any_moment_it_resumes_bit_exactly(large, expected, tmp_path, seed):
    target = tmp_path / "out"
    for attempt in range(3):
        process = subprocess.Popen(command("convert", large, target, *OPTIONS, "--resume"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        # From before anything is written until about the end.
        time.sleep(0.15 + random.Random(seed * 10 + attempt).random() * 0.45)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for path in target.glob("*.safetensors"):
            assert path.read_bytes() == expected[path.name], "a file under its final name is whole"
    found = subprocess.run(command("convert", large, target, *OPTIONS, "--resume"), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert result_tree(target) == expected


def stopped(plan, target, after):
    """Run a conversion and leave it after some blocks, as an interruption does."""
    running = conversion(plan, target, effort=Effort(workers=1)).run()
    for _ in range(after):
        next(running)
    running.close()


@pytest.fixture
def plan():
    return reshard.plan(HF / "llama", to="vllm", tp=2)


def written_blocks(target):
    lines = (target / ".reshard" / "journal.jsonl").read_text().splitlines()
    return [tuple(block[:2]) for line in lines for block in json.loads(line).get("blocks", ())]


@pytest.mark.parametrize("after", [1, 7, 20])
def test_what_is_finished_is_not_done_again(plan, tmp_path, after, monkeypatch):
    target, whole = tmp_path / "out", tmp_path / "whole"
    reshard.convert(plan, whole)
    stopped(plan, target, after)
    noted = written_blocks(target)
    assert len(noted) >= after and final_names(target) == []
    from reshard.storage.files import LocalFiles

    read, real = [], LocalFiles.read_into

    def counted(self, path, at, buffer):
        if self.folder == HF / "llama":
            read.append(len(buffer))
        real(self, path, at, buffer)

    monkeypatch.setattr(LocalFiles, "read_into", counted)
    printed = reshard.convert(plan, target, resume=True)
    total = sum(route.source.nbytes for route in plan.routes)
    assert sum(read) == total - sum(plan.routes[i].source.nbytes for i, _ in noted)
    assert result_tree(target) == result_tree(whole) and printed.fingerprint.root == reshard.fingerprint(HF / "llama").root


PADDED = {"to": "vllm", "tp": 2, "model": FIXTURES / "dcp" / "fsdp2" / "model"}


@pytest.mark.parametrize("at", [0, 9, 0.2, 0.5, 0.8, -1, "padding"])
def test_a_byte_that_changes_between_stop_and_resume_is_found(tmp_path, at):
    """In the header, in tensors and their replicas on both ranks, and in the padding of the vocabulary, which has no block."""
    plan = reshard.plan(FIXTURES / "dcp" / "fsdp2" / "checkpoint", **PADDED)
    reshard.convert(plan, tmp_path / "whole")
    for file in plan.layout.files:
        target = tmp_path / file.path.replace("/", "-")
        stopped(plan, target, len(plan.routes))
        staged = target / ".reshard" / file.path
        if at == "padding":
            where = next(each.byte_offset + 1 for each in plan.target_index.constants if each.path == file.path)
        else:
            where = int(at * file.nbytes) if isinstance(at, float) else at % file.nbytes
        content = bytearray(staged.read_bytes())
        content[where] ^= 1
        staged.write_bytes(content)
        result = reshard.convert(plan, target, resume=True)
        assert result_tree(target) == result_tree(tmp_path / "whole")
        assert not isinstance(at, float) or any("copied again" in note for note in result.notes)
    assert any(each.path == file.path for each in plan.target_index.constants), "the last rank is padded"


def test_a_byte_that_changes_while_files_get_their_names_is_told(plan, tmp_path, monkeypatch):
    """The first files have their names, so nothing is copied again."""
    target, real = tmp_path / "out", os.replace

    def replace(source, to):
        if list(target.glob("*.safetensors")):
            raise KeyboardInterrupt
        real(source, to)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        reshard.convert(plan, target)
    monkeypatch.setattr(os, "replace", real)
    for path in (next(target.glob("*.safetensors")), next((target / ".reshard").glob("*.safetensors"))):
        content = path.read_bytes()
        for at in (9, len(content) // 2, len(content) - 1):  # the header, a tensor, the padding of the vocabulary
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(TargetError, match=r"have changed since the interrupted run.*`overwrite=True`"):
                reshard.convert(plan, target, resume=True)
        path.write_bytes(content)
    reshard.convert(plan, target, resume=True)
    assert reshard.verify(HF / "llama", target).equal


@pytest.mark.parametrize("digest", ["00" * 32, "right"])
def test_a_forged_journal_gives_no_wrong_bytes_a_name(plan, tmp_path, digest):
    """It claims that all blocks are finished, and one that does not exist; the staged files hold zeros."""
    reshard.convert(plan, tmp_path / "whole")
    target = tmp_path / "out"
    stopped(plan, target, len(plan.routes))
    journal = target / ".reshard" / "journal.jsonl"
    header, *lines = map(json.loads, journal.read_text().splitlines())
    blocks = [[i, j, each if digest == "right" else digest] for line in lines for i, j, each in line["blocks"]]
    forged = {**lines[0], "blocks": [*blocks, [0, 99, "11" * 32]]}
    journal.write_text(json.dumps(header, separators=(",", ":")) + "\n" + json.dumps(forged) + "\n")
    for path in (target / ".reshard").glob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    printed = reshard.convert(plan, target, resume=True)
    assert result_tree(target) == result_tree(tmp_path / "whole")
    assert printed.fingerprint.root == reshard.fingerprint(HF / "llama").root


# ---- a source that changes and keeps the lengths and times of its files ----


def other_bytes(path, *, replaced):
    """Change a byte in the middle of a file, in place or in a new file of its name, and restore the times."""
    stamps, content = os.stat(path), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if replaced:
        path.rename(path.parent.with_name("old"))  # inside, it would go along
    path.write_bytes(content)
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))


def same_bytes(path):
    """Another inode, mode and change time."""
    shutil.copy2(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)
    path.chmod(0o600)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_source_that_changed_since_the_stop_is_not_mixed(tmp_path, replaced):
    source, target = shutil.copytree(HF / "llama", tmp_path / "source"), tmp_path / "out"
    stopped(reshard.plan(source, to="vllm", tp=2), target, 21)
    kept = source / "model.safetensors"
    shutil.copy2(kept, tmp_path / "kept")
    other_bytes(kept, replaced=replaced)
    before = tree(target)
    with pytest.raises(TargetError, match="the source has changed since the interrupted run, although the lengths and times"):
        reshard.convert(reshard.plan(source, to="vllm", tp=2), target, resume=True)
    assert {path: data for path, data in tree(target).items() if "lock" not in path} == {
        path: data for path, data in before.items() if "lock" not in path
    }, "what was done is kept for the source that it was made from"
    shutil.copy2(tmp_path / "kept", kept)
    result = reshard.convert(reshard.plan(source, to="vllm", tp=2), target, resume=True)
    assert reshard.verify(HF / "llama", target).equal and not result.notes


def test_a_source_that_was_copied_or_touched_since_the_stop_is_the_same(tmp_path):
    source, target = shutil.copytree(HF / "llama", tmp_path / "source"), tmp_path / "out"
    stopped(reshard.plan(source, to="vllm", tp=2), target, 10)
    same_bytes(source / "model.safetensors")
    reshard.convert(reshard.plan(source, to="vllm", tp=2), target, resume=True)
    assert reshard.verify(HF / "llama", target).equal


@pytest.mark.parametrize("replaced", [False, True])
def test_a_source_that_changes_during_the_run_and_keeps_its_time_is_an_error(tmp_path, replaced):
    source, target = shutil.copytree(HF / "llama", tmp_path / "source"), tmp_path / "out"
    running = conversion(reshard.plan(source, to="vllm", tp=2), target, effort=Effort(workers=1)).run()
    for _ in range(20):
        next(running)
    other_bytes(source / "model.safetensors", replaced=replaced)
    with pytest.raises(CheckpointError, match="was written while it was converted"):
        list(running)
    assert not target.exists()


def test_a_source_that_is_touched_during_the_run_is_compared_again(tmp_path):
    source, target = shutil.copytree(HF / "llama", tmp_path / "source"), tmp_path / "out"
    running = conversion(reshard.plan(source, to="vllm", tp=2), target, effort=Effort(workers=1)).run()
    next(running)
    same_bytes(source / "model.safetensors")
    list(running)
    assert reshard.verify(HF / "llama", target).equal


def test_a_block_is_noted_only_after_its_bytes_are_on_the_disk(plan, tmp_path, monkeypatch):
    from reshard.engine.destinations.journal import Journal
    from reshard.storage.staging import Staging

    happened = []
    sync, append = Staging.sync, Journal._append
    monkeypatch.setattr(Staging, "sync", lambda self: (happened.append("sync"), sync(self))[1])
    monkeypatch.setattr(
        Journal, "_append", lambda self, record: (happened.append("blocks" if "blocks" in record else "head"), append(self, record))[1]
    )
    stopped(plan, tmp_path / "out", 5)
    assert happened[0] == "head" and "blocks" in happened
    assert all(happened[i - 1] == "sync" for i, what in enumerate(happened) if what == "blocks")


def test_a_torn_last_line_of_the_journal_is_harmless(plan, tmp_path):
    stopped(plan, tmp_path / "out", 5)
    journal = tmp_path / "out" / ".reshard" / "journal.jsonl"
    journal.write_text(journal.read_text()[:-20])
    reshard.convert(plan, tmp_path / "out", resume=True)
    assert reshard.verify(HF / "llama", tmp_path / "out").equal


def test_another_conversion_is_not_resumed(plan, tmp_path):
    stopped(plan, tmp_path / "out", 5)
    before = tree(tmp_path / "out")
    for other in (reshard.plan(HF / "llama", to="vllm", tp=4), reshard.plan(HF / "mistral", to="vllm", tp=2)):
        with pytest.raises(RequestError, match="had other options"):
            reshard.convert(other, tmp_path / "out", resume=True)
    with pytest.raises(RequestError, match="`resume=True`"):
        reshard.convert(plan, tmp_path / "out")
    assert tree(tmp_path / "out") == before
    reshard.convert(plan, tmp_path / "out", overwrite=True)
    assert reshard.verify(HF / "llama", tmp_path / "out").equal


def test_resuming_what_is_finished_does_nothing(plan, tmp_path):
    printed = reshard.convert(plan, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert reshard.convert(plan, tmp_path / "out", resume=True).fingerprint.root == printed.fingerprint.root
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("first_line", ["", '{"identity":"98e4'])
def test_stopped_before_the_first_line_of_the_journal_was_whole_it_begins_anew(plan, tmp_path, first_line):
    (tmp_path / "out" / ".reshard").mkdir(parents=True)
    (tmp_path / "out" / ".reshard" / "journal.jsonl").write_text(first_line)
    reshard.convert(plan, tmp_path / "out", resume=True)
    reshard.convert(plan, tmp_path / "expected")
    assert result_tree(tmp_path / "out") == result_tree(tmp_path / "expected")


def test_resuming_where_nothing_is_begins(plan, tmp_path):
    reshard.convert(plan, tmp_path / "out", resume=True)
    assert reshard.verify(HF / "llama", tmp_path / "out").equal


@pytest.mark.parametrize("stop_after", range(6))
def test_stopped_while_files_get_their_names_it_resumes(plan, tmp_path, stop_after, monkeypatch):
    """A kill between two renames, made exact."""
    target = tmp_path / "out"
    real, count = os.replace, []

    def replace(source, to):
        if len(count) == stop_after:
            raise KeyboardInterrupt
        count.append(to)
        real(source, to)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        reshard.convert(plan, target)
        raise KeyboardInterrupt  # there are fewer files than that
    monkeypatch.setattr(os, "replace", real)
    reshard.convert(plan, target, resume=True)
    reshard.convert(plan, tmp_path / "whole")
    assert result_tree(target) == result_tree(tmp_path / "whole")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 40 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", place], capture_output=True, check=False).returncode:
        pytest.skip("a file system of a chosen size can only be mounted by root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_without_room_is_told_before_anything_is_written(large, small_disk):
    found = subprocess.run(command("convert", large, small_disk / "out", *OPTIONS), capture_output=True, text=True, check=False)
    assert found.returncode == 5 and "are needed" in found.stderr and "are free" in found.stderr
    assert f"{MEGABYTES * 1024 * 1024:,}"[:6] in found.stderr, "headers add a little to the weights"
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_loses_nothing(plan, tmp_path, monkeypatch):
    """Another program takes the space in between: the write fails, what is done is kept, and --resume goes on."""
    target, real, written = tmp_path / "out", os.pwrite, []

    def pwrite(descriptor, data, offset):
        if len(written) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(len(data))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(RequestError, match=r"disk is full: [\d,]+ bytes are needed in all.*`resume=True`"):
        reshard.convert(plan, target, workers=1)
    assert final_names(target) == [] and written_blocks(target)
    monkeypatch.setattr(os, "pwrite", real)
    reshard.convert(plan, target, resume=True)
    assert reshard.verify(HF / "llama", target).equal
