import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from places import DCP, HF, MODELS, described, open_case, stored, truth

import reshard
from reshard.errors import CheckpointError, RequestError

SAME_AS_LLAMA = ("llama-sharded", "llama-bin", "llama-bin-sharded", "mistral")


@pytest.mark.parametrize("other", SAME_AS_LLAMA)
def test_the_same_weights_in_other_files_are_equal(other):
    result = reshard.verify(HF / "llama", HF / other)
    assert result.equal and result.tensors == 21
    assert reshard.fingerprint(HF / other).root == reshard.fingerprint(HF / "llama").root


@pytest.mark.parametrize("model", MODELS)
def test_what_is_read_is_what_the_file_holds(model):
    import hashlib

    opened = reshard.open(HF / model)
    expected = {
        name: {"dtype": dtype, "shape": shape, "sha256": hashlib.sha256(data).hexdigest()}
        for name, (dtype, shape, data) in stored(HF / model / "model.safetensors").items()
    }
    assert {t.name: described(t, opened.files) for t in opened.index.tensors} == expected


def test_what_is_written_opens_in_the_safetensors_library_with_the_truth(tmp_path):
    reshard.convert(reshard.plan(open_case("fsdp2-3"), to="hf"), tmp_path / "hf")
    expected = {name: value for (name, role), value in truth("fsdp2-3").items() if role == "weight"}
    found = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(list(found[name].shape) == expected[name]["shape"] for name in found)
    assert (tmp_path / "hf" / "config.json").exists()
    with safetensors.safe_open(tmp_path / "hf" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_files_are_cut_at_the_size_asked_for_and_the_index_is_right(tmp_path):
    plan = reshard.plan(HF / "llama", to="hf", max_shard_bytes=40_000)
    printed = reshard.convert(plan, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))] and len(files) > 3
    assert index["weight_map"] == {name: file for file in files for name in stored(tmp_path / "out" / file)}
    assert index["metadata"]["total_size"] == sum(len(data) for f in files for *_, data in stored(tmp_path / "out" / f).values())
    assert printed.root == reshard.fingerprint(HF / "llama").root


def test_every_tensor_is_aligned_to_its_elements(tmp_path):
    reshard.convert(reshard.plan(open_case("odd"), to="hf"), tmp_path / "out")
    opened = reshard.open(tmp_path / "out")
    for tensor in opened.index.tensors:
        assert tensor.shards.extent(0).byte_offset % min(tensor.dtype.itemsize, 8) == 0
    assert reshard.verify(open_case("odd"), opened).equal


def test_a_cast_is_recorded_in_the_config(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="hf", dtype="fp32", keep_dtype=("*norm*",)), tmp_path / "mixed")
    reshard.convert(reshard.plan(HF / "llama", to="hf", dtype="fp32"), tmp_path / "out")
    assert "float32" in (tmp_path / "out" / "config.json").read_text()
    kinds = {name: dtype for name, (dtype, *_) in stored(tmp_path / "mixed" / "model.safetensors").items()}
    assert {dtype for name, dtype in kinds.items() if "norm" in name} == {"BF16"}
    assert {dtype for name, dtype in kinds.items() if "norm" not in name} == {"F32"}


def test_widening_and_back_is_the_identity(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="hf", dtype="fp32"), tmp_path / "wide")
    printed = reshard.convert(reshard.plan(tmp_path / "wide", to="hf", dtype="bf16"), tmp_path / "back")
    assert printed.root == reshard.fingerprint(HF / "llama").root
    assert reshard.verify(HF / "llama", tmp_path / "wide", cast=True).equal
    assert not reshard.verify(HF / "llama", tmp_path / "wide").equal


def test_a_stale_file_beside_an_index_is_not_read(tmp_path):
    copy = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    stale = {"lm_head.weight": np.zeros((250, 32), np.float32)}
    safetensors.numpy.save_file(stale, copy / "model.safetensors")
    assert reshard.verify(HF / "llama", copy).equal
    assert "model.safetensors" in reshard.open(copy).index.facts.notes[0]


def test_a_file_named_by_the_index_must_be_there(tmp_path):
    copy = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    lost = sorted(copy.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"names {lost.name}, which is not there"):
        reshard.open(copy)


def test_without_an_index_the_numbering_tells_what_is_missing(tmp_path):
    copy = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    (copy / "model.safetensors.index.json").unlink()
    assert reshard.verify(HF / "llama", copy).equal
    lost = sorted(copy.glob("model-*.safetensors"))[-1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        reshard.open(copy)


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    copy = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    (copy / "model.safetensors.index.json").unlink()
    first = sorted(copy.glob("model-*.safetensors"))[0]
    shutil.copy(first, copy / "extra.safetensors")
    with pytest.raises(CheckpointError, match="two files hold it: "):
        reshard.open(copy)


@pytest.mark.parametrize("path", ["../llama/model.safetensors", "/etc/passwd", "..\\x.safetensors", "a/../../b.safetensors"])
def test_an_index_may_not_point_outside(tmp_path, path):
    copy = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    index = copy / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.norm.weight"] = path
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        reshard.open(copy)


def test_parallel_sizes_do_not_apply():
    with pytest.raises(RequestError, match="is whole"):
        reshard.plan(HF / "llama", to="hf", tp=2)


def test_a_model_that_is_not_declared_still_becomes_hf_but_not_vllm(tmp_path):
    copy = shutil.copytree(HF / "llama", tmp_path / "m")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "somebodys_own"}))
    printed = reshard.convert(reshard.plan(copy, to="hf"), tmp_path / "out")
    assert printed.root == reshard.fingerprint(HF / "llama").root
    with pytest.raises(RequestError, match=r"somebodys_own.*not declared.*reshard architectures"):
        reshard.plan(copy, to="vllm")


def test_a_missing_weight_is_not_passed_on(tmp_path):
    copy = shutil.copytree(HF / "llama", tmp_path / "m")
    tensors = safetensors.torch.load_file(copy / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
    safetensors.torch.save_file(kept, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.*no such weight"):
        reshard.plan(copy, to="hf")


def test_accelerates_and_dcps_own_forms_have_one_fingerprint_with_hf(tmp_path):
    for case in ("accelerate", "hsdp", "fsdp2-tied"):
        opened = open_case(case)
        reshard.convert(reshard.plan(opened, to="hf"), tmp_path / case)
        assert reshard.fingerprint(tmp_path / case).root == reshard.fingerprint(opened).root
    assert (DCP / "accelerate").exists()
