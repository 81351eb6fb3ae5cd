"""Packed weights: read, dequantized to the bits of the libraries that own the forms (fixtures/hf_packed), carried unchanged."""

import hashlib
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

import reshard
from reshard.geometry import boxes
from reshard.plans import summary

FIXTURES = Path(__file__).resolve().parent.parent.parent / "fixtures" / "hf_packed"
CASES = sorted(path.parent.name for path in FIXTURES.glob("*/truth.json"))


def truth_of(case):
    return json.loads((FIXTURES / case / "truth.json").read_text())


def stored(folder):
    return {name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in safetensors.torch.load_file(path).items()}


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def described(tensors):
    return {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "sha256": digest(tensor)}
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_dequantized_values_are_the_librarys_bits(case, tmp_path):
    reshard.convert(reshard.plan(FIXTURES / case, to="hf", dequantize=True), tmp_path / "out")
    assert described(stored(tmp_path / "out")) == truth_of(case)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_small_blocks_of_work_give_the_same_values(case, tmp_path, monkeypatch):
    """Work is cut into blocks and runs that end inside of words and groups."""
    monkeypatch.setattr(boxes, "BLOCK_ELEMENTS", 64 * 5)
    monkeypatch.setattr("reshard.engine.values._DECODED", 64 * 3)
    reshard.convert(reshard.plan(FIXTURES / case, to="hf", dequantize=True), tmp_path / "out")
    assert described(stored(tmp_path / "out")) == truth_of(case)


@pytest.mark.parametrize("case", CASES)
def test_without_it_every_byte_stays_whatever_dtype_says(case, tmp_path):
    before = stored(FIXTURES / case)
    reshard.convert(reshard.plan(FIXTURES / case, to="hf", dtype="fp32"), tmp_path / "out")
    after, truth = stored(tmp_path / "out"), truth_of(case)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        plain = name in truth and truth[name]["sha256"] == digest(tensor) and tensor.dtype in (torch.bfloat16, torch.float16)
        assert torch.equal(after[name].flatten().view(torch.uint8), (tensor.float() if plain else tensor).flatten().view(torch.uint8)), name


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_the_values(case):
    opened = reshard.open(FIXTURES / case)
    count = summary.parameter_count(opened.content(), opened.model_files.config)
    assert count == sum(torch.Size(each["shape"]).numel() for each in truth_of(case).values())
