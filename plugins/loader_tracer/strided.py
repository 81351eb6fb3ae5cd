"""Strided sections of arrays, and copies between two of them, as plain numbers.

A StridedCopy is a nest of loops: for every index (i, j, ...) the element `target + i * target_step_i + j * ...` of one array receives the
element `source + i * source_step_i + j * ...` of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

Shape = tuple[int, ...]


class NotABox(Exception):
    """A section that is not described by steps along the axes of its array."""


class Loop(NamedTuple):
    """One loop of a StridedCopy: its length, and the distance between neighbours in both arrays, in elements."""

    size: int
    target_step: int
    source_step: int


class StridedCopy(NamedTuple):
    """A section of one array that receives a section of another."""

    target: int
    source: int
    loops: tuple[Loop, ...]

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(loop.size for loop in self.loops)

    def turned(self) -> StridedCopy:
        """The same loops, with the two arrays exchanged."""
        return StridedCopy(self.source, self.target, tuple(Loop(size, source, target) for size, target, source in self.loops))


class Axis(NamedTuple):
    """A loop along axes of both arrays: its length, and the axis and the step in each."""

    size: int
    target_axis: int
    target_step: int
    source_axis: int
    source_step: int


class Placed(NamedTuple):
    """A StridedCopy in coordinates: where it starts in both arrays, and its loops along their axes."""

    at: Shape
    start: Shape
    axes: tuple[Axis, ...]

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(axis.size for axis in self.axes)


def copy_of(target: tuple[int, Shape, Shape], source: tuple[int, Shape, Shape]) -> StridedCopy:
    """The StridedCopy between two sections (offset, sizes, strides) of the same sizes. Loops of one element are left out."""
    loops = (Loop(*row) for row in zip(target[1], target[2], source[2], strict=True))
    return merged(StridedCopy(target[0], source[0], tuple(loop for loop in loops if loop.size != 1)))


def merged(copy: StridedCopy) -> StridedCopy:
    """The same copy with the fewest loops: a loop that continues the next one in both arrays is joined with it."""
    loops: list[Loop] = []
    for loop in copy.loops:
        last = loops[-1] if loops else None
        if last and last.target_step == loop.size * loop.target_step and last.source_step == loop.size * loop.source_step:
            loops[-1] = Loop(last.size * loop.size, loop.target_step, loop.source_step)
        else:
            loops.append(loop)
    return StridedCopy(copy.target, copy.source, tuple(loops))


@lru_cache(maxsize=4096)
def row_major(shape: Shape) -> Shape:
    """The strides of a row-major array."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return tuple(reversed(steps))


def coordinates(offset: int, shape: Shape) -> list[int]:
    """The coordinates of an element of a row-major array."""
    numbers = []
    for step in row_major(shape):
        number, offset = divmod(offset, step) if step else (0, offset)
        numbers.append(number)
    return numbers


