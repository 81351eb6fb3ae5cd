"""Writer: `dcp.save` in one process writes the files that `convert` would make of torch's own save, or nothing."""

import hashlib
import json
from pathlib import Path

import pytest

import reshard
from reshard.storage.own_files import WORK_FOLDER

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from reshard.torch import Reader, Writer  # noqa: E402
from reshard.torch import writer as writer_module  # noqa: E402

LLAMA = Path(__file__).resolve().parents[2] / "fixtures" / "hf" / "llama"
TARGETS = [
    {"to": "hf"},
    {"to": "hf", "dtype": "fp16", "keep_dtype": "*norm*", "max_shard_size": "30KB"},
    {"to": "vllm", "tp": 4},
    {"to": "sglang", "tp": 2},
    {"to": "megatron-dist"},
    {"to": "megatron", "tp": 2, "pp": 2},
    {"to": "dcp"},
    {"to": "fsdp", "dp": 2},
]


def weights():
    return load_file(LLAMA / "model.safetensors")


def save(state, out, **options):
    dcp.save(state, storage_writer=Writer(out, model=LLAMA, **options))


def refusal(state, out, **options):
    with pytest.raises(CheckpointException) as raised:
        save(state, out, **options)
    return str(raised.value)


def files_of(folder):
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "reshard.json")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.mark.parametrize("options", TARGETS, ids=lambda options: "-".join(map(str, options.values())))
def test_files_are_those_of_convert(options, tmp_path):
    save({"model": weights()}, tmp_path / "saved", **options)
    dcp.save({"model": weights()}, checkpoint_id=tmp_path / "dcp")
    reshard.convert(reshard.plan(tmp_path / "dcp", model=LLAMA, **options), tmp_path / "converted")
    assert files_of(tmp_path / "saved") == files_of(tmp_path / "converted")
    one, other = (json.loads((tmp_path / name / "reshard.json").read_text()) for name in ("saved", "converted"))
    assert {key for key in one | other if one.get(key) != other.get(key)} <= {"source", "time", "plan", "digest"}
    assert one["source"]["path"] == "/the memory of 1 rank"


