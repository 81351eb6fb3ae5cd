"""Real ranks of torch on gloo: FSDP2, HSDP, FSDP2 with tensor parallelism load every format, train on, save, and die."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import reshard

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
LLAMA = FIXTURES / "hf" / "llama"
pytestmark = pytest.mark.slow

# Checkpoint, and the mesh onto which it is loaded, which the run that saved it never had.
LOADS = [
    ("dcp/fsdp2", "fsdp2xtp2"),
    ("dcp/fsdp2", "fsdp3"),
    ("dcp/fsdp2-tp", "fsdp4"),
    ("dcp/groups", "fsdp3"),
    ("fsdp/hsdp", "fsdp2xtp2"),
    ("fsdp/fsdp1-sharded", "hsdp2x2"),
    ("deepspeed/z3-bf16", "hsdp2x2"),
    ("deepspeed/z3-fp32", "fsdp3"),
    ("universal/autotp2-z1", "fsdp2xtp2"),
    ("megatron/llama-tp2-pp2-dp2", "fsdp2xtp2"),
    ("megatron/mixtral-tp2-ep2", "fsdp4"),
    ("megatron_dist/llama-tp2-pp2", "hsdp2x2"),
]


def asked(task, *arguments, check=True):
    """The document that rank 0 prints, and what all ranks print on stderr."""
    command = [sys.executable, str(ROOT / "tests" / "torch_load_save" / "ranks.py"), task, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert not check or done.returncode == 0, done.stderr[-4000:]
    line = next((line for line in done.stdout.splitlines() if line.startswith("DOCUMENT ")), "DOCUMENT null")
    return json.loads(line.removeprefix("DOCUMENT "))


def place(case):
    folder = FIXTURES / case
    return folder / "checkpoint", folder / "model" if (folder / "model").is_dir() else "", folder / "truth.json"


@pytest.mark.parametrize(("case", "mesh"), LOADS)
def test_ranks_hold_the_truth_after_the_load(case, mesh):
    found = asked("load", mesh, *place(case))
    assert found["compared"] > 8 and not found["wrong"]
    settings = [{**group, "betas": tuple(group["betas"])} for group in found["settings"]]
    recorded = [{**group, "betas": tuple(group["betas"])} for group in found["recorded"]]
    assert all(settings[i] | recorded[i] == settings[i] for i in range(len(settings))) and recorded[0]["lr"] != 0.5
    assert found["steps"] and 0.0 not in found["steps"]


@pytest.mark.parametrize(("case", "mesh"), [("megatron/llama-tp2-pp2-dp2", "fsdp2xtp2"), ("deepspeed/z3-bf16", "fsdp3")])
def test_two_steps_after_the_load_are_those_of_a_converted_run(case, mesh, tmp_path):
    checkpoint, model, truth = place(case)
    options = {"model": model} if model else {}
    reshard.convert(reshard.plan(checkpoint, to="dcp", optimizer=True, **options), tmp_path / "dcp")
    straight, converted = (
        asked("train", mesh, checkpoint, model, truth, ""),
        asked("train", mesh, checkpoint, model, truth, tmp_path / "dcp"),
    )
    assert len(straight) > 20 and straight == converted


TARGETS = {
    "hf": {"to": "hf"},
    "hf-fp32": {"to": "hf", "dtype": "fp32", "max_shard_size": "30KB"},
    "vllm": {"to": "vllm", "tp": 2},
    "sglang": {"to": "sglang", "tp": 2},
    "megatron": {"to": "megatron-dist"},
    "saved": {"to": "dcp"},
}


def files_of(folder):
    """SHA-256 of each file. reshard.json has its own tests: it tells the time, and where the source lay."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "reshard.json")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.mark.parametrize("mesh", ["fsdp3", "hsdp2x2", "fsdp2xtp2"])
def test_files_of_many_writers_are_those_of_convert(mesh, tmp_path):
    asked("save", mesh, LLAMA, tmp_path, json.dumps(TARGETS))
    for name, options in {**TARGETS, "async": {"to": "hf"}}.items():
        reshard.convert(reshard.plan(tmp_path / "dcp", model=LLAMA, **options), tmp_path / "converted" / name)
        assert files_of(tmp_path / name) == files_of(tmp_path / "converted" / name), name
        assert reshard.verify(tmp_path / name).equal
    reshard.convert(reshard.plan(tmp_path / "trained", to="dcp", model=LLAMA, optimizer=True), tmp_path / "converted" / "trained")
    assert files_of(tmp_path / "trained-dcp") == files_of(tmp_path / "converted" / "trained")


@pytest.mark.parametrize("phase", ["write", "between", "meet", "digests", "complete"])
def test_a_rank_that_dies_leaves_no_target(phase, tmp_path):
    asked("die", "fsdp3", LLAMA, tmp_path / "out", phase, check=False)
    left = sorted(path.name for path in (tmp_path / "out").iterdir()) if (tmp_path / "out").exists() else []
    assert left in ([], [".reshard"])
    with pytest.raises(reshard.ReshardError):
        reshard.open(tmp_path / "out")
    asked("die", "fsdp3", LLAMA, tmp_path / "out", "none")  # the next save needs no cleaning
    assert reshard.verify(tmp_path / "out").equal
