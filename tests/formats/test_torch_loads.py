"""Real torch, on gloo, loads what was written, at another number of ranks than it was trained with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.fixture_places import DCP, open_case
from helpers.sampled import sampled

import reshard

SCRIPT = Path(__file__).resolve().parent.parent / "helpers" / "torch_ranks.py"


CASES = [("dcp", 3, 2, 21), ("dcp-optimizer", 1, 3, 84), ("fsdp", 3, 3, 21), ("fsdp-optimizer", 2, 2, 84)]


@pytest.mark.parametrize("kind, files, ranks, tensors", sampled(CASES, 4))
def test_fsdp2_holds_every_bit_after_loading(kind, files, ranks, tensors, tmp_path):
    pytest.importorskip("torch", reason="torch loads what was written")
    to, _, optimizer = kind.partition("-")
    reshard.convert(reshard.plan(open_case("fsdp2"), to=to, dp=files, optimizer=bool(optimizer)), tmp_path / "out")
    command = [sys.executable, SCRIPT, tmp_path / "out", kind, str(ranks), DCP / "fsdp2" / "truth.json"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    assert json.loads(found.stdout.splitlines()[-1]) == {"tensors": tensors, "wrong": {}, "lr": 0.01 if optimizer else 0.5}
