"""Updates between processes on gloo: a trainer's ranks that hold rows of a tiny llama, and the ranks of a stand-in engine.

The oracle is plain torch on whole weights (oracle.py). The same with real vLLM is tests/live/check.py.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from live.oracle import rank_tensors
from live.source_rank import free_port, source_ranks
from safetensors.torch import load_file, save_file

LLAMA = Path(__file__).resolve().parents[2] / "fixtures" / "hf" / "llama"
TP = 2


def digests(folder):
    """SHA-256 of what each target rank holds of the weights in a folder; of zeros without one."""
    config, weights = json.loads((LLAMA / "config.json").read_text()), load_file((folder or LLAMA) / "model.safetensors")
    held = [rank_tensors(config, weights, TP, rank) for rank in range(TP)]
    held = [{name: tensor if folder else torch.zeros_like(tensor) for name, tensor in each.items()} for each in held]
    return [{name: hashlib.sha256(tensor.view(torch.uint8).numpy()).hexdigest() for name, tensor in each.items()} for each in held]


def rolled(target, turns):
    """The llama with the rows of each weight rolled."""
    target.mkdir()
    weights = {name: torch.roll(weight, turns, 0).contiguous() for name, weight in load_file(LLAMA / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors")
    (target / "config.json").write_bytes((LLAMA / "config.json").read_bytes())
    return target


def nudged(target, of, step):
    """The llama with every `step`-th element of each weight made another one."""
    target.mkdir()
    weights = load_file(of / "model.safetensors")
    for weight in weights.values():
        weight.view(-1)[::step] += 1
    save_file(weights, target / "model.safetensors")
    (target / "config.json").write_bytes((LLAMA / "config.json").read_bytes())
    return target


@pytest.fixture
def trainer(request):
    """Source ranks; rank 0 also has a stand-in engine."""
    with source_ranks(getattr(request, "param", 2)) as ranks:
        ranks.ask("load", files=str(LLAMA))
        ranks.ask("stand_in", tp=TP, port=free_port())
        yield ranks


def held(trainer):
    """What the stand-in's ranks hold, without scales, which are ones."""
    found = trainer.ask("stand_in_held")[0]
    return [{name: digest for name, digest in each.items() if not name.endswith("_scale")} for each in found]


CASES = [(1, False, "gloo"), (3, False, "gloo"), (2, True, "gloo"), (2, False, "shared")]


@pytest.mark.parametrize("trainer, wide, transport", CASES, indirect=["trainer"])
def test_target_ranks_hold_what_the_sources_held_when_they_sent(trainer, wide, transport, tmp_path):
    trainer.ask("load", files=str(LLAMA), wide=wide)
    planned = trainer.ask("open", engine="stand-in", tp=TP, transport=transport)[0]["nbytes"]
    for folder in (LLAMA, rolled(tmp_path / "next", 1)):
        trainer.ask("load", files=str(folder))
        before = held(trainer)
        reports = trainer.ask("update")
        assert held(trainer) == digests(folder) != before
        assert {report["nbytes"] for report in reports} == {planned}
    assert sum(report["sent"] for report in reports) == 2 * planned and reports[0]["version"] == "2"
    asked = trainer.ask("stand_in_asked")[0]
    assert asked == ["join", *["pause wait", "start", "receive", "finish", "clear cache", "resume"] * 2]


@pytest.mark.parametrize("trainer, wide, transport", CASES, indirect=["trainer"])
def test_only_what_changed_travels(trainer, wide, transport, tmp_path):
    trainer.ask("load", files=str(LLAMA), wide=wide)
    planned = trainer.ask("open", engine="stand-in", tp=TP, transport=transport, changes=True)[0]["nbytes"]
    few, all_of_it = nudged(tmp_path / "few", LLAMA, 50), rolled(tmp_path / "all", 1)
    sent, before = [], 0
    for folder in (LLAMA, few, few, all_of_it):
        trainer.ask("load", files=str(folder), wide=wide)
        reports = trainer.ask("update")
        assert held(trainer) == digests(folder)
        sent.append(reports[0]["nbytes"])
        now = sum(report["sent"] for report in reports)
        assert now - before == sent[-1]
        before = now
    whole, fiftieth, nothing, again = sent
    heads = whole - planned
    assert 0 < heads == nothing < planned / 100 and fiftieth < planned / 8
    assert planned / 4 < again <= whole


def test_after_an_update_that_failed_everything_travels(trainer, tmp_path):
    planned = trainer.ask("open", engine="stand-in", tp=TP, verify=True, changes=True)[0]["nbytes"]
    assert trainer.ask("update")[0]["nbytes"] > planned
    few = nudged(tmp_path / "few", LLAMA, 50)
    trainer.ask("load", files=str(few))
    answers = trainer.ask("update", spoil="last")
    assert all("the digest of the bytes from rank 1" in answer["error"] for answer in answers) and held(trainer) == digests(LLAMA)
    assert trainer.ask("update")[0]["nbytes"] > planned and held(trainer) == digests(few)
    trainer.ask("stand_in_fails", what="install")
    assert "stays paused" in trainer.ask("update")[0]["error"]
    assert trainer.ask("update")[0]["nbytes"] > planned and held(trainer) == digests(few)
    assert trainer.ask("update")[0]["nbytes"] < planned / 100


