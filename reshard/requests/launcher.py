"""Which part of a conversion this process is, as the launcher that started it says in the environment.

Two levels multiply: the tasks of an array (Slurm, Kubernetes), and the processes inside one (torchrun, srun).

    sbatch --array=0-3, and srun -n 2 in each     task 3 of 4, process 1 of 2     ->  part 7 of 8
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.errors import RequestError
from reshard.plans.tasks import PartNumber


def part_of(text: str | None, parts: int | None, environment: Mapping[str, str]) -> PartNumber:
    """The part that --part and --parts say, where "auto" asks the launcher's environment.

    parts: how many parts there are, where the launcher does not say it.

    Raises: RequestError if no launcher is found, or it contradicts `parts`.
    """
    if text is not None and text != "auto":
        if parts is not None:
            raise RequestError(f"--part {text} and --parts {parts} contradict each other", do="Leave out --parts, or say --part auto")
        return PartNumber.parse(text)
    task = _array_task(environment) or _completion_index(environment, parts)
    process = _pair(environment, "RANK", "WORLD_SIZE") or _pair(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if task is None and process is None:
        raise RequestError(
            "--part auto: the environment names no launcher",
            why="Known are Slurm's arrays and steps, torchrun (RANK, WORLD_SIZE) and Kubernetes' Indexed Jobs (JOB_COMPLETION_INDEX)",
            do="Say it, for example --part 0/8",
        )
    outer, inner = task or PartNumber(0, 1), process or PartNumber(0, 1)
    part = PartNumber(outer.number * inner.of + inner.number, outer.of * inner.of)
    if parts is not None and part.of != parts:
        raise RequestError(f"--parts {parts}: the launcher has {part.of} processes", do="Leave out --parts")
    return part


def _pair(environment: Mapping[str, str], number: str, count: str) -> PartNumber | None:
    """The part that two variables name; None unless both are set."""
    if number not in environment or count not in environment:
        return None
    return PartNumber(_number(environment, number), _number(environment, count))


def _array_task(environment: Mapping[str, str]) -> PartNumber | None:
    """The task of a Slurm array. Its numbers may begin anywhere and have a step: --array=1-15:2."""
    if "SLURM_ARRAY_TASK_ID" not in environment:
        return None
    names = ("ID", "MIN", "MAX", "COUNT")
    task, first, last, count = (_number(environment, f"SLURM_ARRAY_TASK_{name}") for name in names)
    step = (last - first) // (count - 1) if count > 1 else 1
    if count < 1 or first + step * (count - 1) != last or (task - first) % max(step, 1):
        raise RequestError(
            f"--part auto: the Slurm array has {count} tasks from {first} to {last}, which are not evenly spaced",
            do="Use an array such as 0-7, or say --part I/N",
        )
    return PartNumber((task - first) // max(step, 1), count)


def _completion_index(environment: Mapping[str, str], parts: int | None) -> PartNumber | None:
    """The pod of an Indexed Job. Kubernetes does not say how many there are."""
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    if parts is None:
        raise RequestError(
            "--part auto: JOB_COMPLETION_INDEX does not say how many parts there are", do="Add --parts N, the completions of the Job"
        )
    return PartNumber(_number(environment, "JOB_COMPLETION_INDEX"), parts)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise RequestError(f"--part auto: {name} is {text!r}, which is not a number", do="Say it, for example --part 0/8")
    return int(text)
