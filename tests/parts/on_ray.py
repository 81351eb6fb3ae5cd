"""Conversions on a Ray cluster of several nodes on this machine, one of which is killed midway. Run in an environment that has Ray.

    python -m venv .venv-ray && .venv-ray/bin/pip install -e '.[ray,cloud]' safetensors
    .venv-ray/bin/python tests/parts/on_ray.py

Every check compares all bytes with those of one process. Takes about a minute.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))

import ray
from cloud.models import content, content_in
from cloud.s3_server import S3Server
from helpers.fixture_places import HF
from helpers.reshard_command import result_tree
from ray.cluster_utils import Cluster
from synthetic import llama, write_hugging_face

import reshard
from reshard.errors import CheckpointError
from reshard.storage.stores.urls import storage_options
from reshard.verbs.convert import Sharing, conversion

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


@check
def a_small_conversion_is_byte_identical(cluster, work):
    plan = reshard.plan(HF / "llama", to="vllm", tp=2)
    reshard.convert(plan, work / "one")
    done = []
    found = reshard.convert(plan, work / "ray", executor="ray", progress=done.append)
    assert result_tree(work / "one") == result_tree(work / "ray")
    assert found.fingerprint.root == reshard.fingerprint(HF / "llama").root and sum(done) == sum(r.target.nbytes for r in plan.routes)


@check
def a_node_that_is_killed_costs_its_running_tasks_only(cluster, work):
    write_hugging_face(llama(0.25), work / "source")
    plan = reshard.plan(work / "source", to="vllm", tp=4)
    reshard.convert(plan, work / "one", workers=1)
    victim = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    submitted = _count_tasks()
    running, done, killed_at = conversion(plan, work / "ray", sharing=Sharing(ray=True)), 0, None
    blocks = running.run()
    for each in blocks:
        done += each.nbytes
        if killed_at is None and done > running.total // 10:
            killed_at = done
            cluster.remove_node(victim, allow_graceful=False)
    assert killed_at is not None and killed_at < running.total and done == running.total
    assert result_tree(work / "one") == result_tree(work / "ray")
    again = _count_tasks() - submitted - len(plan.tasks())
    print(f"    killed after {killed_at / running.total:.0%}; {len(plan.tasks())} tasks, {again} attempts more")
    assert 0 <= again <= 8, "only tasks that ran or waited on the node run again"


@check
def an_interrupted_driver_is_continued(cluster, work):
    write_hugging_face(llama(0.1), work / "source")
    plan = reshard.plan(work / "source", to="hf", max_shard_size="20MB")
    reshard.convert(plan, work / "one", workers=1)
    blocks = conversion(plan, work / "ray", sharing=Sharing(ray=True)).run()
    for _ in range(len(plan.tasks()) // 3):
        next(blocks)
    blocks.close()
    assert not (work / "ray" / "reshard.json").exists()
    running = conversion(plan, work / "ray", sharing=Sharing(ray=True))
    for _ in running.run():
        pass
    assert 0 < running.resumed_bytes < running.total, running.resumed_bytes
    assert result_tree(work / "one") == result_tree(work / "ray")


@check
def the_error_of_a_task_is_that_of_reshard(cluster, work):
    reshard.convert(reshard.plan(HF / "llama", to="vllm", tp=2), work / "source")
    plan = reshard.plan(work / "source", to="hf")
    path = work / "source" / "model-rank-1-part-0.safetensors"
    stamps = os.stat(path)
    os.truncate(path, stamps.st_size - 1000)
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    try:
        reshard.convert(plan, work / "ray", executor="ray")
    except CheckpointError as error:
        assert "model-rank-1" in str(error)
    else:
        raise AssertionError("the truncated file was not found")
    assert not (work / "ray" / "reshard.json").exists()


@check
def a_base_with_a_delta_and_an_average_are_byte_identical(cluster, work):
    for name in ("base", "new"):
        write_hugging_face(llama(0.1), work / name)
    with open(work / "new" / "model.safetensors", "r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        for place in range(start, (work / "new" / "model.safetensors").stat().st_size, 1000):
            file.seek(place)
            file.write(b"\x3c")
    reshard.delta(work / "base", work / "new", work / "delta")
    changed = reshard.plan(f"{work / 'base'}+{work / 'delta'}", to="vllm", tp=2)
    mean = reshard.plan([work / "base", f"{work / 'base'}+{work / 'delta'}"], to="hf", average=True)
    for name, plan in (("changed", changed), ("mean", mean)):
        reshard.convert(plan, work / f"{name}-one", workers=1)
        reshard.convert(plan, work / f"{name}-ray", executor="ray")
        assert result_tree(work / f"{name}-one") == result_tree(work / f"{name}-ray")
    reshard.convert(reshard.plan(work / "new", to="vllm", tp=2), work / "new-one")
    weights = [
        {path: data for path, data in result_tree(work / f"{name}-one").items() if path.endswith(".safetensors")}
        for name in ("changed", "new")
    ]
    assert weights[0] == weights[1]


@check
def the_command_line_uses_the_cluster_at_an_address(cluster, work):
    reshard.convert(reshard.plan(HF / "llama", to="hf"), work / "one")
    command = [sys.executable, "-m", "reshard", "convert", str(HF / "llama"), str(work / "ray"), "--to", "hf", "--ray"]
    found = subprocess.run([*command, "--ray-address", cluster.address], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert result_tree(work / "one") == result_tree(work / "ray")
    found = subprocess.run([*command[:-1], "--ray-address", "127.0.0.1:1", "--overwrite"], capture_output=True, text=True)
    assert found.returncode == 5 and "no Ray cluster answers" in found.stderr and "Traceback" not in found.stderr, found.stderr[-2000:]


@check
def a_store_is_written_by_tasks_of_whole_files(cluster, work):
    write_hugging_face(llama(0.1), work / "source")
    plan = reshard.plan(work / "source", to="vllm", tp=2, max_shard_size="20MB")
    reshard.convert(plan, work / "one", workers=1)
    server = S3Server(work / "s3")
    options = {
        "endpoint": server.endpoint, "access_key_id": "test", "secret_access_key": "test", "region": "us-east-1",
    }  # fmt: skip
    # Options instead of variables, because the workers of the cluster have the environment of its start.
    with storage_options(options):
        blocks = conversion(plan, "s3://bucket/out", sharing=Sharing(ray=True)).run()
        for _ in range(2):
            next(blocks)
        blocks.close()
        running = conversion(plan, "s3://bucket/out", sharing=Sharing(ray=True))
        done = sum(each.nbytes for each in running.run())
    assert done == running.total and 0 < running.resumed_bytes < running.total, (done, running.total, running.resumed_bytes)
    assert content_in(server, "bucket", "out") == content(work / "one")
    server.close()


def _count_tasks():
    """The attempts of tasks that have started, as workers note them (see `main`)."""
    return len(list(Path(os.environ["RESHARD_TEST_ATTEMPTS"]).iterdir()))


def _noted_attempts(folder):
    """Let every task of reshard leave a file when it starts. Workers are forked with this environment."""
    import reshard.engine.on_ray as on_ray

    real = on_ray._convert_task

    def convert(*arguments):
        tempfile.mkstemp(dir=folder)
        return real(*arguments)

    on_ray._convert_task = convert


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a part of the name of a check")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(600, exit=True)
    with tempfile.TemporaryDirectory(prefix="reshard-ray-") as folder:
        attempts = Path(folder, "attempts")
        attempts.mkdir()
        os.environ["RESHARD_TEST_ATTEMPTS"] = str(attempts)
        _noted_attempts(str(attempts))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20})
        cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            for function in CHECKS:
                if options.only and options.only not in function.__name__:
                    continue
                work, began = Path(folder, function.__name__), time.monotonic()
                work.mkdir()
                function(cluster, work)
                print(f"ok    {function.__name__}, {time.monotonic() - began:.1f} s", flush=True)
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()
