"""reshard clean: it finds what interrupted runs left, says what they were, and removes only that."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest
from helpers.fixture_places import HF
from helpers.reshard_command import reshard, tree

import reshard as library
from reshard.engine.pool import Effort
from reshard.verbs.convert import conversion


@pytest.fixture
def runs(tmp_path):
    """A folder for targets."""
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def begun(target, **options):
    """A conversion that has written a block, and goes on when it is asked to."""
    blocks = conversion(library.plan(HF / "llama", to="vllm", tp=2), target, effort=Effort(workers=1), **options).run()
    next(blocks)
    return blocks


def interrupted(target, **options):
    begun(target, **options).close()
    return target / ".reshard"


def clean(runs, *options):
    return {folder["path"]: folder for folder in reshard("clean", runs, *options, "--json").document["folders"]}


def test_it_lists_and_removes_nothing_without_yes(runs):
    work = interrupted(runs / "deep" / "out")
    before = tree(runs)
    shown = reshard("clean", runs)
    assert shown.code == 0 and str(work) in shown.out and "vllm" in shown.out and "% done" in shown.out
    assert "Nothing was removed" in shown.out and "--resume" in shown.out and tree(runs) == before


def test_with_yes_it_removes_them_and_nothing_else(runs):
    work = interrupted(runs / "a" / "out")
    shutil.copytree(HF / "llama", runs / "b")
    (runs / "a" / "out" / "notes.txt").write_text("mine")
    others = {path: content for path, content in tree(runs).items() if ".reshard" not in path}
    (removed,) = clean(runs, "--yes").values()
    assert removed["removed"] and removed["path"] == str(work) and not work.exists()
    assert tree(runs) == others and (runs / "a" / "out").is_dir()
    assert clean(runs) == {}


def test_the_old_checkpoint_under_an_interrupted_overwrite_stays(runs):
    out = runs / "out"
    library.convert(library.plan(HF / "qwen3", to="hf"), out)
    before = tree(out)
    interrupted(out, existing="overwrite")
    assert clean(runs, "--yes")[str(out / ".reshard")]["removed"] and tree(out) == before
    library.verify(out).raise_if_different()


def test_it_says_size_age_and_run(runs):
    work = interrupted(runs / "out")
    week_ago = time.time() - 7 * 86400
    for path in (*work.rglob("*"), work):
        os.utime(path, (week_ago, week_ago))
    (found,) = clean(runs).values()
    assert found["state"] == "resumable" and found["target"] == str(runs / "out") and "vllm" in found["run"]
    assert abs(found["age_seconds"] - 7 * 86400) < 60 and "resume" in found["command"] and not found["removed"]
    assert found["bytes"] == sum(path.stat().st_blocks * 512 for path in work.rglob("*") if path.is_file()) > 0
    assert "7 days old" in reshard("clean", runs).out


def test_a_running_conversion_is_never_touched(runs):
    blocks = begun(runs / "out")
    before = tree(runs).keys()
    found = clean(runs, "--yes")[str(runs / "out" / ".reshard")]
    assert found["state"] == "running" and not found["removed"] and f"process {os.getpid()}" in found["run"]
    assert tree(runs).keys() == before, "its content grows meanwhile"
    for _ in blocks:
        pass
    library.verify(runs / "out").raise_if_different()


def test_a_run_that_begins_in_between_is_not_touched(runs):
    module = __import__("importlib").import_module("reshard.verbs.leftovers")
    interrupted(runs / "out")
    (found,) = module.leftovers(runs, pytest.fail)
    blocks = begun(runs / "out", existing="resume")
    with pytest.raises(library.RequestError, match="another reshard is writing"):
        module.remove(found)
    for _ in blocks:
        pass
    library.verify(runs / "out").raise_if_different()


def test_a_target_whose_files_were_being_replaced_must_be_finished(runs):
    work = interrupted(runs / "out")
    with open(work / "journal.jsonl", "a") as journal:
        journal.write(json.dumps({"commit": "begun"}) + "\n")
    before = tree(runs)
    found = clean(runs, "--yes")[str(work)]
    assert found["state"] == "half-replaced" and not found["removed"] and found["command"] and tree(runs) == before


@pytest.mark.parametrize("content", [{"notes.txt": b"mine"}, {"lock": b"mine"}, {"lock": b"{}"}, {"journal.jsonl": b"mine\n"},
                                     {"journal.jsonl": b'{"identity": "x"}\n'}, {"lock": b""}])  # fmt: skip
def test_what_reshard_did_not_make_stays(runs, content):
    folder = runs / "a" / ".reshard"
    folder.mkdir(parents=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    before = tree(runs)
    assert clean(runs, "--yes")[str(folder)]["state"] == "unknown" and tree(runs) == before


def test_a_run_that_was_killed_before_its_journal_was_written(runs):
    work = interrupted(runs / "out")
    (work / "journal.jsonl").unlink()
    (work / "lock").write_text(json.dumps({"pid": 4711, "host": "node7", "started": "2026-11-22 14:02:11 UTC", "plan": "x"}))
    found = clean(runs)[str(work)]
    assert found["state"] == "not-begun" and "process 4711 on node7" in found["run"] and found["command"] is None
    assert clean(runs, "--yes")[str(work)]["removed"] and not work.exists()
    (runs / "empty" / ".reshard").mkdir(parents=True)
    assert clean(runs, "--yes")[str(runs / "empty" / ".reshard")]["removed"] and not (runs / "empty" / ".reshard").exists()


def test_links_are_not_followed(runs, tmp_path):
    outside = interrupted(tmp_path / "outside" / "out")
    (runs / "to-folder").symlink_to(tmp_path / "outside")
    (runs / "a").mkdir()
    (runs / "a" / ".reshard").symlink_to(outside)
    inside = interrupted(runs / "b" / "out")
    (inside / "link").symlink_to(tmp_path / "outside")
    (inside / "link-to-file").symlink_to(outside / "journal.jsonl")
    before = tree(tmp_path / "outside")
    assert list(clean(runs, "--yes")) == [str(inside)] and not inside.exists()
    assert tree(tmp_path / "outside") == before and (runs / "a" / ".reshard").is_symlink()


def test_it_needs_a_directory(tmp_path):
    assert reshard("clean", tmp_path / "absent").code == 2
    assert reshard("clean", HF / "llama" / "config.json").code == 2
    assert reshard("clean", "nonsense://bucket/runs").code == 6


def test_a_folder_that_cannot_be_read_is_named_and_the_others_are_cleaned(runs, monkeypatch):
    interrupted(runs / "a")
    (runs / "b").mkdir()
    scandir = os.scandir

    def refuse(path="."):
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    shown = reshard("clean", runs, "--yes")
    assert shown.code == 0 and "1 work folder removed" in shown.out and f"{runs / 'b'}: cannot be read" in shown.err
