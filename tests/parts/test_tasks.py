"""Bands of a plan and their owners: pure arithmetic, the same on every machine."""

import random
import subprocess
import sys

import numpy as np
import pytest
from helpers.fixture_places import DCP, HF

import reshard
from reshard.errors import RequestError
from reshard.plans.tasks import PartNumber, imbalance, owners, tasks_of_part
from reshard.requests.launcher import part_of


@pytest.fixture(scope="module", params=["vllm", "hf", "dcp"])
def plan(request):
    sizes = {"vllm": {"tp": 4}, "hf": {"max_shard_size": 30_000}, "dcp": {"dp": 3}}
    return reshard.plan(HF / "llama", to=request.param, **sizes[request.param])


def test_tasks_follow_each_other_and_hold_every_route(plan):
    tasks = plan.tasks()
    assert [task.number for task in tasks] == list(range(len(tasks)))
    assert [i for task in tasks for i in task.routes] == list(range(len(plan.routes)))
    assert all(task.weight > 0 and len(task.routes) for task in tasks)


def test_no_source_byte_is_read_for_two_tasks():
    """The bytes of all pieces of a task's tensors, replicas too, are read for this task alone."""
    plan = reshard.plan(reshard.open(DCP / "fsdp2" / "checkpoint", model=DCP / "fsdp2" / "model"), to="vllm", tp=2)
    owner = {file.path: np.full(file.nbytes, -1) for file in plan.source.files}
    for task in plan.tasks():
        for i in task.routes:
            for piece in plan.routes[i].source.pieces():
                reach = sum((size - 1) * step for size, step in zip(piece.box.sizes, piece.extent.strides, strict=True)) + 1
                start = piece.extent.byte_offset
                found = owner[piece.extent.path][start : start + reach * piece.extent.dtype.itemsize]
                assert ((found == -1) | (found == task.number)).all()
                found[:] = task.number


def test_every_band_has_one_owner_whatever_the_number_of_parts(plan):
    tasks = plan.tasks()
    for parts in (1, 2, 3, 8, 64, 1000):
        owned = [tasks_of_part(tasks, PartNumber(i, parts)) for i in range(parts)]
        assert sorted(task.number for each in owned for task in each) == [task.number for task in tasks]
        assert all([task.number for task in each] == sorted(task.number for task in each) for each in owned)


def test_owners_are_the_same_in_another_process():
    weights = [random.Random(0).randrange(1, 10**12) for _ in range(500)]
    code = f"from reshard.plans.tasks import owners; print(owners({weights}, 7))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "5"})
    assert found.stdout.strip() == str(owners(weights, 7))


@pytest.mark.parametrize("parts", [2, 4, 16, 64])
def test_the_parts_have_about_the_same_work(parts):
    """Tensors as different as those of a model with experts, in as many tasks as a large plan has."""
    random_ = random.Random(parts)
    weights = [random_.choice([10**6, 10**9, 3 * 10**9]) * random_.randint(1, 4) for _ in range(2048)]
    assert imbalance(weights, parts) < 0.05


def test_imbalance_is_that_of_the_part_with_most():
    assert imbalance([10, 10, 10, 10], 2) == 0 and imbalance([30, 10], 2) == 0.5 and imbalance([], 3) == -1


@pytest.mark.parametrize("text", ["8/8", "-1/8", "3", "3/", "a/b", "0/0", "1/2/3", "٣/٨"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(RequestError):
        PartNumber.parse(text)


LAUNCHERS = [
    ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "7", "SLURM_ARRAY_TASK_COUNT": "8"}, None, "3/8"),
    ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "9", "SLURM_ARRAY_TASK_COUNT": "5"}, None, "2/5"),
    ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "7", "SLURM_ARRAY_TASK_MAX": "7", "SLURM_ARRAY_TASK_COUNT": "1"}, None, "0/1"),
    ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}, None, "3/8"),
    ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, None, "3/8"),
    ({"JOB_COMPLETION_INDEX": "2"}, 4, "2/4"),
    ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "3",
      "SLURM_ARRAY_TASK_COUNT": "4"}, None, "6/8"),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "parts", "expected"), LAUNCHERS)
def test_a_launcher_says_which_part_it_is(environment, parts, expected):
    assert str(part_of("auto", parts, environment)) == expected


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script, which runs once
        ({"JOB_COMPLETION_INDEX": "2"}, None),
        ({"JOB_COMPLETION_INDEX": "4"}, 4),
        ({"RANK": "x", "WORLD_SIZE": "8"}, None),
        ({"RANK": "0", "WORLD_SIZE": "8"}, 4),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "4", "SLURM_ARRAY_TASK_COUNT": "3"}, None),
        ({"SLURM_ARRAY_TASK_ID": "3"}, None),
    ],
)
def test_a_launcher_that_does_not_say_it_is_refused(environment, parts):
    with pytest.raises(RequestError):
        part_of("auto", parts, environment)


def test_a_part_and_a_number_of_parts_contradict_each_other():
    with pytest.raises(RequestError, match="contradict"):
        part_of("0/8", 8, {})
