"""Route: where one canonical tensor of a plan is read, and where it is written."""

from __future__ import annotations

from reshard.geometry.dtypes import DType
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.index.index import Tensor

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
        return self.source.dtype is not self.target.dtype and self.source.dtype != self.target.dtype

    @property
    def scaled_by(self) -> tuple[str, ...]:
        """The names of the stored tensors beside its codes, if it is dequantized."""
        return tuple(tensor.name for tensor in self.source.stored[1:])

    @property
    def quantized_by(self) -> str:
        """The recipe by which it is computed from a weight; empty if it is not."""
        return self.source.derivation.recipe if self.source.derivation else ""

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element types that are read and written."""
        return (*self.source.dtypes, self.target.dtype)

    def __repr__(self) -> str:
        pieces = f"{plural(len(self.source.shards), 'piece')} -> {plural(len(self.target.shards), 'piece')}"
        return f"Route({self.name!r}, {self.source.dtype} -> {self.target.dtype}, {list(self.source.shape)}, {pieces})"
