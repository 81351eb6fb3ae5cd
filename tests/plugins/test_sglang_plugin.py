"""What the plugin does inside SGLang, without SGLang. tests/live/on_sglang.py runs it in real servers."""

import asyncio
import hashlib
import json
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.fixture_places import DCP, truth

from reshard.errors import RequestError
from reshard.live.engines.sglang import step_text

PLUGIN = sys.modules[entry_points(group="sglang.srt.plugins", name="reshard")["reshard"].load().__module__]
TRANSFER = pytest.importorskip(f"{PLUGIN.__package__}.weight_transfer.sglang")


def test_whole_tensors_of_any_checkpoint_come_under_their_names():
    """The oracle: what the training processes held, gathered there."""
    config = {"checkpoint": str(DCP / "fsdp2" / "checkpoint")}
    told = PLUGIN.whole_tensors(PLUGIN.loader_options(config), str(DCP / "fsdp2" / "model"))
    found = {name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest() for name, tensor in told}
    assert found == {name: tensor["sha256"] for (name, role), tensor in truth("fsdp2").items() if role == "weight" and name in found}
    assert len(found) > 10


@pytest.mark.parametrize("given, told", [({"layout": "x"}, "layout"), ({"threads": 2}, "threads"), ({"chekpoint": "x"}, "chekpoint")])
def test_an_option_that_does_nothing_is_refused(given, told):
    with pytest.raises(RequestError, match=told):
        PLUGIN.loader_options(given)


def test_other_load_formats_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(PLUGIN, "loader_class", lambda: dict)
    seen = []
    for name in ("auto", "reshard"):
        PLUGIN.verify_load_format(lambda config: seen.append(config.load_format), SimpleNamespace(load_format=name))
    assert seen == ["auto", dict]


class InitReqInput(SimpleNamespace):
    """Named as SGLang's requests are."""


@pytest.fixture
def done(monkeypatch):
    """The steps that a rank was asked for."""
    asked = []
    steps = {"join": lambda values: asked.append(("join", values)), "receive": lambda values: asked.append(("receive", values))}
    rank = SimpleNamespace(**steps, finish=lambda: asked.append("finish"), close=lambda: asked.append("close"))
    monkeypatch.setattr(TRANSFER, "_rank_of", lambda worker: rank)
    structs = ModuleType("sglang.srt.managers")
    structs.io_struct = SimpleNamespace(InitReqOutput=lambda **values: SimpleNamespace(**values))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", structs)
    return asked


def step(group_name):
    return TRANSFER.step(lambda *_: "SGLang's own", SimpleNamespace(tp_worker=None), InitReqInput(group_name=group_name))


def test_steps_go_to_the_rank_and_other_requests_to_sglang(done):
    for name, values in (("join", {"port": 1}), ("receive", {"port": 1}), ("finish", {}), ("leave", {})):
        assert step(step_text(name, values)).success
    assert done == [("join", {"port": 1}), ("receive", {"port": 1}), "finish", "close"]
    assert step("weight_update_group") == "SGLang's own" and not step(json.dumps({"reshard": "dance"})).success and len(done) == 4


def test_a_pause_that_waits_ends_when_no_request_runs_and_new_ones_wait():
    answers = [True, True, False]

    async def paused(rid):
        condition, lock = asyncio.Condition(), SimpleNamespace(is_locked=lambda: asyncio.sleep(0, answers.pop(0)))
        manager = SimpleNamespace(is_pause=False, is_pause_cond=condition, model_update_lock=lock)
        await TRANSFER.pause(lambda manager, request: asyncio.sleep(0), manager, SimpleNamespace(rid=rid))
        return manager.is_pause

    assert asyncio.run(paused("reshard")) is True and answers == []
    assert asyncio.run(paused("7")) is False


def test_tensors_with_several_names_are_one():
    head = torch.nn.Linear(2, 3, bias=False)
    model = torch.nn.ModuleDict({"a": head, "b": torch.nn.Linear(2, 3, bias=False)})
    model["b"].weight = head.weight
    assert [names for names, _ in TRANSFER.load_form(model)] == [["a.weight", "b.weight"]]
