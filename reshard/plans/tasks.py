"""Route: where a canonical tensor of a plan is read and written. Tasks: a plan in pieces of work for several processes, and which part of a
conversion owns which task.

By routes: a task is a run of consecutive routes, canonical tensors in the order in which the source's files hold them, for all ranks. So
every source byte is read for one task, and a task's tensors are digested whole.

    routes   |  0  1  2  |  3  4  |  5  |  6  7  8  9  | ...      in the order of the plan
    tasks          0          1      2         3
    owners         1          0      0         1                  the heaviest task first, always to the part that has least

By files: a task writes whole files. Stores need it, because a file there is written by one process, from front to back.

    rank 0    file 0 | file 1 | file 2        a task is a set of files that hold the same tensors: no source byte is read for two tasks
    rank 1    file 0 | file 1 | file 2
    tasks       0        1        2

The layout cuts the files of all ranks at the same tensors, so that they make such sets. Where no rank has more than one file, a set would
be all ranks together, and each file is a task of its own: tensors that several ranks share are read for each of them.

The same plan has the same tasks on every machine. How many parts share the work matters only for their owners.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Sequence

from reshard.errors import RequestError
from reshard.geometry.dtypes import DType, are_same_bytes
from reshard.geometry.quantities import grouped, plural
from reshard.geometry.value import value
from reshard.index.origin import Encoded, Tensor
from reshard.plans.layout import TargetFile

BlockKey = tuple[int, int]
"""A block of a plan: (index of the route in the plan, index of the block in its tensor)."""


@value(eq=False)
class Route:
    """One canonical tensor in a plan: where it is read, and where it is written."""

    source: Tensor
    """The tensor with the pieces that are read."""
    target: Tensor
    """The tensor with the pieces that are written."""

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.source.name

    @property
    def is_cast(self) -> bool:
        """Whether the element type changes."""
        return self.source.dtype is not self.target.dtype and not are_same_bytes(self.source.dtype, self.target.dtype)

    @property
    def scaled_by(self) -> tuple[str, ...]:
        """The names of the stored tensors beside its codes, if it is dequantized."""
        decoded = self.source.origin.decoded
        beside = decoded.inputs[1:] if decoded else ()
        nested = (leaf for tensor in beside if tensor.is_computed for leaf in tensor.leaves[1:])
        return tuple(tensor.name for tensor in (*beside, *nested))

    @property
    def quantized_by(self) -> str:
        """The recipe by which it is computed from a weight; empty if it is not."""
        origin = self.source.origin
        return origin.recipe if isinstance(origin, Encoded) else ""

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element types that are read and written."""
        return (*self.source.dtypes, self.target.dtype)

    def __repr__(self) -> str:
        pieces = f"{plural(len(self.source.shards), 'piece')} -> {plural(len(self.target.shards), 'piece')}"
        return f"Route({self.name!r}, {self.source.dtype} -> {self.target.dtype}, {list(self.source.shape)}, {pieces})"


# A plan has about as many tasks, if it has as many tensors. For 64 parts, 32 tasks each keep the weights within a few per cent.
_MOST_TASKS = 2048
# What a box costs besides its bytes, in bytes that could be copied meanwhile: a conversion of tiny tensors takes 40 microseconds for each.
_BOX_WEIGHT = 1 << 15


@value
class Task:
    """What one process does of a conversion."""

    number: int
    """Its number, counted from 0."""
    routes: Sequence[int]
    """The indexes in the plan of the routes that it converts."""
    weight: int
    """How much work it is: the bytes that are read and written, and for tasks by routes a constant for each box."""
    paths: tuple[str, ...] = ()
    """The files that it writes; empty if it writes parts of many."""


