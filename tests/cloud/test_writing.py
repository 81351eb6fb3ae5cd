"""Conversions into a store: the same bytes as into a folder, whatever fails on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cloud.models import content, content_in, converted, write_hf
from cloud.s3_server import Faults, Stored
from helpers.fixture_places import FIXTURES
from helpers.reshard_command import command
from helpers.reshard_command import reshard as run
from helpers.sampled import sampled

import reshard
from reshard.engine.destinations import front_to_back
from reshard.engine.destinations.store import StoreFolder
from reshard.engine.pool import Effort
from reshard.errors import CheckpointError, RequestError, SystemRefusal, TargetError
from reshard.plans.manifest import MANIFEST
from reshard.storage.stores import file_fronts
from reshard.verbs.convert import conversion

TARGETS = (
    ("hf/llama", {"to": "vllm", "tp": 2}),
    ("hf/llama", {"to": "vllm", "tp": 2, "pp": 2}),
    ("hf/llama-tied", {"to": "megatron", "tp": 2, "pp": 2}),
    ("hf/llama", {"to": "sglang", "tp": 2}),
    ("hf/gpt2", {"to": "megatron", "tp": 2}),
    ("hf/mixtral", {"to": "trtllm", "tp": 2}),
    ("hf/llama", {"to": "hf", "max_shard_size": 30_000}),
    ("hf_packed/llama-ct-mxfp4", {"to": "hf", "requantize": "fp8-block"}),
    ("hf_packed/llama-modelopt-fp8-blocks", {"to": "hf", "dequantize": True}),
    ("nanotron/llama-tp2-pp2/checkpoint", {"to": "nanotron", "tp": 2}),
    ("dcp/fsdp2/checkpoint", {"to": "fsdp", "dp": 3, "optimizer": True}),
    ("dcp/fsdp2/checkpoint", {"to": "deepspeed", "dp": 2}),
    ("dcp/zstd/checkpoint", {"to": "dcp", "dp": 2}),
)


@pytest.mark.parametrize(("source", "options"), TARGETS, ids=lambda value: str(value).replace("/", "-"))
def test_the_files_in_a_store_are_those_of_a_folder(source, options, tmp_path, s3):
    plan = reshard.plan(reshard.open(FIXTURES / source), **options)
    local = reshard.convert(plan, tmp_path / "out")
    stored = reshard.convert(plan, "s3://bucket/out")
    assert content_in(s3, "bucket", "out") == content(tmp_path / "out")
    assert stored.fingerprint.root == local.fingerprint.root and not s3.uploads
    assert reshard.verify("s3://bucket/out").equal


def test_a_conversion_that_is_resumed_records_the_checksums_of_earlier_files(tmp_path, s3):
    plan = reshard.plan(FIXTURES / "hf/llama-tied", to="megatron", tp=2, pp=2)
    reshard.convert(plan, tmp_path / "out")
    running = conversion(plan, "s3://bucket/out", effort=Effort(workers=1)).run()
    for _ in range(len(plan.routes) - 1):
        next(running)
    running.close()
    assert s3.keys("bucket", "out/.reshard/files/"), "a file was complete"
    reshard.convert(plan, "s3://bucket/out", resume=True)
    assert content_in(s3, "bucket", "out") == content(tmp_path / "out")
    assert reshard.verify("s3://bucket/out").equal


def test_ranks_that_do_not_fit_into_the_budget_are_written_in_passes(tmp_path, s3, monkeypatch):
    """A budget for one open file: eight ranks take eight passes, and the bytes stay the same."""
    source = write_hf(tmp_path / "hf", hidden=64)
    plan = reshard.plan(reshard.open(source), to="vllm", tp=8)
    memory = front_to_back._LEAST_READING + 2 * file_fronts.SMALLEST_PART
    reshard.convert(plan, "s3://bucket/out", memory=memory)
    reshard.convert(plan, tmp_path / "out")
    assert content_in(s3, "bucket", "out") == content(tmp_path / "out")
    with pytest.raises(RequestError, match="is too little: writing to a store needs"):
        reshard.convert(plan, "s3://bucket/other", memory=memory - 1)


def test_a_large_file_has_fewer_parts_than_s3_allows():
    for nbytes in (1, 52 << 30, 76 << 30, 5 << 40):
        part = file_fronts.part_bytes(nbytes)
        assert part >= 8 << 20 and -(-nbytes // part) <= 9_500 and part <= 5 << 30


def test_the_manifest_comes_last_and_the_index_before_it(tmp_path, s3):
    source, order = write_hf(tmp_path / "hf"), []
    original = s3.objects.__class__.__setitem__

    class Ordered(dict):
        def __setitem__(self, key, value):
            order.append(key[1])
            original(self, key, value)

    s3.objects = Ordered()
    converted(source, "s3://bucket/out", to="hf", max_shard_size=200_000)
    order = [key.removeprefix("out/") for key in order]
    weights = [i for i, key in enumerate(order) if key.endswith(".safetensors")]
    assert order[0] == ".reshard/begun.json" and order[-1] == MANIFEST
    assert max(weights) < order.index("model.safetensors.index.json") < order.index(MANIFEST)


def test_what_lies_there_is_not_touched(tmp_path, s3):
    source = write_hf(tmp_path / "hf")
    plan = reshard.plan(reshard.open(source), to="vllm")
    s3.put_tree("bucket", "out", source)
    with pytest.raises(TargetError, match="the target exists and holds"):
        reshard.convert(plan, "s3://bucket/out")
    before = content_in(s3, "bucket", "out")
    assert before == content(source)
    reshard.convert(plan, "s3://bucket/out", overwrite=True)
    reshard.convert(plan, tmp_path / "out")
    assert content_in(s3, "bucket", "out") == content(tmp_path / "out")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    s3.put_tree("bucket", "notes", tmp_path / "notes")
    with pytest.raises(TargetError, match="is no checkpoint"):
        reshard.convert(plan, "s3://bucket/notes", overwrite=True)
    with pytest.raises(TargetError, match="is inside of"):
        reshard.convert(reshard.plan(reshard.open("s3://bucket/out"), to="hf"), "s3://bucket/out/hf")


@pytest.mark.parametrize("looks", [True, False])
def test_of_two_runs_one_writes(tmp_path, s3, monkeypatch, looks):
    """looks: whether the second one sees that the first has begun; if both look at once, the store lets one of them begin."""
    plan = reshard.plan(reshard.open(write_hf(tmp_path / "hf")), to="vllm")
    first, second = (conversion(plan, "s3://bucket/out") for _ in range(2))
    steps = first.run()
    next(steps)
    if not looks:
        monkeypatch.setattr(StoreFolder, "refresh", lambda folder: None)
    with pytest.raises(TargetError, match="has begun here and has not ended" if looks else "exists already"):
        list(second.run())
    list(steps)
    assert reshard.verify("s3://bucket/out").equal


def interrupted(tmp_path):
    """The plan of a conversion that has ended half-way."""
    plan = reshard.plan(reshard.open(write_hf(tmp_path / "hf", layers=6)), to="hf", max_shard_size=150_000)
    running = conversion(plan, "s3://bucket/out").run()
    for _ in range(30):
        next(running)
    running.close()
    return plan


def test_an_interrupted_conversion_is_resumed_from_its_complete_files(tmp_path, s3):
    plan = interrupted(tmp_path)
    assert not s3.uploads
    complete = [key for key in s3.keys("bucket", "out/") if key.endswith(".safetensors")]
    assert complete and len(complete) < len(plan.layout.files)
    with pytest.raises(CheckpointError, match="a conversion to hf has begun here and has not ended"):
        reshard.open("s3://bucket/out")
    with pytest.raises(TargetError, match="has begun here and has not ended"):
        reshard.convert(plan, "s3://bucket/out")
    with pytest.raises(TargetError, match="had other options"):
        reshard.convert(reshard.plan(reshard.open(tmp_path / "hf"), to="vllm"), "s3://bucket/out", resume=True)
    s3.reset_counts()
    resumed = conversion(plan, "s3://bucket/out", existing="resume")
    list(resumed.run())
    assert resumed.resumed_bytes > 0
    assert not any(s3.written[key] for key in complete)
    reshard.convert(plan, tmp_path / "out")
    assert content_in(s3, "bucket", "out") == content(tmp_path / "out")
    assert reshard.convert(plan, "s3://bucket/out", resume=True).fingerprint.root == resumed.fingerprint.root


@pytest.mark.parametrize("change", [0, 1])
def test_a_source_that_was_replaced_since_the_stop_and_keeps_its_time_is_compared(tmp_path, s3, change):
    source = write_hf(tmp_path / "hf", layers=6)
    running = conversion(reshard.plan(source, to="hf", max_shard_size=150_000), "s3://bucket/out").run()
    for _ in range(30):
        next(running)
    running.close()
    for path in source.glob("*.safetensors"):
        stamps, data = os.stat(path), bytearray(path.read_bytes())
        for at in range(len(data) // 2, len(data), 1000):
            data[at] ^= change
        path.write_bytes(data)
        os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    plan = reshard.plan(source, to="hf", max_shard_size=150_000)
    if change:
        with pytest.raises(TargetError, match="although the lengths and times of its files are the same"):
            reshard.convert(plan, "s3://bucket/out", resume=True)
        assert not [key for key in s3.keys("bucket", "out/") if key.endswith("reshard.json")]
    else:
        reshard.convert(plan, "s3://bucket/out", resume=True)
        assert reshard.verify(source, "s3://bucket/out").equal


def test_if_changed_writes_only_what_has_changed(tmp_path, s3):
    source = write_hf(tmp_path / "hf", layers=6)

    def update(**options):
        before = dict(s3.written)
        found = reshard.convert(reshard.plan(source, to="hf", max_shard_size=150_000, **options), "s3://bucket/out", if_changed=True)
        assert found.unchanged == (s3.written == before)
        return found

    first = update()
    assert not first.unchanged and update().unchanged and update().fingerprint.root == first.fingerprint.root
    assert not update(dtype="bf16").unchanged and update(dtype="bf16").unchanged
    reshard.convert(reshard.plan(source, to="hf", max_shard_size=150_000, dtype="bf16"), tmp_path / "out")
    assert content_in(s3, "bucket", "out") == content(tmp_path / "out"), "the files of the first conversion are gone"
    key = next(key for key in s3.keys("bucket", "out/") if key.endswith(".safetensors"))
    stored = s3.objects["bucket", key]
    Path(stored.parts[0][0]).write_bytes(b"\0" * stored.nbytes)
    assert not update(dtype="bf16").unchanged and content_in(s3, "bucket", "out") == content(tmp_path / "out")
    for plan, is_resumed in ((reshard.plan(source, to="vllm"), False), (reshard.plan(source, to="hf", max_shard_size=150_000), True)):
        running = conversion(plan, "s3://bucket/other").run()
        for _ in range(30 if is_resumed else 5):
            next(running)
        running.close()
        steps = conversion(reshard.plan(source, to="hf", max_shard_size=150_000), "s3://bucket/other", existing="update")
        list(steps.run())
        assert (steps.resumed_bytes > 0) is is_resumed and reshard.verify("s3://bucket/other").equal
        s3.objects = {key: value for key, value in s3.objects.items() if not key[1].startswith("other/")}


def test_if_changed_replaces_only_what_reshard_wrote(tmp_path, s3):
    source = write_hf(tmp_path / "hf")
    s3.put_tree("bucket", "theirs", source)
    converted(source, "s3://bucket/ours", to="hf", max_shard_size=150_000)
    s3.objects["bucket", "ours/model-99999-of-99999.safetensors"] = s3.objects["bucket", "theirs/model-00001-of-00004.safetensors"]
    before = {folder: content_in(s3, "bucket", folder) for folder in ("theirs", "ours")}
    for folder in before:
        with pytest.raises(TargetError, match=r"`if_changed=True`: .*so reshard did not write"):
            reshard.convert(reshard.plan(source, to="hf", dtype="bf16"), f"s3://bucket/{folder}", if_changed=True)
        assert content_in(s3, "bucket", folder) == before[folder]


def test_a_complete_file_that_was_changed_since_is_written_again(tmp_path, s3):
    plan = interrupted(tmp_path)
    key = next(key for key in s3.keys("bucket", "out/") if key.endswith(".safetensors"))
    stored = s3.objects["bucket", key]
    Path(stored.parts[0][0]).write_bytes(b"\0" * stored.nbytes)
    stored.etag = "another"
    reshard.convert(plan, "s3://bucket/out", resume=True)
    reshard.convert(plan, tmp_path / "out")
    assert content_in(s3, "bucket", "out") == content(tmp_path / "out")


def test_a_source_that_is_broken_leaves_nothing(tmp_path, s3):
    source = write_hf(tmp_path / "hf", layers=4)
    plan = reshard.plan(reshard.open(source), to="hf", max_shard_size=150_000)
    os.truncate(source / "model-00006-of-00006.safetensors", 5000)
    with pytest.raises(CheckpointError):
        reshard.convert(plan, "s3://bucket/out")
    assert s3.keys("bucket", "out") == [] and not s3.uploads


def test_a_store_that_refuses_is_named(tmp_path, s3, monkeypatch):
    plan = reshard.plan(reshard.open(write_hf(tmp_path / "hf")), to="vllm")
    monkeypatch.setattr("reshard.storage.stores.store.random.uniform", None)  # no pause: asking again would change nothing
    s3.forbidden = "model-rank"
    with pytest.raises(SystemRefusal, match=r"out/model-rank.*cannot be written.*credentials"):
        reshard.convert(plan, "s3://bucket/out")
    assert [key for key in s3.keys("bucket", "out/") if "rank" in key] == [] and not s3.uploads


def _large(tmp_path):
    """A model whose two ranks have several parts each."""
    return write_hf(tmp_path / "hf", layers=2, hidden=512, feed_forward=2048, vocabulary=4096)


def test_a_run_that_stops_aborts_its_uploads(tmp_path, s3):
    running = conversion(reshard.plan(reshard.open(_large(tmp_path)), to="vllm", tp=2), "s3://bucket/out").run()
    while not s3.uploads:
        next(running)
    running.close()
    assert not s3.uploads and not [key for key in s3.keys("bucket", "out/") if key.endswith(".safetensors")]


def test_a_killed_run_leaves_uploads_that_clean_aborts(tmp_path, s3):
    source = _large(tmp_path)
    s3.latency = 0.05
    process = subprocess.Popen(
        command("convert", source, "s3://bucket/out", "--to", "vllm", "--tp", 2), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not any(parts for _, parts, _ in list(s3.uploads.values())) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    s3.latency = 0
    assert s3.uploads and not [key for key in s3.keys("bucket", "out/") if key.endswith(".safetensors")]
    listed = run("clean", "s3://bucket/out", "--json")
    assert {each["kind"] for each in listed.document["leftovers"]} == {"upload", "target"} and s3.uploads
    assert run("clean", "s3://bucket/out", "--yes").code == 0
    assert not s3.uploads and s3.keys("bucket", "out") == []
    converted(source, "s3://bucket/out", to="vllm", tp=2)
    assert reshard.verify("s3://bucket/out").equal


@pytest.mark.parametrize("seed", sampled(range(4), 4))
def test_faults_never_change_a_byte_or_leave_a_part(seed, tmp_path, s3):
    """At least 50 faults for each seed: refusals, resets before and after the work, bodies that are cut or too short."""
    source = _large(tmp_path)
    s3.put_tree("bucket", "hf", source)
    expected = content(converted(source, tmp_path / "out", to="vllm", tp=2))
    s3.faults, rounds = Faults(share=0.25, seed=seed, paths="^(hf|out-)"), 0
    while sum(s3.faults.injected.values()) < 50:
        rounds += 1
        name = f"out-{rounds}"
        for attempt in range(4):
            try:
                plan = reshard.plan(reshard.open("s3://bucket/hf"), to="vllm", tp=2)
                reshard.convert(plan, f"s3://bucket/{name}", resume=attempt > 0)
                break
            except SystemRefusal:
                for key in s3.keys("bucket", f"{name}/"):
                    path = key.removeprefix(f"{name}/")
                    assert path.startswith(".reshard/") or s3.content("bucket", key) == expected[path], path
        assert content_in(s3, "bucket", name) == expected
    s3.faults = Faults()
    assert run("clean", "s3://bucket", "--yes").code == 0
    assert not s3.uploads


_MEMORY = """
import re, sys, reshard

