"""What version 0.1.0 wrote (fixtures/reshard_0.1.0), and what its users wrote for it: read, or refused with a message that helps.

The oracle is the source from which 0.1.0 converted, and its truth, which was gathered while training.
"""

import json
import os
import shutil

import pytest
from helpers.fixture_places import DCP, FIXTURES, HF, described, truth
from helpers.reshard_command import reshard, tree

import reshard as library

WRITTEN = FIXTURES / "reshard_0.1.0"
SOURCE = DCP / "empty"
DECLARATIONS = sorted(path.name for path in (WRITTEN / "declarations").iterdir())
# The built-in model that the declaration of a user describes, under another model_type.
SAME_MODEL = {"llama.yaml": "llama", "like_llama.yaml": "qwen2"}
assert sorted(SAME_MODEL) == DECLARATIONS


@pytest.mark.parametrize("target", ["hf", "vllm-tp2", "dcp"])
def test_a_finished_conversion_is_read_bit_by_bit(target):
    checkpoint = library.open(WRITTEN / target)
    expected = {name: value for (name, kind), value in truth("empty").items() if kind == "weight"}
    weights = library.plan(checkpoint, to="hf").content.tensors
    assert {name: described(tensor, checkpoint.files) for name, tensor in weights.items()} == expected


@pytest.mark.parametrize("target", ["hf", "vllm-tp2", "dcp"])
def test_a_finished_conversion_has_the_fingerprint_of_its_manifest(target):
    manifest = json.loads((WRITTEN / target / "reshard.json").read_text())
    assert reshard("verify", SOURCE / "checkpoint", WRITTEN / target).code == 0
    assert library.fingerprint(WRITTEN / target, digest_version=1).root == manifest["fingerprint"]
    assert library.fingerprint(WRITTEN / target).root != manifest["fingerprint"], "digests of version 2 are printed"


@pytest.mark.parametrize("target", ["hf", "vllm-tp2", "dcp"])
def test_a_finished_conversion_is_verified_with_its_own_digests(target, tmp_path):
    copy = shutil.copytree(WRITTEN / target, tmp_path / "out")
    result = reshard("verify", copy)
    assert result.code == 0 and "recorded no digests of single tensors" in result.out, result.out + result.err
    extent = next(library.open(copy).index.tensors[0].pieces()).extent
    path = copy / extent.path
    content = bytearray(path.read_bytes())
    content[extent.byte_offset] ^= 1
    path.write_bytes(content)
    assert reshard("verify", copy).code == 1
    path.unlink()
    result = reshard("verify", copy)
    assert result.code == 1 and path.name in result.out and "missing" in result.out


@pytest.mark.parametrize("target", ["hf", "vllm-tp2", "dcp"])
def test_a_finished_conversion_converts(target, tmp_path):
    result = reshard("convert", WRITTEN / target, tmp_path / "out", "--to", "vllm", "--tp", 2)
    assert result.code == 0, result.err
    (_, expected), (_, found) = (
        sorted((path, data) for path, data in tree(folder).items() if path.endswith(".safetensors"))
        for folder in (WRITTEN / "vllm-tp2", tmp_path / "out")
    )
    assert found == expected


@pytest.fixture
def unfinished(tmp_path, monkeypatch):
    """The interrupted conversion, `out` in the current directory, beside its source. Its journal names the source as `checkpoint`."""
    shutil.copytree(SOURCE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(WRITTEN / "unfinished", tmp_path / "out")


def restore_time_stamps():
    """Give the copied source the time stamps that it had when 0.1.0 was interrupted."""
    for name, nanoseconds in json.loads((WRITTEN / "source.json").read_text())["mtime_ns"].items():
        os.utime(f"checkpoint/{name}", ns=(nanoseconds, nanoseconds))


def convert(target, *options):
    return reshard("convert", "checkpoint", target, "--to", "hf", "--model", "model", *options)


def is_whole(target):
    return not (target / ".reshard").exists() and all(
        (target / name).read_bytes() == (WRITTEN / "hf" / name).read_bytes() for name in ("model.safetensors", "config.json")
    )


def test_an_unfinished_conversion_is_resumed_or_refused_with_help(unfinished):
    """Its journal holds a digest of the plan. A version that words plans otherwise than 0.1.0 cannot know that the plan is the same."""
    restore_time_stamps()
    before = tree(unfinished)
    result = convert(unfinished, "--resume")
    if result.code == 0:
        assert is_whole(unfinished)
    else:
        assert result.code == 4 and "another version of reshard" in result.err and "--overwrite" in result.err, result.err
        assert tree(unfinished) == before


def test_an_unfinished_conversion_of_a_source_that_has_changed_is_refused(unfinished):
    os.utime("checkpoint/__0_0.distcp")
    before = tree(unfinished)
    result = convert(unfinished, "--resume")
    assert result.code == 4 and "another version of reshard" in result.err and "--overwrite" in result.err, result.err
    assert tree(unfinished) == before


def test_an_unfinished_conversion_can_be_begun_anew(unfinished):
    assert convert(unfinished).code == 4, "without --overwrite nothing is replaced"
    assert convert(unfinished, "--overwrite").code == 0
    assert is_whole(unfinished)


def test_a_finished_conversion_of_a_source_that_has_changed_is_not_resumed(unfinished):
    os.utime("checkpoint/__0_0.distcp")
    target = shutil.copytree(WRITTEN / "hf", unfinished.parent / "finished")
    before = tree(target)
    result = convert(target, "--resume")
    assert result.code == 4 and "--overwrite" in result.err and tree(target) == before


@pytest.mark.parametrize("name", DECLARATIONS)
def test_a_declaration_of_a_user_is_read(name, tmp_path):
    """It is in version 1 of the language, and converts to the bytes of the built-in model that it describes."""
    built_in = HF / SAME_MODEL[name]
    source = shutil.copytree(built_in, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "mymodel"}))
    declaration = WRITTEN / "declarations" / name
    result = reshard("convert", source, tmp_path / "out", "--to", "vllm", "--tp", 2, "--architecture", declaration)
    assert result.code == 0, result.err
    assert reshard("convert", built_in, tmp_path / "expected", "--to", "vllm", "--tp", 2).code == 0
    made, expected = tree(tmp_path / "out"), tree(tmp_path / "expected")
    weights = {path for path in expected if path.endswith(".safetensors")}
    assert weights and {path: made[path] for path in weights} == {path: expected[path] for path in weights}
