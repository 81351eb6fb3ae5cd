"""Parts of a conversion into a store: killed, restarted, run twice, run with another number of parts; always what one process writes."""

import json
import random
import threading
from pathlib import Path

import pytest
from cloud.models import content, content_in, write_hf
from cloud.store_kills import Work, experiment
from helpers.fixture_places import FIXTURES
from helpers.reshard_command import reshard as run

import reshard
from reshard.adapter.serving_format.writing import _starts
from reshard.engine.conversion import Conversion
from reshard.engine.destinations.store import BEGUN, StoreFolder, StoreRecords
from reshard.engine.pool import Effort
from reshard.errors import CheckpointError, RequestError, TargetError
from reshard.geometry.dtypes import BF16
from reshard.geometry.sections import StoredTensor
from reshard.plans.manifest import MANIFEST
from reshard.plans.tasks import PartNumber, by_files
from reshard.storage.stores.store import Store
from reshard.storage.stores.urls import open_store
from reshard.verbs.convert import Sharing, conversion

TARGETS = (
    ("hf/llama", {"to": "vllm", "tp": 2, "max_shard_size": 30_000}),
    ("hf/llama", {"to": "vllm", "tp": 4, "pp": 2, "max_shard_size": 20_000}),
    ("hf/mixtral", {"to": "vllm", "tp": 2, "max_shard_size": 30_000}),
    ("hf/llama", {"to": "sglang", "tp": 2, "max_shard_size": 30_000}),
    ("hf/llama-tied", {"to": "vllm", "tp": 2, "pp": 2, "max_shard_size": 10_000}),
    ("hf/llama", {"to": "vllm", "tp": 2}),
    ("hf/mixtral", {"to": "trtllm", "tp": 2}),
    ("hf/llama", {"to": "hf", "max_shard_size": 30_000}),
    ("hf/llama-tied", {"to": "megatron", "tp": 2, "pp": 2}),
    ("dcp/fsdp2/checkpoint", {"to": "fsdp", "dp": 3, "optimizer": True}),
    ("dcp/fsdp2/checkpoint", {"to": "deepspeed", "dp": 2}),
    ("dcp/zstd/checkpoint", {"to": "dcp", "dp": 2}),
)


@pytest.fixture
def plan():
    return reshard.plan(FIXTURES / "hf" / "llama", to="vllm", tp=2, max_shard_size=30_000)


@pytest.fixture
def whole(plan, tmp_path):
    reshard.convert(plan, tmp_path / "whole")
    return content(tmp_path / "whole")


def parts(plan, target, of, order=None):
    return [reshard.convert_part(plan, target, f"{i}/{of}") for i in order or range(of)]


def test_a_part_whose_record_is_removed_because_the_target_is_complete_has_ended_well(plan, whole, s3, monkeypatch):
    """Another process sees the last record, completes the target and removes the records, before the part looks at what it wrote."""
    reshard.convert_part(plan, "s3://bucket/out", "0/2")
    look, others = Store._written, []

    def written(store, path, nbytes):
        if not others and len([key for key in s3.keys("bucket") if "/.reshard/files/" in key]) == len(plan.layout.files):
            others.append(conversion(plan, "s3://bucket/out", sharing=Sharing(finish=True)))
            list(others[0].run())
        return look(store, path, nbytes)

    monkeypatch.setattr(Store, "_written", written)
    assert reshard.convert_part(plan, "s3://bucket/out", "1/2").complete and others
    assert content_in(s3, "bucket", "out") == whole


@pytest.mark.parametrize(("source", "options"), TARGETS, ids=lambda value: str(value).replace("/", "-"))
def test_parts_write_what_one_process_writes(source, options, tmp_path, s3):
    plan = reshard.plan(FIXTURES / source, **options)
    local = reshard.convert(plan, tmp_path / "out")
    found = parts(plan, "s3://bucket/out", 3, random.Random(0).sample(range(3), 3))
    assert [each.complete for each in found] == [False, False, True] or len(by_files(plan.layout.files, plan.routes)) < 3
    assert content_in(s3, "bucket", "out") == content(tmp_path / "out")
    assert found[-1].result.fingerprint.root == local.fingerprint.root and not s3.uploads
    assert reshard.verify("s3://bucket/out").equal
    one, many = json.loads((tmp_path / "out" / MANIFEST).read_text()), json.loads(s3.content("bucket", f"out/{MANIFEST}"))
    assert {key for key in one if one[key] != many[key]} <= {"time", "command", "digest"} and one.keys() == many.keys()


