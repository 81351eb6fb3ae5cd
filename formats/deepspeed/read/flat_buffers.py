"""The pieces of a parameter in the tensors of the files: in flat buffers, whole in one file, or as a copy in each rank's file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from reshard.containers.torch_zip import AnyTensor, LocatedTensor, Locations
from reshard.errors import CheckpointError
from reshard.geometry.boxes import flat_boxes, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Extent
from reshard.geometry.sections import Columns
from reshard.index.shards import PieceTable, Shards

from ..layout.partitions import FlatSlice
from ..layout.states import Shape


class FlatBuffer:
    """A flat buffer: the rows of elements of the ranks that share it, in order."""

    def __init__(self, rows: Mapping[int, AnyTensor], locations: Locations) -> None:
        self.rows = tuple(rows.values())
        """The rows."""
        self.paths = tuple(row.path for row in self.rows)
        """The file of each row: that of its rank, or a swap file. All parameters share the tuple."""
        self._ranks, self._locations = _column(rows), locations

    def __repr__(self) -> str:
        return f"<flat buffer of {len(self.rows)} rows, {self.dtype}>"

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.rows[0].dtype

    def check_size(self, needed: Sequence[int], what: str) -> None:
        """Raises CheckpointError if a row has another element type than the first, or fewer elements than `needed` says for it."""
        for row, elements in zip(self.rows, needed, strict=True):
            if row.shape[0] < elements or row.dtype != self.dtype:
                raise CheckpointError(
                    f"its {what} has {row.shape[0]:,} elements ({row.dtype}), but the parameters need {elements:,} ({self.dtype})",
                    where=row.path,
                    why="The file is from another save than param_shapes and the files beside it",
                    do="Copy that file from where the checkpoint was written",
                )

    def shards(self, parameter: FlatSlice) -> Shards:
        """The pieces of a parameter. Parameters with equal shapes and bounds share their columns."""
        offsets, sizes, runs, skips = boxes_of_runs(parameter.shape, parameter.bounds)
        rows = runs + parameter.first_rank if parameter.first_rank else runs
        strides, itemsize = row_major(parameter.shape), self.dtype.itemsize

        def extent(i: int) -> Extent:
            run = int(runs[i])
            row = self.rows[parameter.first_rank + run]
            element = (parameter.first_offset if run == 0 else parameter.later_offset) + int(skips[i])
            return Extent(row.path, self._locations.of(row) + element * itemsize, strides, self.dtype)

        table = PieceTable(
            paths=self.paths,
            offsets=offsets,
            sizes=sizes,
            files=rows,
            positions=np.broadcast_to(np.int64(parameter.first_offset * itemsize), len(rows)),
            extent=extent,
            ranks=self._ranks[rows],
        )
        return Shards(table)


@lru_cache(maxsize=4096)
def boxes_of_runs(shape: Shape, bounds: tuple[int, ...]) -> tuple[Columns, Columns, Columns, Columns]:
    """The boxes of the elements bounds[i]..bounds[i + 1] of a row-major tensor, for every i, in the order of the runs.

    Their offsets [n, ndim], their sizes [n, ndim], the run of each [n], and the elements of that run that lie before it [n].
    """
    rows = []
    for run, (start, stop) in enumerate(pairwise(bounds)):
        skip = 0
        for box in flat_boxes(shape, start, stop):
            rows.append((*box.offsets, *box.sizes, run, skip))
            skip += box.volume
    ndim = len(shape)
    table = np.array(rows, np.int64).reshape(len(rows), 2 * ndim + 2)
    offsets, sizes, runs, skips = (np.ascontiguousarray(columns) for columns in np.split(table, [ndim, 2 * ndim, 2 * ndim + 1], axis=1))
    return offsets, sizes, runs.reshape(-1), skips.reshape(-1)


def pieces_of_copies(copies: Mapping[int, AnyTensor], locations: Locations) -> Shards:
    """The pieces of a tensor that each of these ranks' files holds whole: one piece, or replicas. copies: by data-parallel rank."""
    tensors, shapes = list(copies.values()), [tensor.shape for tensor in copies.values()]

    def extent(i: int) -> Extent:
        return Extent(tensors[i].path, locations.of(tensors[i]), tensors[i].strides, tensors[i].dtype)

    positions = [at.byte_offset if isinstance(at, LocatedTensor) else at.member + at.skipped for at in tensors]
    sizes = np.array(shapes, np.int64).reshape(len(tensors), len(shapes[0]))
    table = PieceTable(
        paths=tuple(tensor.path for tensor in tensors),
        offsets=np.zeros_like(sizes),
        sizes=sizes,
        files=np.arange(len(tensors)),
        positions=np.array(positions, np.int64),
        extent=extent,
        ranks=_column(copies),
    )
    return Shards(table)


def _column(ranks: Iterable[int]) -> Columns:
    """Ranks as a column of `Shards`."""
    return np.array(list(ranks), np.int64)
