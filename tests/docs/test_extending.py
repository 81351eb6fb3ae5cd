"""The format of docs/extending/format.md works: it is read and written, and a round trip through it is proven."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import numpy
import pytest
from helpers.doc_pages import FIXTURES, ROOT, read_page
from helpers.reshard_command import reshard

from reshard.adapter import registry
from reshard.testing import FormatCase, FormatLaws


@pytest.fixture
def npy(monkeypatch, tmp_path):
    """The folder with the files of the page, as an installed format."""
    folder = tmp_path / "installed" / "npy"
    folder.mkdir(parents=True)
    for block in read_page(ROOT / "docs" / "extending" / "format.md").blocks:
        if block.language == "python" and block.lines[0].startswith("# npy/"):
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


class TestNpy(FormatLaws):
    """The laws, on what NumPy itself writes."""

    @pytest.fixture
    def case(self, npy, tmp_path):
        folder, truth = tmp_path / "checkpoint", {}
        folder.mkdir()
        for name, dtype in (("head.weight", "float32"), ("norm.weight", "float16")):
            array = numpy.random.default_rng(0).standard_normal((6, 5)).astype(dtype)
            numpy.save(folder / f"{name}.npy", array)
            about = {"dtype": f"F{array.itemsize * 8}", "shape": [6, 5], "sha256": hashlib.sha256(array.tobytes()).hexdigest()}
            truth[name, "weight"] = about
        return FormatCase("npy", folder, truth, named={f"{name}.npy": None for name, _ in truth})

    def test_it_is_not_loaded_for_another_format(self):
        """Only this process knows the format; `test_the_format_of_the_page_keeps_the_rules_of_the_tree` says the same."""


def test_numpy_reads_what_the_format_of_the_page_writes(npy, tmp_path):
    llama, out = FIXTURES / "hf" / "llama", tmp_path / "out"
    assert "--dtype fp32" in reshard("convert", llama, out, "--to", "npy").err
    assert reshard("convert", llama, out, "--to", "npy", "--dtype", "fp32").code == 0
    assert numpy.load(out / "model.norm.weight.npy").dtype == "float32"
    cut = out / "lm_head.weight.npy"
    cut.write_bytes(cut.read_bytes()[:-1])
    result = reshard("inspect", out)
    assert result.code == 3 and "lm_head.weight.npy" in result.err
