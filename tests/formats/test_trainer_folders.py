"""The folders of trainers: where each puts the weights, the optimizer, the config and what is neither, around the files of one saver.

The layouts are those of the trainers' sources (docs/reference/trainers.md); the files are by torch and transformers themselves.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.fixture_places import FIXTURES, described, truth
from helpers.reshard_command import reshard as run
from safetensors.torch import save_file

import reshard
from reshard.opening.run_folders import find_steps

TRANSFORMERS, ACCELERATE = FIXTURES / "trainer_folders" / "transformers", FIXTURES / "dcp" / "accelerate"
ZSTD, VERL = FIXTURES / "dcp" / "zstd", FIXTURES / "fsdp" / "verl"


def transformers_run(folder: Path) -> Path:
    shutil.copytree(TRANSFORMERS / "checkpoint", step := folder / "checkpoint-2")
    torch.save({"last_epoch": 2}, step / "scheduler.pt")
    (step / "trainer_state.json").write_text('{"global_step": 2}')
    return step


def automodel(folder: Path) -> Path:
    step = folder / "epoch_0_step_2"
    _shards(step / "model")
    shutil.copytree(TRANSFORMERS / "checkpoint" / "optimizer", step / "optim")
    for name in ("rng/rng_dp_rank_0", "dataloader/dataloader_dp_rank_0", "step_scheduler"):
        (step / name).parent.mkdir(exist_ok=True)
        torch.save({"state": torch.get_rng_state()}, step / f"{name}.pt")
    (step / "config.yaml").write_text("model: {}\n")
    (folder / "LATEST").symlink_to(step.name)
    return step


def nemo_rl(folder: Path) -> Path:
    step = folder / "step_2"
    _shards(step / "policy" / "weights" / "model")
    shutil.copytree(TRANSFORMERS / "checkpoint" / "optimizer", step / "policy" / "optimizer" / "optim")
    (step / "policy" / "tokenizer").mkdir()
    torch.save({"epoch": 1}, step / "train_dataloader.pt")
    return step


def lerobot(folder: Path) -> Path:
    step = folder / "checkpoints" / "000002"
    shutil.copytree(ACCELERATE / "checkpoint" / "pytorch_model_fsdp_0", step / "pretrained_model" / "pytorch_model_fsdp_0")
    shutil.copytree(ACCELERATE / "checkpoint" / "optimizer_0", step / "training_state" / "optimizer_0")
    shutil.copy(ACCELERATE / "model" / "config.json", step / "pretrained_model")
    save_file({"state": torch.get_rng_state()}, step / "training_state" / "rng_state.safetensors")
    (step.parent / "last").symlink_to(step.name)
    return step


def prime_rl(folder: Path) -> Path:
    step = folder / "checkpoints" / "step_2"
    shutil.copytree(ZSTD / "checkpoint", step / "trainer")
    (step / "trainer" / "dataloader").mkdir()
    torch.save({"state": {"epoch": 1}}, step / "trainer" / "dataloader" / "rank_0.pt")
    return step


def skyrl(folder: Path) -> Path:
    step = folder / "global_step_2"
    shutil.copytree(VERL / "checkpoint", step / "policy")
    torch.save({"epoch": 1}, step / "data.pt")
    torch.save({"global_step": 2, "config": {}}, step / "trainer_state.pt")
    (folder / "latest_ckpt_global_step.txt").write_text("2")
    return step


def _shards(folder: Path) -> None:
    """The weights of AutoModel: shards, the files that its consolidation needs, and the script for that."""
    shutil.copytree(TRANSFORMERS / "checkpoint", folder, ignore=lambda *_: ["optimizer", "config.json", "generation_config.json"])
    (folder / ".hf_metadata").mkdir()
    shutil.copy(TRANSFORMERS / "checkpoint" / "config.json", folder / ".hf_metadata")
    (folder / ".hf_metadata" / "fqn_to_file_index_mapping.json").write_text("{}")
    (folder / "consolidate.sh").write_text("#!/usr/bin/env bash\n")


LAYOUTS = [
    (transformers_run, TRANSFORMERS),
    (automodel, TRANSFORMERS),
    (nemo_rl, TRANSFORMERS),
    (lerobot, ACCELERATE),
    (prime_rl, ZSTD),
    (skyrl, VERL),
]


def content(checkpoint):
    return {(tensor.name, tensor.kind): described(tensor, checkpoint.files) for tensor in checkpoint.index.tensors}


@pytest.mark.parametrize(("lay", "case"), LAYOUTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_step_is_one_checkpoint_with_its_optimizer(tmp_path, lay, case):
    step = lay(tmp_path)
    for place in (step, tmp_path):
        opened = reshard.open(place, model=case / "model")
        assert truth(case).items() <= content(opened).items()
        assert {tensor.kind for tensor in opened.index.tensors} >= {"weight", "moment1", "moment2"}
    assert [(found.number, found.complete) for found in find_steps(tmp_path, quiet=0)] == [(2, True)]
    assert run("doctor", tmp_path, "--model", case / "model").code == 0
    assert "2" in run("log", tmp_path).out


@pytest.mark.parametrize(("lay", "case"), LAYOUTS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_state_arrives(tmp_path, lay, case):
    reshard.convert(reshard.plan(lay(tmp_path / "run"), to="dcp", optimizer=True, model=case / "model"), tmp_path / "out")
    arrived = content(reshard.open(tmp_path / "out", model=case / "model"))
    assert {key: value for key, value in truth(case).items() if key[1] != "state"}.items() <= arrived.items()


@pytest.mark.parametrize("lay", [transformers_run, automodel, nemo_rl, lerobot], ids=lambda lay: lay.__name__)
def test_the_config_of_the_trainer_is_used(tmp_path, lay):
    assert reshard.open(lay(tmp_path)).model_files.config["model_type"] == "llama"


def test_groups_of_a_flattened_optimizer(tmp_path):
    decayed, others = reshard.open(transformers_run(tmp_path)).index.param_groups()
    assert [group.settings["weight_decay"] for group in (decayed, others)] == [0.01, 0.0]
    assert set(decayed.names) == {"model.layers.0.self_attn.q_proj.weight"} and all("norm" in name for name in others.names)


@pytest.mark.parametrize("lay", [transformers_run, automodel, nemo_rl], ids=lambda lay: lay.__name__)
def test_weights_alone_do_not_need_the_optimizer(tmp_path, lay):
    """Neither a damaged one, nor one whose names are those of another form of the model."""
    metadata = next(path for path in lay(tmp_path / "run").rglob(".metadata"))
    metadata.write_bytes(metadata.read_bytes()[:-200])
    opened = reshard.open(tmp_path / "run")
    assert {tensor.kind for tensor in opened.index.tensors} == {"weight"}
    assert any("the optimizer is left out" in note for note in opened.index.facts.notes)
    reshard.convert(reshard.plan(tmp_path / "run", to="hf"), tmp_path / "out")
    weights = {key: value for key, value in truth(TRANSFORMERS).items() if key[1] == "weight"}
    assert content(reshard.open(tmp_path / "out")) == weights


def test_an_optimizer_alone_is_not_a_model_of_lerobot(tmp_path):
    """Runs without shards have safetensors of both; only one of the folders holds weights."""
    step = tmp_path / "checkpoints" / "000002"
    for folder, name in (("pretrained_model", "model"), ("training_state", "optimizer_state"), ("training_state", "rng_state")):
        (step / folder).mkdir(parents=True, exist_ok=True)
        save_file({"state/0/exp_avg": torch.ones(2)} if name != "model" else {"w": torch.ones(2)}, step / folder / f"{name}.safetensors")
    (step / "pretrained_model" / "config.json").write_text(json.dumps({"type": "act"}))
    opened = reshard.open(step)
    assert [tensor.name for tensor in opened.index.tensors] == ["w"]
    assert "the optimizer in training_state beside this folder is not read with it" in opened.index.facts.notes


@pytest.mark.parametrize("case", ["torchtitan", "torchtitan-experts"])
def test_torchtitan_is_read_as_the_published_model(case, tmp_path):
    """The oracle is torchtitan's own code: its hook for the fused query, key and value, and its adapter (published.json)."""
    folder = FIXTURES / "trainer_folders" / case
    opened = reshard.open(folder / "checkpoint", model=folder / "model")
    published = json.loads((folder / "published.json").read_text())
    named = {f"{tensor.name} {tensor.kind}": tensor for tensor in opened.named().tensors}
    assert {key: described(named[key], opened.files) for key in published} == published
    reshard.convert(reshard.plan(opened, to="hf"), tmp_path / "hf")
    weights = {(key.split()[0], "weight"): value for key, value in published.items() if key.endswith(" weight")}
    assert content(reshard.open(tmp_path / "hf")) == weights


