"""convert --if-changed: nothing where nothing has changed; a new result where anything has; and only what reshard wrote is replaced."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard, result_tree, tree

import reshard as library
from reshard.engine.destinations.journal import read_journal
from reshard.engine.pool import Effort
from reshard.verbs.convert import conversion


@pytest.fixture
def source(tmp_path):
    shutil.copytree(HF / "llama-sharded", tmp_path / "step", copy_function=shutil.copy2)
    return tmp_path / "step"


@pytest.fixture
def run(source, tmp_path):
    """Convert with --if-changed; returns whether the target was unchanged, after a check that it is what a new conversion would be."""

    def convert(*options, code=0, target=tmp_path / "out"):
        before = tree(target)
        usual = {"--to": "vllm", "--tp": 2}
        options = (*(word for name, text in usual.items() if name not in options for word in (name, text)), *options)
        result = reshard("convert", source, target, *options, "--if-changed", "--json")
        assert result.code == code, result.err
        if code:
            assert tree(target) == before
            return result
        fresh = tmp_path / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        assert reshard("convert", source, fresh, *options).code == 0
        assert result_tree(target) == result_tree(fresh)
        if result.document["unchanged"]:
            assert tree(target) == before
        return result.document["unchanged"]

    return convert


def test_the_second_run_does_nothing(run, source, tmp_path):
    assert run() is False
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert run() is True and run("--workers", 1) is True
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times
    shown = reshard("convert", source, tmp_path / "out", "--to", "vllm", "--tp", 2, "--if-changed")
    fingerprint = library.fingerprint(source).root
    assert shown.out == f"{tmp_path / 'out'}: unchanged, 2 files, 154 kB, fingerprint {fingerprint[:19]}\n"


def test_the_result_in_python_says_so(source, tmp_path):
    plan = library.plan(source, to="hf")
    first, second = (library.convert(plan, tmp_path / "out", if_changed=True) for _ in range(2))
    assert (first.unchanged, second.unchanged) == (False, True)
    assert second.files == first.files and second.fingerprint.root == first.fingerprint.root and second.dropped == first.dropped


def test_the_spelling_of_the_paths_does_not_matter(run, source, tmp_path, monkeypatch):
    assert run() is False
    monkeypatch.chdir(tmp_path)
    assert reshard("convert", "step", "./out/", "--to", "vllm", "--tp", 2, "--if-changed", "--json").document["unchanged"] is True


def touch(source):
    os.utime(next(source.glob("*.safetensors")), ns=(1, 10**18))


def add_a_tokenizer_file(source):
    (source / "tokenizer_config.json").write_text('{"a": 1}')


def change_the_config(source):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))


@pytest.mark.parametrize("change", [touch, add_a_tokenizer_file, change_the_config])
def test_a_changed_source_is_converted_again(run, source, change):
    assert run() is False and run() is True
    change(source)
    assert run() is False and run() is True


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "fp32"),
        ("--tp", 4),
        ("--max-shard-size", "50kB", "--to", "hf", "--tp", 1),
        ("--dtype", "fp16", "--keep-dtype", "*norm*"),
        ("--checksums",),
    ],
)
def test_other_options_are_a_change(run, options):
    assert run() is False
    assert run(*options) is False and run(*options) is True


def test_another_source_of_the_same_weights_is_a_change(run, source, tmp_path):
    assert run() is False
    shutil.copytree(source, tmp_path / "step-2", copy_function=shutil.copy2)
    other = reshard("convert", tmp_path / "step-2", tmp_path / "out", "--to", "vllm", "--tp", 2, "--if-changed", "--json")
    assert other.document["unchanged"] is False


def test_the_masters_instead_of_the_weights_are_a_change(tmp_path):
    case, arguments = FIXTURES / "deepspeed" / "z3-4", ("--to", "hf", "--dtype", "fp32", "--if-changed", "--json")
    for options, unchanged in (((), False), ((), True), (("--weights", "master"), False), (("--weights", "master"), True), ((), False)):
        result = reshard("convert", case / "checkpoint", tmp_path / "out", *arguments, *options)
        assert result.code == 0 and result.document["unchanged"] is unchanged


def test_another_of_two_equally_large_models_is_a_change(tmp_path):
    torch = pytest.importorskip("torch")
    weights = {f"{root}.layer.{i}.weight": torch.full((4, 4), float(i)) for root in ("actor", "critic") for i in range(3)}
    torch.save(weights, tmp_path / "model.pt")
    for root, unchanged in (("actor", False), ("actor", True), ("critic", False), ("critic", True)):
        result = reshard("convert", tmp_path / "model.pt", tmp_path / "out", "--to", "hf", "--root", root, "--if-changed", "--json")
        assert result.code == 0 and result.document["unchanged"] is unchanged


def remove(path):
    path.unlink()


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def overwrite_its_middle(path):
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * min(8192, path.stat().st_size // 2))  # The samples of a large file lie apart.


@pytest.mark.parametrize("damage", [remove, cut, overwrite_its_middle])
@pytest.mark.parametrize("name", ["model-rank-1-part-0.safetensors", "config.json", "reshard.digests"])
def test_a_damaged_target_is_written_again(run, tmp_path, damage, name):
    assert run() is False
    damage(tmp_path / "out" / name)
    assert run() is False and run() is True


def test_exchanged_rank_files_are_damage(run, tmp_path):
    assert run() is False
    one, two = sorted((tmp_path / "out").glob("*.safetensors"))
    one.rename(tmp_path / "aside"), two.rename(one), (tmp_path / "aside").rename(two)
    assert run() is False and run() is True


def test_a_target_that_reshard_did_not_write_is_never_replaced(run, tmp_path):
    shutil.copytree(HF / "llama", tmp_path / "out")
    assert "reshard did not write" in run(code=4).err
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert "reshard did not write" in run(code=4).err


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"schema_version": 99}'])
def test_without_a_readable_manifest_nothing_is_replaced(run, tmp_path, content):
    assert run() is False
    manifest = tmp_path / "out" / "reshard.json"
    manifest.unlink() if content is None else manifest.write_bytes(content)
    run(code=6 if content and b"99" in content else 4)


def test_weights_that_somebody_added_are_not_removed(run, source, tmp_path):
    assert run() is False
    shutil.copy(HF / "qwen3" / "model.safetensors", tmp_path / "out" / "model-other.safetensors")
    assert "model-other.safetensors" in run(code=4).err
    touch(source)
    assert "model-other.safetensors" in run(code=4).err


def test_other_files_of_the_user_stay(run, source, tmp_path):
    assert run() is False
    (tmp_path / "out" / "NOTES.txt").write_text("mine")
    touch(source)
    assert reshard("convert", source, tmp_path / "out", "--to", "vllm", "--tp", 2, "--if-changed").code == 0
    assert (tmp_path / "out" / "NOTES.txt").read_text() == "mine"


def interrupt(source, target, **options):
    """Stop a conversion after its first block."""
    blocks = conversion(library.plan(source, to="vllm", tp=2), target, effort=Effort(workers=1), **options).run()
    next(blocks)
    blocks.close()


def test_an_interrupted_run_is_resumed(run, source, tmp_path):
    interrupt(source, tmp_path / "out")
    assert read_journal(tmp_path / "out").blocks
    shown = reshard("convert", source, tmp_path / "out", "--to", "vllm", "--tp", 2, "--if-changed", "-v")
    assert shown.code == 0 and "from an earlier run" in shown.out and "an earlier run was interrupted" in shown.err
    assert run() is True


def test_an_interrupted_run_of_another_plan_is_started_anew(run, source, tmp_path):
    interrupt(source, tmp_path / "out")
    assert run("--dtype", "fp32") is False
    touch(source)
    interrupt(source, tmp_path / "out", existing="overwrite")
    assert run("--dtype", "fp32") is False, "the old result lay there until the end"


def stopped_in_commit(source, target, monkeypatch, *options):
    """A conversion that was stopped when the first of its files had its final name."""
    replace, renamed = os.replace, []

    def once(old, new):
        if renamed:
            raise KeyboardInterrupt
        renamed.append(new)
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", once)
        assert reshard("convert", source, target, "--to", "vllm", "--tp", 2, "--if-changed", *options).code == 130


def test_a_run_that_was_stopped_while_it_replaced_files_is_finished(run, source, tmp_path, monkeypatch):
    assert run("--dtype", "fp32") is False
    stopped_in_commit(source, tmp_path / "out", monkeypatch)
    refused = reshard("inspect", tmp_path / "out")
    assert refused.code == 3 and "--resume" in refused.err and "--if-changed" not in refused.err, "the two contradict each other"
    assert run() is False and run() is True


def test_the_files_of_a_half_replaced_target_are_not_taken_for_reshards_without_a_record(run, source, tmp_path, monkeypatch):
    assert run() is False
    stopped_in_commit(source, tmp_path / "out", monkeypatch, "--dtype", "fp32")
    touch(source)
    assert "--overwrite" in run(code=4).err


def test_it_contradicts_the_other_ways():
    for other in ("--resume", "--overwrite"):
        result = reshard("convert", "a", "b", "--to", "hf", "--if-changed", other)
        assert result.code == 2 and "contradict" in result.err


def test_the_log_says_why(run, source, tmp_path):
    arguments = ("convert", source, tmp_path / "out", "--to", "hf", "--if-changed", "-v")
    assert "there is no target yet" in reshard(*arguments).err
    assert "is unchanged" in reshard(*arguments).err
    touch(source)
    assert "the source files have changed" in reshard(*arguments).err
    assert "the options or the model have changed" in reshard(*arguments, "--dtype", "fp32").err
    (tmp_path / "out" / "model.safetensors").unlink()
    assert "model.safetensors is missing" in reshard(*arguments, "--dtype", "fp32").err
