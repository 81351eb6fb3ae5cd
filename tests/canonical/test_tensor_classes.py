"""Which tensors of a checkpoint are weights: of each kind of misjudgement that users met, in each format that can hold it."""

import json
import shutil

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from helpers.fixture_places import HF
from helpers.reshard_command import reshard as run

import reshard
from reshard.errors import CheckpointError, RequestError, UnsupportedError

LLAMA = HF / "llama"
WEIGHTS = safetensors.torch.load_file(LLAMA / "model.safetensors")
PARAMETERS = sum(tensor.numel() for tensor in WEIGHTS.values())
# What runs keep under the names of a flat state dict, beside the weights.
RUN_STATE = {
    "extra.rng_rank0": torch.zeros(5056, dtype=torch.uint8),
    "extra.probe": torch.tensor([1, 2]),
    "extra.flag": torch.tensor([True]),
    "extra.empty": torch.zeros(0),
    "rng": torch.zeros(16, dtype=torch.uint8),
    "cuda_rng_state": torch.zeros(16, dtype=torch.uint8),
    "scaler.scale": torch.tensor(65536.0),
    "scaler.growth_tracker": torch.tensor([3]),
    "loss_history": torch.ones(100),
    "data_sampler.epoch": torch.tensor(3),
    "data_sampler.seeds": torch.arange(4),
    "global_step": torch.tensor(7),
    "model.layers.0.self_attn.q_proj._extra_state": torch.zeros(64, dtype=torch.uint8),
    "model.layers.0.mlp.up_proj.amax_history": torch.ones(1024, 3),
}
BUFFERS = {
    "bn.num_batches_tracked": torch.tensor(3),
    "bn.running_mean": torch.ones(8),
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
}
EMA = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
LORA = {
    f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": torch.full(shape, 1.0)
    for layer in range(2)
    for part, shape in (("A", (4, 32)), ("B", (32, 4)))
}
# An undeclared model with names that resemble other things.
ODD = {
    "scheduler.weight": torch.ones(4),
    "sampler.proj": torch.ones(4, 4),
    "random.features.weight": torch.ones(4, 4),
    "generator.rng_embedding": torch.ones(4, 4),
    "loss.log_vars": torch.ones(2),
    "ema_gate.weight": torch.ones(4, 4),
    "teacher.head.weight": torch.ones(4, 4),
    "value_head.weight": torch.ones(1, 4),
    "policy_head.bias": torch.ones(4),
    "critic.0.weight": torch.ones(4, 4),
    "logit_scale": torch.tensor(2.5),
    "blocks.0.w1": torch.ones(4, 4, dtype=torch.bfloat16),
    "blocks.0.qweight": torch.ones(4, 4, dtype=torch.int32),
    "blocks.0.packed": torch.ones(4, 4, dtype=torch.uint8),
    "blocks.0.mask": torch.ones(4, 4, dtype=torch.bool),
    "blocks.0.position_ids": torch.arange(4),
    "freqs": torch.ones(4, 4, dtype=torch.complex64),
    "lora_embedding.weight": torch.ones(4, 4),
    "0": torch.ones(2),
}


def hf(folder, tensors, *, config=True):
    folder.mkdir(parents=True)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    if config:
        shutil.copy(LLAMA / "config.json", folder)
    return folder


def distributed(folder, state_dict, *, config=True):
    dcp.save(state_dict, checkpoint_id=folder, no_dist=True)
    if config:
        shutil.copy(LLAMA / "config.json", folder)
    return folder


def moments(weights, *, frozen=()):
    return {
        "state": {
            name: {"exp_avg": torch.ones_like(tensor), "exp_avg_sq": torch.ones_like(tensor), "step": torch.tensor(3.0)}
            for name, tensor in weights.items()
            if name not in frozen
        },
        "param_groups": [{"lr": 0.1, "params": [name for name in weights if name not in frozen]}],
    }


def converted(source, out, **options):
    reshard.convert(reshard.plan(source, to="hf", **options), out)
    return safetensors.torch.load_file(out / "model.safetensors")


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def kinds(path, **options):
    return {tensor.name: tensor.kind for tensor in reshard.open(path, **options).index.tensors}


@pytest.mark.parametrize("make", [hf, distributed])
@pytest.mark.parametrize("declared", [True, False])
def test_run_state_is_listed_and_withheld_and_carried_on_request(tmp_path, make, declared):
    source = make(tmp_path / "in", {**WEIGHTS, **RUN_STATE}, config=declared)
    assert equal(converted(source, tmp_path / "out"), WEIGHTS)
    withheld = {drop.name: (drop.kind, drop.reason) for drop in reshard.plan(source, to="hf").drops}
    assert withheld.keys() == RUN_STATE.keys()
    assert all(kind == "state" and "run state" in reason for kind, reason in withheld.values())
    assert equal(converted(source, tmp_path / "all", keep_unknown=True), {**WEIGHTS, **RUN_STATE})
    assert json.loads(run("inspect", source, "--json").out)["parameters"] == PARAMETERS