@pytest.mark.parametrize("of", [1, 2, 5, 40])
def test_each_file_is_written_once_whatever_the_number_of_parts(plan, whole, s3, of):
    found = parts(plan, "s3://bucket/out", of, random.Random(of).sample(range(of), of))
    assert found[-1].complete and sum(each.tasks for each in found) == len(by_files(plan.layout.files, plan.routes))
    assert content_in(s3, "bucket", "out") == whole
    assert {s3.written[f"out/{file.path}"] for file in plan.layout.files} == {1}


@pytest.mark.parametrize(("source", "options"), TARGETS[:5], ids=lambda value: str(value).replace("/", "-"))
def test_ranks_are_cut_at_the_same_tensors_so_that_tasks_share_no_source_byte(source, options):
    plan = reshard.plan(FIXTURES / source, **options)
    tasks = by_files(plan.layout.files, plan.routes)
    counts = [i for task in tasks for i in task.routes]
    assert len(tasks) > 2 and sorted(counts) == list(range(len(plan.routes)))
    limit = options["max_shard_size"]
    for file in plan.layout.files:
        assert len(file.tensors) == 1 or file.stored_nbytes <= limit, file
    ranks = {}
    for file in plan.layout.files:
        ranks.setdefault(tuple(file.ranks.items()), []).append({item.tensor.name for item in file.tensors})
    for stage in {rank[0] for rank in ranks}:
        names = [parts for rank, parts in ranks.items() if rank[0] == stage]
        assert all(each == names[0] for each in names), "the parts of one number hold the same tensors on every rank"


def test_ranks_of_unequal_tensors_are_cut_where_the_first_of_them_is_full():
    ranks = [[StoredTensor(str(i), BF16, (n,)) for i, n in enumerate(sizes)] for sizes in ((5, 5, 5, 5, 5), (1, 1, 20, 1), (1, 1, 1, 9, 9))]
    assert _starts(ranks, 24) == [0, 2, 3, 4]
    assert _starts(ranks, None) == [0]


def test_a_format_with_one_file_for_each_rank_has_a_task_for_each_rank():
    plan = reshard.plan(FIXTURES / "hf/mixtral", to="trtllm", tp=2, pp=2)
    assert [task.paths for task in by_files(plan.layout.files, plan.routes)] == [(f"rank{rank}.safetensors",) for rank in range(4)]


def test_a_part_that_runs_again_writes_nothing_again(plan, whole, s3):
    first = reshard.convert_part(plan, "s3://bucket/out", "0/3")
    before = dict(s3.written)
    again = reshard.convert_part(plan, "s3://bucket/out", "0/3")
    assert first.resumed_bytes == 0 and again.resumed_bytes == again.nbytes == first.nbytes and s3.written == before
    found = parts(plan, "s3://bucket/out", 2)
    assert found[-1].complete and sum(each.resumed_bytes for each in found) == first.nbytes
    assert content_in(s3, "bucket", "out") == whole
    before = dict(s3.written)
    late = reshard.convert_part(plan, "s3://bucket/out", "4/9")
    assert late.complete and s3.written == before and late.result.fingerprint.root == found[-1].result.fingerprint.root


def test_parts_at_the_same_time_and_twice(plan, whole, s3):
    """Every part runs three times at once: each of them ends without an error, and the result is right."""
    for attempt in range(5):
        url, found, errors = f"s3://bucket/out-{attempt}", [], []
        gate = threading.Barrier(9)

        def work(i, url=url, found=found, errors=errors, gate=gate):
            gate.wait()
            try:
                found.append(reshard.convert_part(plan, url, f"{i % 3}/3", workers=1))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and any(each.complete for each in found)
        assert content_in(s3, "bucket", f"out-{attempt}") == whole and not s3.uploads


def test_a_part_that_is_late_does_not_write_into_a_complete_target(plan, whole, s3):
    late = conversion(plan, "s3://bucket/out", effort=Effort(workers=1), sharing=Sharing(PartNumber.parse("0/1")))
    steps = late.run()
    next(steps)
    parts(plan, "s3://bucket/out", 2)
    before = dict(s3.written)
    list(steps)
    assert late.fingerprint and not s3.uploads and s3.written == before
    assert content_in(s3, "bucket", "out") == whole