@value
class PartNumber:
    """One of the processes that share a conversion."""

    number: int
    """Its number, counted from 0."""
    of: int
    """How many parts there are."""

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise RequestError(
                f"part {self.number} of {self.of}: parts are counted from 0 to {self.of - 1}", do="For example 0/8, the first of eight"
            )

    @staticmethod
    def parse(text: str) -> PartNumber:
        """The part from a text such as "3/8". Raises RequestError if it is another text."""
        match = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
        if not match:
            raise RequestError(f"`part={text}`: not of the form I/N", do="Give the number of the part and how many there are, such as 0/8")
        return PartNumber(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def by_routes(routes: Sequence[Route]) -> tuple[Task, ...]:
    """The tasks of a plan with these routes. A task ends where the weights so far reach the next of `_MOST_TASKS` equal steps."""
    weights = [_weight(route) for route in routes]
    step = max(1, sum(weights) // _MOST_TASKS)
    tasks: list[Task] = []
    start = weight = done = 0
    for i, of_route in enumerate(weights, 1):
        weight += of_route
        if (done + weight) // step > done // step or i == len(weights):
            tasks.append(Task(len(tasks), range(start, i), weight))
            start, weight, done = i, 0, done + weight
    return tuple(tasks)


def _weight(route: Route) -> int:
    read, written = route.source.shards, route.target.shards
    nbytes = read.elements * route.source.dtype.itemsize + written.elements * route.target.dtype.itemsize
    return nbytes + _BOX_WEIGHT * (len(read) + len(written))


def by_files(files: Sequence[TargetFile], routes: Sequence[Route]) -> tuple[Task, ...]:
    """The tasks of a plan that writes these files, in their order."""
    is_cut = max(Counter(tuple(sorted(file.ranks.items())) for file in files).values(), default=0) > 1
    sets = files_sharing_tensors(files, routes) if is_cut else [[file.path] for file in files]
    task_of = {path: number for number, paths in enumerate(sets) for path in paths}
    sizes, routes_of = {file.path: file.nbytes for file in files}, [list[int]() for _ in sets]
    weights = [sum(sizes[path] for path in paths) for paths in sets]
    for i, route in enumerate(routes):
        nbytes = route.source.shards.elements * route.source.dtype.itemsize
        for number in {task_of[path] for path in route.target.shards.holders}:
            routes_of[number].append(i)
            weights[number] += nbytes
    return tuple(Task(i, tuple(routes_of[i]), weights[i], tuple(paths)) for i, paths in enumerate(sets))


def files_sharing_tensors(files: Sequence[TargetFile], routes: Sequence[Route]) -> list[list[str]]:
    """The paths of the files in sets: two files are in the same set if a tensor goes to both."""
    parent = {file.path: file.path for file in files}

    def root(path: str) -> str:
        while parent[path] != path:
            parent[path] = parent[parent[path]]
            path = parent[path]
        return path

    for route in routes:
        first, *others = route.target.shards.holders or ("",)
        for other in others:
            parent[root(other)] = root(first)
    return list(grouped(parent, root).values())


def owners(weights: Sequence[int], parts: int) -> list[int]:
    """The part that owns each task: the heaviest task is given away first, each to the part that has least so far."""
    loads = [(0, part) for part in range(parts)]
    owner_of = [0] * len(weights)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, owner_of[i] = loads[0]
        heapq.heapreplace(loads, (load + weights[i], owner_of[i]))
    return owner_of


def tasks_of_part(tasks: Sequence[Task], part: PartNumber) -> tuple[Task, ...]:
    """The tasks of one part, in the order of the plan."""
    owner_of = owners([task.weight for task in tasks], part.of)
    return tuple(task for task, owner in zip(tasks, owner_of, strict=True) if owner == part.number)


def imbalance(weights: Sequence[int], parts: int) -> float:
    """How much more than the mean the part with the most work has; 0.05 is 5 %."""
    loads = [0] * parts
    for weight, owner in zip(weights, owners(weights, parts), strict=True):
        loads[owner] += weight
    return max(loads) * parts / max(sum(loads), 1) - 1