@pytest.mark.parametrize("to", ["hf", "dcp", "vllm", "fsdp"])
def test_a_declared_model_has_no_buffers_of_others(tmp_path, to):
    source = hf(tmp_path / "in", {**WEIGHTS, **BUFFERS})
    plan = reshard.plan(source, to=to)
    assert {drop.name: drop.kind for drop in plan.drops} == dict.fromkeys(BUFFERS, "buffer")
    reshard.convert(plan, tmp_path / "out")
    assert reshard.verify(LLAMA, tmp_path / "out").equal
    assert reshard.verify(source, tmp_path / "out").equal
    assert reshard.fingerprint(source) == reshard.fingerprint(LLAMA)


def test_a_serving_engine_gets_nothing_that_it_cannot_load(tmp_path):
    for name in ("value_head.weight", "model.layers.0.self_attn.q_norm.weight"):
        source = hf(tmp_path / name, {**WEIGHTS, name: torch.ones(8)})
        for given in ({}, {"keep_unknown": True}):
            with pytest.raises(CheckpointError, match=rf"{name}.*has no such weight"):
                reshard.plan(source, to="vllm", **given)


@pytest.mark.parametrize("make", [hf, distributed])
def test_an_undeclared_model_with_odd_names_is_converted_completely(tmp_path, make):
    source = make(tmp_path / "in", ODD, config=False)
    plan = reshard.plan(source, to="hf")
    assert not plan.drops
    assert equal(converted(source, tmp_path / "out"), ODD)
    assert reshard.verify(source, tmp_path / "out").equal


def test_an_undeclared_model_keeps_its_buffers_which_are_no_parameters(tmp_path):
    source = hf(tmp_path / "in", {"conv.weight": torch.ones(4, 4), **BUFFERS}, config=False)
    assert len(converted(source, tmp_path / "out")) == 1 + len(BUFFERS)
    assert json.loads(run("inspect", source, "--json").out)["parameters"] == 16


def test_moments_prove_weights_and_their_absence_proves_nothing(tmp_path):
    weights = {**ODD, "rng.table": torch.ones(4), "scheduler.gain": torch.ones(3)}
    frozen = {"blocks.0.w1", "blocks.0.qweight", "blocks.0.packed", "blocks.0.mask", "blocks.0.position_ids", "logit_scale", "freqs"}
    source = distributed(tmp_path / "in", {"model": weights, "optim": moments(weights, frozen=frozen)}, config=False)
    assert equal(converted(source, tmp_path / "out"), weights)
    flat = distributed(tmp_path / "flat", {**weights, "optim": moments(weights, frozen=frozen)}, config=False)
    assert equal(converted(flat, tmp_path / "flat-out"), weights)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_an_ema_beside_the_model_is_another_model(tmp_path, declared, nested):
    roots = {"model": WEIGHTS, "ema": {"model": EMA} if nested else EMA, "optimizer": moments(WEIGHTS), "loss_history": torch.ones(9)}
    source = distributed(tmp_path / "in", roots, config=declared)
    document = json.loads(run("inspect", source, "--json").out)
    assert [(found["root"], found["main"], found["parameters"]) for found in document["models"]] == [
        ("model", True, PARAMETERS),
        ("ema", False, PARAMETERS),
    ]
    assert document["parameters"] == PARAMETERS
    assert "(--root ema)" in run("inspect", source).out
    assert equal(converted(source, tmp_path / "main"), WEIGHTS)
    assert equal(converted(source, tmp_path / "named", root="model"), WEIGHTS)
    assert equal(converted(source, tmp_path / "ema", root="ema"), EMA)
    assert run("verify", source, tmp_path / "ema", "--root", "ema").code == 0
    assert run("verify", source, tmp_path / "ema").code == 1
    assert run("fingerprint", source, "--root", "ema").out.split()[0] == run("fingerprint", tmp_path / "ema").out.split()[0]
    assert run("roundtrip", source, "--to", "hf", "--root", "ema", "--materialize").code == 0
    with pytest.raises(RequestError, match=r"`root=nonsense.*model, ema"):
        reshard.plan(source, to="hf", root="nonsense")
    with pytest.raises(RequestError, match="no optimizer state of the chosen weights"):
        reshard.plan(source, to="dcp", root="ema", optimizer=True)


@pytest.mark.parametrize("root", ["model_ema", "ema"])
def test_an_ema_in_a_flat_state_dict_is_another_model(tmp_path, root):
    source = hf(tmp_path / "in", {**WEIGHTS, **{f"{root}.{name}": tensor for name, tensor in EMA.items()}})
    assert equal(converted(source, tmp_path / "main"), WEIGHTS)
    assert equal(converted(source, tmp_path / "ema", root=root), EMA)
    assert reshard.plan(source, to="vllm", root=root, tp=2)


