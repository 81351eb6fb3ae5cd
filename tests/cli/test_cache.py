"""`reshard cache`: one conversion for each plan and content; and what is damaged, waited for, or removed to make room."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from helpers.fixture_places import DCP, FIXTURES, HF
from helpers.reshard_command import reshard

import reshard as library
from reshard.verbs.serve.cache import Cache

ASKED = ("--to", "vllm", "--tp", 2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RESHARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def plan_of_fsdp2():
    return library.plan(DCP / "fsdp2" / "checkpoint", to="vllm", tp=2, model=DCP / "fsdp2" / "model")


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


def test_get_prints_the_folder_that_convert_would_write(cache, tmp_path):
    result = reshard("cache", "get", HF / "llama", *ASKED)
    assert result.code == 0 and result.out.count("\n") == 1
    folder = cache / "entries" / result.out.strip().rpartition("/")[2]
    assert reshard("convert", HF / "llama", tmp_path / "out", *ASKED).code == 0
    assert files_of(folder) == files_of(tmp_path / "out") and files_of(folder)
    assert library.verify(HF / "llama", folder).equal


def test_the_second_time_nothing_is_converted(cache):
    first = reshard("cache", "get", HF / "llama", *ASKED).out.strip()
    times = {path: path.stat().st_mtime_ns for path in (cache / "entries").rglob("*") if path.is_file()}
    again = reshard("cache", "get", HF / "llama", *ASKED, "--json").document
    assert (again["path"], again["used"]) == (first, True)
    assert times == {path: path.stat().st_mtime_ns for path in (cache / "entries").rglob("*") if path.is_file()}


def test_other_sizes_versions_and_weights_are_other_entries(cache, tmp_path):
    asked = [
        (HF / "llama", *ASKED),
        (HF / "llama", "--to", "vllm", "--tp", 4),
        (HF / "llama", *ASKED, "--engine-version", "0.11.0"),
        (HF / "llama", "--to", "sglang", "--tp", 2),
        (HF / "llama-tied", *ASKED),
    ]
    assert len({reshard("cache", "get", *each).out for each in asked}) == len(asked)


def test_the_same_weights_under_another_path_are_one_entry(cache, tmp_path):
    shutil.copytree(HF / "llama", tmp_path / "copy")
    one, two = (reshard("cache", "get", source, *ASKED).out for source in (HF / "llama", tmp_path / "copy"))
    assert one == two and len(list((cache / "entries").iterdir())) == 1 and len(list((cache / "links").iterdir())) == 2


def test_a_source_that_changed_is_converted_anew(cache, tmp_path):
    shutil.copytree(HF / "llama", tmp_path / "model")
    first = reshard("cache", "get", tmp_path / "model", *ASKED).out
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(1, time.time_ns() + 10**9))
    assert reshard("cache", "get", tmp_path / "model", *ASKED).out != first


@pytest.mark.parametrize("damage", ["weights", "config", "missing"])
def test_a_damaged_entry_is_never_given_out(damage, cache):
    folder = cache / "entries" / reshard("cache", "get", HF / "llama", *ASKED).out.strip().rpartition("/")[2]
    was = files_of(folder)
    if damage == "weights":
        file = folder / "model-rank-0-part-0.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    elif damage == "config":
        (folder / "config.json").write_text("{}")
    else:
        (folder / "model-rank-1-part-0.safetensors").unlink()
    assert reshard("cache", "get", HF / "llama", *ASKED).out.strip() == str(folder)
    assert files_of(folder) == was and json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_an_interrupted_conversion_is_finished(cache, monkeypatch):
    from reshard.engine.conversion import Conversion

    run = Conversion.run

    def stops(self):
        for done in run(self):
            yield done
            raise KeyboardInterrupt

    monkeypatch.setattr(Conversion, "run", stops)
    with pytest.raises(KeyboardInterrupt):
        library.cache(library.plan(HF / "llama", to="vllm", tp=2))
    assert list((cache / "work").iterdir()) and not (cache / "entries").exists()
    monkeypatch.setattr(Conversion, "run", run)
    entry = library.cache(library.plan(HF / "llama", to="vllm", tp=2))
    assert library.verify(HF / "llama", entry.path).equal and not list((cache / "work").iterdir())


def test_processes_that_ask_at_once_convert_once(cache):
    from reshard.verbs.serve import cache as module

    converted, convert = [], module.convert

    def counted(*arguments, **keywords):
        converted.append(arguments)
        time.sleep(0.2)
        return convert(*arguments, **keywords)

    module.convert = counted
    found = []
    try:
        threads = [threading.Thread(target=lambda: found.append(library.cache(plan_of_fsdp2()))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        module.convert = convert
    assert len(found) == 3 and len({each.path for each in found}) == 1
    assert len(converted) == 1 and sorted(each.used for each in found) == [False, True, True]


def test_what_was_used_longest_ago_makes_room(cache):
    sources = [HF / name for name in ("llama", "qwen2", "qwen3")]
    entries = [library.cache(library.plan(source, to="vllm", tp=1)) for source in sources]
    for number, link in enumerate(sorted((cache / "links").iterdir(), key=lambda path: path.stat().st_mtime)):
        os.utime(link, (1_000_000 + number, 1_000_000 + number))
    library.cache(library.plan(sources[0], to="vllm", tp=1))  # used now
    total = sum(each.nbytes for each in Cache().entries())
    library.cache(library.plan(HF / "mistral", to="vllm", tp=1), max_size=total)
    left = {each.path for each in Cache().entries()}
    assert entries[0].path in left and entries[1].path not in left
    with pytest.raises(library.RequestError, match="the cache may have 1,000"):
        library.cache(library.plan(HF / "gpt2", to="vllm", tp=1), max_size=1000)
    assert not [each for each in Cache().entries() if "gpt2" in each.source]


def test_an_entry_without_a_record_and_a_learned_layout_do_not_make_room(cache, tmp_path, caplog):
    entry = library.cache(library.plan(HF / "llama", to="vllm", tp=1))
    layout = cache / "layouts" / "qwen3_next.json"
    layout.parent.mkdir()
    shutil.copy(FIXTURES / "learned" / "qwen3_next" / "layout.json", layout)
    for path in (layout, *(cache / "links").iterdir()):
        os.utime(path, (1_000_000, 1_000_000))
    os.unlink(f"{entry.path}/reshard.json")
    assert {each.path for each in Cache().entries()} == {str(layout)}
    assert f"{entry.path} is no entry that reshard wrote, and stays" in caplog.text
    plan = library.plan(HF / "qwen2", to="vllm", tp=1)
    library.cache(plan, max_size=sum(file.nbytes for file in plan.layout.files) + layout.stat().st_size)
    left = {each.path for each in Cache().entries()}
    assert str(layout) in left and len(left) == 2 and os.path.exists(f"{entry.path}/config.json")


def test_list_and_clean(cache):
    reshard("cache", "get", HF / "llama", *ASKED)
    listed = reshard("cache", "list").out
    assert "1 entry" in listed and str(HF / "llama") in listed and "vllm" in listed
    assert "Nothing was removed" in reshard("cache", "clean").out and list((cache / "entries").iterdir())
    assert reshard("cache", "clean", "--yes", "--json").document["removed"] is True
    assert not list((cache / "entries").iterdir()) and not list((cache / "links").iterdir())


def test_a_forged_link_leads_nowhere(cache, tmp_path):
    reshard("cache", "get", HF / "llama", *ASKED)
    (tmp_path / "other").mkdir()
    for content in ('{"entry": "../../other"}', '{"entry": ".."}', "[1]", "not json", '{"entry": 5}'):
        for link in (cache / "links").iterdir():
            link.write_text(content)
        assert reshard("cache", "get", HF / "llama", *ASKED).out.startswith(str(cache / "entries" / "vllm-tp2-"))


def test_what_is_missing_is_said(cache):
    assert "needs both" in reshard("cache", "get", HF / "llama").err
    assert "takes no SOURCE" in reshard("cache", "list", HF / "llama").err
    assert "local folder" in reshard("cache", "list", "--cache", "s3://bucket/x").err


def test_what_reshard_did_not_write_is_never_removed_and_is_told(cache, tmp_path):
    entry = Path(reshard("cache", "get", HF / "llama", *ASKED).out.strip())
    (entry / "evaluation.txt").write_text("mine")
    (entry / "notes").mkdir()
    (entry / "notes" / "a").write_text("mine")
    (cache / "entries" / "thesis" / "chapter").mkdir(parents=True)
    (cache / "entries" / "thesis" / "chapter" / "1").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "reshard.json").write_bytes((entry / "reshard.json").read_bytes())
    (cache / "entries" / "link").symlink_to(tmp_path / "elsewhere")
    done = reshard("cache", "clean", "--yes")
    assert done.code == 0 and "1 entry" in done.out and "removed" in done.out
    for said in (
        "entries/thesis is no entry that reshard wrote",
        "entries/link is no entry",
        "evaluation.txt, notes",
        f".replaced-{entry.name}",
    ):
        assert said in done.err, done.err
    rest = cache / "entries" / f".replaced-{entry.name}"
    assert not entry.exists() and (rest / "evaluation.txt").read_text() == (rest / "notes" / "a").read_text() == "mine"
    assert (cache / "entries" / "thesis" / "chapter" / "1").exists() and (tmp_path / "elsewhere" / "reshard.json").exists()


def test_another_programs_folder_in_the_place_of_an_entry_stays(cache):
    entry = Path(reshard("cache", "get", HF / "llama", *ASKED).out.strip())
    (entry / "reshard.json").unlink()
    refused = reshard("cache", "get", HF / "llama", *ASKED)
    assert refused.code == 4 and "did not write lies there" in refused.err and (entry / "config.json").exists()


def test_links_that_are_no_links_of_reshard_are_passed_over_at_once(cache, tmp_path):
    asked = ["cache", "get", HF / "llama", *ASKED]
    first, (link,) = reshard(*asked).out, list((cache / "links").iterdir())

    def fifo():
        os.mkfifo(link)

    made = {
        "fifo": fifo,
        "zero": lambda: link.symlink_to("/dev/zero"),
        "folder": link.mkdir,
        "nested": lambda: link.write_bytes(b"[" * 60_000),
        "long": lambda: link.write_bytes(b'{"entry": "x", "source": "' + b"x" * 70_000 + b'"}'),
        "no source": lambda: link.write_text(json.dumps({"entry": Path(first.strip()).name})),
        "other types": lambda: link.write_text(json.dumps({"entry": Path(first.strip()).name, "source": 5})),
    }
    for name, make in made.items():
        for words in (asked, ["cache", "list"], ["cache", "clean"]):
            link.rmdir() if link.is_dir() and not link.is_symlink() else link.unlink(missing_ok=True)
            make()
            done = reshard(*words)
            if (name, words) == ("folder", asked):  # a file cannot take its place
                assert done.code == 2 and str(link) in done.err, done.err
            else:
                assert done.code == 0 and "is no link that reshard wrote" in done.err, (name, done.err)