def test_one_process_resumes_what_parts_have_begun_and_parts_what_one_has(plan, whole, s3):
    parts(plan, "s3://bucket/a", 4, [0, 3])
    with pytest.raises(CheckpointError, match="a conversion to vllm has begun here and has not ended"):
        reshard.open("s3://bucket/a")
    with pytest.raises(TargetError, match="has begun here and has not ended"):
        reshard.convert(plan, "s3://bucket/a")
    reshard.convert(plan, "s3://bucket/a", resume=True)
    running = conversion(plan, "s3://bucket/b").run()
    for _ in range(12):
        next(running)
    running.close()
    found = parts(plan, "s3://bucket/b", 2)
    assert sum(each.resumed_bytes for each in found) > 0
    assert content_in(s3, "bucket", "a") == content_in(s3, "bucket", "b") == whole


def test_finish_names_what_is_missing_and_completes_what_is_there(plan, whole, s3, monkeypatch):
    with pytest.raises(TargetError, match="no conversion with these options has begun here"):
        conversion(plan, "s3://bucket/out", sharing=Sharing(finish=True))
    tasks = by_files(plan.layout.files, plan.routes)
    parts(plan, "s3://bucket/out", len(tasks), range(1, len(tasks)))
    with pytest.raises(TargetError, match=rf"1 of {len(tasks)} tasks are missing \(2 files, [\d,]+ bytes\): model-rank-"):
        conversion(plan, "s3://bucket/out", sharing=Sharing(finish=True))
    with pytest.raises(TargetError, match="another conversion has begun here"):
        conversion(reshard.plan(FIXTURES / "hf/llama", to="vllm"), "s3://bucket/out", sharing=Sharing(finish=True))
    # The last part is killed before it completes the target.
    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "_commit", killed)
        with pytest.raises(KeyboardInterrupt):
            reshard.convert_part(plan, "s3://bucket/out", f"0/{len(tasks)}")
    assert f"out/{MANIFEST}" not in s3.keys("bucket", "out")
    s3.reset_counts()
    list(conversion(plan, "s3://bucket/out", sharing=Sharing(finish=True)).run())
    assert content_in(s3, "bucket", "out") == whole
    assert not any(s3.written[f"out/{file.path}"] for file in plan.layout.files)
    assert list(conversion(plan, "s3://bucket/out", sharing=Sharing(finish=True)).run()) == []


def killed(*_):
    raise KeyboardInterrupt


class Stopping:
    """Stops a part before one of the requests with which it completes a target. before: how many it may make."""

    def __init__(self, before):
        self.left, self.completes = before, False

    def install(self, patch):
        for verb in ("create", "remove"):
            patch.setattr(Store, verb, self.counted(getattr(Store, verb)))
        original = Conversion._commit

        def complete(*arguments):
            self.completes = True
            original(*arguments)

        patch.setattr(Conversion, "_commit", complete)

    def counted(self, original):
        def call(*arguments, **options):
            if self.completes:
                if not self.left:
                    raise KeyboardInterrupt
                self.left -= 1
            return original(*arguments, **options)

        return call


def test_a_part_that_stops_while_it_completes_the_target_is_finished_by_any_other(plan, whole, s3, monkeypatch):
    """Stopped before each of its requests in turn, from the first small file to the last record that is removed."""
    stops = 0
    while True:
        url = f"s3://bucket/out-{stops}"
        parts(plan, url, 2, [1])
        with monkeypatch.context() as patch:
            Stopping(stops).install(patch)
            try:
                reshard.convert_part(plan, url, "0/2")
                break
            except KeyboardInterrupt:
                stops += 1
        assert reshard.convert_part(plan, url, "5/7").complete
        assert content_in(s3, "bucket", url.removeprefix("s3://bucket/")) == whole
    assert stops == len(plan.layout.sidecars) + 4, "digests, manifest, records, begun.json"


def test_parts_write_into_an_empty_folder_only(plan, s3):
    s3.put_tree("bucket", "old", FIXTURES / "hf/llama")
    before = content_in(s3, "bucket", "old")
    with pytest.raises(TargetError, match="Parts write into an empty folder"):
        reshard.convert_part(plan, "s3://bucket/old", "0/2")
    with pytest.raises(RequestError, match="`overwrite=True` does not go with `part=` and `ray=True` for a target in a store"):
        reshard.convert_part(plan, "s3://bucket/old", "0/2", overwrite=True)
    assert content_in(s3, "bucket", "old") == before
    reshard.convert_part(plan, "s3://bucket/out", "0/2")
    before = content_in(s3, "bucket", "out")
    with pytest.raises(TargetError, match="another conversion to vllm has begun here"):
        reshard.convert_part(reshard.plan(FIXTURES / "hf/llama", to="vllm"), "s3://bucket/out", "0/2")
    assert content_in(s3, "bucket", "out") == before


