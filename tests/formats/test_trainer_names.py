"""Trainers' names: read as the published model and written back. The oracle is each trainer's own conversion (fixtures/trainer_names)."""

import hashlib
import json
import shutil

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from places import FIXTURES, HF

import reshard
from reshard.canonical.trainer_names import TRAINERS
from reshard.errors import CheckpointError, RequestError, UnsupportedError

FOLDER = FIXTURES / "trainer_names"
BASE = FOLDER / "base"
TRUTH = json.loads((FOLDER / "truth.json").read_text())


def stored(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def written(trainer, folder, base=BASE, **options):
    reshard.convert(reshard.plan(base, to="hf", names=trainer, **options), folder)
    return stored(folder)


def digests(tensors):
    return {
        name: [list(tensor.shape), hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()]
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("trainer", TRUTH)
def test_what_is_written_are_the_bits_of_the_trainers_own_conversion(trainer, tmp_path):
    assert digests(written(trainer, tmp_path / "out")) == TRUTH[trainer]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainers_names_are_read_as_the_published_model(trainer, tmp_path):
    tensors = written(trainer, tmp_path / "in")
    found = reshard.open(tmp_path / "in")
    assert reshard.verify(BASE, found).equal
    reshard.convert(reshard.plan(found, to="vllm", tp=2), tmp_path / "vllm")
    assert reshard.verify(BASE, tmp_path / "vllm").equal
    # Ranks whose rows begin inside of a head; Meta's and torchtitan's extra tensor is computed from the config.
    extra = {"freqs_cis": torch.ones(4)} if TRAINERS[trainer].pairs else {}
    model = {"model": {**tensors, **extra}}
    dcp.save(model, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert reshard.verify(BASE, reshard.open(tmp_path / "dcp", model=BASE)).equal


def test_rows_of_rotary_pairs_are_found_in_pieces_that_begin_inside_of_a_head(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="hf", names="torchtitan"), tmp_path / "in")
    reshard.convert(reshard.plan(tmp_path / "in", to="dcp", dp=3, model=HF / "llama"), tmp_path / "dcp")
    found = reshard.open(tmp_path / "dcp", model=HF / "llama")
    assert any("qkv_linear" in tensor.name for tensor in found.index.tensors)
    assert reshard.verify(HF / "llama", found).equal


def test_names_are_recognised_by_all_of_them_and_by_shapes(tmp_path):
    tensors = written("torchtitan", tmp_path / "in")
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copy(BASE / "config.json", folder)
    safetensors.torch.save_file({**tensors, "layers.0.attention.wqq.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="no such weight"):
        reshard.plan(folder, to="hf")
    safetensors.torch.save_file({**tensors, "norm.weight": torch.ones(8)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"its shape is \[8\]; as a tensor of torchtitan it holds model.norm.weight"):
        reshard.plan(folder, to="hf")
    del tensors["norm.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no such weight"):
        reshard.plan(folder, to="hf")


def test_names_of_other_trainers_and_models_are_refused():
    with pytest.raises(RequestError, match=r"unknown trainer.*torchtitan"):
        reshard.plan(BASE, to="hf", names="titan")
    with pytest.raises(UnsupportedError, match=r"known for llama, and this is qwen2"):
        reshard.plan(HF / "qwen2", to="hf", names="torchtitan")
