"""Stored tensors: the array that a file holds under one name, as sections that are boxes of canonical tensors."""

from __future__ import annotations

import math
import struct

from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.quantities import plural
from reshard.geometry.sections import NO_SECTIONS, Section, Sections
from reshard.geometry.value import value


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
    return StoredTensor(name, dtype, shape, Sections.of([Section(name, Box.whole(shape), 0, row_major(shape))]))


def part(name: str, canonical: str, dtype: DType, shape: tuple[int, ...], box: Box) -> StoredTensor:
    """A box of a canonical tensor, stored as a row-major tensor called `name`.

    canonical, shape: the name and the global shape of the canonical tensor. An empty box has a section only if the whole tensor is empty.
    """
    sections = [Section(canonical, box, 0, row_major(box.sizes))] if box.volume or 0 in shape else []
    return StoredTensor(name, dtype, box.sizes, Sections.of(sections))


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
        found = _sliced_section(section, stored.shape, steps, box, new_steps)
        if found is None:
            return None
        sections += found
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
