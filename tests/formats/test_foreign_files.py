"""Files of other programs are named with what to do instead; remains of downloads are broken sources; a config alone is a model."""

import io
import json
import shutil
import zipfile

import pytest
from helpers.fixture_places import FIXTURES
from helpers.reshard_command import reshard as command

import reshard
from reshard.adapter.foreign_files import FOREIGN
from reshard.errors import CheckpointError, RequestError, UnsupportedError

LLAMA = FIXTURES / "hf" / "llama"
HDF5 = b"\x89HDF\r\n\x1a\n" + bytes(64)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"


def a_zip():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("model/config.json", "{}")
    return stream.getvalue()


# (files of a folder, the folder or file that is given, the words of the message)
OTHERS = [
    ({"model-q4.gguf": b"GGUF\x03" + bytes(60)}, "", ("model-q4.gguf is a GGUF file", "safetensors files that it was made from")),
    ({"model-q4.gguf": b"GGUF\x03" + bytes(60)}, "model-q4.gguf", ("this file is a GGUF file",)),
    ({"weights": b"GGUF\x03" + bytes(60)}, "weights", ("this file is a GGUF file",)),
    ({"0/_CHECKPOINT_METADATA": b"{}", "0/default/_METADATA": b"{}"}, "", ("Orbax", "0/_CHECKPOINT_METADATA", "Hugging Face folder")),
    ({"0/_CHECKPOINT_METADATA": b"{}", "0/default/_METADATA": b"{}"}, "0", ("Orbax",)),
    ({"0/default/_METADATA": b"{}", "0/default/manifest.ocdbt": b"x"}, "0/default", ("Orbax",)),
    ({"checkpoint": b"x", "model.ckpt-9.index": b"x", "model.ckpt-9.data-00000-of-00001": b"x"}, "", ("TensorFlow", "from_tf=True")),
    ({"saved_model.pb": b"x", "variables/variables.index": b"x"}, "", ("TensorFlow",)),
    ({"tf_model.h5": HDF5, "config.json": b"{}"}, "", ("TensorFlow",)),
    ({"m.keras": a_zip()}, "", ("Keras", "as safetensors")),
    ({"m.keras": a_zip()}, "m.keras", ("Keras",)),
    ({"model.weights.h5": HDF5}, "", ("Keras",)),
    ({"flax_model.msgpack": b"\x82\xa5", "config.json": b"{}"}, "", ("Flax", "from_flax=True")),
    ({"flax_model.msgpack": b"\x82\xa5"}, "flax_model.msgpack", ("Flax",)),
    ({"model.onnx": b"\x08\x07"}, "", ("ONNX", "exported")),
    ({"onnx/model.onnx": b"\x08\x07"}, "", ("ONNX",)),
    ({"rank0.engine": b"ftrt", "config.json": b"{}"}, "", ("TensorRT engine", "cannot be taken out")),
    ({"model.zip": a_zip()}, "", ("zip archive", "Unpack it")),
    ({"model.zip": a_zip()}, "model.zip", ("zip archive",)),
]
REMAINS = [
    ({"model.safetensors": POINTER}, "", "Git LFS pointer"),
    ({"pytorch_model.bin": POINTER}, "", "Git LFS pointer"),
    ({"weights": POINTER}, "weights", "Git LFS pointer"),
    ({"model.safetensors": b""}, "", "0 bytes"),
    ({"model.pt": b""}, "", "empty file"),
    ({"weights": b""}, "weights", "empty file"),
    ({"model.safetensors.incomplete": b"x"}, "", "download that has not ended"),
    ({"model-00001-of-00002.safetensors.crdownload": b"x"}, "", "download that has not ended"),
    ({".cache/huggingface/download/ab.incomplete": b"x", "config.json": b"{}"}, "", "download that has not ended"),
]


def folder_of(files, folder):
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


@pytest.mark.parametrize(("files", "given", "words"), OTHERS, ids=lambda part: str(part)[:40])
def test_files_of_another_program_are_named_with_what_to_do(files, given, words, tmp_path):
    with pytest.raises(UnsupportedError) as error:
        reshard.open(folder_of(files, tmp_path) / given)
    assert error.value.exit_code == 6 and all(word in str(error.value) for word in (*words, "does not read")), str(error.value)


@pytest.mark.parametrize(("files", "given", "word"), REMAINS, ids=lambda part: str(part)[:40])
def test_what_a_download_leaves_is_a_broken_source(files, given, word, tmp_path):
    with pytest.raises(CheckpointError, match=word) as error:
        reshard.open(folder_of(files, tmp_path) / given)
    assert error.value.exit_code == 3


@pytest.mark.parametrize("kind", FOREIGN, ids=lambda kind: kind.word)
def test_a_target_of_another_program_is_told_how_to_get_it(kind):
    with pytest.raises(UnsupportedError) as error:
        reshard.plan(LLAMA, to=kind.word)
    assert "reshard does not write" in str(error.value) and kind.write in str(error.value)


def test_a_checkpoint_beside_foreign_files_is_read(tmp_path):
    folder = shutil.copytree(LLAMA, tmp_path / "model")
    folder_of({"onnx/model.onnx": b"x", "model.gguf": b"GGUF", "flax_model.msgpack": b"x"}, folder)
    assert reshard.open(folder).format == "hf"


def bare(folder, name="config.json"):
    shutil.copy(LLAMA / "config.json", folder / name)
    return folder


def test_a_config_alone_is_shown_as_a_model_without_weights(tmp_path):
    shown = command("inspect", bare(tmp_path)).out
    assert "llama, 74,016 parameters; a model without weights" in shown and "vllm at TP 1, 2, 4, 8" in shown
    refused = command("convert", tmp_path, tmp_path / "out", "--to", "hf")
    assert refused.code == 2 and "no weights lie here, only a model's config.json" in refused.err


@pytest.mark.parametrize("verb", ["inspect", "degrees", "estimate"])
def test_a_config_of_any_name_describes_a_model(verb, tmp_path):
    assert {"inspect": "llama"}.get(verb, "74,016 parameters") in command(verb, bare(tmp_path, "70b.json") / "70b.json").out
    bare(tmp_path)
    name = tmp_path / "70b.json"
    assert command(verb, name).out.replace("70b.json", "config.json") == command(verb, tmp_path / "config.json").out
    name.write_text(json.dumps({"a": 1}))
    with pytest.raises(RequestError):
        reshard.degrees(name, to="vllm")


def test_a_file_beside_checkpoints_in_folders_is_not_called_a_part_of_one(tmp_path):
    shutil.copytree(FIXTURES / "dcp" / "fsdp2" / "checkpoint", tmp_path / "checkpoint")
    (tmp_path / "notes.txt").write_text("a remark\n")
    with pytest.raises(RequestError) as error:
        reshard.open(tmp_path / "notes.txt")
    assert "one file of a checkpoint" not in str(error.value) and "no known format" in str(error.value)
    with pytest.raises(RequestError, match=r"one file of a checkpoint \(dcp\) was given"):
        reshard.open(tmp_path / "checkpoint" / "__0_0.distcp")
