"""File tasks: a plan in tasks that write whole files. Stores need them, because a file there is written by one process, from front to back.

    rank 0    part 0 | part 1 | part 2        a task is a set of files that hold the same tensors: no source byte is read for two tasks
    rank 1    part 0 | part 1 | part 2
    tasks       0        1        2

The layout cuts the files of all ranks at the same tensors, so that they make such sets. Where no rank has more than one file, a set would
be all ranks together, and each file is a task of its own: tensors that several ranks share are read for each of them.

Like the bands (bands.py), the tasks follow from the plan alone, whatever the number of parts is.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from reshard.geometry.value import value

if TYPE_CHECKING:
    from reshard.plans.plan import Plan


@value
class FileTask:
    """Files of a plan that one process writes."""

    number: int
    """Its number, counted from 0."""
    paths: tuple[str, ...]
    """Its files."""
    routes: tuple[int, ...]
    """The indexes of the routes whose tensors it writes."""
    weight: int
    """How much work it is: the bytes that are read and written."""


def file_tasks(plan: Plan) -> tuple[FileTask, ...]:
    """The tasks of a plan, in the order of its files."""
    files = plan.layout.files
    is_cut = max(Counter(tuple(sorted(file.ranks.items())) for file in files).values(), default=0) > 1
    sets = files_sharing_tensors(plan) if is_cut else [[file.path] for file in files]
    task_of = {path: number for number, paths in enumerate(sets) for path in paths}
    sizes, routes = {file.path: file.nbytes for file in files}, [list[int]() for _ in sets]
    weights = [sum(sizes[path] for path in paths) for paths in sets]
    for i, route in enumerate(plan.routes):
        nbytes = route.source.shards.elements * route.source.dtype.itemsize
        for number in {task_of[path] for path in route.target.shards.holders}:
            routes[number].append(i)
            weights[number] += nbytes
    return tuple(FileTask(i, tuple(paths), tuple(routes[i]), weights[i]) for i, paths in enumerate(sets))


def files_sharing_tensors(plan: Plan) -> list[list[str]]:
    """The files in sets: two files are in the same set if a tensor goes to both."""
    parent = {file.path: file.path for file in plan.layout.files}

    def root(path: str) -> str:
        while parent[path] != path:
            parent[path] = parent[parent[path]]
            path = parent[path]
        return path

    for route in plan.routes:
        first, *others = route.target.shards.holders or ("",)
        for other in others:
            parent[root(other)] = root(first)
    sets: dict[str, list[str]] = {}
    for file in plan.layout.files:
        sets.setdefault(root(file.path), []).append(file.path)
    return list(sets.values())