def test_the_state_of_torchtitans_fused_tensor_follows_its_weights(tmp_path):
    """Where names are kept, the weights are wq, wk and wv, and their state lies in wqkv."""
    folder = FIXTURES / "trainer_folders" / "torchtitan"
    reshard.convert(reshard.plan(folder / "checkpoint", to="dcp", optimizer=True, model=folder / "model"), tmp_path / "dcp")
    opened = reshard.open(tmp_path / "dcp", model=folder / "model")
    states = {tensor.name for tensor in opened.index.tensors if tensor.kind == "moment1"}
    assert {f"layers.0.attention.qkv_linear.{part}.weight" for part in ("wq", "wk", "wv")} < states and not any(
        "wqkv" in name for name in states
    )
    published = json.loads((folder / "published.json").read_text())
    named = {f"{tensor.name} {tensor.kind}": tensor for tensor in opened.named().tensors}
    assert {key: described(named[key], opened.files) for key in published} == published
    assert len([name for group in opened.index.param_groups() for name in group.names if "qkv_linear" in name]) == 3


def composer(folder: Path) -> Path:
    """All lies in the state of Composer's trainer, the optimizer under the name of its class."""
    weights = {name: torch.randn(2, 3) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    states = {name: {"step": torch.tensor(2.0), "exp_avg": value + 1, "exp_avg_sq": value + 2} for name, value in weights.items()}
    optimizer = {"state": states, "param_groups": [{"lr": 0.5, "params": list(weights)}]}
    state = {"model": weights, "optimizers": {"DecoupledAdamW": optimizer}, "timestamp": {"Timestamp": {"batch": 4}}}
    step = folder / "ep0-ba4"
    dcp.save({"state": state, "rng": [{"torch": torch.get_rng_state()}]}, checkpoint_id=step, no_dist=True)
    (folder / "latest-rank0.pt").symlink_to(step.name)
    return step


def test_composers_shards(tmp_path):
    step = composer(tmp_path)
    for place in (step, tmp_path, tmp_path / "latest-rank0.pt"):
        opened = reshard.open(place)
        kinds = {(tensor.name, tensor.kind) for tensor in opened.index.tensors if tensor.kind != "state"}
        names = ("model.embed_tokens.weight", "lm_head.weight")
        assert kinds == {(name, kind) for name in names for kind in ("weight", "moment1", "moment2", "step")}
        assert [(group.names, group.settings["lr"]) for group in opened.index.param_groups()] == [(names, 0.5)]
    assert [(found.number, found.complete) for found in find_steps(tmp_path, quiet=0)] == [(4, True)]


@pytest.mark.parametrize("flat", [False, True])
def test_an_optimizer_saved_without_a_key_around_it(tmp_path, flat):
    """composer.checkpoint, and get_optimizer_state_dict of torch as it is: ("state", name, "exp_avg"), or "state.<name>.exp_avg"."""
    step = tmp_path / "ep0-ba4"
    weights = {"model.embed_tokens.weight": torch.randn(2, 3), "lm_head.weight": torch.randn(2, 3)}
    state = {name: {"step": torch.tensor(2.0), "exp_avg": value + 1, "exp_avg_sq": value + 2} for name, value in weights.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": list(weights)}]}
    if flat:
        optimizer = {f"state.{name}.{key}": value for name, of_one in state.items() for key, value in of_one.items()}
        optimizer |= {f"param_groups.{name}.lr": 0.5 for name in weights}
    dcp.save(weights, checkpoint_id=step / "model", no_dist=True)
    dcp.save(optimizer, checkpoint_id=step / "optim", no_dist=True)
    opened = reshard.open(step)
    kinds = ("weight", "moment1", "moment2", "step")
    assert {(tensor.name, tensor.kind) for tensor in opened.index.tensors} == {(name, kind) for name in weights for kind in kinds}
    reshard.convert(reshard.plan(step, to="fsdp", optimizer=True), tmp_path / "fsdp")
    (path,) = (tmp_path / "fsdp").glob("optim*.pt")
    moments = [state["exp_avg"].to_local().tolist() for state in torch.load(path, weights_only=False)["state"].values()]
    assert sorted(moments) == sorted((value + 1).tolist() for value in weights.values())
    assert [(set(group.names), group.settings["lr"]) for group in opened.index.param_groups()] == [({*weights}, 0.5)]
    reshard.convert(reshard.plan(step, to="hf"), tmp_path / "hf")
    assert {tensor.name for tensor in reshard.open(tmp_path / "hf").index.tensors} == {*weights}


def test_an_adapter_in_the_folder_of_a_step(tmp_path):
    """NeMo AutoModel: the adapter is in the model's folder, the optimizer beside it by torch.distributed.checkpoint."""
    step = tmp_path / "epoch_0_step_2"
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB"]
    (step / "model").mkdir(parents=True)
    save_file(dict(zip(names, (torch.ones(2, 4), torch.ones(4, 2)), strict=True)), step / "model" / "adapter_model.safetensors")
    config = {"r": 2, "lora_alpha": 4, "peft_type": "LORA", "target_modules": ["q_proj"], "base_model_name_or_path": "org/base"}
    config |= {"task_type": "CAUSAL_LM"}
    (step / "model" / "adapter_config.json").write_text(json.dumps(config))
    dcp.save({"optim": {f"state.{name}.exp_avg": torch.ones(2) for name in names}}, checkpoint_id=step / "optim", no_dist=True)
    for place in (step, tmp_path):
        opened = reshard.open(place)
        assert (opened.format, [tensor.name for tensor in opened.index.tensors]) == ("peft", names)
        assert any("the optimizer in optim beside this folder is not read" in note for note in opened.index.facts.notes)
    reshard.convert(reshard.plan(step, to="peft"), tmp_path / "out")
    assert {tensor.name for tensor in reshard.open(step / "optim").index.tensors} == set(names)


def test_automodel_that_saved_it(tmp_path):
    """Shards, the consolidated folder in theirs, and the optimizer; of LoRA an adapter (fixtures/trainer_folders/automodel.py)."""
    folder = FIXTURES / "trainer_folders" / "automodel"
    for place in (folder / "checkpoint", folder / "checkpoint" / "epoch_0_step_2"):
        opened = reshard.open(place)
        assert (opened.format, content(opened)) == ("dcp-safetensors", truth(folder))
    reshard.convert(reshard.plan(folder / "checkpoint", to="hf"), tmp_path / "hf")
    consolidated = folder / "checkpoint" / "epoch_0_step_2" / "model" / "consolidated"
    assert reshard.verify(consolidated, tmp_path / "hf").equal
    adapter = FIXTURES / "trainer_folders" / "automodel-lora"
    opened = reshard.open(adapter / "checkpoint" / "epoch_0_step_2")
    assert (opened.format, content(opened)) == ("peft", truth(adapter))
    # AutoModel names no base where it has trained a model of no repository.
    reshard.convert(reshard.plan(opened, to="peft", base_model="org/base"), tmp_path / "peft")
    assert content(reshard.open(tmp_path / "peft")) == truth(adapter)