def test_a_checkpoint_of_an_ema_alone_is_that_model(tmp_path):
    source = distributed(tmp_path / "in", {"ema": EMA})
    assert equal(converted(source, tmp_path / "out"), EMA)


def test_of_actor_and_critic_none_is_the_main_model(tmp_path):
    roots = {"actor": WEIGHTS, "critic": {**EMA, "value_head.weight": torch.ones(1, 32)}}
    flat = {f"{root}.{name}": tensor for root, weights in roots.items() for name, tensor in weights.items()}
    source = distributed(tmp_path / "in", {**roots, "optim": moments(flat)})
    shown = run("inspect", source)
    assert shown.code == 0 and "several models" in shown.out and "actor" in shown.out and "critic" in shown.out
    with pytest.raises(RequestError, match=r"several models: actor, critic.*`root=actor"):
        reshard.plan(source, to="hf")
    assert equal(converted(source, tmp_path / "actor", root="actor"), WEIGHTS)
    assert equal(converted(source, tmp_path / "critic", root="critic"), {**EMA, "value_head.weight": torch.ones(1, 32)})
    assert reshard.plan(source, to="dcp", root="critic", optimizer=True).content.states.keys() == {
        f"optim.state.{name}.{kind}" for name in (*WEIGHTS, "value_head.weight") for kind in ("exp_avg", "exp_avg_sq", "step")
    }
    assert run("roundtrip", source, "--to", "hf", "--root", "actor", "--materialize").code == 0


def test_several_models_are_carried_together_under_their_full_names(tmp_path):
    weights = {f"{root}.{name}": torch.ones(4, 4) for root in ("actor", "critic") for name in ("a.weight", "b.weight")}
    source = hf(tmp_path / "in", weights, config=False)
    assert equal(converted(source, tmp_path / "out", keep_unknown=True), weights)


def test_an_ema_in_a_torch_file_is_another_model(tmp_path):
    state_dict = {"model": WEIGHTS, "ema": EMA, "optimizer": moments(WEIGHTS), "torch_rng": torch.zeros(16, dtype=torch.uint8), "epoch": 3}
    torch.save(state_dict, tmp_path / "model.pt")
    shutil.copy(LLAMA / "config.json", tmp_path)
    assert equal(converted(tmp_path, tmp_path.with_name(f"{tmp_path.name}-main")), WEIGHTS)
    assert equal(converted(tmp_path, tmp_path.with_name(f"{tmp_path.name}-ema"), root="ema"), EMA)
    assert kinds(tmp_path)["torch_rng"] == "state"
    assert reshard.open(tmp_path).index.objects == ("optimizer", "epoch")


def test_a_lora_adapter_is_recognized(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    safetensors.torch.save_file(LORA, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    shown = run("inspect", folder)
    assert "LoRA of rank 4, on q_proj: 4 tensors, 512 parameters" in shown.out and "--merge-adapter" in shown.out
    assert "LoRA adapter without its base model" in shown.out
    assert run("inspect", folder, "--model", LLAMA).code == 0
    for given in ({}, {"model": LLAMA}):
        with pytest.raises(UnsupportedError, match=r"LoRA adapter and no base weights.*`to=peft`.*`merge_adapter="):
            reshard.plan(folder, to="hf", **given)
    plan = reshard.plan(folder, to="hf", keep_unknown=True)
    assert any("not merged" in note for note in plan.layout.notes)
    assert equal(converted(folder, tmp_path / "out", keep_unknown=True), LORA)


@pytest.mark.parametrize("to", ["hf", "vllm"])
def test_the_frozen_base_of_an_adapter_is_the_model(tmp_path, to):
    base = {f"base_model.model.{name}".replace("q_proj.", "q_proj.base_layer."): tensor for name, tensor in WEIGHTS.items()}
    source = distributed(tmp_path / "in", {"model": {**base, **LORA}, "optim": moments(LORA)})
    plan = reshard.plan(source, to=to, drop_adapter=True)
    assert {drop.name for drop in plan.drops if drop.kind == "adapter"} == LORA.keys()
    assert all("not merged" in drop.reason for drop in plan.drops if drop.kind == "adapter")
    reshard.convert(plan, tmp_path / "out")
    assert reshard.verify(LLAMA, tmp_path / "out").equal


def test_state_of_one_run_stays_in_a_round_trip(tmp_path):
    source = distributed(tmp_path / "in", {**WEIGHTS, **RUN_STATE})
    assert run("roundtrip", source, "--to", "hf", "--keep-unknown", "--materialize").code == 0
    assert run("roundtrip", source, "--to", "dcp", "--dp", "2", "--keep-unknown").code == 0
    assert run("roundtrip", source, "--to", "vllm", "--tp", "2").code == 0
