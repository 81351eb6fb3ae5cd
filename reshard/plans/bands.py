"""Bands: a plan in tasks that share no source byte, and which part of a conversion owns which task.

A band is a run of consecutive routes: canonical tensors in the order in which the source's files hold them, for all ranks. So every source
byte is read for one band, a band's tensors are digested whole, and the same plan has the same bands on every machine. How many parts
share the work does not matter for the bands, only for their owners.

    routes   |  0  1  2  |  3  4  |  5  |  6  7  8  9  | ...      in the order of the plan
    bands          0          1      2         3
    owners         1          0      0         1                  the heaviest band first, always to the part that has least
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from reshard.errors import RequestError
from reshard.geometry.value import value

if TYPE_CHECKING:
    from reshard.plans.plan import Route

# A plan has about as many bands, if it has as many tensors. For 64 parts, 32 bands each keep the weights within a few per cent.
_MOST_BANDS = 2048
# What a box costs besides its bytes, in bytes that could be copied meanwhile: a conversion of tiny tensors takes 40 microseconds for each.
_BOX_WEIGHT = 1 << 15


@value
class Band:
    """Consecutive routes of a plan, which one process converts."""

    number: int
    """Its number, counted from 0."""
    start: int
    """The index of its first route in the plan."""
    stop: int
    """The index after the last one."""
    weight: int
    """How much work it is: the bytes that are read and written, and a constant for each box."""

    @property
    def routes(self) -> range:
        """The indexes of its routes."""
        return range(self.start, self.stop)


class Task(Protocol):
    """What one process does of a conversion: a Band, or a FileTask of a conversion into a store."""

    @property
    def number(self) -> int:
        """Its number, counted from 0."""

    @property
    def routes(self) -> Sequence[int]:
        """The indexes of the routes that it converts."""

    @property
    def weight(self) -> int:
        """How much work it is."""


AnyTask = TypeVar("AnyTask", bound=Task)


@value
class PartNumber:
    """One of the processes that share a conversion."""

    number: int
    """Its number, counted from 0."""
    of: int
    """How many parts there are."""

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise RequestError(f"part {self.number} of {self.of}: parts are counted from 0 to {self.of - 1}", do="For example --part 0/8")

    @staticmethod
    def parse(text: str) -> PartNumber:
        """The part from a text such as "3/8". Raises RequestError if it is another text."""
        found = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
        if not found:
            raise RequestError(f"--part {text}: not of the form I/N", do="Give the number of the part and how many there are, such as 0/8")
        return PartNumber(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def bands_of(routes: Sequence[Route]) -> tuple[Band, ...]:
    """The bands of a plan with these routes. A band ends where the weights so far reach the next of `_MOST_BANDS` equal steps."""
    weights = [_weight(route) for route in routes]
    step = max(1, sum(weights) // _MOST_BANDS)
    bands: list[Band] = []
    start = weight = done = 0
    for i, each in enumerate(weights, 1):
        weight += each
        if (done + weight) // step > done // step or i == len(weights):
            bands.append(Band(len(bands), start, i, weight))
            start, weight, done = i, 0, done + weight
    return tuple(bands)


def _weight(route: Route) -> int:
    read, written = route.source.shards, route.target.shards
    nbytes = read.elements * route.source.dtype.itemsize + written.elements * route.target.dtype.itemsize
    return nbytes + _BOX_WEIGHT * (len(read) + len(written))


def owners(weights: Sequence[int], parts: int) -> list[int]:
    """The part that owns each band: the heaviest band is given away first, each to the part that has least so far."""
    loads = [(0, part) for part in range(parts)]
    found = [0] * len(weights)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, found[i] = loads[0]
        heapq.heapreplace(loads, (load + weights[i], found[i]))
    return found


def tasks_of_part(tasks: Sequence[AnyTask], part: PartNumber) -> tuple[AnyTask, ...]:
    """The tasks of one part, in the order of the plan."""
    found = owners([task.weight for task in tasks], part.of)
    return tuple(task for task, owner in zip(tasks, found, strict=True) if owner == part.number)


def imbalance(weights: Sequence[int], parts: int) -> float:
    """How much more than the mean the part with the most work has; 0.05 is 5 %."""
    loads = [0] * parts
    for weight, owner in zip(weights, owners(weights, parts), strict=True):
        loads[owner] += weight
    return max(loads) * parts / max(sum(loads), 1) - 1
