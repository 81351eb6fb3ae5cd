"""What lies beside the weights: files and entries of headers go along, or are named; nothing vanishes."""

import json
import os
import pickle
import re
import shutil
import socket
import struct
import zipfile
from pathlib import Path

import pytest
from helpers.fixture_places import DCP, FIXTURES, HF
from helpers.reshard_command import reshard as run

import reshard
from reshard.errors import RequestError

BESIDE = FIXTURES / "beside"
OWN = {"reshard.json", "reshard.digests", "config.json"}


def files_of(folder):
    """Path -> content of every file in a folder, but for weights and what reshard writes about them."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path): (folder / path).read_bytes() for path in paths if str(path) not in OWN and not str(path).startswith("model")}


def header_of(path):
    """`__metadata__` of a safetensors file and the names of its tensors, read by hand."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return header.pop("__metadata__", {}), set(header)


@pytest.fixture
def sentence(tmp_path):
    """The folder of sentence-transformers. Its model is made an undeclared one, as this is not about its missing head."""
    folder = tmp_path / "sentence"
    shutil.copytree(BESIDE / "sentence", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "undeclared", "architectures": ["UndeclaredModel"]}))
    return folder


def causal(tmp_path):
    """A language model with a chat template apart, and the modules of sentence-transformers."""
    folder = tmp_path / "causal"
    shutil.copytree(BESIDE / "processor", folder)
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "README.md"):
        shutil.copy(BESIDE / "sentence" / name, folder)
    for name in ("1_Pooling", "2_Dense", "3_Normalize"):
        shutil.copytree(BESIDE / "sentence" / name, folder / name)
    for name in ("custom_generate/generate.py", "figures/loss.png", "LICENSE", "video_preprocessor_config.json", "normalizer.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_a_folder_of_sentence_transformers_goes_along_whole(sentence, tmp_path):
    result = reshard.convert(reshard.plan(sentence, to="hf"), tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(sentence) and len(files_of(sentence)) == 10
    assert not result.left and result.to_json()["left"] == {}


@pytest.mark.parametrize(("to", "sizes"), [("hf", {}), ("vllm", {"tp": 2}), ("sglang", {"tp": 2}), ("trtllm", {"tp": 2}), ("dcp", {})])
def test_small_files_and_modules_go_along_into_every_target(tmp_path, to, sizes):
    source = causal(tmp_path)
    plan = reshard.plan(source, to=to, **sizes)
    reshard.convert(plan, tmp_path / "out")
    written, expected = files_of(tmp_path / "out"), files_of(source)
    assert {name: written.get(name) for name in expected} == expected
    assert "2_Dense/model.safetensors" in expected and "custom_generate/generate.py" in expected
    assert not plan.layout.left
    assert run("verify", tmp_path / "out").code == 0
    (tmp_path / "out" / "1_Pooling" / "config.json").write_text("{}")
    assert run("verify", tmp_path / "out").code == 1


def litter(folder):
    """Everything that does not go along -> its kind."""
    kinds = {
        "optimizer.pt": "optimizer-state",
        "rng_state_0.pth": "random-state",
        "scheduler.pt": "trainer-state",
        "trainer_state.json": "trainer-state",
        "zero_to_torch.py": "trainer-state",
        "training_args.bin": "trainer-state",
        "train.log": "log",
        "events.out.tfevents.17.host": "log",
        ".env": "secret",
        "deploy.pem": "secret",
        "model.sig": "signature",
        ".gitattributes": "repository-file",
        ".hidden.json": "hidden-file",
        "reshard.json.bak": None,
        "pytorch_model.bin": "weight-file",
        "model-q4.gguf": "foreign-weight-file",
        "tf_model.h5": "foreign-weight-file",
        "flax_model.msgpack": "foreign-weight-file",
        "extra.pkl": "pickle",
    }
    del kinds["reshard.json.bak"]
    for name in kinds:
        (folder / name).write_text(name)
    for name, kind in {"wandb/run": "log", "checkpoint-5/weights": "weight-folder", "onnx/model": "weight-folder"}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "file.json").write_text("{}")
        kinds[f"{name.partition('/')[0]}/"] = kind
    (folder / "by-content.dat").write_bytes(pickle.dumps([1, 2]))
    with zipfile.ZipFile(folder / "zipped.json", "w") as archive:
        archive.writestr("data.pkl", b"")
    with (folder / "big.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    return kinds | {"by-content.dat": "pickle", "zipped.json": "pickle", "big.json": "large-file"}


def test_what_does_not_go_along_is_named_with_its_kind(tmp_path):
    source = causal(tmp_path)
    clean = files_of(source)
    kinds = litter(source)
    document = run("convert", source, tmp_path / "out", "--to", "hf", "--json", "--full").document
    assert {file["path"]: file["kind"] for file in document["plan"]["left_files"]} == kinds
    assert all(file["reason"] for file in document["plan"]["left_files"])
    counts = {kind: [*kinds.values()].count(kind) for kind in kinds.values()}
    assert document["left"] == counts == document["plan"]["left"]
    assert files_of(tmp_path / "out") == clean
    dry = run("convert", source, tmp_path / "none", "--to", "hf", "--dry-run")
    assert f"left      {len(kinds)} files: " in dry.out and "1 optimizer state" in dry.out and "3 pickles" in dry.out


def test_a_folder_with_weights_of_its_own_is_left_as_a_whole(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(BESIDE / "processor", source)
    shutil.copytree(BESIDE / "processor", source / "quantized")
    shutil.copytree(BESIDE / "sentence" / "2_Dense", source / "2_Dense")
    left = reshard.plan(source, to="hf").layout.left
    assert [(file.path, file.kind) for file in left] == [("2_Dense/", "weight-folder"), ("quantized/", "weight-folder")]


def test_links_that_leave_the_checkpoint_and_what_is_no_file_are_not_read(tmp_path):
    source = causal(tmp_path)
    (tmp_path / "secret.txt").write_text("secret")
    (source / "notes.md").symlink_to(tmp_path / "secret.txt")
    (source / "inner.md").symlink_to("README.md")
    (source / "gone.md").symlink_to("nowhere")
    (source / "outside").symlink_to(tmp_path)
    os.mkfifo(source / "pipe")
    for name in (b"a:b.txt", b"back\\slash.txt", b"not \xff utf-8.txt"):
        Path(os.fsdecode(os.fsencode(source) + b"/" + name)).write_text("odd")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(source / "socket"))
        plan = reshard.plan(source, to="hf")
    reshard.convert(plan, tmp_path / "out")
    left = {file.path: file.kind for file in plan.layout.left}
    assert left["notes.md"] == left["gone.md"] == left["outside/"] == "link" and left["pipe"] == left["socket"] == "unreadable-file"
    assert [*left.values()].count("unreadable-file") == 5 and "odd" not in str(files_of(tmp_path / "out"))
    assert (tmp_path / "out" / "inner.md").read_bytes() == (source / "README.md").read_bytes()
    assert not any(b"secret" in content for content in files_of(tmp_path / "out").values())
    assert not {"notes.md", "outside", "pipe"} & {path.name for path in (tmp_path / "out").iterdir()}


def test_the_blobs_of_a_hub_cache_go_along(tmp_path):
    source = causal(tmp_path)
    root = tmp_path / "models--org--name"
    (root / "blobs").mkdir(parents=True)
    for i, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        link = root / "snapshots" / "0123" / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / "blobs" / str(i))
        link.symlink_to(os.path.relpath(root / "blobs" / str(i), link.parent))
    plan = reshard.plan(root / "snapshots" / "0123", to="hf")
    reshard.convert(plan, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(source) and not plan.layout.left


def test_safetensors_beside_the_index_go_along_unread(tmp_path):
    """An index keeps vLLM from loading them (weight_utils.py: filter_duplicate_safetensors_files)."""
    source = tmp_path / "source"
    shutil.copytree(HF / "llama-sharded", source)
    shutil.copy(BESIDE / "sentence" / "2_Dense" / "model.safetensors", source / "mtp.safetensors")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    reshard.convert(reshard.plan(source, to="hf"), whole)
    reshard.convert(reshard.plan(source, to="hf", max_shard_size="60kB"), cut)
    for out in (whole, cut):
        assert (out / "mtp.safetensors").read_bytes() == (source / "mtp.safetensors").read_bytes()
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert "mtp.safetensors" not in index["weight_map"].values()
        assert run("verify", source, out).code == 0 and run("verify", out).code == 0
    ranks = reshard.plan(source, to="vllm")
    assert [(file.path, file.kind) for file in ranks.layout.left if file.path.startswith("mtp")] == [("mtp.safetensors", "unplaced-file")]


def test_a_stray_model_file_beside_an_index_is_noted_everywhere(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(HF / "llama-sharded", source)
    shutil.copy(HF / "llama" / "model.safetensors", source)
    note = "transformers looks for model.safetensors before the index, and loads it in place of the checkpoint's files"
    assert note in run("inspect", source).out and note in run("convert", source, tmp_path / "out", "--to", "hf").out
    found = run("doctor", source)
    assert "model.safetensors" in found.out and "no tensor lies in it" not in found.out
    left = reshard.plan(source, to="hf", max_shard_size="60kB").layout.left
    assert [(file.path, file.kind) for file in left if "model" in file.path] == [("model.safetensors", "weight-file")]


def test_of_the_folder_that_model_names_weights_and_state_are_not_looked_at(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(HF / "llama-sharded", model)
    shutil.copy(DCP / "fsdp2" / "model" / "config.json", model)
    for name in ("README.md", "optimizer.pt", "extra.safetensors", "1_Pooling/config.json", "sub/file.json"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(name)
    (model / "away.md").symlink_to("/etc/hostname")
    plan = reshard.plan(DCP / "fsdp2" / "checkpoint", to="hf", model=model)
    reshard.convert(plan, tmp_path / "out")
    assert "README.md" in files_of(tmp_path / "out") and not {"optimizer.pt", "extra.safetensors"} & {*files_of(tmp_path / "out")}
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert [(file.path, file.kind) for file in plan.layout.left] == [("away.md", "link")]


def test_a_file_named_like_one_of_the_target_replaces_nothing(tmp_path):
    source = causal(tmp_path)
    (source / "model-rank-0-part-0.safetensors.txt").write_text("free")
    (source / "params.json").write_text("not those of the model")
    plan = reshard.plan(source, to="consolidated")
    reshard.convert(plan, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "params.json").read_text())["dim"] == 32
    assert ("params.json", "replaced-file") in [(file.path, file.kind) for file in plan.layout.left]
    paths = [sidecar.path for sidecar in plan.layout.sidecars]
    assert len(paths) == len({*paths})


def test_overwriting_leaves_no_module_of_the_model_before(tmp_path):
    reshard.convert(reshard.plan(causal(tmp_path), to="hf"), tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("not written by reshard")
    reshard.convert(reshard.plan(BESIDE / "processor", to="hf"), tmp_path / "out", overwrite=True)
    assert files_of(tmp_path / "out").keys() == files_of(BESIDE / "processor").keys() | {"mine.txt"}


def test_a_conversion_goes_on_with_the_files_beside(tmp_path):
    """In parts, resumed, and from a plan file that holds the model's folder."""
    source = causal(tmp_path)
    for part in ("0/2", "1/2"):
        reshard.convert_part(reshard.plan(source, to="vllm", tp=2), tmp_path / "parts", part)
    assert files_of(tmp_path / "parts") == files_of(source)
    reshard.convert(reshard.plan(source, to="vllm", tp=2), tmp_path / "parts", if_changed=True)
    plan = reshard.plan(DCP / "fsdp2" / "checkpoint", to="hf", model=_with_config(source, DCP / "fsdp2" / "model"))
    reshard.save_plan(plan, tmp_path / "plan")
    reshard.convert(reshard.load_plan(tmp_path / "plan", DCP / "fsdp2" / "checkpoint"), tmp_path / "planned")
    assert files_of(tmp_path / "planned") == files_of(source)


def _with_config(folder, model):
    shutil.copy(model / "config.json", folder)
    return folder


def test_fail_if_skipped_writes_nothing(tmp_path):
    source = causal(tmp_path)
    (source / ".gitattributes").write_text("is of the repository")
    assert run("convert", source, tmp_path / "whole", "--to", "hf", "--fail-if-skipped").code == 0
    (source / "run.log").write_text("log")
    plan = reshard.plan(source, to="hf")
    with pytest.raises(RequestError, match=r"run\.log \(log\)") as caught:
        reshard.convert(plan, tmp_path / "out", fail_if_skipped=True)
    assert caught.value.exit_code == 1 and caught.value.id == "skipped" and not (tmp_path / "out").exists()
    with pytest.raises(RequestError, match=r"run\.log"):
        reshard.cache(plan, root=tmp_path / "cache", fail_if_skipped=True)
    for command in (
        ("convert", source, tmp_path / "out", "--to", "hf"),
        ("convert", source, tmp_path / "out", "--to", "hf", "--dry-run"),
        ("cache", "get", source, "--to", "vllm", "--cache", tmp_path / "cache"),
    ):
        refused = run(*command, "--fail-if-skipped")
        assert refused.code == 1 and "run.log (log)" in refused.err and not (tmp_path / "out").exists()
    skipped = run(
        "convert", DCP / "fsdp2" / "checkpoint", tmp_path / "out", "--to", "hf", "--model", DCP / "fsdp2" / "model", "--fail-if-skipped"
    )
    assert skipped.code == 1 and "tensors and 0 files would not be carried: " in skipped.err


# ---- entries of headers ----


def test_the_classes_of_torchao_are_kept(tmp_path):
    """In every file all of them, as transformers writes them: each file's `tensor_names` must find its classes."""
    source, names = header_of(BESIDE / "torchao-fp8" / "model.safetensors")
    assert len(source) == 14 and json.loads(source["model.layers.0.mlp.up_proj.weight"])["_type"] == "Float8Tensor"
    for out, options in ((tmp_path / "whole", {}), (tmp_path / "cut", {"max_shard_size": "5kB"})):
        plan = reshard.plan(BESIDE / "torchao-fp8", to="hf", **options)
        reshard.convert(plan, out)
        headers = [header_of(path) for path in sorted(out.glob("*.safetensors"))]
        assert len(headers) == len(plan.layout.files) and set().union(*(held for _, held in headers)) == names
        assert all(entries == source for entries, _ in headers) and not plan.layout.left


def with_headers(folder, entries):
    """Give the files of a folder these entries: file -> entries."""
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length]) | {"__metadata__": entries[path.name]}
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def test_entries_go_with_the_tensors_that_they_name(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(HF / "llama", source)
    name, other = "model.norm.weight", "model.embed_tokens.weight"
    entries = {"format": "mlx", "made by": "us", name: "of the norm", other: "of the table"}
    with_headers(source, {"model.safetensors": entries})
    reshard.convert(reshard.plan(source, to="hf", max_shard_size="20kB"), tmp_path / "out")
    for path in (tmp_path / "out").glob("*.safetensors"):
        found, names = header_of(path)
        assert found == {key: text for key, text in entries.items() if key not in (name, other) or key in names}
    left = reshard.plan(source, to="vllm").layout.left
    assert {file.path: file.kind for file in left} == dict.fromkeys(entries, "header-entry")


@pytest.mark.parametrize("entries", [{}, {"format": "pt"}, {"by": "us"}])
def test_the_default_stands_where_the_source_has_none(tmp_path, entries):
    source = tmp_path / "source"
    shutil.copytree(HF / "llama", source)
    with_headers(source, {"model.safetensors": entries})
    reshard.convert(reshard.plan(source, to="hf"), tmp_path / "out")
    assert header_of(tmp_path / "out" / "model.safetensors")[0] == {"format": "pt", **entries}


def test_entries_in_which_files_disagree_are_named(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(HF / "llama-sharded", source)
    paths = sorted(path.name for path in source.glob("*.safetensors"))
    with_headers(source, {path: {"format": "pt", "file": path, "by": "us"} for path in paths})
    plan = reshard.plan(source, to="hf")
    reshard.convert(plan, tmp_path / "out")
    assert header_of(tmp_path / "out" / "model.safetensors")[0] == {"format": "pt", "by": "us"}
    assert [(file.path, file.kind) for file in plan.layout.left] == [("file", "header-entry")]


def test_what_is_said_of_a_tensor_is_left_where_its_form_changes(tmp_path):
    source = tmp_path / "source"
    packed = FIXTURES / "hf_fp8" / "llama-fp8-block"
    shutil.copytree(packed, source)
    name = "model.layers.0.mlp.up_proj.weight"
    entries = {"format": "pt", name: "FP8", "names": json.dumps([name]), "by": "us"}
    with_headers(source, dict.fromkeys((path.name for path in source.glob("*.safetensors")), entries))
    kept, changed = reshard.plan(source, to="hf"), reshard.plan(source, to="hf", dequantize=True)
    assert not kept.layout.left and kept.layout.headers == entries.keys()
    assert {file.path for file in changed.layout.left if file.kind == "header-entry"} == {name, "names"}


def test_every_kind_says_why_and_stands_on_its_page():
    from reshard.adapter.file_kinds import kind_of, kinds

    assert all(rule["why"] for rule in kinds().values())
    page = (FIXTURES.parent / "docs" / "formats" / "hf.md").read_text()
    rows = {kind: f"| {'no' if rule.get('harmless') else 'yes'} |\n" for kind, rule in kinds().items()}
    assert all(re.search(rf"^\| `{kind}` \| .* {re.escape(end)}", page, re.MULTILINE) for kind, end in rows.items())
    assert [kind_of(name) for name in ("README.md", "tokenizer.model", "model_index.json", "a/spiece.model", "latin.txt")] == [""] * 5
