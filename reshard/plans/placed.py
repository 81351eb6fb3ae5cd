"""Placed tensors: stored tensors at their place in a file."""

from __future__ import annotations

from reshard.geometry.dtypes import DType
from reshard.geometry.sections import Pattern
from reshard.geometry.stored import StoredTensor
from reshard.geometry.value import value


@value
class PlacedTensor:
    """A stored tensor in a file."""

    tensor: StoredTensor
    """The tensor."""
    byte_offset: int
    """Where it starts in the file."""


@value(eq=False)
class FileSections:
    """Sections of one or more tensors of a file."""

    names: tuple[str, ...]
    """[n]: the canonical tensor of each section."""
    pattern: Pattern
    """Where they lie. Starts count from `byte_offset`."""
    dtype: DType
    """The element type of the tensors."""
    byte_offset: int
    """The byte of the file from which starts count."""


Literal = tuple[int, bytes]
"""A range of framing: (byte offset, bytes)."""
