"""What no plan cuts is refused by its name, or sent whole to the engine's own loader, with fallback="whole"."""

import hashlib
import json

import numpy as np
import pytest
import torch
from live.in_memory import updated
from live.source_rank import free_port, source_ranks
from live.test_quantized import copies
from live.test_transfers import HF, assert_equal, by_rows, hellos, of_rank, stored
from live.test_update import digests, held
from safetensors.torch import load_file, save_file

import reshard
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.live.agreement import agreed_plan
from reshard.live.sender import Sender

LLAMA, TP = HF / "llama", 2
CONFIG = json.loads((LLAMA / "config.json").read_text())
GATE = "model.layers.0.self_attn.g_proj.weight"


def with_gate(target):
    """The llama with a weight that its declaration lacks."""
    target.mkdir()
    weights = load_file(LLAMA / "model.safetensors")
    save_file({**weights, GATE: torch.randn(12, 16).to(torch.bfloat16)}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(CONFIG))
    return target


def test_a_weight_that_the_declaration_lacks_arrives_whole_beside_the_plan(tmp_path):
    folder = with_gate(tmp_path / "gated")
    said, arrays = by_rows(stored(folder), 3)
    with pytest.raises(CheckpointError, match=r"g_proj.*no such weight"):
        agreed_plan(said, hellos(CONFIG, TP))
    plan = agreed_plan(said, hellos(CONFIG, TP), fallback=True)
    assert plan.fallbacks == (GATE,) and f"  whole     {GATE}: sent whole to the engine's own loader" in str(plan)
    assert plan.to_json()["fallbacks"] == [GATE]
    reshard.convert(reshard.plan(LLAMA, to="vllm", tp=TP), tmp_path / "out")
    staged, nbytes = updated(plan, arrays)
    for rank in range(TP):
        whole = staged[rank].pop(GATE)
        assert np.array_equal(whole, stored(folder)[GATE][1])
        assert_equal(staged[rank], of_rank(tmp_path / "out", rank))
        assert GATE not in {each.name for each in plan.targets(rank)}
    alone = agreed_plan(by_rows(stored(LLAMA), 3)[0], hellos(CONFIG, TP), fallback=True)
    assert alone.fallbacks == () and nbytes == plan.nbytes == alone.nbytes + TP * 12 * 16 * 2


@pytest.mark.parametrize("describe", [by_rows, copies])
def test_a_model_without_a_declaration_arrives_whole(describe):
    config = {**CONFIG, "model_type": "nobody", "architectures": ["Nobody"]}
    tensors = stored(LLAMA)
    said, arrays = describe(tensors, 2)
    with pytest.raises(UnsupportedError, match="'nobody' is not declared"):
        agreed_plan(said, hellos(config, TP))
    plan = agreed_plan(said, hellos(config, TP), fallback=True)
    assert set(plan.fallbacks) == tensors.keys() and plan.targets(0) == ()
    for found in updated(plan, arrays)[0]:
        assert_equal(found, tensors)


@pytest.fixture
def trainer(tmp_path):
    """Two ranks that each hold the gated llama, and a stand-in engine that knows its gate."""
    with source_ranks(2) as ranks:
        ranks.ask("load", files=str(with_gate(tmp_path / "gated")), copies=True)
        yield ranks


def test_the_engines_loader_gets_whole_tensors_and_the_report_lists_them(trainer, tmp_path):
    trainer.ask("stand_in", tp=TP, port=free_port(), extra={GATE: [12, 16]}, served=CONFIG)
    assert all(f"{GATE}: the declaration of llama has no such weight" in answer["error"] for answer in trainer.ask("join"))
    planned = trainer.ask("join", fallback="whole")[0]
    assert planned["fallbacks"] == [GATE] and any(line.startswith(f"  whole     {GATE}") for line in planned["lines"])
    for _ in range(2):
        reports = trainer.ask("update")
        assert all(report["fallbacks"] == [GATE] and report["nbytes"] == planned["nbytes"] for report in reports)
    found, gate = held(trainer), load_file(tmp_path / "gated" / "model.safetensors")[GATE]
    for rank, each in enumerate(found):
        assert each.pop(GATE) == sha256(gate.chunk(TP)[rank])
    assert found == digests(LLAMA)


def sha256(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()


@pytest.mark.parametrize(
    "extra, why",
    [
        ({GATE: [14, 16]}, "the stand-in's loader does not take it"),
        ({GATE: [12, 16], "another": [2]}, "another: the plan does not bring it"),
    ],
)
def test_what_the_loader_does_not_take_is_refused_before_anything_is_sent(trainer, extra, why):
    trainer.ask("stand_in", tp=TP, port=free_port(), extra=extra, served=CONFIG)
    answers = trainer.ask("join", fallback="whole")
    assert all(why in answer["error"] for answer in answers)
    assert trainer.ask("stand_in_asked")[0] == ["join"]


def test_a_given_plan_has_no_fallback():
    with pytest.raises(RequestError, match="Leave out one of them"):
        Sender({}, "http://127.0.0.1:1", plan=lambda hellos: None, fallback="whole")


def test_another_fallback_is_refused(trainer):
    assert all("Fallback half: unknown value" in answer["error"] for answer in trainer.ask("join", fallback="half"))
