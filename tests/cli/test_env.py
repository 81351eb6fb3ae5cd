"""reshard env: what a bug report needs, without importing heavy packages, and nothing private."""

from __future__ import annotations

import getpass
import json
import platform
import socket
import subprocess
import sys
from importlib.metadata import version

import pytest
from helpers.reshard_command import command, reshard

import reshard as library
from reshard.adapter import registry


def test_it_names_versions_machine_formats_and_plugins():
    document = reshard("env", "--json").document
    assert document["reshard"] == library.__version__ and document["python"].startswith(platform.python_version())
    assert document["packages"]["numpy"] == version("numpy") and document["packages"]["blake3"] == version("blake3")
    assert document["packages"]["sglang"] is None or document["packages"]["sglang"]
    assert document["machine"]["processors"] >= 1 and document["machine"]["memory_bytes"] > 1 << 28
    assert list(document["formats"]) == sorted(registry.formats()) and "reshard" in document["formats"]["hf"]
    assert "vllm.general_plugins:reshard" in document["plugins"]
    shown = reshard("env")
    assert shown.code == 0
    for words in (library.__version__, platform.python_version(), version("numpy"), "megatron-dist"):
        assert words in shown.out


@pytest.mark.skipif(sys.platform != "linux", reason="the type of a file system is known on Linux only")
def test_the_file_system_is_that_of_the_current_folder(monkeypatch, tmp_path):
    (tmp_path / "a b").mkdir()
    module = __import__("importlib").import_module("reshard.cli.commands.env")
    types = subprocess.run(["stat", "-f", "-c", "%T", "/proc"], capture_output=True, text=True).stdout.strip()
    monkeypatch.chdir("/proc")
    assert types == "proc" and reshard("env", "--json").document["current_folder"]["file_system"] == "proc"
    assert module._file_system(tmp_path / "a b") is not None


def test_it_imports_neither_torch_nor_numpy():
    script = (
        "import sys, importlib\n"
        "assert importlib.import_module('reshard.cli.main').run(['env']) == 0\n"
        "print(*({'torch', 'numpy', 'transformers', 'vllm'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


def test_it_shows_nothing_private(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.chdir(tmp_path)
    for shown in (reshard("env").out, reshard("env", "--json").out):
        assert "secret" not in shown and str(tmp_path) not in shown and socket.gethostname() not in shown
        assert getpass.getuser() == "root" or getpass.getuser() not in shown
    assert reshard("env", "--json").document["environment"]["OMP_NUM_THREADS"] == "3"


def test_a_broken_third_party_format_is_shown_and_does_not_stop_it(tmp_path):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[reshard.formats]\nbroken = no_such_module:FORMAT\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['reshard', 'env', '--json']; "
    code += "import importlib; importlib.import_module('reshard.cli.main').main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "no_such_module" in json.loads(done.stdout)["formats"]["broken"]


def test_it_runs_as_a_command():
    assert subprocess.run(command("env"), capture_output=True, text=True, check=True).stdout.startswith("reshard  ")
