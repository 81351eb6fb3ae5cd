"""Muon as megatron-core 0.19.2 saves it: read with names, kept by what can keep it, and never in the way of the weights.

tests/formats/test_truth.py compares the values with those of the processes.
"""

import json
import shutil

import pytest
from helpers.fixture_places import FIXTURES

import reshard
from reshard.canonical.content import Selection
from reshard.errors import RequestError

CASES = sorted(case.name for case in (FIXTURES / "megatron_0_19").glob("muon*"))
LAYER_WISE = ("muon-layer-wise", "muon-layer-wise-ep2")


def opened(name, checkpoint=None):
    case = FIXTURES / "megatron_0_19" / name
    return reshard.open(checkpoint or case / "checkpoint", model=case / "model")


def state(checkpoint):
    """The masters and the state by key, and the settings of each parameter's group. Step counts may be in either."""
    weights = "master" if checkpoint.index.by_kind("master") else None
    view = checkpoint.tensors(Selection(weights=weights, optimizer=True))
    values = {key: view[key].numpy().tobytes() for key in view if not key.endswith(".step")}
    steps = {key.split(".state.")[1].removesuffix(".step"): float(view[key].numpy()) for key in view if key.endswith(".step")}
    settings = {}
    for group in checkpoint.index.param_groups():
        for name in group.names:
            settings[name] = {key: group.settings.get(key) for key in ("lr", "weight_decay", "momentum", "betas")}
            if "step" in group.settings:
                steps[name] = float(group.settings["step"])
    return values, steps, settings


@pytest.mark.parametrize("name", CASES)
def test_matrices_have_momentum_and_the_rest_has_moments_and_steps(name):
    checkpoint = opened(name)
    _, steps, settings = state(checkpoint)
    for weight in checkpoint.index.by_kind("weight").values():
        is_matrix = len(weight.shape) == 2 and weight.name not in ("model.embed_tokens.weight", "lm_head.weight")
        group = settings[weight.name]
        assert (group["momentum"], bool(group["betas"])) == ((0.95, False) if is_matrix else (None, True)), weight.name
        assert group["weight_decay"] == (0.1 if len(weight.shape) == 2 else 0.0) and 0.001 <= group["lr"] < 0.01
        assert steps.get(weight.name) == (None if is_matrix else 2.0), weight.name
    assert not checkpoint.index.facts.notes


@pytest.mark.parametrize("target", ["dcp", "fsdp", "deepspeed", "universal"])
@pytest.mark.parametrize("name", ["muon", "muon-layer-wise-dist", "muon-layer-wise-ep2"])
def test_what_keeps_any_state_keeps_muon(tmp_path, name, target):
    checkpoint = opened(name)
    reshard.convert(reshard.plan(checkpoint, to=target, optimizer=True), tmp_path / "out")
    assert state(opened(name, tmp_path / "out")) == state(checkpoint)


@pytest.mark.parametrize("target", ["megatron", "megatron-dist", "fsdp_dtensor"])
def test_megatron_targets_refuse_two_optimizers_by_name(target):
    with pytest.raises(RequestError, match="Muon's momentum of some weights and Adam's moments of others"):
        reshard.plan(opened("muon-tp2-dist"), to=target, optimizer=True)
    assert reshard.plan(opened("muon-tp2-dist"), to=target).layout.files


def weights(name):
    truth = json.loads((FIXTURES / "megatron_0_19" / name / "truth.json").read_text())["tensors"]
    return {tensor for tensor, roles in truth.items() if "weight" in roles}


@pytest.mark.parametrize("name", LAYER_WISE)
def test_a_lost_file_of_a_data_parallel_rank_costs_the_state_and_not_the_weights(tmp_path, name):
    folder = shutil.copytree(FIXTURES / "megatron_0_19" / name / "checkpoint", tmp_path / "run")
    next(folder.rglob("layer_wise_optimizer_1.pt")).unlink()
    checkpoint = opened(name, folder)
    assert {tensor.name for tensor in checkpoint.index.tensors} == weights(name)
    assert {tensor.kind for tensor in checkpoint.index.tensors} <= {"weight", "buffer"}
    assert any("data-parallel ranks that share these parameters have such a file" in note for note in checkpoint.index.facts.notes)
    reshard.convert(reshard.plan(checkpoint, to="hf"), tmp_path / "out")


def test_files_that_changed_places_are_refused(tmp_path):
    """The masters show it."""
    folder = shutil.copytree(FIXTURES / "megatron_0_19" / "muon-layer-wise" / "checkpoint", tmp_path / "run")
    first, second = (folder / "iter_0000002" / f"mp_rank_{rank:02d}" / "layer_wise_optimizer_1.pt" for rank in (0, 1))
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    with pytest.raises(
        reshard.errors.CheckpointError, match=r"its master in .*layer_wise_optimizer_1\.pt is not what the weight was rounded"
    ):
        opened("muon-layer-wise", folder)