def most():  # of this program alone; ru_maxrss also counts the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

plan = reshard.plan(reshard.open(sys.argv[1]), to="vllm", tp=16)
before = most()
reshard.convert(plan, sys.argv[2], memory=384 << 20)
print(len(plan.layout.files), most() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Skipped: without /proc. Memory is measured there")
@pytest.mark.slow
def test_sixteen_open_files_stay_within_the_budget(tmp_path, s3):
    source = write_hf(tmp_path / "hf", layers=2, hidden=2048, feed_forward=8192, vocabulary=16384)
    s3.put_tree("bucket", "hf", source)
    done = subprocess.run([sys.executable, "-c", _MEMORY, "s3://bucket/hf", "s3://bucket/out"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files, grown = map(int, done.stdout.split())
    assert files == 16 and 0 < grown <= (384 << 10) + (150 << 10), f"{grown >> 10} MiB"
    assert json.loads(s3.content("bucket", f"out/{MANIFEST}"))["file_count"] == 16


def test_dry_run_forecasts_the_requests(tmp_path, s3):
    source = _large(tmp_path)
    s3.put_tree("bucket", "hf", source)
    shown = run("convert", "s3://bucket/hf", "s3://bucket/out", "--to", "vllm", "--tp", 2, "--dry-run", "--json")
    assert shown.code == 0, shown.err
    reading, writing = shown.document["stores"]
    plan = reshard.plan(reshard.open("s3://bucket/hf"), to="vllm", tp=2)
    s3.reset_counts()
    reshard.convert(plan, "s3://bucket/out")
    written = s3.bytes_in - sum(s3.objects["bucket", f"out/{name}"].nbytes for name in (MANIFEST, "reshard.digests"))
    assert written == pytest.approx(writing["written"], rel=0.02) and s3.bytes_out == pytest.approx(
        reading["read"] + writing["read"], rel=0.05
    )
    assert s3.requests["PUT"] + s3.requests["POST"] == pytest.approx(writing["writes"], rel=0.1)
    # Whether the source lies in a pipeline, whose tokenizers are elsewhere, is asked of the folder above.
    of_source = sum(count for key, count in s3.by_key.items() if key.startswith("hf/") or key == "model_index.json")
    assert of_source == pytest.approx(reading["reads"], rel=0.1)
    assert sum(s3.requests.values()) - of_source == pytest.approx(writing["reads"] + writing["writes"], rel=0.1)
    text = run("convert", "s3://bucket/hf", "s3://bucket/out2", "--to", "vllm", "--dry-run").out
    assert "requests to read" in text and "requests to write" in text


def test_a_card_in_a_store_is_that_of_a_folder_and_keeps_what_somebody_wrote(tmp_path, s3):
    plan = reshard.plan(FIXTURES / "hf/llama", to="vllm", tp=2)
    for place in (tmp_path / "out", "s3://bucket/out"):
        reshard.convert(plan, place, card=True)
    assert content_in(s3, "bucket", "out") == content(tmp_path / "out")
    (tmp_path / "README.md").write_bytes(b"mine\n")
    s3.objects["bucket", "out/README.md"] = Stored([(str(tmp_path / "README.md"), 5)], "mine")
    reshard.convert(plan, "s3://bucket/out", card=True, overwrite=True)
    assert content_in(s3, "bucket", "out")["README.md"].startswith(b"mine\n\n<!-- reshard:card -->")
    assert reshard.verify("s3://bucket/out").equal