def test_an_update_with_a_wrong_byte_is_dropped_and_the_next_one_succeeds(trainer):
    trainer.ask("open", engine="stand-in", tp=TP, verify=True)
    answers = trainer.ask("update", spoil="digest")
    assert all("the digest of the bytes from rank 1 of the trainer" in answer["error"] for answer in answers)
    assert all("holds the old weights and answers" in answer["error"] for answer in answers)
    assert held(trainer) == digests(None)
    assert [answer["version"] for answer in trainer.ask("update", version="step-7")] == ["step-7"] * 2
    assert held(trainer) == digests(LLAMA)


def test_a_source_rank_that_dies_leaves_the_old_weights(trainer):
    trainer.ask("open", engine="stand-in", tp=TP)
    answers = trainer.ask("update", spoil="dies")
    assert (
        answers[1] is None
        and "rank 1 of the channel: the connection to it ended" in answers[0]["error"].lower()
        and "holds the old weights" in answers[0]["error"]
    )
    assert "Make a new Sender" in trainer.ask("update")[0]["error"]
    assert held(trainer) == digests(None) and trainer.ask("stand_in_asked")[0][-2:] == ["resume", "close"]


def test_a_rank_that_fails_to_install_leaves_the_engine_paused_until_the_next_update(trainer):
    trainer.ask("open", engine="stand-in", tp=TP)
    trainer.ask("stand_in_fails", what="install")
    answers = trainer.ask("update")
    assert all("no memory to install" in answer["error"] and "stays paused" in answer["error"] for answer in answers)
    assert trainer.ask("stand_in_asked")[0][-1] == "finish"
    assert trainer.ask("update")[1]["nbytes"] and held(trainer) == digests(LLAMA)
    assert trainer.ask("stand_in_asked")[0][-1] == "resume"


def test_a_transport_that_nobody_knows_is_refused_on_every_rank(trainer):
    answers = trainer.ask("open", engine="stand-in", tp=TP, transport="pigeon")
    assert all("pigeon: unknown value. Known: gloo, nccl, shared" in answer["error"] for answer in answers)


def test_a_source_rank_that_dies_leaves_the_old_weights_with_shared_memory(trainer):
    trainer.ask("open", engine="stand-in", tp=TP, transport="shared")
    answers = trainer.ask("update", spoil="dies")
    assert answers[1] is None and "holds the old weights" in answers[0]["error"] and held(trainer) == digests(None)


def test_engines_of_a_list_get_the_same_and_one_may_fail_alone(trainer):
    trainer.ask("stand_in", tp=TP, port=free_port())
    trainer.ask("open", engine="stand-in", tp=TP, replicas=2)
    trainer.ask("stand_in_fails", what="install")
    answers = trainer.ask("update")
    said = "stand-in holds the new weights and answers. the stand-in may hold old and new weights, and stays paused"
    assert all("no memory to install" in answer["error"] and said in answer["error"] for answer in answers), answers
    asked = [trainer.ask("stand_in_asked", engine=engine)[0][-1] for engine in range(2)]
    assert asked == ["resume", "finish"] and held(trainer)[:TP] == digests(LLAMA) != held(trainer)[TP:]
    reports = trainer.ask("update")
    assert held(trainer) == digests(LLAMA) * 2 and {report["version"] for report in reports} == {"2"}


def test_another_shape_is_refused_before_anything_is_sent(trainer):
    others = {"qkv_proj.weight": {"head_dim": 16}, "embed_tokens.weight": {"vocab_size": 300}, "layers.1.": {"num_hidden_layers": 1}}
    for what, config in others.items():
        answers = trainer.ask("open", engine="stand-in", tp=TP, config=config)
        assert all(what in answer["error"] and "Nothing was sent" in answer["error"] for answer in answers)
    assert held(trainer) == digests(None)
    assert trainer.ask("stand_in_asked")[0] == ["join"] * 3
    assert trainer.ask("open", engine="stand-in", tp=TP)[0]["nbytes"] and "nbytes" in trainer.ask("update")[0]
    assert held(trainer) == digests(LLAMA)


def test_who_leaves_gives_the_staging_back_and_may_come_again(trainer):
    trainer.ask("open", engine="stand-in", tp=TP)
    trainer.ask("close")
    assert trainer.ask("stand_in_asked")[0] == ["join", "close"]
    trainer.ask("open", engine="stand-in", tp=TP)
    trainer.ask("update")
    assert held(trainer) == digests(LLAMA)


def test_a_tensor_that_is_not_the_planned_one_stops_the_update(trainer):
    trainer.ask("open", engine="stand-in", tp=TP)
    trainer.ask("reshape", name="model.norm.weight", who=1)
    answers = trainer.ask("update")
    said = [answer["error"] for answer in answers]
    assert all("model.norm.weight: it is bfloat16 [8, 2]" in error and "Nothing was sent" in error for error in said)
    assert trainer.ask("stand_in_asked")[0] == ["join"] and held(trainer) == digests(None)


def test_without_a_server_the_error_comes_on_every_rank(trainer):
    answers = trainer.ask("open", engine=f"http://127.0.0.1:{free_port()}", tp=TP)
    assert all("the server cannot be asked" in answer["error"] for answer in answers)
