"""Linux, macOS and Windows: what one of them lacks has a fallback that changes no byte, or one clear sentence."""

import os
import resource
import sys
from importlib import import_module

import pytest
from helpers.fixture_places import DCP, HF
from helpers.reshard_command import reshard, result_tree

import reshard as library
from reshard.adapter import processes
from reshard.storage import system_calls
from reshard.storage.files import LocalFiles


@pytest.mark.parametrize("lacks", [("fdatasync",), ("preadv",), ("fdatasync", "preadv")], ids="+".join)
def test_without_calls_that_macos_lacks_the_same_bytes_are_written(lacks, tmp_path, monkeypatch):
    def convert(to):
        # zstd: compressed entries are read through a temporary file.
        assert reshard("convert", DCP / "zstd" / "checkpoint", to, "--to", "hf", "--model", DCP / "zstd" / "model").code == 0
        return result_tree(to)

    expected = convert(tmp_path / "expected")
    for name in lacks:
        monkeypatch.delattr(os, name)
    assert convert(tmp_path / "copy") == expected
    assert reshard("verify", tmp_path / "expected", tmp_path / "copy").code == 0


def test_without_preadv_a_long_range_is_read_in_parts(tmp_path, monkeypatch):
    content = os.urandom(1000)
    (tmp_path / "file").write_bytes(content)
    monkeypatch.delattr(os, "preadv")
    monkeypatch.setattr(system_calls, "_COPY_BYTES", 300)
    buffer = bytearray(900)
    with open(tmp_path / "file", "rb") as file:
        assert system_calls.read_at(file.fileno(), memoryview(buffer), 50) == 300
        assert buffer[:300] == content[50:350] and not any(buffer[300:])
        assert system_calls.read_at(file.fileno(), memoryview(buffer), 1000) == 0
    LocalFiles(tmp_path).read_into("file", 50, memoryview(buffer))
    assert bytes(buffer) == content[50:950]


@pytest.mark.parametrize("refused", [False, True])
def test_on_macos_content_is_written_out_of_the_cache_of_the_drive(refused, tmp_path, monkeypatch):
    import fcntl

    calls = []

    def full_sync(descriptor, command):
        calls.append(command)
        if refused:
            raise OSError("a network file system")

    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    with open(tmp_path / "file", "wb") as file:
        system_calls.sync_content(file.fileno())
    assert calls == ([51, "fsync"] if refused else [51])


@pytest.mark.parametrize("limit, expected", [(256, 64), (1024, 200), (16, 8), (resource.RLIM_INFINITY, 200)])
def test_files_kept_open_leave_room_within_the_limit_of_the_process(limit, expected, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, resource.RLIM_INFINITY))
    assert system_calls.open_files_at_once() == expected


def test_where_forking_is_not_safe_all_work_stays_in_this_process(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert processes.in_processes(range(1000), lambda jobs: os.getpid()) == [os.getpid()]


@pytest.mark.parametrize("arguments", [["--help"], ["formats"], ["inspect", HF / "llama"]], ids=lambda arguments: arguments[0])
def test_windows_gets_one_sentence(arguments, monkeypatch):
    import_module("reshard.cli.main")  # before the change: click asks for the platform, too
    monkeypatch.setattr(sys, "platform", "win32")
    result = reshard(*arguments)
    sentence = "Windows is not supported: reshard runs on Linux and macOS, and on Windows in WSL."
    assert (result.code, result.out, result.err) == (6, "", f"reshard: {sentence} [unsupported]\n")


def test_windows_gets_the_same_sentence_in_python(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(Exception, match="on Windows in WSL"):
        library.open(HF / "llama")


def test_casts_do_not_need_torch(tmp_path, monkeypatch):
    """In the container, torch is not installed."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for dtype in ("fp16", "fp8", "fp64"):
        assert reshard("convert", HF / "llama", tmp_path / dtype, "--to", "hf", "--dtype", dtype).code == 0


@pytest.mark.parametrize("to", ["consolidated", "fsdp", "dcp", "deepspeed", "universal", "megatron", "megatron-dist"])
def test_no_format_needs_torch(to, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    model = "--model", DCP / "fsdp2" / "model"
    result = reshard("convert", DCP / "fsdp2" / "checkpoint", tmp_path / "out", "--to", to, *model)
    assert result.code == 0, result.err
