"""Sections: the boxes of canonical tensors inside a stored tensor, as columns of numbers.

What stored tensors of one kind share, such as those of all layers, is one Pattern; only the names differ. A million sections are then a few
patterns and the names. A Section object is made only on demand.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from reshard.geometry.boxes import Box, contiguous_runs, row_major
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.quantities import plural
from reshard.geometry.value import value

Columns = npt.NDArray[np.int64]
"""Numbers, one row per box."""


def distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The distinct values of an array, sorted. (`np.unique` imports numpy.ma first, which takes longer than opening a small checkpoint.)"""
    ordered = np.sort(values, axis=None)
    result: npt.NDArray[Any] = ordered[np.append(np.ones(min(1, len(ordered)), np.bool_), ordered[1:] != ordered[:-1])]
    return result


@value
class Section:
    """A box of a canonical tensor inside a stored tensor."""

    name: str
    """The canonical tensor."""
    box: Box
    """The box, in the coordinates of the canonical tensor."""
    start: int
    """Where the box starts, in elements from the start of the stored tensor."""
    strides: tuple[int, ...]
    """The distance between neighbours of the box along each canonical axis, in stored elements."""


@value(slots=False, eq=False)
class Pattern:
    """Where the sections of a stored tensor lie, without the names of their canonical tensors. n sections.

    All sections have the same number of axes, or `axes` tells how many each has. Then the columns are as wide as the widest section, and
    the axes that a section lacks have offset 0, size 1 and stride 0.
    """

    offsets: Columns
    """[n, ndim]: where each box starts in its canonical tensor."""
    sizes: Columns
    """[n, ndim]: how long each box is."""
    starts: Columns
    """[n]: where each box starts, in elements from the start of the stored tensor."""
    strides: Columns
    """[n, ndim]: the distance between neighbours along each canonical axis, in stored elements."""
    axes: Columns | None = None
    """[n]: the number of axes of each box; None: all have ndim axes."""

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def volumes(self) -> Columns:
        """[n]: the number of elements of each section."""
        volumes: Columns = self.sizes.prod(axis=1)
        return volumes

    @cached_property
    def elements(self) -> int:
        """The number of elements in all sections."""
        return int(self.volumes.sum())

    @cached_property
    def lasts(self) -> Columns:
        """[n]: the stored element at which the last element of each box lies. Without meaning for an empty box."""
        lasts: Columns = self.starts + ((self.sizes - 1) * self.strides).sum(axis=1)
        return lasts

    def ndim_of(self, row: int) -> int:
        """The number of axes of a section."""
        return self.sizes.shape[1] if self.axes is None else int(self.axes[row])

    def repeated(self, count: int, step: int) -> Pattern:
        """The sections `count` times, each time `step` stored elements further."""
        starts = (np.arange(count, dtype=np.int64)[:, None] * step + self.starts).reshape(-1)
        axes = None if self.axes is None else np.tile(self.axes, count)
        return Pattern(np.tile(self.offsets, (count, 1)), np.tile(self.sizes, (count, 1)), starts, np.tile(self.strides, (count, 1)), axes)

    def along_first_axis(self, count: int, step: int) -> Pattern:
        """The boxes, which have one element along their first axis, with `count`: each neighbour lies `step` stored elements further."""
        sizes, strides = self.sizes.copy(), self.strides.copy()
        sizes[:, 0], strides[:, 0] = count, step
        return Pattern(self.offsets, sizes, self.starts, strides, self.axes)

    def with_ndim(self) -> Iterator[tuple[int, npt.NDArray[np.int64] | slice, Pattern]]:
        """The sections in groups of one number of axes: (number of axes, their rows, the group as a pattern)."""
        if self.axes is None:
            yield self.sizes.shape[1], slice(None), self
            return
        for ndim in distinct(self.axes).tolist():
            rows = np.flatnonzero(self.axes == ndim)
            columns = (column[rows, :ndim] for column in (self.offsets, self.sizes, self.strides))
            offsets, sizes, strides = columns
            yield ndim, rows, Pattern(offsets, sizes, self.starts[rows], strides)


