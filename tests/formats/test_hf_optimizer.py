"""The optimizer beside a Hugging Face folder's weights: `optimizer.pt` of transformers' Trainer, `optimizer.bin` of accelerate.

That every state equals what the live optimizer held is test_truth.py's; here is what becomes of it, and what hinders it.
"""

import json
import shutil

import pytest
from helpers.fixture_places import FIXTURES, described, truth

import reshard
from reshard.errors import RequestError

TRAINER, ADAFACTOR = FIXTURES / "hf_trainer" / "trainer", FIXTURES / "hf_trainer" / "accelerate"
EXPERTS = FIXTURES / "hf_trainer" / "experts"


def content(checkpoint):
    return {(tensor.name, tensor.kind): described(tensor, checkpoint.files) for tensor in checkpoint.index.tensors}


def test_groups_are_those_of_the_trainer():
    """Trainer takes norms and biases out of weight decay (get_parameter_names, ALL_LAYERNORM_LAYERS)."""
    decayed, others = reshard.open(TRAINER / "checkpoint").index.param_groups()
    assert (decayed.settings["weight_decay"], others.settings["weight_decay"]) == (0.1, 0.0)
    assert all("norm" in name for name in others.names) and not any("norm" in name for name in decayed.names)
    assert {*decayed.names, *others.names} == {name for name, kind in truth(TRAINER) if kind == "weight"}


@pytest.mark.parametrize("between", ["dcp", "fsdp", "universal", "deepspeed"])
def test_the_state_arrives_in_formats_of_trainers(tmp_path, between):
    options = {} if between in ("universal", "deepspeed") else {"optimizer": True}
    reshard.convert(reshard.plan(TRAINER / "checkpoint", to=between, **options), tmp_path / "out")
    arrived, told = content(reshard.open(tmp_path / "out")), truth(TRAINER)
    for (name, kind), value in told.items():
        if kind in ("moment1", "moment2"):
            assert arrived[name, kind] == value, (name, kind)


def test_rows_and_columns_arrive_in_dcp(tmp_path):
    """Adafactor's factors have no shape of a weight; they keep the optimizer's names."""
    reshard.convert(reshard.plan(ADAFACTOR / "checkpoint", to="dcp", optimizer=True), tmp_path / "out")
    arrived = content(reshard.open(tmp_path / "out", model=ADAFACTOR / "model"))
    assert truth(ADAFACTOR).items() <= arrived.items()


def test_weights_alone_do_not_need_the_optimizer(tmp_path):
    folder = shutil.copytree(TRAINER / "checkpoint", tmp_path / "in")
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:1000])
    opened = reshard.open(folder)
    assert {tensor.kind for tensor in opened.index.tensors} == {"weight"}
    assert any("it is not read here: " in note and "optimizer.pt" in note for note in opened.index.facts.notes)
    reshard.convert(reshard.plan(folder, to="hf"), tmp_path / "out")
    assert reshard.verify(TRAINER / "checkpoint", tmp_path / "out").equal


def test_without_a_declared_order_numbers_get_no_names(tmp_path):
    """safetensors sorts names, so of a model that nobody declared the order of the parameters is not known."""
    folder = shutil.copytree(TRAINER / "checkpoint", tmp_path / "in")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "made_up", "architectures": ["MadeUp"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"optimizer\.pt numbers the optimizer's parameters, and their order in this model is not known"):
        reshard.plan(folder, to="dcp", optimizer=True)
    reshard.convert(reshard.plan(folder, to="hf"), tmp_path / "out")


def test_experts_of_a_stack_get_their_state(tmp_path):
    """transformers 5 numbers the experts of a layer as two arrays, which qwen3_moe has before the router, and mixtral after it."""
    reshard.convert(reshard.plan(EXPERTS / "checkpoint", to="dcp", optimizer=True), tmp_path / "out")
    arrived, told = content(reshard.open(tmp_path / "out", model=EXPERTS / "model")), truth(EXPERTS)
    assert told.items() <= arrived.items() and sum(".experts.1." in name and kind == "moment2" for name, kind in told) == 3
    decayed, others = reshard.open(EXPERTS / "checkpoint").index.param_groups()
    assert sum(".experts." in name for name in decayed.names) == 6 and all("norm" in name for name in others.names)


def test_experts_in_an_order_of_transformers_4_get_no_names(tmp_path):
    """Before, w1, w2 and w3 were numbered in turn, where w2 can have the shape of w3."""
    folder = shutil.copytree(FIXTURES / "hf" / "mixtral-2", tmp_path / "in")
    shutil.copy(TRAINER / "checkpoint" / "optimizer.pt", folder)
    opened = reshard.open(folder)
    assert any("their names are not certain: the optimizer has" in note for note in opened.index.facts.notes)
    assert {tensor.kind for tensor in opened.index.tensors} == {"weight", "state"}


def test_an_optimizer_beside_an_adapter_is_left(tmp_path):
    """It numbers the factors of the adapter, in an order that nobody declares."""
    adapter = FIXTURES / "peft" / "plain" / "adapter"
    folder = shutil.copytree(adapter, tmp_path / "in")
    shutil.copy(TRAINER / "checkpoint" / "optimizer.pt", folder)
    assert content(reshard.open(folder)) == content(reshard.open(adapter))
    assert reshard.fingerprint(folder) == reshard.fingerprint(adapter)
