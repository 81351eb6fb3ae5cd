"""Repackings: the known ways in which an engine arranges the bytes of a weight anew after loading, under the weight's own name.

A weight is a matrix [rows, columns], or a stack of them ([experts, rows, columns]). Kernels for processors take it in panels of rows. In a
panel, `together` neighbours of a row stay neighbours, and those of all its rows follow each other:

    rows=2, together=2:     a b c d        a b e f  c d g h
                            e f g h   ->   i j m n  k l o p
                            i j k l
                            m n o p

A panel of all rows is the transposed matrix. The bytes are the same ones, so that an equal digest proves equal weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from reshard.geometry.value import value

if TYPE_CHECKING:
    from reshard.engine.views import LazyTensor

# The most elements that are read at a time.
_ELEMENTS = 1 << 21


class Repacking(Protocol):
    """A way to arrange a weight."""

    def parts(self, weight: LazyTensor) -> Iterator[npt.NDArray[Any]]:
        """The words of a weight as they lie in memory, in parts; none if its shape does not allow it."""


@value
class Widened:
    """A vector, such as a bias, in 32-bit floats: each value stays what it is."""

    def parts(self, weight: LazyTensor) -> Iterator[npt.NDArray[Any]]:
        """Its values."""
        if len(weight.shape) == 1 and weight.dtype.floating:
            yield weight.numpy().astype(np.float32)


@value
class Panels:
    """A matrix in panels of rows."""

    rows: int | None
    """The rows of a panel; the last panel may have fewer. None: all."""
    together: int
    """Neighbours of a row that stay neighbours."""

    def parts(self, weight: LazyTensor) -> Iterator[npt.NDArray[Any]]:
        """Its words, matrix by matrix and panel by panel."""
        # A weight of a convolution over one channel, [channels, 1, width], is a matrix of two axes.
        shape = tuple(size for size in weight.shape if size != 1)
        if len(shape) not in (2, 3) or shape[-1] % self.together:
            return
        for matrix in (weight[i] for i in range(shape[0])) if len(shape) == 3 else (weight,):
            yield from self._of_matrix(matrix, *shape[-2:])

    def _of_matrix(self, matrix: LazyTensor, rows: int, columns: int) -> Iterator[npt.NDArray[Any]]:
        if self.rows is None:
            width = max(1, _ELEMENTS // rows // self.together) * self.together
            for start in range(0, columns, width):
                yield self._arranged(matrix[..., start : start + width].words().reshape(rows, -1))
            return
        height = max(1, _ELEMENTS // columns // self.rows) * self.rows
        for start in range(0, rows, height):
            words = matrix[start : start + height].words().reshape(-1, columns)
            yield from (self._arranged(words[i : i + self.rows]) for i in range(0, len(words), self.rows))

    def _arranged(self, panel: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return panel.reshape(len(panel), -1, self.together).transpose(1, 0, 2).reshape(-1)
