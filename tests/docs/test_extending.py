"""The format of docs/extending/format.md works: it is read and written, and a round trip through it is proven."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import numpy
import pytest
from helpers.doc_pages import FIXTURES, ROOT, read_page
from helpers.reshard_command import reshard

from reshard.adapter import registry


@pytest.fixture
def npy(monkeypatch, tmp_path):
    """The folder with the files of the page, as an installed format."""
    folder = tmp_path / "installed" / "npy"
    folder.mkdir(parents=True)
    for block in read_page(ROOT / "docs" / "extending" / "format.md").blocks:
        if block.language == "python":
            (folder / block.lines[0].removeprefix("# npy/")).write_text("\n".join(block.lines) + "\n")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setitem(registry.others(registry.GROUP), "npy", EntryPoint("npy", "npy:FORMAT", registry.GROUP))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "npy"]:
        del sys.modules[name]


def test_the_format_of_the_page_keeps_the_rules_of_the_tree(npy):
    """Importing it loads nothing heavy, and what the checkers of the tree say of it is nothing."""
    script = "import sys, npy; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(npy.parent)}
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment).stdout.split()
    assert "npy" in loaded and not {"numpy", "torch", "npy.read"} & {*loaded}
    settings = ["--config", str(ROOT / "pyproject.toml"), "--ignore", "TID"]  # neighbours are imported relatively, as in formats/
    for check in (["check", *settings], ["format", "--check", "--config", str(ROOT / "pyproject.toml")]):
        found = subprocess.run([sys.executable, "-m", "ruff", *check, str(npy)], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def test_the_format_of_the_page_reads_what_it_writes(npy, tmp_path):
    llama, out = FIXTURES / "hf" / "llama", tmp_path / "out"
    assert reshard("convert", llama, out, "--to", "npy", "--dtype", "fp32").code == 0
    assert reshard("verify", llama, out, "--cast").code == 0
    assert reshard("roundtrip", llama, "--to", "npy", "--dtype", "fp32").code == 0
    assert reshard("inspect", out, "--json").document["format"] == "npy"
    # NumPy itself reads the files.
    assert numpy.load(out / "model.norm.weight.npy").dtype == "float32"


def test_the_format_of_the_page_refuses_what_it_should(npy, tmp_path):
    llama, out = FIXTURES / "hf" / "llama", tmp_path / "out"
    assert "--dtype fp32" in reshard("convert", llama, out, "--to", "npy").err
    assert reshard("convert", llama, out, "--to", "npy", "--dtype", "fp32").code == 0
    cut = out / "lm_head.weight.npy"
    cut.write_bytes(cut.read_bytes()[:-1])
    found = reshard("inspect", out)
    assert found.code == 3 and "lm_head.weight.npy" in found.err
