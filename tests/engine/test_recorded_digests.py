"""`verify_source`: files are read whole and compared with the SHA-256 that other programs have recorded beside them."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard as run

import reshard
from reshard.errors import CheckpointError, MissingFile, UnsupportedError

MEGATRON = FIXTURES / "megatron_dist" / "llama-tp2-pp2" / "checkpoint"
MODEL = MEGATRON.parent / "model"


def folder_of(root):
    """The folder with the .distcp files."""
    return next(root.rglob(".metadata")).parent


@pytest.fixture
def megatron(tmp_path):
    """A save of Megatron with an integrity.json, as its validation.py writes it: of every file of the folder but itself."""
    root = shutil.copytree(MEGATRON, tmp_path / "megatron")
    folder = folder_of(root)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir()) if path.is_file()}
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": digests}))
    return root


def git_digest(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def download(tmp_path):
    """A model as huggingface_hub downloads it into a folder: SHA-256 of large files, git's SHA-1 of small ones."""
    folder = shutil.copytree(HF / "llama", tmp_path / "download")
    for path in [path for path in folder.iterdir() if path.is_file()]:
        etag = hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".safetensors" else git_digest(path.read_bytes())
        record = folder / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(f"{'a' * 40}\n{etag}\n1700000000.0\n")
    return folder


@pytest.fixture
def hub_cache(tmp_path):
    """A snapshot in the cache of huggingface_hub: links to blobs that are called by their etags."""
    repository = tmp_path / "models--org--llama"
    snapshot = repository / "snapshots" / ("b" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in [path for path in (HF / "llama").iterdir() if path.is_file()]:
        content = path.read_bytes()
        etag = hashlib.sha256(content).hexdigest() if path.suffix == ".safetensors" else git_digest(content)
        (repository / "blobs" / etag).write_bytes(content)
        (snapshot / path.name).symlink_to(f"../../blobs/{etag}")
    return snapshot


def plan_to_hf(source):
    return reshard.plan(reshard.open(source, model=MODEL if "megatron" in source.name else None), to="hf")


def flip(path, at=-20):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_git_computes_the_same_digest_of_a_blob(tmp_path):
    (tmp_path / "file").write_bytes(b"some content\n" * 99)
    said = subprocess.run(["git", "hash-object", tmp_path / "file"], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == git_digest(b"some content\n" * 99)


@pytest.mark.parametrize("source", ["megatron", "download", "hub_cache"])
def test_an_undamaged_source_is_verified_and_counted(source, request, tmp_path):
    source = request.getfixturevalue(source)
    plan = plan_to_hf(source)
    result = reshard.convert(plan, tmp_path / "out", verify_source=True)
    weights = {file.path for file in plan.source.files}
    assert result.source_digests.verified >= len(weights) and result.source_digests.without_digest == 0
    assert result.to_json()["source_digests"] == {"verified": result.source_digests.verified, "without_digest": 0}
    assert any("recorded" in note for note in result.notes)
    without = reshard.convert(plan, tmp_path / "without")
    assert without.fingerprint == result.fingerprint and without.source_digests.verified == 0


def damaged(source, request):
    """A source with one changed byte in a file, and that file."""
    root = request.getfixturevalue(source)
    path = folder_of(root) / "__0_0.distcp" if source == "megatron" else root / "model.safetensors"
    flip(path)
    return root, path.name


@pytest.mark.parametrize("source", ["megatron", "download", "hub_cache"])
def test_a_changed_byte_is_refused_before_anything_is_written(source, request, tmp_path):
    root, name = damaged(source, request)
    found = run("convert", root, tmp_path / "out", "--to", "hf", "--verify-source", *(["--model", MODEL] if source == "megatron" else []))
    assert found.code == 3 and found.err.rstrip().endswith("[wrong-digest]") and name in found.err, found.err
    path = next(root.rglob(name))
    assert hashlib.sha256(path.read_bytes()).hexdigest() in found.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("push", "SOURCE", "http://127.0.0.1:1"),
        ("cache", "get", "SOURCE", "--to", "vllm", "--cache", "CACHE"),
        ("delta", "GOOD", "SOURCE", "OUT"),
        ("delta", "SOURCE", "GOOD", "OUT"),
        ("apply", "SOURCE", "DELTA", "OUT", "--to", "hf"),
        ("convert", "SOURCE", "GOOD", "OUT", "--to", "hf", "--average"),
        ("convert", "SOURCE", "OUT", "--to", "hf", "--part", "0/2"),
        ("verify", "SOURCE", "GOOD"),
        ("verify", "GOOD", "SOURCE"),
        ("diff", "GOOD", "SOURCE"),
        ("fingerprint", "SOURCE"),
        ("stats", "SOURCE"),
    ],
    ids=lambda command: " ".join(command),
)
def test_every_command_that_reads_a_source_verifies_it(command, download, tmp_path, monkeypatch):
    other = shutil.copytree(HF / "llama", tmp_path / "other")
    flip(other / "model.safetensors", -3)
    reshard.delta(HF / "llama", other, tmp_path / "delta")
    flip(download / "model.safetensors")
    words = {"SOURCE": download, "GOOD": HF / "llama", "OUT": tmp_path / "out", "CACHE": tmp_path / "cache", "DELTA": tmp_path / "delta"}
    if command[0] == "push":  # without a server: what is planned is made up, and nothing may be sent
        from reshard.live.from_files.pushing import PlannedPush

        planned = PlannedPush(str(download), reshard.plan(download, to="vllm"), ())
        with pytest.raises(CheckpointError) as refused:
            planned.run(reshard.engine.pool.Effort(verify_source=True))
        assert refused.value.id == "wrong-digest"
        return
    found = run(*(words.get(word, word) for word in command), "--verify-source")
    assert found.code == 3 and "[wrong-digest]" in found.err, found.err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("cache/entries/*"))


