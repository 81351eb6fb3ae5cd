"""Stored tensors: the array that a file holds under one name, as sections that are boxes of canonical tensors."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.quantities import plural
from reshard.geometry.sections import NO_SECTIONS, Section, Sections


@dataclass(frozen=True, slots=True)
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
