"""Checkpoints in a store: what is read is what a local folder holds, and how many requests it takes."""

import io
import subprocess
import sys
import tarfile

import pytest
from cloud.models import converted, write_hf
from helpers.fixture_places import FIXTURES, TRUTHS, described, truth
from helpers.reshard_command import reshard as run
from helpers.sampled import sampled

import reshard
from reshard.errors import CheckpointError, RequestError, SystemRefusal, UnsupportedError
from reshard.storage.stores import remote_files, similar_files, store
from reshard.storage.stores.store import REQUESTS_AT_ONCE
from reshard.storage.stores.urls import storage_options


@pytest.mark.parametrize("case", TRUTHS[:: max(1, len(TRUTHS) // 24)], ids=lambda case: str(case.relative_to(FIXTURES)))
def test_every_tensor_of_a_checkpoint_in_a_store_is_its_truth(case, s3):
    s3.put_tree("bucket", "case/checkpoint", case / "checkpoint")
    model = case / "model" if (case / "model").exists() else None
    if model is None and (case / "checkpoint").is_dir() and (case / "config.json").exists():
        model = case
    try:
        local = reshard.open(case / "checkpoint", model=model)
    except reshard.ReshardError as error:
        pytest.skip(f"not readable without more options: {error.what}")
    remote = reshard.open("s3://bucket/case/checkpoint", model=model)
    expected = {(t.name, t.kind): described(t, local.files) for t in local.index.tensors}
    assert {(t.name, t.kind): described(t, remote.files) for t in remote.index.tensors} == expected
    assert truth(case).keys() & expected.keys()


MODELS = {
    "hf": {"layers": 499, "hidden": 16, "feed_forward": 32, "vocabulary": 32, "files_per_layer": 2},
    "megatron": {"layers": 50, "hidden": 80, "feed_forward": 40, "vocabulary": 40},
    "dcp": {"layers": 1, "hidden": 16, "feed_forward": 32, "vocabulary": 1000},
}


@pytest.mark.parametrize(("format", "options"), sampled([("hf", None), ("megatron", {"tp": 20, "pp": 50}), ("dcp", {"dp": 1000})], 3))
def test_a_thousand_files_take_three_requests_each_two_in_sequence_64_at_a_time(format, options, tmp_path, s3, monkeypatch):
    # Files of a few kB stand for large ones: a start and an end of 4 kB are fetched, not the whole file.
    monkeypatch.setattr(similar_files, "END", 4096 if format != "hf" else 1024)
    source = write_hf(tmp_path / "hf", **MODELS[format])
    folder = source if options is None else converted(source, tmp_path / format, to=format, **options)
    s3.put_tree("bucket", "run/step", folder)
    s3.latency = 0.15  # requests at the same time overlap, also when the machine is busy
    done = run("inspect", "s3://bucket/run/step")
    assert done.code == 0, done.err
    keys = [f"run/step/{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_file()]
    assert len(keys) >= 1000 and max(s3.by_key[key] for key in keys) <= 3
    # The first file of a kind tells what is needed of the others.
    in_sequence = sorted(s3.longest_chain(key) for key in keys)
    assert in_sequence[-1] <= 3 and in_sequence[-3] <= 2
    assert 32 < s3.most_in_flight <= REQUESTS_AT_ONCE + 1
    assert s3.longest_chain() <= sum(s3.requests.values()) / 32 + 12


@pytest.mark.parametrize("case", ["megatron/deepseek3-mtp", "megatron_dist/mixtral-dp-reshardable", "deepspeed_parallel/moe-ep2-z0"])
def test_what_is_compared_of_optimizers_is_read_side_by_side(case, s3, monkeypatch):
    monkeypatch.setattr(similar_files, "END", 2048)
    monkeypatch.setattr(remote_files, "_NEARBY", 1024)
    s3.put_tree("bucket", "step", FIXTURES / case / "checkpoint")
    s3.latency = 0.1  # long enough for requests at the same time to overlap on a busy machine
    model = FIXTURES / case / "model"
    reshard.open("s3://bucket/step", model=model if model.exists() else None)
    assert s3.longest_chain() <= 20


def test_a_conversion_reads_ranges_of_megabytes_and_every_byte_once(tmp_path, s3):
    source = write_hf(tmp_path / "hf", layers=2, hidden=1024, feed_forward=4096, vocabulary=2048)
    s3.put_tree("bucket", "hf", source)
    plan = reshard.plan(reshard.open("s3://bucket/hf"), to="vllm", tp=4)
    s3.reset_counts()
    reshard.convert(plan, tmp_path / "remote")
    weights = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert 0.99 * weights <= s3.bytes_out <= 1.01 * weights
    assert len(s3.sizes) <= weights / (4 << 20) + 2 * len(list(source.glob("*.safetensors")))
    assert max(s3.sizes) <= 16 << 20
    converted(source, tmp_path / "local", to="vllm", tp=4)
    assert reshard.verify(tmp_path / "local", tmp_path / "remote").equal


def test_one_rank_of_rows_that_are_cut_reads_the_covering_rows_once(tmp_path, s3):
    source = write_hf(tmp_path / "hf", layers=1, hidden=512, feed_forward=2048)
    s3.put_tree("bucket", "hf", source)
    opened = reshard.open("s3://bucket/hf")
    view = opened.view(to="vllm", tp=8, rank=3)
    name = "model.layers.0.mlp.down_proj.weight"
    s3.reset_counts()
    found = view[name].numpy()
    assert (found == reshard.open(source).view(to="vllm", tp=8, rank=3)[name].numpy()).all()
    assert sum(s3.requests.values()) <= 4


def test_a_file_that_was_written_since_is_not_mixed_with_what_was_read(tmp_path, s3):
    source = write_hf(tmp_path / "hf", hidden=512)
    s3.put_tree("bucket", "hf", source)
    plan = reshard.plan(reshard.open("s3://bucket/hf"), to="vllm")
    key = ("bucket", "hf/model-00003-of-00004.safetensors")
    s3.objects[key].etag = "other"
    with pytest.raises(CheckpointError, match="was written since it was listed"):
        reshard.convert(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tar_and_a_single_file_in_a_store_are_read(tmp_path, s3):
    source = write_hf(tmp_path / "hf", layers=1)
    with tarfile.open(tmp_path / "model.tar", "w") as archive:
        archive.add(source, ".")
    (tmp_path / "put").mkdir()
    (tmp_path / "model.tar").rename(tmp_path / "put" / "model.tar")
    s3.put_tree("bucket", "tars", tmp_path / "put")
    (source / "model-00001-of-00003.safetensors").rename(source / "table.safetensors")
    s3.put_tree("bucket", "hf", source)
    assert len(reshard.open("s3://bucket/tars").index.tensors) == 21 - 9
    assert len(reshard.open("s3://bucket/hf/table.safetensors").index.tensors) == 1


def test_a_model_option_may_be_a_url(tmp_path, s3):
    source = write_hf(tmp_path / "hf", layers=1)
    config = tmp_path / "model"
    config.mkdir()
    (source / "config.json").rename(config / "config.json")
    s3.put_tree("bucket", "model", config)
    assert reshard.open(source, model="s3://bucket/model").model is not None


def test_the_log_names_requests_and_bytes(tmp_path, s3):
    s3.put_tree("bucket", "hf", write_hf(tmp_path / "hf"))
    done = run("inspect", "s3://bucket/hf", "-v")
    assert done.code == 0, done.err
    assert "s3://bucket/hf: " in done.err and "requests" in done.err and "bytes read" in done.err


def test_what_is_not_there_is_named(s3):
    with pytest.raises(RequestError, match="here is no file or folder 's3://bucket/nothing'"):
        reshard.open("s3://bucket/nothing")


def test_a_storage_option_reaches_the_store(tmp_path, s3, monkeypatch):
    s3.put_tree("bucket", "hf", write_hf(tmp_path / "hf"))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    done = run("inspect", "s3://bucket/hf", "--storage-option", f"endpoint={s3.endpoint}")
    assert done.code == 0, done.err
    refused = run("inspect", "s3://bucket/hf", "--storage-option", "endpoint")
    assert refused.code == 2 and "not KEY=VALUE" in refused.err
    unknown = run("inspect", "s3://bucket/hf", "--storage-option", "nonsense=1")
    assert unknown.code == 2 and "nonsense" in unknown.err


@pytest.mark.parametrize(
    "option, code, said",
    [
        ("allow_http=true", 0, "complete"),
        ("Timeout=30s", 0, "complete"),
        ("allow_http=maybe", 2, "'maybe' as boolean"),
        ("allow_htp=true", 2, "allow_htp"),
        ("timeout=abc", 2, "'abc' as Duration"),
    ],
)
def test_options_of_the_http_client_reach_it_and_never_panic(option, code, said, tmp_path, s3):
    """obstore panics, with a text of Rust on stderr, if it gets an option of its client among those of the store."""
    s3.put_tree("bucket", "hf", write_hf(tmp_path / "hf"))
    command = [sys.executable, "-m", "reshard", "inspect", "s3://bucket/hf", "--storage-option", option]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "panicked" in done.stderr, "Traceback" in done.stderr) == (code, False, False)
    assert said in (done.stdout + done.stderr).replace('"', "'")


def test_an_option_of_the_http_client_is_obeyed(tmp_path, s3, monkeypatch):
    s3.put_tree("bucket", "hf", write_hf(tmp_path / "hf"))
    monkeypatch.setattr(store, "_ATTEMPTS", 1)
    with storage_options({"allow_http": "false"}), pytest.raises(SystemRefusal, match="HTTP error: builder error"):
        reshard.open("s3://bucket/hf")


def test_http_reads_a_file_and_is_not_written(tmp_path, s3):
    source = write_hf(tmp_path / "hf", layers=1)
    plan = reshard.plan(reshard.open(source), to="vllm")
    (source / "model-00001-of-00003.safetensors").rename(source / "table.safetensors")
    s3.put_tree("bucket", "hf", source)
    assert len(reshard.open(f"{s3.endpoint}/bucket/hf/table.safetensors").index.tensors) == 1
    with pytest.raises(UnsupportedError, match="not written"):
        reshard.convert(plan, f"{s3.endpoint}/bucket/out")


def test_a_scheme_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(UnsupportedError, match=r"s3:// paths need obstore.*pip install 'reshard\[cloud\]'"):
        reshard.open("s3://bucket/x")
    with pytest.raises(UnsupportedError, match="nonsense:// is not a known kind of path"):
        reshard.open("nonsense://x/y")


def test_fsspec_serves_other_schemes(tmp_path):
    import fsspec

    source, memory = write_hf(tmp_path / "hf"), fsspec.filesystem("memory")
    for path in source.iterdir():
        memory.pipe_file(f"/models/hf/{path.name}", path.read_bytes())
    reshard.convert(reshard.plan(reshard.open("memory://models/hf"), to="vllm", tp=2), "memory://models/out")
    assert reshard.verify("memory://models/out").equal and reshard.verify(source, "memory://models/out").equal
    assert io.BytesIO(memory.cat_file("/models/out/config.json")).getvalue() == (source / "config.json").read_bytes()


def test_local_paths_load_no_store():
    import subprocess
    import sys

    code = (
        "import sys, reshard; reshard.open(sys.argv[1]);"
        "print([name for name in sys.modules if name.startswith(('reshard.storage.stores', 'obstore', 'fsspec', 'boto', 'concurrent'))])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(FIXTURES / "hf" / "llama")], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
