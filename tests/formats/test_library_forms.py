"""Weights that bitsandbytes and torchao packed: `dequantize` gives the values that the library itself computes (fixtures/hf_library)."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from helpers.reshard_command import reshard as reshard_command

import reshard
from reshard.errors import CheckpointError, UnsupportedError

FIXTURES = Path(__file__).resolve().parent.parent.parent / "fixtures" / "hf_library"
CASES = sorted(path.parent.name for path in FIXTURES.glob("*/truth.json"))


def stored(folder):
    return {key: tensor for path in sorted(folder.glob("*.safetensors")) for key, tensor in safetensors.torch.load_file(path).items()}


def described(tensors):
    return {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), hashlib.sha256(tensor.view(torch.uint8).numpy()).hexdigest()]
        for name, tensor in tensors.items()
    }


def changed(case, folder, change):
    """A copy of a fixture with other tensors or texts in its header. change: gets both."""
    shutil.copytree(FIXTURES / case, folder)
    path = folder / "model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        texts = dict(file.metadata())
    tensors = safetensors.torch.load_file(path)
    change(tensors, texts)
    safetensors.torch.save_file(tensors, path, metadata=texts)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_values_are_those_of_the_library(case, tmp_path):
    plan = reshard.plan(FIXTURES / case, to="hf", dequantize=True)
    reshard.convert(plan, tmp_path / "out", memory="32MiB", workers=1)
    assert described(stored(tmp_path / "out")) == json.loads((FIXTURES / case / "truth.json").read_text())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not any("lacks" in note for note in plan.layout.notes) and not plan.layout.left
    assert reshard.verify(tmp_path / "out").equal


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_the_same_values(case, tmp_path):
    reshard.convert(reshard.plan(FIXTURES / case, to="hf", dequantize=True, dtype="fp32"), tmp_path / "whole")
    reshard.convert(reshard.plan(FIXTURES / case, to="vllm", tp=2, dequantize=True, dtype="fp32"), tmp_path / "ranks")
    assert reshard.verify(tmp_path / "whole", tmp_path / "ranks").equal


@pytest.mark.parametrize("case", ["bnb-nf4", "torchao-int8"])
def test_who_does_not_dequantize_is_told_of_it(case, tmp_path):
    refused = reshard_command("convert", FIXTURES / case, tmp_path / "out", "--to", "vllm", "--tp", 2)
    assert refused.code == 6 and "Add --dequantize, which makes plain weights" in refused.err
    shown = reshard_command("serve-check", FIXTURES / case)
    assert "in a form that only --dequantize reads" in shown.out and "Give the model's config" not in shown.out


def test_entries_of_headers_are_no_files(tmp_path):
    lines = reshard_command("convert", FIXTURES / "torchao-int8", tmp_path / "out", "--to", "dcp", "--dry-run").out.splitlines()
    assert [line for line in lines if line.startswith("  left ") and " header entries; --json" in line and "file" not in line]


@pytest.mark.parametrize("case", ["bnb-nf4-nested", "bnb-int8", "torchao-int8"])
def test_a_view_reads_any_rows_and_columns(case, tmp_path):
    reshard.convert(reshard.plan(FIXTURES / case, to="hf", dequantize=True), tmp_path / "whole")
    whole = stored(tmp_path / "whole")["model.layers.0.mlp.down_proj.weight"]
    for rank in range(2):
        view = reshard.open(FIXTURES / case).view(to="vllm", tp=2, rank=rank, dequantize=True)
        assert torch.equal(view["model.layers.0.mlp.down_proj.weight"].torch(), whole.chunk(2, 1)[rank])
        gate = view["model.layers.0.mlp.gate_up_proj.weight"]
        assert torch.equal(torch.as_tensor(gate.torch()[3:9, 5:7]), gate.torch()[3:9, 5:7])


def test_an_unknown_model_is_dequantized(tmp_path):
    folder = shutil.copytree(FIXTURES / "bnb-nf4", tmp_path / "source")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "homemade", "architectures": ["HomemadeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    reshard.convert(reshard.plan(folder, to="hf", dequantize=True), tmp_path / "out")
    assert described(stored(tmp_path / "out")) == json.loads((FIXTURES / "bnb-nf4" / "truth.json").read_text())


FRONT = "model.layers.0.mlp.up_proj."
BY = f"{FRONT}weight"


def state_of(tensors, **change):
    name = f"{FRONT}weight.quant_state.bitsandbytes__nf4"
    about = json.loads(bytes(tensors[name].tolist())) | change
    tensors[name] = torch.tensor([*json.dumps(about).encode()], dtype=torch.uint8)


@pytest.mark.parametrize(("case", "change", "why"), [
    ("bnb-nf4", lambda tensors, texts: tensors.pop(f"{FRONT}weight.absmax"), "it is missing"),
    ("bnb-nf4", lambda tensors, texts: state_of(tensors, shape=[64, 32]), "expected"),
    ("bnb-nf4", lambda tensors, texts: state_of(tensors, shape=[-64, 64]), "its sizes are"),
    ("bnb-nf4", lambda tensors, texts: state_of(tensors, blocksize=1e9), "its sizes are"),
    ("bnb-nf4", lambda tensors, texts: state_of(tensors, dtype="no_type"), "no_type"),
    ("bnb-nf4", lambda tensors, texts: tensors.update({f"{FRONT}weight.absmax": torch.ones(4)}), "tables"),
    ("bnb-int8", lambda tensors, texts: tensors.update({f"{FRONT}SCB": torch.ones(4)}), "shape"),
    ("torchao-int8", lambda tensors, texts: tensors.pop(f"{FRONT}_weight_scale"), "it is missing"),
    ("torchao-int8", lambda tensors, texts: texts.update({BY: texts[BY].replace("[1, 64]", "[1, 7]")}), "expected"),
])  # fmt: skip
def test_what_contradicts_itself_is_refused(case, change, why, tmp_path):
    with pytest.raises(CheckpointError, match=why):
        reshard.plan(changed(case, tmp_path / "source", change), to="hf", dequantize=True)


def test_other_forms_are_named(tmp_path):
    def other_class(tensors, texts):
        texts[f"{FRONT}weight"] = texts[f"{FRONT}weight"].replace("Int8Tensor", "Int4Tensor")

    with pytest.raises(UnsupportedError, match="Int4Tensor of torchao"):
        reshard.plan(changed("torchao-int8", tmp_path / "a", other_class), to="hf", dequantize=True)
    of_gpu = changed("bnb-int8", tmp_path / "b", lambda tensors, texts: tensors[f"{FRONT}weight_format"].fill_(1))
    with pytest.raises(UnsupportedError, match="order of a GPU"):
        reshard.plan(of_gpu, to="hf", dequantize=True)
