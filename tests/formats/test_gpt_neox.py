"""GPT-NeoX of EleutherAI: layers of a DeepSpeed pipeline under its own names (fixtures/deepspeed_pipeline/neox.py; test_truth reads it)."""

import json
import shutil

import pytest
import torch
from helpers.fixture_places import FIXTURES, described, truth

import reshard
from reshard.errors import CheckpointError

CASE = FIXTURES / "deepspeed_pipeline" / "neox-tp2-z1"
WEIGHTS = {key: value for key, value in truth(CASE).items() if key[1] == "weight"}
SPELLINGS = {
    "since-2024": {},
    "older": {"mlp.linear1.": "mlp.dense_h_to_4h.", "mlp.linear2.": "mlp.dense_4h_to_h."},
    "transformer-engine": {
        "mlp.linear1.": "mlp.fc1_", "mlp.linear2.": "mlp.fc2_", "post_attention_layernorm.": "mlp.layer_norm_",
        "attention.query_key_value.": "attention.qkv.", "attention.dense.": "attention.proj.",
    },
}  # fmt: skip


def spelled(name, spelling):
    for new, other in SPELLINGS[spelling].items():
        name = name.replace(new, other)
    return name


def weights_alone(folder, spelling, sequential):
    """The model's files of the fixture under other names; without a pipeline, a rank's layers are in one file."""
    (tag,) = (path for path in (CASE / "checkpoint").iterdir() if path.is_dir())
    out = folder / tag.name
    out.mkdir(parents=True)
    modules = {0: {}, 1: {}}
    for path in sorted(tag.glob("layer_*")):
        layer, rank = int(path.name[6:8]), int(path.name[15:17])
        held = {spelled(name, spelling): tensor for name, tensor in torch.load(path, weights_only=True).items()}
        modules[rank] |= {f"sequential.{layer}.{name}": tensor for name, tensor in held.items()}
        if not sequential:
            torch.save(held, out / path.name)
    state = {"dp_world_size": 1, "mp_world_size": 2, "global_steps": 2, "ds_version": "0.15.0", "param_shapes": None, "buffer_names": None}
    for rank, module in modules.items():
        torch.save(state | {"module": module if sequential else None}, out / f"mp_rank_{rank:02d}_model_states.pt")
    (folder / "latest").write_text(tag.name)
    return folder


@pytest.mark.parametrize("sequential", [False, True], ids=["pipeline", "sequential"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_the_published_model(tmp_path, spelling, sequential):
    source = weights_alone(tmp_path / "in", spelling, sequential)
    reshard.convert(reshard.plan(source, to="hf", model=CASE / "model"), tmp_path / "out")
    written = reshard.open(tmp_path / "out")
    assert {(tensor.name, tensor.kind): described(tensor, written.files) for tensor in written.index.tensors} == WEIGHTS


def test_biases_of_a_sequential_residual_are_copies(tmp_path):
    """The fixture's are not: they are summands."""
    model = shutil.copytree(CASE / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"use_parallel_residual": False}
    (model / "config.json").write_text(json.dumps(config))
    source = weights_alone(tmp_path / "in", "since-2024", False)
    with pytest.raises(CheckpointError, match="bias"):
        reshard.convert(reshard.plan(source, to="hf", model=model), tmp_path / "out")


def test_the_state_arrives_with_the_sums(tmp_path):
    reshard.convert(reshard.plan(CASE / "checkpoint", to="dcp", optimizer=True, model=CASE / "model", weights="master"), tmp_path / "out")
    written = reshard.open(tmp_path / "out", model=CASE / "model")
    states = {key: value for key, value in truth(CASE).items() if key[1].startswith("moment")}
    arrived = {(tensor.name, tensor.kind): described(tensor, written.files) for tensor in written.index.tensors}
    assert states and states.items() <= arrived.items()
    masters = {name: value for (name, kind), value in truth(CASE).items() if kind == "master"}
    assert {name: value for (name, kind), value in arrived.items() if kind == "weight"} == masters
