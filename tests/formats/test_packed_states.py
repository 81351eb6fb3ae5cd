"""Optimizer state in 8 and 4 bits, by real bitsandbytes and torchao: decoded as they decode it, carried as it is stored."""

import hashlib
import json

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES
from helpers.reshard_command import reshard as run

import reshard
from reshard.canonical.content import Selection

PLACE = FIXTURES / "packed_states"
TORCHAO = [f"{case}/{form}" for case in ("adamw8bit", "adamw4bit", "adamwfp8") for form in ("dcp", "fsdp")]
BITSANDBYTES = ["bitsandbytes/model.pt", "older/model.pt", "lion8bit/model.pt"]
KINDS = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


def truth(source):
    return json.loads((PLACE / source.partition("/")[0] / "values.json").read_text())


def states(path):
    """The values of the states, by "parameter.state", as `verify` reads them."""
    opened, said = reshard.open(path), {}
    view = opened.tensors(Selection(optimizer=True))
    for key in view:
        parameter, kind = key.removeprefix("optim.state.").rpartition(".")[::2]
        if key.startswith("optim.state.") and kind != "step":
            values = np.ascontiguousarray(view[key].numpy().astype(np.float32))
            said[f"{parameter}.{kind}"] = {"shape": list(values.shape), "sha256": hashlib.sha256(values.tobytes()).hexdigest()}
    return said


@pytest.mark.parametrize("source", [*BITSANDBYTES, *TORCHAO])
def test_their_values_are_what_the_library_decodes(source):
    assert states(PLACE / source) == truth(source)


def test_inspect_names_them():
    names = {"bitsandbytes/model.pt": "4 of bitsandbytes", "adamw8bit/dcp": "2 of torchao's OptimState8bit"}
    names |= {"adamw4bit/fsdp": "2 of torchao's OptimState4bit", "adamwfp8/dcp": "2 of torchao's OptimStateFp8"}
    for source, name in names.items():
        shown = run("inspect", PLACE / source).out
        assert "complete" in shown and "note      optimizer state in 8 or 4 bits: " in shown and name in shown, source


@pytest.mark.parametrize("target", ["universal", "deepspeed", "dcp", "fsdp"])
@pytest.mark.parametrize("source", [*BITSANDBYTES[:2], *TORCHAO])
def test_every_target_gets_them(tmp_path, source, target):
    """Whatever a target keeps, what a run resumes from is equal, and the values are those of the truth."""
    options = ("--optimizer",) if target in ("dcp", "fsdp") else ()
    result = run("convert", PLACE / source, tmp_path / "out", "--to", target, *options)
    assert result.code == 0, result.err
    assert states(tmp_path / "out") == truth(source)
    assert run("verify", PLACE / source, tmp_path / "out", "--optimizer").code == 0
    assert run("roundtrip", PLACE / source, "--to", target, *options).code == 0


@pytest.mark.parametrize("source", ["bitsandbytes/model.pt", "adamw4bit/dcp", "adamw8bit/fsdp"])
def test_weights_alone_need_none_of_them(tmp_path, source):
    assert run("convert", PLACE / source, tmp_path / "out", "--to", "hf").code == 0


def test_states_of_bitsandbytes_stay_as_they_are_in_formats_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    stored = torch.load(PLACE / "ademamix" / "model.pt", weights_only=False)["optimizer"]["state"]
    assert run("convert", PLACE / "ademamix" / "model.pt", tmp_path / "out", "--to", "dcp", "--optimizer").code == 0
    for number, name in enumerate(("0.weight", "1.weight", "0.bias", "1.bias")):
        for kind, tensor in stored[number]["__bnb_optimizer_quant_state__"].items():
            read = {f"optim.state.{name}.__bnb_optimizer_quant_state__.{kind}": torch.empty_like(tensor)}
            dcp.load(read, checkpoint_id=tmp_path / "out", no_dist=True)
            assert torch.equal(*read.values(), tensor), (name, kind)


def test_a_part_that_begins_inside_of_a_block_is_refused_by_name(tmp_path):
    """Scales of another number than the codes have blocks."""
    torch = pytest.importorskip("torch")
    saved = torch.load(PLACE / "older" / "model.pt", weights_only=False)
    state = saved["optimizer"]["state"][0]
    state["absmax1"] = state["absmax1"][:-1].clone()
    torch.save(saved, tmp_path / "model.pt")
    result = run("convert", tmp_path / "model.pt", tmp_path / "out", "--to", "universal")
    assert result.code != 0 and "0.weight" in result.err and not (tmp_path / "out").exists()