def test_a_config_that_was_changed_after_the_download_is_told(download, tmp_path):
    flip(download / "config.json", 0)
    (download / "config.json").write_text((HF / "llama" / "config.json").read_text() + " ")
    with pytest.raises(CheckpointError, match=r"config\.json.*git SHA-1"):
        reshard.convert(plan_to_hf(download), tmp_path / "out", verify_source=True)


def test_files_without_a_digest_are_counted(tmp_path):
    result = reshard.convert(reshard.plan(HF / "llama", to="hf"), tmp_path / "out", verify_source=True)
    assert (result.source_digests.verified, result.source_digests.without_digest) == (0, 1)


def test_another_algorithm_is_refused_by_name(megatron, tmp_path):
    place = folder_of(megatron) / "integrity.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "algorithm": "blake2b"}))
    with pytest.raises(UnsupportedError, match="blake2b"):
        reshard.convert(plan_to_hf(megatron), tmp_path / "out", verify_source=True)
    (finding,) = [each for each in reshard.doctor(megatron, deep=True).findings if each.id == "integrity-not-checked"]
    assert "blake2b" in finding.detail


@pytest.mark.distinct
@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"algorithm": "sha256"}', '{"algorithm": "sha256", "files": []}', '{"algorithm": "sha256", "files": {"a": 1}}',
     '{"algorithm": "sha256", "files": {"a": "00"}}', '{"algorithm": "sha256", "files": {"../../x": "' + "0" * 64 + '"}}', "[" * 100_000],
)  # fmt: skip
def test_an_integrity_json_is_a_claim(content, megatron, tmp_path):
    (folder_of(megatron) / "integrity.json").write_text(content)
    with pytest.raises(CheckpointError):
        reshard.convert(plan_to_hf(megatron), tmp_path / "out", verify_source=True)
    assert {"integrity-not-checked"} <= {each.id for each in reshard.doctor(megatron, deep=True).findings}


def test_doctor_compares_names_at_once_and_digests_with_deep(megatron):
    assert [each.id for each in reshard.doctor(megatron).findings if "integrity" in each.detail + each.id] == ["integrity-not-checked"]
    deep = {each.id for each in reshard.doctor(megatron, deep=True).findings}
    assert not deep & {"integrity-not-checked", "wrong-digest", "unlisted-file"}
    folder = folder_of(megatron)
    place = folder / "integrity.json"
    listed = json.loads(place.read_text())
    (folder / "added.bin").write_bytes(b"x")
    listed["files"]["lost.distcp"] = "0" * 64
    place.write_text(json.dumps(listed))
    flip(folder / "__0_0.distcp")
    findings = {each.id: each.file for each in reshard.doctor(megatron, deep=True).findings}
    assert Path(findings["missing-file"]).name == "lost.distcp"
    assert Path(findings["unlisted-file"]).name == "added.bin" and Path(findings["wrong-digest"]).name == "__0_0.distcp"
    flip(folder / "__0_0.distcp")
    with pytest.raises(MissingFile, match="lost"):
        reshard.fingerprint(megatron, verify_source=True)


@pytest.mark.parametrize("source", ["download", "hub_cache"])
def test_doctor_compares_what_hugging_face_recorded(source, request):
    root, name = damaged(source, request)
    (finding,) = [each for each in reshard.doctor(root, deep=True).findings if each.id == "wrong-digest"]
    assert finding.file == name


def test_the_layout_of_a_download_is_that_of_huggingface_hub(tmp_path):
    local_folder = pytest.importorskip("huggingface_hub._local_folder", reason="an extra: huggingface_hub is not installed")
    folder = shutil.copytree(HF / "llama", tmp_path / "download")
    etag = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    local_folder.write_download_metadata(folder, "model.safetensors", "a" * 40, etag)
    plan = plan_to_hf(folder)
    assert reshard.convert(plan, tmp_path / "out", verify_source=True).source_digests.verified == 1
    flip(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=etag):
        reshard.convert(plan, tmp_path / "again", verify_source=True)
