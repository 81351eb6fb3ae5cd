"""A conversion that is stopped, at any moment and in any way, leaves no half file and goes on where it was."""

import errno
import json
import os
import random
import signal
import subprocess
import time

import numpy as np
import pytest
from command import command, result_tree, tree
from places import HF
from sampled import sampled

import reshard
from reshard.containers import safetensors
from reshard.errors import RequestError
from reshard.geometry.dtypes import from_safetensors
from reshard.verbs.convert import conversion
from reshard.verbs.request import Effort

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

    read = []
    real = LocalFiles.read_into
    monkeypatch.setattr(LocalFiles, "read_into", lambda self, path, at, buffer: (read.append(len(buffer)), real(self, path, at, buffer))[1])
    printed = reshard.convert(plan, target, resume=True)
    total = sum(route.source.nbytes for route in plan.routes)
    assert sum(read) == total - sum(plan.routes[i].source.nbytes for i, _ in noted)
    assert result_tree(target) == result_tree(whole) and printed.fingerprint.root == reshard.fingerprint(HF / "llama").root


def test_a_block_is_noted_only_after_its_bytes_are_on_the_disk(plan, tmp_path, monkeypatch):
    from reshard.engine.journal import Journal
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
    with pytest.raises(RequestError, match="--resume"):
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
    with pytest.raises(RequestError, match=r"disk is full: [\d,]+ bytes are needed in all.*--resume"):
        reshard.convert(plan, target, workers=1)
    assert final_names(target) == [] and written_blocks(target)
    monkeypatch.setattr(os, "pwrite", real)
    reshard.convert(plan, target, resume=True)
    assert reshard.verify(HF / "llama", target).equal
