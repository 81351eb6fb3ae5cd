"""reshard.json and reshard.digests: complete, small, checked when they are read, and computed again by a script that knows no reshard."""

import json
import random
import subprocess
import sys

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard

import reshard as library
from reshard.errors import CheckpointError, UnsupportedError
from reshard.plans.digests import content_digest
from reshard.plans.manifest import DIGESTS, MANIFEST, MOST_BYTES, listed_files, manifest_bytes, read_digests, read_manifest
from reshard.storage.files import LocalFiles

ROOT = FIXTURES.parent
FSDP2 = FIXTURES / "dcp" / "fsdp2"


@pytest.fixture
def folder(tmp_path):
    assert reshard("convert", HF / "llama", tmp_path / "out", "--to", "vllm", "--tp", 2).code == 0
    return tmp_path / "out"


def test_the_manifest_says_from_what_and_how_the_result_was_made(tmp_path):
    out = tmp_path / "out"
    arguments = ("convert", FSDP2 / "checkpoint", out, "--to", "hf", "--model", FSDP2 / "model")
    assert reshard(*arguments).code == 0
    document = json.loads((out / MANIFEST).read_text())
    assert document["command"].split() == ["reshard", *map(str, arguments)]
    state = document["source"].pop("state")
    assert document["source"] == {"path": str(FSDP2 / "checkpoint"), "format": "dcp", "step": None, "fingerprint": None}
    assert state.startswith("blake3:") and document["request"].startswith("blake3:")
    assert document["versions"]["reshard"] == library.__version__ and document["time"].endswith("Z")
    assert document["files"] == {"model.safetensors": (out / "model.safetensors").stat().st_size}
    assert {each["kind"]: each["tensors"] for each in document["dropped"]} == {"moment1": 21, "moment2": 21, "step": 21}
    assert all("optimizer" in each["reason"] for each in document["dropped"])
    assert all(each["examples"][0] == "model.embed_tokens.weight" for each in document["dropped"])


def test_the_digests_are_of_every_tensor_and_every_other_file(tmp_path):
    out = tmp_path / "out"
    library.convert(library.plan(FSDP2 / "checkpoint", to="dcp", model=FSDP2 / "model", optimizer=True), out)
    digests = read_digests(LocalFiles(out), read_manifest(LocalFiles(out)))
    assert sum(name.startswith("optim.") for name in digests.tensors) == 63 and len(digests.tensors) == 84
    assert digests.small_files == {
        path.name: content_digest(path.read_bytes()) for path in out.iterdir() if path.name not in (*digests.files, MANIFEST, DIGESTS)
    }


def test_a_script_with_numpy_and_blake3_alone_computes_the_same_digests(tmp_path):
    for model in ("llama", "gpt2"):
        out = tmp_path / model
        library.convert(library.plan(HF / model, to="hf", max_shard_size=100_000), out)
        script = [sys.executable, str(ROOT / "docs" / "recompute_digests.py"), str(out)]
        lines = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
        manifest = read_manifest(LocalFiles(out))
        assert lines.pop() == f"fingerprint {manifest.fingerprint}"
        assert dict(line.split() for line in lines) == read_digests(LocalFiles(out), manifest).tensors


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 2_100_000), (2_097_152,), (2, 3, 1_000_003), (4_200_000,)])
def test_the_script_knows_the_blocks_of_every_shape(shape, tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    (tmp_path / "in").mkdir()
    save_file({"a": values, "b": np.zeros(2, np.float32)}, tmp_path / "in" / "model.safetensors")
    printed = library.fingerprint(tmp_path / "in")
    script = [sys.executable, str(ROOT / "docs" / "recompute_digests.py"), str(tmp_path / "in")]
    assert subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == f"fingerprint {printed}"


def test_a_long_list_of_files_is_in_the_digests_alone(folder):
    document = json.loads((folder / MANIFEST).read_text())
    listed = read_manifest(LocalFiles(folder)).files
    many = {f"model-rank-{i}-part-0.safetensors": 10**12 for i in range(5000)}
    drops = [{"kind": "weight", "reason": "é" * 200, "tensors": 1, "bytes": 1, "examples": ["é" * 200]}] * 32
    content = manifest_bytes({**document, "dropped": drops, "command": "é" * 4096}, many)
    assert len(content) < MOST_BYTES and json.loads(content)["files"] is None
    (folder / MANIFEST).write_bytes(manifest_bytes({**document, "dropped": drops}, many))
    manifest = read_manifest(LocalFiles(folder))
    assert manifest.files is None and listed_files(LocalFiles(folder), manifest) == listed
    assert reshard("inspect", folder).code == 0


def test_a_flipped_bit_in_the_manifest_is_found_or_means_nothing(folder):
    content, chosen = (folder / MANIFEST).read_bytes(), random.Random(0)
    for _ in range(60):
        at, bit = chosen.randrange(len(content)), 1 << chosen.randrange(8)
        changed = content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
        (folder / MANIFEST).write_bytes(changed)
        result = reshard("verify", folder)
        if result.code == 0:
            assert json.loads(changed) == json.loads(content), changed[at - 10 : at + 10]
        assert result.code != 70


@pytest.mark.distinct
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"schema_version": 3}, UnsupportedError),
        ({"schema_version": "2"}, UnsupportedError),
        ({"schema_version": [[]]}, UnsupportedError),
        ({"files": {"a": -1}}, CheckpointError),
        ({"files": {"../a": 1}}, CheckpointError),
        ({"files": [1]}, CheckpointError),
        ({"fingerprint": "abc"}, CheckpointError),
        ({"digests": None}, CheckpointError),
        ({"format": 3}, CheckpointError),
    ],
)
def test_a_manifest_that_lies_is_refused(folder, change, error):
    document = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**document, **change}))
    with pytest.raises(error):
        read_manifest(LocalFiles(folder))
    assert reshard("verify", folder).code not in (0, 70)
    assert reshard("inspect", folder).code == 0, "a checkpoint is read without its manifest"


@pytest.mark.distinct
@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b'{"file": "../a", "bytes": 1, "fixed": "", "fixed_digest": "", "samples": ""}',
        b'{"file": "a", "bytes": 1, "fixed": "0-9", "fixed_digest": "", "samples": ""}',
        b'{"file": "a", "bytes": 1, "fixed": "x", "fixed_digest": "", "samples": ""}',
        b'{"tensor": "a", "digest": 1}',
        b'{"small_file": "/etc/passwd", "digest": "blake3:' + b"0" * 64 + b'"}',
        b"[" * 100_000,
        b'{"alias": "a", "of": "b"}',
    ],
)
def test_digests_that_lie_are_refused(folder, line):
    content = (folder / DIGESTS).read_bytes()
    (folder / DIGESTS).write_bytes(content + line + b"\n")
    with pytest.raises(CheckpointError, match=r"reshard\.digests"):
        read_digests(LocalFiles(folder), read_manifest(LocalFiles(folder)))
    result = reshard("verify", folder)
    assert result.code == 1 and DIGESTS in result.out
