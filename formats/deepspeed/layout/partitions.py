"""Where the elements of a parameter lie in the flat buffers that data-parallel ranks share.

ZeRO-1, 2   parameters end to end, in the order of param_shapes; the row is padded and cut into equal partitions, one per rank:

                | q_proj          | k_proj | norm | up_proj ......... | padding |
                | rank 0               | rank 1                | rank 2         |

ZeRO-3      every parameter is cut for itself into parts of ceil(n / ranks) elements; a rank's row is its parts, end to end. A part is
            always whole: what the last ranks have not is filled with whatever was in memory, and belongs to nothing.

                rank 0 | q_proj 0..k | k_proj 0..m | ...
                rank 1 | q_proj k..2k | k_proj m..2m | ...

Source: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py; measured on 0.14.5, 0.16.9 and 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from reshard.containers.torch_zip import AnyTensor, Locations, StoredTensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import flat_boxes, row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Extent
from reshard.index.shards import Columns, Shards

from .states import Parameters, Shape


@dataclass(frozen=True, slots=True)
class Slice:
    """A parameter's runs of elements: run i is elements bounds[i]..bounds[i + 1], on the (first + i)-th rank of those that share it.

    start: where the first run starts in its rank's row; then: where all others start in theirs.
    """

    name: str
    shape: Shape
    bounds: tuple[int, ...]
    first: int
    start: int
    then: int


def slices_of_stage_2(parameters: Parameters, alignments: Sequence[int], partition: int, ranks: int, *, where: str) -> Iterator[Slice]:
    """A group's parameters in its row of `ranks` partitions, each `partition` elements long.

    alignments: elements of padding after each parameter. Raises: CheckpointError if the parameters do not fit.
    """
    at = 0
    for number, (name, shape) in enumerate(parameters):
        numel = math.prod(shape)
        if at + numel > partition * ranks:
            raise CheckpointError(
                f"it ends at element {at + numel:,} of its group's row, which {ranks} ranks with {partition:,} elements each share",
                where=f"{name} in {where}",
                why="param_shapes and the optimizer's flat buffers are from different saves",
                do="Keep the files of one save only",
            )
        first = at // partition if numel else 0
        cuts = range((first + 1) * partition, at + numel, partition) if numel else ()
        yield Slice(name, shape, (0, *(cut - at for cut in cuts), numel), first, at - first * partition, 0)
        at += numel + (alignments[number] if number < len(alignments) else 0)


def slices_of_stage_3(parameters: Parameters, ranks: int) -> Iterator[Slice]:
    """A sub-group's parameters in every rank's row."""
    at = 0
    for name, shape in parameters:
        part = part_of_stage_3(shape, ranks)
        yield Slice(name, shape, tuple(min(i * part, math.prod(shape)) for i in range(ranks + 1)), 0, at, at)
        at += part


def part_of_stage_3(shape: Shape, ranks: int) -> int:
    """How many elements every rank has of a parameter, padding included."""
    return -(-math.prod(shape) // ranks)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A flat buffer: the pieces of it that the ranks' files hold, in order."""

    paths: tuple[str, ...]
    ranks: Columns
    tensors: tuple[AnyTensor, ...]
    locations: Locations

    @property
    def dtype(self) -> DType:
        return self.tensors[0].dtype

    def check(self, needed: Sequence[int], what: str) -> None:
        """Raises CheckpointError unless each rank's piece has at least so many elements, all of one type."""
        for path, tensor, least in zip(self.paths, self.tensors, needed, strict=True):
            if tensor.shape[0] < least or tensor.dtype != self.dtype:
                raise CheckpointError(
                    f"its {what} has {tensor.shape[0]:,} elements ({tensor.dtype}), {least:,} ({self.dtype}) are needed",
                    where=path,
                    why="The file is from another save than param_shapes and the files beside it",
                    do="Copy that file from where the checkpoint was written",
                )

    def shards(self, cut: Slice) -> Shards:
        """A parameter's pieces. Those of parameters that are cut alike share their columns."""
        runs = cut_of(cut.shape, cut.bounds)
        files = runs.runs + cut.first if cut.first else runs.runs
        strides, itemsize = row_major(cut.shape), self.dtype.itemsize

        def extent(i: int) -> Extent:
            run = int(runs.runs[i])
            rank = cut.first + run
            skipped = (cut.start if run == 0 else cut.then) + int(runs.skips[i])
            start = self.locations.of(self.tensors[rank])
            return Extent(self.paths[rank], start + skipped * itemsize, strides, self.dtype)

        near = np.int64(cut.start * itemsize)
        return Shards(
            self.paths,
            runs.offsets,
            runs.sizes,
            files,
            np.broadcast_to(near, len(files)),
            extent,
            ranks=self.ranks[files],
        )


def ranks_of(values: Mapping[int, object]) -> Columns:
    """The ranks that something is known of, as a column."""
    return np.array(list(values), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The boxes of runs of elements: [n, ndim] offsets and sizes, the run of each box, and the elements of the run before it."""

    offsets: Columns
    sizes: Columns
    runs: Columns
    skips: Columns


@lru_cache(maxsize=4096)
def cut_of(shape: Shape, bounds: tuple[int, ...]) -> Cut:
    """The boxes of a row-major tensor's elements bounds[i]..bounds[i + 1], for every i."""
    rows = []
    for run, (start, stop) in enumerate(pairwise(bounds)):
        at = 0
        for box in flat_boxes(shape, start, stop):
            rows.append((*box.offsets, *box.sizes, run, at))
            at += box.volume
    table = np.array(rows, np.int64).reshape(len(rows), 2 * len(shape) + 2)
    ndim = len(shape)
    offsets, sizes, runs, skips = (np.ascontiguousarray(column) for column in np.split(table, [ndim, 2 * ndim, 2 * ndim + 1], axis=1))
    return Cut(offsets, sizes, runs.reshape(-1), skips.reshape(-1))


def on_every_rank(tensors: Mapping[int, AnyTensor], paths: Mapping[int, str], locations: Locations) -> Shards:
    """A tensor of which every rank's file holds a copy: a step count."""
    kept = list(tensors.values())
    order = tuple(paths[rank] for rank in tensors)
    shape = kept[0].shape

    def extent(i: int) -> Extent:
        return Extent(order[i], locations.of(kept[i]), kept[i].strides, kept[i].dtype)

    return Shards(
        order,
        np.zeros((len(kept), len(shape)), np.int64),
        np.tile(np.array(shape, np.int64), (len(kept), 1)),
        np.arange(len(kept)),
        np.zeros(len(kept), np.int64),
        extent,
        ranks=ranks_of(tensors),
    )


def as_it_is(tensor: AnyTensor, rank: int, locations: Locations) -> Shards:
    """A tensor that a file holds whole."""

    def extent(_: int) -> Extent:
        return Extent(tensor.path, locations.of(tensor), tensor.strides, tensor.dtype)

    near = tensor.byte_offset if isinstance(tensor, StoredTensor) else tensor.member + tensor.skipped
    return Shards(
        (tensor.path,),
        np.zeros((1, len(tensor.shape)), np.int64),
        np.array([tensor.shape], np.int64).reshape(1, -1),
        np.zeros(1, np.int64),
        np.array([near], np.int64),
        extent,
        ranks=np.array([rank], np.int64),
    )


def flat_part(tensor: AnyTensor, shape: Shape, locations: Locations) -> Shards:
    """A parameter that lies whole in a file as one row of its elements."""
    row = Row((tensor.path,), np.zeros(1, np.int64), (tensor,), locations)
    return row.shards(Slice("", shape, (0, math.prod(shape)), 0, 0, 0))
