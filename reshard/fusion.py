"""Stored tensors: what a file holds under one name, as sections that are boxes of canonical tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.boxes import Box, row_major
from reshard.dtypes import DType
from reshard.errors import CheckpointError
from reshard.splits import LocalPart


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


def constant(name: str, dtype: DType, shape: tuple[int, ...], element: bytes) -> StoredTensor:
    """A stored tensor that holds no weight: one element's bytes, repeated."""
    return StoredTensor(name, dtype, shape, (), element)


def stack(name: str, dtype: DType, parts: Sequence[tuple[str, LocalPart]]) -> StoredTensor:
    """The parts of several canonical tensors on top of each other along axis 0; padding rows follow each part's own rows.

    Raises: CheckpointError if the parts' other axes differ.
    """
    inner = parts[0][1].shape[1:]
    rows, sections = 0, []
    for canonical, part in parts:
        if part.shape[1:] != inner:
            raise CheckpointError(
                f"{list(part.shape)} and {list(parts[0][1].shape)} do not stack", where=canonical, why=f"They are fused as {name}"
            )
        if part.box is not None:
            # The local array's own strides, not the box's: the two differ only in axis 0, which never enters a stride.
            sections.append(Section(canonical, part.box, rows * math.prod(inner), row_major(part.shape)))
        rows += part.shape[0] if part.shape else 1
    shape = (rows, *inner) if parts[0][1].shape else ()
    return StoredTensor(name, dtype, shape, tuple(sections))
