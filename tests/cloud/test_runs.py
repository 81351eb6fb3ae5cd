"""Runs in a store: their steps are listed with few requests, and each is converted once, into a store or onto the disk."""

import json
import random
import signal
import subprocess
import time

import pytest
from cloud.models import content_in
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import command, reshard

import reshard as library
from reshard.opening.run_folders import find_steps

DCP, MODEL = FIXTURES / "dcp" / "fsdp2" / "checkpoint", FIXTURES / "dcp" / "fsdp2" / "model"
MEGATRON = FIXTURES / "megatron" / "llama-tied-pp2" / "checkpoint" / "iter_0000002"
RUN, OUT = "s3://bucket/runs/7", "s3://bucket/out"


@pytest.fixture
def run(s3):
    for step in (10, 20):
        save(s3, step)
    return RUN


def save(s3, step, checkpoint=DCP):
    s3.put_tree("bucket", f"runs/7/step-{step}", checkpoint)


def watch(*more, run=RUN, into=f"{OUT}/{{step}}"):
    return reshard("watch", run, "--to", "vllm", "--tp", 2, "--model", MODEL, "--into", into, "--all", "--json", *more)


def events(result):
    return [(each["step"], each["event"]) for each in map(json.loads, result.out.splitlines())]


def test_the_table_of_a_run(run, s3):
    marker = s3.objects.pop(("bucket", "runs/7/step-20/.metadata"))
    done = reshard("inspect", run, "--json")
    assert done.code == 0, done.err
    rows = [(each["step"], each["format"], each["complete"], each["reason"]) for each in done.document["steps"]]
    assert rows == [(10, "dcp", True, ".metadata is there"), (20, "dcp", False, ".metadata is not there yet")]
    assert done.document["steps"][0]["bytes"] == sum(path.stat().st_size for path in DCP.iterdir())
    s3.objects["bucket", "runs/7/step-20/.metadata"] = marker
    table = reshard("inspect", run)
    assert "2 checkpoints of 2 steps, 2 complete" in table.out and f"next  reshard inspect {RUN}/step-20" in table.out


def test_a_bucket_lists_all_that_lies_in_it(run, s3, tmp_path):
    for name in ("llama", "gpt2"):
        s3.put_tree("bucket", f"models/{name}", HF / name)
    listed = reshard("inspect", "s3://bucket/", "--json")
    assert listed.code == 0, listed.err
    found = {each["path"].removeprefix("s3://bucket/").strip("/") for each in listed.document["steps"]}
    assert found == {"models/llama", "models/gpt2", "runs/7/step-10", "runs/7/step-20"}
    refused = reshard("convert", "s3://bucket/models", tmp_path / "out", "--to", "hf")
    assert refused.code and "[ambiguous]" in refused.err and "--component llama" in refused.err, refused.err
    chosen = reshard("convert", "s3://bucket/models", tmp_path / "out", "--to", "hf", "--component", "llama")
    assert chosen.code == 0 and library.verify(HF / "llama", tmp_path / "out").equal, chosen.err


def test_a_tracker_names_the_newest_step(s3, tmp_path):
    for step in (1, 2):
        s3.put_tree("bucket", f"runs/7/iter_{step:07}", MEGATRON)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "latest_checkpointed_iteration.txt").write_text("1")
    s3.put_tree("bucket", "runs/7", tmp_path / "beside")
    assert [(step.number, step.complete) for step in find_steps(RUN)] == [(1, True), (2, False)]


def test_without_a_marker_nothing_may_have_changed_for_a_while(s3):
    s3.put_tree("bucket", "runs/7/iter_0000001", MEGATRON)
    assert not find_steps(RUN)[0].complete
    for stored in s3.objects.values():
        stored.time -= 100
    (step,) = find_steps(RUN)
    assert step.complete and step.completeness.reason.startswith("unchanged for 10") and 99 < step.age < 130


def test_where_a_store_tells_no_times_two_looks_are_compared(s3, monkeypatch):
    from reshard.opening.run_folders import Seen
    from reshard.storage.stores.remote_files import RemoteFiles

    monkeypatch.setattr(RemoteFiles, "written", lambda self, path: None)
    s3.put_tree("bucket", "runs/7/iter_0000001", MEGATRON)
    seen = Seen()
    assert not find_steps(RUN, quiet=0.2, seen=seen)[0].complete
    time.sleep(0.3)
    assert find_steps(RUN, quiet=0.2, seen=seen)[0].complete
    s3.objects["bucket", "runs/7/iter_0000001/mp_rank_00_000/model_optim_rng.pt"].etag = "saved again"
    assert not find_steps(RUN, quiet=0.2, seen=seen)[0].complete


