"""One way after another in which a checkpoint can be wrong: exit code 2, one paragraph with what the user needs, nothing written."""

import json
import os
import pickle
import shutil
import struct

import pytest
import torch
from helpers.fixture_places import DCP, HF, patch_stored, stored
from helpers.reshard_command import reshard, tree
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from reshard.errors import ERROR_IDS

FSDP2 = DCP / "fsdp2"
MODEL = FSDP2 / "model"


@pytest.fixture
def dcp(tmp_path):
    return shutil.copytree(FSDP2 / "checkpoint", tmp_path / "step-1000")


@pytest.fixture
def hf(tmp_path):
    return shutil.copytree(HF / "llama", tmp_path / "hf")


@pytest.fixture
def vllm(tmp_path):
    assert reshard("convert", HF / "llama", tmp_path / "tp2", "--to", "vllm", "--tp", 2).code == 0
    return tmp_path / "tp2"


def refused(source, tmp_path, *needed, to=("vllm", "--tp", 2), options=()):
    """Converting is refused: the exit code of the error's id, a paragraph that holds all of `needed`, and no target."""
    target = tmp_path / "target"
    result = reshard("convert", source, target, "--to", *to, *options)
    assert result.code in (2, 3, 6) and result.code == ERROR_IDS[result.err[:-2].rpartition("[")[2]][0], result.err
    assert not target.exists()
    assert result.out == "" and result.err.startswith("reshard: ") and result.err.count("\n") == 1 and "Traceback" not in result.err
    for words in needed:
        assert words in result.err, f"{words!r} is not in {result.err!r}"


def edited(path, change):
    """Unpickle a real .metadata with torch's own classes, change it, pickle it again."""
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


EMBEDDING = "model.model.embed_tokens.weight"


def test_a_missing_rank_file(dcp, tmp_path):
    (dcp / "__1_0.distcp").unlink()
    refused(dcp, tmp_path, "__1_0.distcp", "not there", ".metadata names it", "parts of", "Copy that file", options=("--model", MODEL))


def test_a_truncated_rank_file(dcp, tmp_path):
    path = dcp / "__1_0.distcp"
    size = path.stat().st_size
    os.truncate(path, size - 100)
    refused(dcp, tmp_path, "__1_0.distcp", f"{size - 100:,} bytes", f"{size:,}", options=("--model", MODEL))


def test_no_metadata(dcp, tmp_path):
    (dcp / ".metadata").unlink()
    refused(dcp, tmp_path, "no .metadata", "not finished", options=("--model", MODEL))


def test_a_chunk_that_nobody_stored(dcp, tmp_path):
    """As left by a rank whose metadata was lost in the gathering."""

    def change(metadata):
        chunks = metadata.state_dict_metadata[EMBEDDING].chunks
        lost = chunks.pop()
        del metadata.storage_data[MetadataIndex(EMBEDDING, lost.offsets)]

    edited(dcp / ".metadata", change)
    refused(dcp, tmp_path, "model.embed_tokens.weight", "is in no file", ":250, 0:32]", options=("--model", MODEL))


def test_chunks_that_overlap(dcp, tmp_path):
    def change(metadata):
        item = metadata.state_dict_metadata[EMBEDDING]
        moved = item.chunks[1]
        to = torch.Size([moved.offsets[0] - 1, 0])
        metadata.storage_data[MetadataIndex(EMBEDDING, to)] = metadata.storage_data.pop(MetadataIndex(EMBEDDING, moved.offsets))
        item.chunks[1] = ChunkStorageMetadata(to, moved.sizes)

    edited(dcp / ".metadata", change)
    refused(dcp, tmp_path, "model.embed_tokens.weight", "overlap", ".distcp", options=("--model", MODEL))


def test_a_chunk_beyond_its_tensor(dcp, tmp_path):
    def change(metadata):
        metadata.state_dict_metadata[EMBEDDING].size = torch.Size([200, 32])

    edited(dcp / ".metadata", change)
    refused(dcp, tmp_path, EMBEDDING, "200", options=("--model", MODEL))


