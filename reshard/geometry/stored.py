"""Stored tensors: what a file holds under one name, as sections that are boxes of canonical tensors."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType, from_torch


@dataclass(frozen=True, slots=True)
class Section:
    """A box of canonical tensor `name` inside a stored tensor: the stored element it starts at, and the distance in stored
    elements between neighbours along each canonical axis."""

    name: str
    box: Box
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file holds under one name. Elements in no section hold `fill`, an element's bytes, repeated."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    sections: tuple[Section, ...]
    fill: bytes = b"\0"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def filled(self) -> int:
        """How many elements hold the fill."""
        return math.prod(self.shape) - sum(section.box.volume for section in self.sections)


def whole(name: str, dtype: DType, shape: tuple[int, ...]) -> StoredTensor:
    """A canonical tensor stored as it is."""
    return StoredTensor(name, dtype, shape, (Section(name, Box.whole(shape), 0, row_major(shape)),))


def part(name: str, canonical: str, dtype: DType, shape: tuple[int, ...], box: Box) -> StoredTensor:
    """A box of a canonical tensor of that shape, stored as a row-major tensor of its own; it may be empty."""
    sections = (Section(canonical, box, 0, row_major(box.sizes)),) if box.volume or 0 in shape else ()
    return StoredTensor(name, dtype, box.sizes, sections)


def count(name: str, number: int) -> StoredTensor:
    """A count of steps as torch's optimizers keep it: a 32-bit float without axes."""
    return constant(name, from_torch("float32", where=name), (), struct.pack("<f", number))


def constant(name: str, dtype: DType, shape: tuple[int, ...], element: bytes) -> StoredTensor:
    """A stored tensor that holds no weight: one element's bytes, repeated."""
    return StoredTensor(name, dtype, shape, (), element)