def trained():
    """A model and its AdamW after a step, as get_state_dict gives them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = torch.nn.Module()
    for name, tensor in weights().items():
        module = model
        *path, last = name.split(".")
        for part in path:
            module._modules.setdefault(part, torch.nn.Module())
            module = module._modules[part]
        module.register_parameter(last, torch.nn.Parameter(tensor))
    parameters = [*model.parameters()]
    # As Megatron has them: no decay of vectors.
    groups = [{"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0}]
    groups.append({"params": [each for each in parameters if each.dim() > 1], "lr": 0.25})
    optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state, states = get_state_dict(model, optimizer)
    return {"model": state, "optim": states}


@pytest.mark.parametrize("to", ["dcp", "megatron-dist"])
def test_the_optimizer_is_written_too(to, tmp_path):
    state = trained()
    save(state, tmp_path / "step-7", to=to, optimizer=True)
    dcp.save(state, checkpoint_id=tmp_path / "step-7-dcp" / "step-7")
    plan = reshard.plan(tmp_path / "step-7-dcp" / "step-7", model=LLAMA, to=to, optimizer=True)
    reshard.convert(plan, tmp_path / "converted")
    assert files_of(tmp_path / "step-7") == files_of(tmp_path / "converted")
    assert reshard.open(tmp_path / "step-7", model=LLAMA).index.facts.step == 7
    again = trained()
    for tensor in again["model"].values():
        tensor.zero_()
    for each in again["optim"]["state"].values():
        [tensor.zero_() for tensor in each.values()]
    again["optim"]["param_groups"][1]["lr"] = 0.0
    dcp.load(again, storage_reader=Reader(tmp_path / "step-7", optimizer=True, model=LLAMA))
    assert all(torch.equal(again["model"][name], tensor) for name, tensor in state["model"].items())
    for name, each in state["optim"]["state"].items():
        assert all(torch.equal(again["optim"]["state"][name][kind], tensor) for kind, tensor in each.items()), name
    assert again["optim"]["param_groups"][1]["lr"] == 0.25


def test_what_lies_there_is_refused_or_replaced_as_a_whole(tmp_path):
    save(weights(), tmp_path / "out", to="hf")
    before = files_of(tmp_path / "out")
    assert "the target exists and holds config.json" in refusal(weights(), tmp_path / "out", to="hf")
    changed = weights()
    changed["model.norm.weight"] += 1
    save(changed, tmp_path / "out", to="hf", overwrite=True)
    after = files_of(tmp_path / "out")
    assert after.keys() == before.keys() and after["model.safetensors"] != before["model.safetensors"]
    assert reshard.verify(tmp_path / "out").equal


def test_without_digests_there_are_no_records(tmp_path):
    save(weights(), tmp_path / "out", to="hf", digests=False)
    save(weights(), tmp_path / "whole", to="hf")
    left = files_of(tmp_path / "whole")
    del left["reshard.digests"]
    assert files_of(tmp_path / "out") == left and not (tmp_path / "out" / "reshard.json").exists()
    assert reshard.verify(tmp_path / "out", tmp_path / "whole").equal


@pytest.mark.parametrize("place", ["s3://bucket/out", "https://example.org/out"])
def test_stores_are_refused_by_name(place):
    assert "store" in refusal(weights(), place, to="hf") or "http" in refusal(weights(), place, to="hf")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "vllm", "tp": 3}, "3"),
        ({"to": "hf", "quantize": "fp8-block"}, "computed from other tensors"),
        ({"to": "nowhere"}, "nowhere"),
        ({"to": "hf", "tp": 2, "nonsense": 1}, "nonsense"),
    ],
)
def test_a_save_that_cannot_be_leaves_nothing(options, said, tmp_path):
    assert said in refusal(weights(), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_whole_is_refused(tmp_path):
    state = weights()
    del state["model.norm.weight"]
    assert "model.norm.weight" in refusal(state, tmp_path / "out", to="vllm", tp=2)


def test_values_that_become_infinite_are_refused_unless_allowed(tmp_path):
    state = {name: tensor.float() for name, tensor in weights().items()}
    state["model.norm.weight"][0] = 1e6
    assert "model.norm.weight" in refusal(state, tmp_path / "out", to="hf", dtype="fp16") and not (tmp_path / "out").exists()
    save(state, tmp_path / "out", to="hf", dtype="fp16", allow_overflow=True)
    assert json.loads((tmp_path / "out" / "reshard.json").read_text())["overflow"] == {"model.norm.weight": 1}


@pytest.mark.parametrize("phase", ["write", "digests", "complete"])
def test_a_save_that_fails_leaves_no_target_and_the_next_needs_no_cleaning(phase, tmp_path, monkeypatch):
    def fails(*given):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(writer_module._Save, phase, fails)
        assert "the disk is gone" in refusal(weights(), tmp_path / "out", to="hf")
    left = [path.name for path in (tmp_path / "out").iterdir()] if (tmp_path / "out").exists() else []
    assert left == ([WORK_FOLDER] if phase == "complete" else [])
    save(weights(), tmp_path / "out", to="hf")
    assert reshard.verify(tmp_path / "out").equal


def test_tensors_that_are_views_are_written_by_their_values(tmp_path):
    state = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in weights().items()}
    assert not state["lm_head.weight"].is_contiguous()
    save(state, tmp_path / "out", to="hf")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in weights().items())


def test_tensors_of_several_blocks_are_written_piece_by_piece(tmp_path):
    state = {"a.weight": torch.arange(3_000_000, dtype=torch.float32).view(1000, 3000), "b": torch.arange(5)}
    dcp.save(state, storage_writer=Writer(tmp_path / "out", to="hf"))
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    reshard.convert(reshard.plan(tmp_path / "dcp", to="hf"), tmp_path / "converted")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "converted")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a.weight"], state["a.weight"])


def test_copies_of_a_tied_head_that_differ_are_refused(tmp_path):
    tied = LLAMA.parent / "llama-tied"
    state = load_file(tied / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    dcp.save(state, storage_writer=Writer(tmp_path / "same", to="hf", model=tied))
    state["lm_head.weight"][3, 2] += 1
    with pytest.raises(CheckpointException, match="disagree"):
        dcp.save(state, storage_writer=Writer(tmp_path / "out", to="hf", model=tied))
    assert not (tmp_path / "out").exists()
