"""Files of a checkpoint that reshard wrote, exchanged, copied or from another conversion: named by every verb that reads the weights."""

import json
import shutil

import pytest
from helpers.fixture_places import FIXTURES, HF, patch_stored, stored
from helpers.reshard_command import reshard, result_tree

import reshard as library
from reshard.plans.manifest import DIGESTS, MANIFEST

FSDP2 = FIXTURES / "dcp" / "fsdp2"
ENGINES = ("vllm", "sglang", "trtllm")


def files_of(folder):
    return sorted(path for path in folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Engine -> its folder at TP 2, and one of another model of the same shapes."""
    found = {}
    other = shutil.copytree(HF / "llama", tmp_path_factory.mktemp("other") / "model")
    for name in ("model.layers.0.mlp.gate_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        for at in range(0, 2000, 2):
            patch_stored(other / "model.safetensors", name, at)
    for engine in ENGINES:
        base = tmp_path_factory.mktemp(engine)
        library.convert(library.plan(HF / "llama", to=engine, tp=2), base / "out")
        library.convert(library.plan(other, to=engine, tp=2), base / "other")
        found[engine] = base
    return found


def exchanged(folder, other):
    first, second = files_of(folder)
    shutil.move(first, folder / "kept")
    shutil.move(second, first)
    shutil.move(folder / "kept", second)
    return [f"{first.name} holds what was written as {second.name}", f"{second.name} holds what was written as {first.name}"]


def copied(folder, other):
    first, second = files_of(folder)
    shutil.copy(first, second)
    return [f"{second.name} holds what was written as {first.name}"]


def from_another(folder, other):
    first = files_of(folder)[0]
    shutil.copy(files_of(other)[0], first)
    return [f"{first.name} holds something else"]


def flipped(folder, other):
    second = files_of(folder)[1]
    patch_stored(second, next(name for name in stored(second) if "down_proj" in name or "mlp.proj" in name))
    return [second.name]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", [exchanged, copied, from_another, flipped])
def test_a_file_that_is_not_the_one_that_was_written_is_named(folders, engine, change, tmp_path):
    folder = shutil.copytree(folders[engine] / "out", tmp_path / "out")
    names = change(folder, folders[engine] / "other")
    printed = reshard("fingerprint", folder)
    if "disagree" not in printed.err and "the same bytes" not in printed.err:  # replicas and copies tell it before
        assert printed.code == 1 and f"does not match {MANIFEST}" in printed.err, printed.err
        assert all(name in printed.err for name in names), printed.err
    converted = reshard("convert", folder, tmp_path / "again", "--to", "hf")
    assert converted.code not in (0, 1, 70) and not (tmp_path / "again").exists()
    told_before = any(words in converted.err for words in ("disagree", "the same bytes"))  # by replicas, or as a copy
    assert all(name in converted.err for name in names) or told_before, converted.err
    compared = reshard("verify", folder, folder)
    assert (compared.code != 0 and all(name in compared.out + compared.err for name in names)) or (compared.code == 3 and told_before)
    checked = reshard("verify", folder)
    assert checked.code == 1 and names[0].split()[0] in checked.out


@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_file_is_named(folders, engine, tmp_path):
    folder = shutil.copytree(folders[engine] / "out", tmp_path / "out")
    lost = files_of(folder)[1]
    lost.unlink()
    for verb in ("inspect", "fingerprint"):
        result = reshard(verb, folder)
        assert result.code not in (0, 1, 70) and f"{lost.name}: the file is missing. {MANIFEST} lists 2 files, tp 2" in result.err
    result = reshard("verify", folder)
    assert result.code == 1 and f"the file is missing ({MANIFEST} lists 2 files, tp 2)" in result.out and lost.name in result.out


def test_an_added_file_of_weights_is_a_difference_and_another_file_a_note(folders, tmp_path):
    folder = shutil.copytree(folders["vllm"] / "out", tmp_path / "out")
    (folder / "README.md").write_text("mine")
    result = reshard("verify", folder)
    assert result.code == 0 and "note      README.md is not listed" in result.out
    shutil.copy(files_of(folder)[0], folder / "model-rank-2-part-0.safetensors")
    result = reshard("verify", folder, "--json")
    assert result.code == 1
    assert [(each["name"], each["kind"]) for each in result.document["differences"]] == [("model-rank-2-part-0.safetensors", "extra")]


def test_a_cast_is_not_compared_and_a_note_says_so(folders, tmp_path):
    result = reshard("convert", folders["vllm"] / "out", tmp_path / "out", "--to", "hf", "--dtype", "fp16")
    assert result.code == 0 and f"21 tensors of the source were not compared with its {MANIFEST}, because of the cast" in result.out
    result = reshard("convert", folders["vllm"] / "out", tmp_path / "same", "--to", "hf")
    assert result.code == 0 and "not compared" not in result.out
    recorded = json.loads((tmp_path / "same" / MANIFEST).read_text())
    source = json.loads((folders["vllm"] / "out" / MANIFEST).read_text())
    assert recorded["source"]["fingerprint"] == source["fingerprint"] == recorded["fingerprint"]


def test_a_folder_that_another_program_wrote_since_is_read_without_the_manifest(folders, tmp_path):
    folder = shutil.copytree(folders["vllm"] / "other", tmp_path / "out")
    shutil.copy(folders["vllm"] / "out" / MANIFEST, folder)
    refused = reshard("convert", folder, tmp_path / "again", "--to", "hf")
    assert refused.code not in (0, 1, 70) and "remove both" in refused.err and DIGESTS in refused.err
    for name in (MANIFEST, DIGESTS):
        (folder / name).unlink()
    assert reshard("convert", folder, tmp_path / "again", "--to", "hf").code == 0


def test_the_optimizer_state_is_compared_or_a_note_says_that_it_is_not(tmp_path):
    model = ("--model", FSDP2 / "model")
    assert reshard("convert", FSDP2 / "checkpoint", tmp_path / "out", "--to", "universal", *model).code == 0
    for tensor in library.open(tmp_path / "out", model=FSDP2 / "model").index.by_kind("moment1").values():
        extent = next(tensor.pieces()).extent
        path = tmp_path / "out" / extent.path
        content = bytearray(path.read_bytes())
        content[extent.byte_offset : extent.byte_offset + tensor.nbytes] = bytes(tensor.nbytes)
        path.write_bytes(content)
    result = reshard("verify", FSDP2 / "checkpoint", tmp_path / "out", *model)
    for name in (FSDP2 / "checkpoint", tmp_path / "out"):
        assert f"not compared in {name}: 21 " in result.out and "--optimizer" in result.out, result.out + result.err
    assert reshard("verify", tmp_path / "out", *model).code == 1


def test_checksums_are_those_of_sha256sum(tmp_path):
    import subprocess

    assert reshard("convert", HF / "llama", tmp_path / "out", "--to", "vllm", "--tp", 2, "--checksums").code == 0
    found = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "out", capture_output=True, text=True, check=True).stdout
    listed = {line.split(":")[0] for line in found.splitlines()}
    assert listed == result_tree(tmp_path / "out").keys() - {"SHA256SUMS", DIGESTS, "reshard.json"}
    assert reshard("verify", tmp_path / "out").code == 0
    assert reshard("convert", HF / "llama", tmp_path / "plain", "--to", "vllm", "--tp", 2).code == 0
    before = result_tree(tmp_path / "plain")
    refused = reshard("convert", HF / "llama", tmp_path / "plain", "--to", "vllm", "--tp", 2, "--checksums", "--resume")
    assert refused.code not in (0, 1, 70) and "SHA256SUMS" in refused.err and result_tree(tmp_path / "plain") == before
