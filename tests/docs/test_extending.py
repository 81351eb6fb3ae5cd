"""The format of docs/extending/format.md works: it is read and written, and a round trip through it is proven."""

from __future__ import annotations

import sys
import types

import numpy
import pytest
from command import reshard
from doc_pages import FIXTURES, ROOT, read_page

from reshard.adapter import registry
from reshard.adapter.registry import EntryPoint


@pytest.fixture
def npy(monkeypatch):
    page = read_page(ROOT / "docs" / "extending" / "format.md")
    code = next(block for block in page.blocks if block.language == "python")
    module = types.ModuleType("npy_format")
    exec(compile("\n".join(code.lines), "format.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "npy_format", module)
    monkeypatch.setitem(registry.points(), "npy", EntryPoint("npy", "npy_format:FORMAT", None))


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