def along_axes(copy: StridedCopy, shape: Shape) -> tuple[StridedCopy, list[int], list[tuple[int, int]]]:
    """The copy with its loops split until each runs along one axis of the target array; the start in coordinates; (axis, step) per loop.

    Raises: NotABox if a loop crosses the end of an axis in another way than row by row.
    """
    steps, start = row_major(shape), coordinates(copy.target, shape)
    if not copy.loops:
        return copy, start, []
    loops, axes = list(copy.loops), []
    number = 0
    while number < len(loops):
        size, stride, source_step = loops[number]
        for axis, unit in enumerate(steps):
            if unit <= stride and shape[axis] > 1 and not stride % unit:
                break
        else:
            raise NotABox(f"a step of {stride} elements in {list(shape)}")
        step = stride // unit
        if start[axis] + (size - 1) * step < shape[axis]:
            axes.append((axis, step))
            number += 1
            continue
        inner = (shape[axis] - start[axis]) // step
        if start[axis] % step or shape[axis] % step or inner < 1 or size % inner or inner == size:
            raise NotABox(f"{size} steps of {stride} elements from {start} in {list(shape)}")
        loops[number : number + 1] = [Loop(size // inner, stride * inner, source_step * inner), Loop(inner, stride, source_step)]
    return (copy if len(loops) == len(copy.loops) else StridedCopy(copy.target, copy.source, tuple(loops))), start, axes


def placed(copy: StridedCopy, target: Shape, source: Shape) -> Placed:
    """The copy in coordinates of both arrays.

    Raises: NotABox as `along_axes` does.
    """
    copy, at, target_axes = along_axes(merged(copy), target)
    turned, start, source_axes = along_axes(copy.turned(), source)
    if len(turned.loops) != len(copy.loops):
        copy, at, target_axes = along_axes(turned.turned(), target)
    axes = (Axis(loop.size, *t, *s) for loop, t, s in zip(copy.loops, target_axes, source_axes, strict=True))
    return Placed(tuple(at), tuple(start), tuple(axes))


def composed(outer: StridedCopy, inner: StridedCopy, shape: Shape) -> Iterator[StridedCopy]:
    """What the outer copy takes from the inner copy's source, where outer reads an array of that shape that inner has written.

    Raises: NotABox if the two meet in a way that loops do not describe.
    """
    inner, wrote_at, wrote_axes = along_axes(inner, shape)
    turned, read_at, read_axes = along_axes(outer.turned(), shape)
    outer = turned.turned()
    written = {axis: (loop.size, step, loop.source_step) for loop, (axis, step) in zip(inner.loops, wrote_axes, strict=True)}
    if len(written) < len(wrote_axes):
        raise NotABox("a write that runs twice along one axis")
    target, source = outer.target, inner.source
    kept: dict[int, Loop] = {}
    for axis in range(len(shape)):
        size, step, source_step = written.get(axis, (1, 1, 0))
        loops = [number for number, (along, _) in enumerate(read_axes) if along == axis]
        distance = read_at[axis] - wrote_at[axis]
        if len(loops) > 1:
            # The loops nest. They are all inside of what was written, all outside, or met one by one.
            span = sum(read_axes[number][1] * (outer.loops[number].size - 1) for number in loops)
            if distance + span < 0 or distance >= (size - 1) * step + 1:
                return
            if distance < 0 or distance + span > (size - 1) * step or any(read_axes[n][1] % step for n in loops) or distance % step:
                yield from _one_by_one(outer, loops[0], inner, shape)
                return
            source += distance // step * source_step
            for number in loops:
                loop = outer.loops[number]
                kept[number] = Loop(loop.size, loop.target_step, read_axes[number][1] // step * source_step)
            continue
        count, read_step = (outer.loops[loops[0]].size, read_axes[loops[0]][1]) if loops else (1, 1)
        met = _meeting(distance, count, read_step, size, step)
        if met is None:
            return
        first, number_of, every = met
        source += (distance + first * read_step) // step * source_step
        if loops:
            loop = outer.loops[loops[0]]
            target += first * loop.target_step
            kept[loops[0]] = Loop(number_of, loop.target_step * every, every * read_step // step * source_step)
    loops_left = (kept.get(number, loop) for number, loop in enumerate(outer.loops))
    yield merged(StridedCopy(target, source, tuple(loop for loop in loops_left if loop.size != 1)))


def _meeting(distance: int, count: int, read_step: int, size: int, step: int) -> tuple[int, int, int] | None:
    """The reads `distance + i * read_step` (i < count) that hit a write `j * step` (j < size): the first i, how many, and their distance.
    None if there are none."""
    every = step // math.gcd(step, read_step)
    first = next((i for i in range(min(every, count)) if (distance + i * read_step) % step == 0), None)
    if first is None:
        return None
    if distance + first * read_step < 0:
        first += -((distance + first * read_step) // (every * read_step)) * every
    last = min(count - 1, ((size - 1) * step - distance) // read_step)
    if last < first or first >= count:
        return None
    return first, (last - first) // every + 1, every


def _one_by_one(outer: StridedCopy, number: int, inner: StridedCopy, shape: Shape) -> Iterator[StridedCopy]:
    loop = outer.loops[number]
    others = outer.loops[:number] + outer.loops[number + 1 :]
    for i in range(loop.size):
        yield from composed(StridedCopy(outer.target + i * loop.target_step, outer.source + i * loop.source_step, others), inner, shape)
