"""Weights in whose place an engine stores a function of them: A = -exp(A_log) in vLLM's files of state-space models."""

import json
import shutil
import sys

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES

import reshard
from reshard.errors import UnsupportedError
from reshard.models.lookup import find_model

sys.path.insert(0, str(FIXTURES))
import named_weights

A_LOG = "backbone.layers.0.mixer.A_log"


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A mamba2 model of named weights."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    config = json.loads((FIXTURES / "vllm_declared/mamba2.json").read_text())["config"]
    shapes = {weight.name: weight.shape for weight in find_model(config).weights.values() if not weight.optional}
    named_weights.write(folder, config, shapes)
    return folder


@pytest.fixture(scope="module")
def vllm(hf):
    reshard.convert(reshard.plan(hf, to="vllm", tp=2), hf.parent / "vllm")
    return hf.parent / "vllm"


@pytest.mark.parametrize("cast", [False, True])
def test_verify_computes_the_values_of_either_side(hf, vllm, cast):
    for left, right in ((hf, vllm), (vllm, hf), (vllm, vllm)):
        result = reshard.verify(left, right, cast=cast)
        assert result.equal, result.differences
        assert result.tensors == 25


def test_verify_finds_a_value_that_is_one_unit_off(hf, vllm, tmp_path):
    changed = shutil.copytree(vllm, tmp_path / "changed")
    (changed / "reshard.manifest.json").unlink(missing_ok=True)
    path = changed / "model-rank-1-part-0.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start = json.loads(data[8 : 8 + length])[A_LOG.replace("A_log", "A")]["data_offsets"][0]
    data[8 + length + start + 4] ^= 1
    path.write_bytes(data)
    for left, right in ((hf, changed), (changed, hf)):
        (difference,) = [each for each in reshard.verify(left, right).differences if each.kind == "values"]
        assert difference.name == A_LOG
        assert "[9]" in difference.detail


@pytest.mark.parametrize("to", ["hf", "dcp", "fsdp"])
def test_the_way_back_is_refused_by_name(vllm, to):
    with pytest.raises(UnsupportedError) as refused:
        reshard.plan(vllm, to=to)
    assert refused.value.where == A_LOG
    assert "-exp of this weight" in str(refused.value)
    reshard.plan(vllm, to=to, exclude=["*.A_log"])


def test_files_for_other_degrees_are_made_of_the_values(hf, vllm, tmp_path):
    reshard.convert(reshard.plan(vllm, to="vllm", tp=4), tmp_path / "again")
    reshard.convert(reshard.plan(hf, to="vllm", tp=4), tmp_path / "direct")
    for rank in range(4):
        name = f"model-rank-{rank}-part-0.safetensors"
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()


def test_a_round_trip_names_the_weights_that_do_not_come_back(hf):
    losses = reshard.roundtrip(reshard.plan(hf, to="vllm", tp=2)).losses
    assert [loss.partition(":")[0] for loss in losses] == [A_LOG, A_LOG.replace("0", "1")]
    assert all("F32 of -exp" in loss for loss in losses)


def test_a_view_holds_the_values(hf, vllm):
    name = A_LOG.replace("A_log", "A")
    tensor = reshard.open(hf).view(to="vllm", tp=2, rank=1)[name]
    expected = reshard.open(vllm).view(to="vllm", tp=2, rank=1)[name]
    assert np.array_equal(tensor.numpy(), expected.numpy())
    assert (tensor.numpy() < 0).all()
    torch = pytest.importorskip("torch")
    for each in (tensor, expected):
        parameter = torch.zeros(8)
        each.read_into(parameter)
        assert np.array_equal(parameter.numpy(), tensor.numpy())


def test_the_plan_says_what_is_stored(hf):
    plan = reshard.plan(hf, to="vllm", tp=2)
    assert any("-exp" in note for note in plan.layout.notes)
    assert {each["to"] for each in plan.to_json()["tensors"] if each["name"].endswith("A_log")} == {"F32 of -exp"}