def test_a_file_that_was_changed_since_its_record_is_written_again(plan, whole, s3):
    reshard.convert_part(plan, "s3://bucket/out", "0/2")
    key = next(key for key in s3.keys("bucket", "out/model"))
    stored = s3.objects["bucket", key]
    Path(stored.parts[0][0]).write_bytes(b"\0" * stored.nbytes)
    stored.etag = "another"
    assert not reshard.convert_part(plan, "s3://bucket/out", "1/2").complete
    assert reshard.convert_part(plan, "s3://bucket/out", "0/2").complete
    assert content_in(s3, "bucket", "out") == whole


def test_a_source_that_changes_is_refused_and_nothing_is_completed(tmp_path, s3):
    source = write_hf(tmp_path / "hf", layers=2)
    plan = reshard.plan(source, to="hf", max_shard_size=150_000)
    reshard.convert_part(plan, "s3://bucket/out", "0/2")
    weights = next(source.glob("model-00001*"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match="the file was written"):
        reshard.convert_part(plan, "s3://bucket/out", "1/2")
    with pytest.raises(TargetError, match="another conversion to hf has begun here"):
        reshard.convert_part(reshard.plan(source, to="hf", max_shard_size=150_000), "s3://bucket/out", "1/2")
    assert f"out/{MANIFEST}" not in s3.keys("bucket", "out")
    assert run("clean", "s3://bucket/out", "--yes").code == 0
    assert s3.keys("bucket", "out") == [] and not s3.uploads


def test_clean_keeps_a_complete_checkpoint_whose_records_are_still_there(plan, whole, s3, monkeypatch):
    parts(plan, "s3://bucket/out", 2, [1])
    with monkeypatch.context() as patch:
        patch.setattr(StoreRecords, "end", killed)
        with pytest.raises(KeyboardInterrupt):
            reshard.convert_part(plan, "s3://bucket/out", "0/2")
    assert f"out/{BEGUN}" in s3.keys("bucket", "out")
    assert run("clean", "s3://bucket/out", "--yes").code == 0
    assert content_in(s3, "bucket", "out") == whole and reshard.verify("s3://bucket/out").equal


def test_clean_removes_a_file_that_was_completed_and_not_recorded(plan, s3, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(StoreRecords, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            reshard.convert_part(plan, "s3://bucket/out", "0/2")
    assert s3.keys("bucket", "out/model")
    assert run("clean", "s3://bucket/out", "--yes").code == 0
    assert s3.keys("bucket", "out") == []
    assert StoreFolder(open_store("s3://bucket/out")).entries() == []


def test_the_command_line(tmp_path, s3):
    plan_options = ("--to", "vllm", "--tp", 2, "--max-shard-size", "30kB")
    source = FIXTURES / "hf/llama"
    done = run("convert", source, "s3://bucket/out", *plan_options, "--part", "1/2", "--json")
    assert done.code == 0 and not done.document["complete"] and done.document["tasks"] > 1, done.err
    refused = run("convert", source, "s3://bucket/out", *plan_options, "--finish")
    assert refused.code == 4 and "tasks are missing" in refused.err
    assert run("plan", source, *plan_options, "--plan-out", tmp_path / "plan").code == 0
    done = run("convert", source, "s3://bucket/out", "--plan", tmp_path / "plan", "--part", "0/2")
    assert done.code == 0 and "part 0/2" in done.out and "; complete" in done.out, done.err
    assert run("convert", source, "s3://bucket/out", *plan_options, "--finish").code == 0
    run("convert", source, tmp_path / "local", *plan_options)
    assert content_in(s3, "bucket", "out") == content(tmp_path / "local")


def test_parts_that_are_killed_leave_no_wrong_byte(tmp_path, s3):
    """tests/cloud/store_kills.py is the long form."""
    work = Work(tmp_path / "work", to="vllm", tp=2, max_shard_size="12MB")
    phases = experiment(work, s3, random.Random(1), kills=4)
    assert phases.total() > 0


def test_a_file_that_another_part_writes_again_while_the_target_is_completed(plan, whole, s3, monkeypatch):
    """Stores give the same bytes another ETag. The part that has written them completes the target."""
    parts(plan, "s3://bucket/out", 2, [1])
    original = Conversion._commit

    def complete(*arguments):
        s3.objects["bucket", f"out/{plan.layout.files[0].path}"].etag = "written-again"
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "_commit", complete)
        assert not reshard.convert_part(plan, "s3://bucket/out", "0/2").complete
    assert f"out/{MANIFEST}" not in s3.keys("bucket", "out")
    assert [each.complete for each in parts(plan, "s3://bucket/out", 2)][-1]
    assert content_in(s3, "bucket", "out") == whole