def test_a_look_lists_the_run_and_reads_no_step_of_it(s3):
    for step in range(10, 160, 10):
        save(s3, step)
    s3.reset_counts()
    assert len(find_steps(RUN)) == 15
    files = len(s3.keys("bucket", "runs/7/"))
    assert sum(s3.requests.values()) == -(-files // 1000) and s3.requests["GET"] == s3.by_key[""]


def test_every_step_is_converted_once_from_store_to_store(run, s3, tmp_path):
    first = watch()
    assert first.code == 0, first.err + first.out
    assert events(first) == [(step, name) for step in (10, 20) for name in ("converted", "latest", "finished")]
    library.convert(library.plan(DCP, to="vllm", tp=2, model=MODEL), "s3://bucket/alone")
    assert content_in(s3, "bucket", "out/10") == content_in(s3, "bucket", "out/20") == content_in(s3, "bucket", "alone")
    assert s3.content("bucket", "out/latest") == b"20\n"
    s3.reset_counts()
    assert events(watch()) == []
    # The run is listed; the record is looked for and read. A loaded machine asks again after a wait.
    assert set(s3.by_key) == {"", "out/reshard.watch.jsonl"} and sum(s3.requests.values()) <= 6
    assert library.verify(f"{OUT}/20").equal  # a request of its read-ahead can arrive after its end
    save(s3, 30)
    assert events(watch()) == [(30, "converted"), (30, "latest"), (30, "finished")]
    assert s3.content("bucket", "out/latest") == b"30\n"


def test_a_step_that_was_saved_again_is_converted_again(run, s3):
    assert watch().code == 0
    s3.objects["bucket", "runs/7/step-10/.metadata"].time += 5
    assert events(watch()) == [(10, "converted"), (10, "finished")]
    assert s3.content("bucket", "out/latest") == b"20\n"


@pytest.mark.parametrize("local", ["run", "out"])
def test_one_of_the_two_may_be_on_the_disk(local, run, s3, tmp_path):
    import shutil

    for step in (10, 20):
        shutil.copytree(DCP, tmp_path / "runs" / f"step-{step}")
    places = {"run": tmp_path / "runs"} if local == "run" else {"into": tmp_path / "out" / "{step}"}
    done = watch(**places)
    assert done.code == 0 and len(events(done)) == 6
    assert events(watch(**places)) == []


def test_only_the_newest_are_kept_and_only_what_reshard_wrote_is_removed(run, s3, tmp_path):
    assert events(watch("--keep", 1))[-1] == (20, "finished")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_bytes(b"x")
    s3.put_tree("bucket", "out/5", tmp_path / "mine")
    save(s3, 30)
    assert events(watch("--keep", 1))[-1] == (30, "removed")
    assert {key.split("/")[1] for key in s3.keys("bucket", "out/")} == {"5", "30", "latest", "reshard.watch.jsonl"}
    # The manifest went: somebody else's files lie there now.
    del s3.objects["bucket", "out/30/reshard.json"]
    save(s3, 40)
    assert (30, "removed") not in events(watch("--keep", 1)) and s3.keys("bucket", "out/30/")


def test_what_reshard_did_not_write_is_not_replaced(run, s3, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine").write_bytes(b"x")
    s3.put_tree("bucket", "out/10", tmp_path / "mine")
    done = watch()
    assert done.code == 1 and (10, "failed") in events(done) and (20, "finished") in events(done)
    assert s3.keys("bucket", "out/10/") == ["out/10/mine"]


def test_a_latest_of_somebody_else_is_not_replaced(run, s3, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "latest").write_bytes(b"my notes, which name no output")
    s3.put_tree("bucket", "out", tmp_path / "mine")
    done = watch()
    assert done.code == 1 and "does not name an output" in done.out


def test_a_command_runs_with_the_url(run, tmp_path):
    done = watch("--then", f"echo $RESHARD_STEP $RESHARD_SOURCE $RESHARD_TARGET >> {tmp_path / 'ran'}")
    assert done.code == 0
    assert (tmp_path / "ran").read_text().splitlines() == [f"{step} {RUN}/step-{step} {OUT}/{step}" for step in (10, 20)]


def test_links_and_web_servers_are_refused_before_anything_is_done(run, s3):
    refused = watch("--link-unchanged")
    assert refused.code != 0 and "--link-unchanged needs outputs on a disk" in refused.err and not s3.keys("bucket", "out/")
    assert "not written" in watch(into="https://host/out/{step}").err


def test_killed_at_random_moments_it_ends_with_the_same_outputs(run, s3):
    choose = random.Random(7)
    arguments = command("watch", RUN, "--to", "vllm", "--tp", 2, "--model", MODEL, "--into", f"{OUT}/{{step}}", "--all")
    s3.latency = 0.01
    for _ in range(6):
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(choose.uniform(0.8, 2.2))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    s3.latency = 0.0
    assert watch().code == 0
    library.convert(library.plan(DCP, to="vllm", tp=2, model=MODEL), "s3://bucket/alone")
    assert content_in(s3, "bucket", "out/10") == content_in(s3, "bucket", "out/20") == content_in(s3, "bucket", "alone")
    assert s3.content("bucket", "out/latest") == b"20\n"


def test_the_users_objects_in_an_output_that_is_too_old_stay(run, s3):
    assert watch().code == 0
    s3.put_tree("bucket", "out/10/mine", HF / "llama")
    save(s3, 30)
    done = watch("--keep", 2)
    assert (30, "removed") in events(done) and "s3://bucket/out/10, which is older than the newest 2" in done.out
    assert "which stays: 10/mine/config.json" in done.err, done.err
    assert s3.keys("bucket", "out/10/") == sorted(f"out/10/mine/{path.name}" for path in (HF / "llama").iterdir())