@value(eq=False)
class Sections(Sequence[Section]):
    """The sections of a stored tensor: a pattern, and the canonical tensor of each section."""

    names: tuple[str, ...]
    """[n]: the canonical tensor of each section."""
    pattern: Pattern
    """Where they lie."""

    @classmethod
    def of(cls, sections: Iterable[Section]) -> Sections:
        """The columns of existing sections."""
        rows = tuple(sections)
        counts = [len(row.strides) for row in rows]
        ndim = max(counts, default=0)
        is_mixed = min(counts, default=0) < ndim
        table = np.array(
            [
                (*_filled(row.box.offsets, ndim, 0), *_filled(row.box.sizes, ndim, 1), *_filled(row.strides, ndim, 0), row.start)
                for row in rows
            ],
            np.int64,
        ).reshape(len(rows), 3 * ndim + 1)
        pattern = Pattern(
            table[:, :ndim],
            table[:, ndim : 2 * ndim],
            table[:, 3 * ndim],
            table[:, 2 * ndim : 3 * ndim],
            np.array(counts, np.int64) if is_mixed else None,
        )
        return cls(tuple(row.name for row in rows), pattern)

    def with_names(self, names: tuple[str, ...]) -> Sections:
        """The sections at the same places, of other canonical tensors."""
        assert len(names) == len(self.names)
        return Sections(names, self.pattern)

    def moved(self, by: int) -> Iterator[Section]:
        """The sections, `by` stored elements further."""
        return (Section(section.name, section.box, section.start + by, section.strides) for section in self)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, row: int) -> Section: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[Section]: ...

    def __getitem__(self, row: int | slice) -> Section | Sequence[Section]:
        if isinstance(row, slice):
            return tuple(self[i] for i in range(len(self))[row])
        row = range(len(self))[row]
        pattern, ndim = self.pattern, self.pattern.ndim_of(row)
        offsets, sizes, strides = (tuple(column[row, :ndim].tolist()) for column in (pattern.offsets, pattern.sizes, pattern.strides))
        return Section(self.names[row], Box(offsets, sizes), int(pattern.starts[row]), strides)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sections) and self.names == other.names and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self.names)


def _filled(values: tuple[int, ...], ndim: int, value: int) -> tuple[int, ...]:
    return values if len(values) == ndim else (*values, *(value,) * (ndim - len(values)))


NO_SECTIONS = Sections.of(())
"""The sections of a stored tensor that holds no weight."""


def first_overlap(pattern: Pattern, length: int) -> tuple[int, int] | None:
    """Two sections that claim one element of a stored tensor of `length` elements; the same section twice if it reaches beyond the tensor,
    or claims an element twice. None if there are none: then every element of the stored tensor is in one section or in none."""
    rows = np.flatnonzero(pattern.volumes > 0)
    outside = rows[(pattern.lasts[rows] >= length) | (pattern.starts[rows] < 0)]
    if len(outside):
        return int(outside[0]), int(outside[0])
    sizes = pattern.sizes[rows]
    return _first_overlap(pattern.starts[rows], sizes, np.where(sizes > 1, pattern.strides[rows], 0), rows)