def test_entries_of_another_shape_than_the_metadata_says(dcp, tmp_path):
    """As many elements, cut otherwise: the files of one save under the .metadata of another."""
    name = "model.model.layers.0.self_attn.q_proj.weight"

    def change(metadata):
        item = metadata.state_dict_metadata[name]
        rows, columns = item.size
        item.size = torch.Size([rows // 2, columns * 2])
        for i, chunk in enumerate(list(item.chunks)):
            offsets = torch.Size([chunk.offsets[0] // 2, 0])
            item.chunks[i] = ChunkStorageMetadata(offsets, torch.Size([chunk.sizes[0] // 2, columns * 2]))
            info = metadata.storage_data.pop(MetadataIndex(name, chunk.offsets))
            metadata.storage_data[MetadataIndex(name, offsets)] = info

    edited(dcp / ".metadata", change)
    refused(dcp, tmp_path, name, "[64, 32]", "[32, 64]", "different saves", to=("hf",))


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/hostname"])
def test_a_storage_path_that_leaves_the_directory(dcp, tmp_path, path):
    (tmp_path / "outside.distcp").write_bytes(bytes(1 << 20))

    def change(metadata):
        next(iter(metadata.storage_data.values())).relative_path = path

    edited(dcp / ".metadata", change)
    refused(dcp, tmp_path, path, "outside", options=("--model", MODEL))


class Trap:
    """Pickles as a call: what a hostile checkpoint would have run."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


def traps(sentinel):
    import subprocess

    return [
        Trap(os.system, f"touch {sentinel}"),
        Trap(eval, f"open({str(sentinel)!r}, 'w')"),
        Trap(subprocess.check_call, ["touch", str(sentinel)]),
    ]


@pytest.mark.parametrize("number", range(3))
def test_a_metadata_that_is_a_program_runs_nothing(dcp, tmp_path, number):
    sentinel = tmp_path / "it-ran"
    (dcp / ".metadata").write_bytes(pickle.dumps(traps(sentinel)[number]))
    refused(dcp, tmp_path, ".metadata", options=("--model", MODEL))
    assert not sentinel.exists()


@pytest.mark.parametrize("number", range(3))
def test_a_metadata_with_a_program_inside_runs_nothing(dcp, tmp_path, number):
    sentinel = tmp_path / "it-ran"
    edited(dcp / ".metadata", lambda metadata: setattr(metadata, "planner_data", {"x": traps(sentinel)[number]}))
    for arguments in (("inspect", dcp), ("fingerprint", dcp), ("convert", dcp, tmp_path / "t", "--to", "hf")):
        assert reshard(*arguments).code in (0, 3)
    assert not sentinel.exists()


@pytest.mark.parametrize("number", range(3))
def test_a_bin_file_with_a_program_inside_runs_nothing(tmp_path, number):
    sentinel = tmp_path / "it-ran"
    folder = tmp_path / "bin"
    folder.mkdir()
    torch.save({"a": torch.ones(3), "b": traps(sentinel)[number]}, folder / "pytorch_model.bin")
    assert reshard("convert", folder, tmp_path / "t", "--to", "hf").code == 0
    assert list(stored(tmp_path / "t" / "model.safetensors")) == ["a"] and not sentinel.exists()


def test_a_header_longer_than_its_file(hf, tmp_path):
    path = hf / "model.safetensors"
    raw = bytearray(path.read_bytes())
    for claimed in (len(raw) - 7, 1 << 40):
        raw[:8] = struct.pack("<Q", claimed)
        path.write_bytes(bytes(raw))
        refused(hf, tmp_path, "model.safetensors", f"{claimed:,} bytes")


def test_a_truncated_safetensors_file(hf, tmp_path):
    os.truncate(hf / "model.safetensors", 100_000)
    refused(hf, tmp_path, "model.safetensors", "100,000")


@pytest.mark.parametrize("name", ["BF17", "bfloat16", "F4", "", 7])
def test_a_dtype_that_is_none(hf, tmp_path, name):
    path = hf / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = name
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    refused(hf, tmp_path, "model.norm.weight", str(name))


def test_an_index_that_points_outside(tmp_path):
    folder = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    document["weight_map"]["model.norm.weight"] = "../hf/model.safetensors"
    path.write_text(json.dumps(document))
    refused(folder, tmp_path, "../hf/model.safetensors", "outside")


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\xff"])
def test_an_index_that_is_none(tmp_path, text):
    folder = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    (folder / "model.safetensors.index.json").write_bytes(text.encode("latin1"))
    refused(folder, tmp_path, "model.safetensors.index.json")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model_type": "llama"}', '{"model_type": "llama", "num_hidden_layers": -1}', '{"model_type": "../x"}']
)
def test_a_config_that_is_none(hf, tmp_path, text):
    (hf / "config.json").write_text(text)
    refused(hf, tmp_path)


def test_replicas_that_disagree(vllm, tmp_path):
    patch_stored(vllm / "model-rank-1-part-0.safetensors", "model.layers.1.input_layernorm.weight", 6)
    refused(vllm, tmp_path, "model.layers.1.input_layernorm.weight", "two copies", "[3]", "rank-0", "rank-1", to=("hf",))
    result = reshard("fingerprint", vllm)
    assert result.code == 3 and "two copies" in result.err
    result = reshard("verify", HF / "llama", vllm)
    assert result.code == 3 and "two copies" in result.err


def test_a_tied_head_that_is_not(tmp_path):
    """The config says that head and embedding are one; the file holds two."""
    import safetensors.torch

    folder = shutil.copytree(HF / "llama", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert safetensors.torch.load_file(folder / "model.safetensors").keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
    refused(folder, tmp_path, "model.embed_tokens.weight: it and lm_head.weight disagree", "tie_word_embeddings")


def test_a_missing_serving_rank(vllm, tmp_path):
    (vllm / "model-rank-0-part-0.safetensors").unlink()
    refused(vllm, tmp_path, "model-rank-0-part-0.safetensors: the file is missing", to=("hf",))
    (vllm / "reshard.json").unlink()  # what the reader says of files that reshard did not write
    refused(vllm, tmp_path, "rank 0 is not there", to=("hf",))


def test_a_degree_that_does_not_divide_the_heads(hf, tmp_path):
    refused(hf, tmp_path, "--tp 3", "8 attention heads", "Legal tensor-parallel sizes are 1, 2, 4, 8", to=("vllm", "--tp", 3))
    refused(hf, tmp_path, "--tp 16", "1, 2, 4, 8", to=("vllm", "--tp", 16))
    refused(hf, tmp_path, "--tp", "positive whole number", to=("vllm", "--tp", 0))


def test_another_models_config(dcp, tmp_path):
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "vocab_size": 256}))
    refused(dcp, tmp_path, "[250, 32]", "[256, 32]", "--model", options=("--model", tmp_path / "other"))
    refused(dcp, tmp_path, "no config.json", options=("--model", tmp_path))


def test_names_with_a_prefix_are_told_to_be_stripped(hf, tmp_path):
    import safetensors.torch

    tensors = safetensors.torch.load_file(hf / "model.safetensors")
    safetensors.torch.save_file({f"policy.{name}": tensor for name, tensor in tensors.items()}, hf / "model.safetensors")
    refused(hf, tmp_path, "--strip-prefix 'policy.'")
    assert reshard("convert", hf, tmp_path / "out", "--to", "vllm", "--strip-prefix", "policy.").code == 0
    assert reshard("verify", HF / "llama", tmp_path / "out").code == 0


def test_no_checkpoint_at_all(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, tmp_path, "empty")
    (empty / "notes.txt").write_text("nothing")
    refused(empty, tmp_path, "no known format", "notes.txt")
    refused(tmp_path / "absent", tmp_path, "absent")


def test_a_file_that_only_looks_like_a_checkpoint(tmp_path):
    for name, content in (
        ("model.safetensors", b""),
        ("pytorch_model.bin", b"\x80\x02."),
        ("pytorch_model.bin", b"PK\x03\x04" + bytes(100)),
    ):
        folder = tmp_path / "m"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / name).write_bytes(content)
        refused(folder, tmp_path, name, to=("hf",))


def test_the_target_exists(hf, tmp_path):
    target = tmp_path / "there"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    before = tree(target)
    result = reshard("convert", hf, target, "--to", "vllm")
    assert result.code == 4 and "--overwrite" in result.err and tree(target) == before
    result = reshard("convert", hf, target, "--to", "vllm", "--overwrite")
    assert result.code == 4 and "no checkpoint" in result.err and tree(target) == before
    result = reshard("convert", hf, target / "notes.txt", "--to", "vllm")
    assert result.code == 4 and tree(target) == before
    result = reshard("convert", hf, target, "--to", "vllm", "--resume")
    assert result.code == 4 and tree(target) == before


def test_the_target_is_the_source(hf):
    before = tree(hf)
    for options in ((), ("--overwrite",), ("--resume",)):
        assert reshard("convert", hf, hf, "--to", "vllm", *options).code == 4
        assert reshard("convert", hf / "model.safetensors", hf, "--to", "hf", *options).code == 4
    assert tree(hf) == before


def test_overwriting_replaces_all_of_an_older_checkpoint_and_nothing_else(hf, tmp_path):
    target = tmp_path / "out"
    assert reshard("convert", hf, target, "--to", "vllm", "--tp", 4).code == 0
    (target / "notes.txt").write_text("mine")
    assert reshard("convert", hf, target, "--to", "vllm", "--tp", 2, "--overwrite").code == 0
    assert sorted(path.name for path in target.glob("*.safetensors")) == [
        "model-rank-0-part-0.safetensors",
        "model-rank-1-part-0.safetensors",
    ]
    assert (target / "notes.txt").read_text() == "mine" and not (target / ".reshard").exists()
    assert reshard("verify", hf, target).code == 0


def test_overwriting_that_fails_leaves_the_older_checkpoint(hf, vllm, tmp_path):
    before = tree(vllm)
    bad = shutil.copytree(vllm, tmp_path / "bad")
    patch_stored(bad / "model-rank-1-part-0.safetensors", "model.norm.weight")
    assert reshard("convert", bad, vllm, "--to", "vllm", "--tp", 4, "--overwrite").code == 3
    assert tree(vllm) == before


def test_control_characters_in_a_name_do_not_reach_the_terminal(hf, tmp_path):
    """What a message prints of a file must not act on the terminal."""
    path = hf / "model.safetensors"
    text = json.dumps({"\x1b[2Jmodel": {"dtype": "F99", "shape": [1], "data_offsets": [0, 1]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0")
    result = reshard("convert", hf, tmp_path / "t", "--to", "hf")
    assert result.code == 3 and "\x1b" not in result.err and "\\x1b[2Jmodel" in result.err