def _first_overlap(starts: Columns, sizes: Columns, strides: Columns, rows: Columns) -> tuple[int, int] | None:
    """`first_overlap` of sections that are not empty. strides: 0 along axes of one element. rows: the numbers of the sections."""
    step = int(np.gcd.reduce(strides, axis=None)) if strides.size else 0
    if step > 1:
        # Every section stays in one residue class, as even and odd columns do: classes never meet, and within one the steps shrink.
        for residue in distinct(starts % step).tolist():
            same = np.flatnonzero(starts % step == residue)
            if overlap := _first_overlap(starts[same] // step, sizes[same], strides[same] // step, rows[same]):
                return overlap
        return None
    begins, ends, owners = [], [], []
    forms = sorted(set(map(tuple, np.concatenate([sizes, strides], axis=1).tolist())))
    for form in map(np.array, forms):
        alike = np.flatnonzero((sizes == form[: len(form) // 2]).all(axis=1) & (strides == form[len(form) // 2 :]).all(axis=1))
        _, run, outer = contiguous_runs(form[: len(form) // 2].tolist(), form[len(form) // 2 :].tolist())
        begin = (starts[alike][:, None] + outer).reshape(-1)
        begins.append(begin)
        ends.append(begin + run)
        owners.append(np.repeat(rows[alike], len(outer)))
    begin, end, owner = (np.concatenate(columns) for columns in (begins, ends, owners)) if begins else (rows, rows, rows)
    order = np.argsort(begin, kind="stable")
    begin, end, owner = begin[order], end[order], owner[order]
    meeting = np.flatnonzero(begin[1:] < end[:-1])
    return (int(owner[meeting[0]]), int(owner[meeting[0] + 1])) if len(meeting) else None


@value
class StoredTensor:
    """The array that a file holds under one name."""

    name: str
    """Its name in the file."""
    dtype: DType
    """Its element type."""
    shape: tuple[int, ...]
    """Its shape in the file; the elements are row-major."""
    sections: Sections = NO_SECTIONS
    """The boxes of canonical tensors that it holds."""
    fill: bytes = b"\0"
    """The bytes of an element that is in no section: one byte, which is repeated, or a whole element."""
    is_unset: bool = False
    """Whether such an element means nothing, and files of others have any bytes there."""

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def filled(self) -> int:
        """The number of elements that hold the fill."""
        return math.prod(self.shape) - self.sections.pattern.elements

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, {self.dtype}, {list(self.shape)}, {plural(len(self.sections), 'section')})"


def whole(name: str, dtype: DType, shape: tuple[int, ...]) -> StoredTensor:
    """A canonical tensor, stored unchanged."""
    return StoredTensor(name, dtype, shape, Sections((name,), _one_box(Box.whole(shape))))


def part(name: str, canonical: str, dtype: DType, shape: tuple[int, ...], box: Box) -> StoredTensor:
    """A box of a canonical tensor, stored as a row-major tensor called `name`.

    canonical, shape: the name and the global shape of the canonical tensor. An empty box has a section only if the whole tensor is empty.
    """
    sections = Sections((canonical,), _one_box(box)) if box.volume or 0 in shape else NO_SECTIONS
    return StoredTensor(name, dtype, box.sizes, sections)


@lru_cache(maxsize=1 << 12)
def _one_box(box: Box) -> Pattern:
    """The pattern of a stored tensor that is one box, row-major. Tensors of equal boxes share it."""
    return Sections.of([Section("", box, 0, row_major(box.sizes))]).pattern


def step_count(name: str, number: int) -> StoredTensor:
    """A step count as torch's optimizers store it: a 32-bit float of shape []."""
    return constant(name, from_torch("float32", where=name), (), struct.pack("<f", number))


def constant(name: str, dtype: DType, shape: tuple[int, ...], element: bytes) -> StoredTensor:
    """A stored tensor that holds no weight: the bytes of one element, repeated."""
    return StoredTensor(name, dtype, shape, fill=element)


def sliced(stored: StoredTensor, box: Box, shape: tuple[int, ...]) -> StoredTensor | None:
    """A box of a stored tensor as a stored tensor of its own; None if one of its sections is not a box of the stored tensor.

    shape: that of the box, perhaps without axes of size 1.
    """
    steps, new_steps = row_major(stored.shape), row_major(box.sizes)
    sections = []
    for section in stored.sections:
        kept = _sliced_section(section, stored.shape, steps, box, new_steps)
        if kept is None:
            return None
        sections += kept
    return StoredTensor(stored.name, stored.dtype, shape, Sections.of(sections), stored.fill)


def _sliced_section(
    section: Section, shape: tuple[int, ...], steps: tuple[int, ...], box: Box, new_steps: tuple[int, ...]
) -> list[Section] | None:
    """What a box of the stored tensor keeps of a section: one section or none; None if the section is not a box of the stored tensor."""
    origin = [section.start // step % max(size, 1) for step, size in zip(steps, shape, strict=True)]
    axes: list[int | None] = []  # for each axis of the section, the stored axis along which it runs
    for size, stride in zip(section.box.sizes, section.strides, strict=True):
        along = [axis for axis, step in enumerate(steps) if step == stride and origin[axis] + size <= shape[axis] and axis not in axes]
        if size > 1 and not along:
            return None
        axes.append(max(along, key=lambda axis: shape[axis]) if size > 1 else None)
    low, high = list(section.box.offsets), list(section.box.stops)
    first = list(origin)
    for axis in range(len(shape)):
        start, stop = box.offsets[axis], box.stops[axis]
        if axis not in axes:
            if not start <= origin[axis] < stop:
                return []
            continue
        k = axes.index(axis)
        first[axis] = max(start, origin[axis])
        low[k] = section.box.offsets[k] + first[axis] - origin[axis]
        high[k] = section.box.offsets[k] + min(stop - origin[axis], section.box.sizes[k])
        if low[k] >= high[k]:
            return []
    kept = Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
    at = sum((a - b) * step for a, b, step in zip(first, box.offsets, new_steps, strict=True))
    return [Section(section.name, kept, at, tuple(1 if axis is None else new_steps[axis] for axis in axes))]
