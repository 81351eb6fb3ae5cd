"""Where the elements of a parameter lie in the flat buffers that data-parallel ranks share.

ZeRO-1, 2   Parameters lie end to end, in the order of param_shapes. The buffer is padded and split into equal rows, one per rank:

                | q_proj          | k_proj | norm | up_proj ......... | padding |
                | rank 0               | rank 1                | rank 2         |

ZeRO-3      Each parameter is split into parts of ceil(n / ranks) elements. A rank's row is its parts, end to end. All parts have the
            same size: where the last ranks have fewer elements, uninitialized memory fills the rest.

                rank 0 | q_proj 0..k  | k_proj 0..m  | ...
                rank 1 | q_proj k..2k | k_proj m..2m | ...

Source: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py; measured on 0.14.5, 0.16.9 and 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from reshard.geometry.value import value

from .states import Parameters, Shape
from .tag import mixed_saves


@value
class FlatSlice:
    """One parameter in a flat buffer, as runs of its elements: one run per rank, on consecutive ranks."""

    name: str
    """The parameter."""
    shape: Shape
    """Its shape."""
    bounds: tuple[int, ...]
    """Run i holds the elements bounds[i]..bounds[i + 1] of the row-major parameter."""
    first_rank: int
    """Run i lies on rank first_rank + i of the ranks that share the buffer."""
    first_offset: int
    """The element of its rank's row at which the first run starts."""
    later_offset: int
    """The element of its rank's row at which every later run starts."""


def zero2_slices(parameters: Parameters, alignments: Sequence[int], partition: int, ranks: int, *, where: str) -> Iterator[FlatSlice]:
    """A group's parameters in a buffer of `ranks` rows with `partition` elements each (ZeRO-1, 2).

    alignments: elements of padding after each parameter.
    Raises: CheckpointError if the parameters do not fit.
    """
    start = 0
    for number, (name, shape) in enumerate(parameters):
        elements = math.prod(shape)
        stop = start + elements
        if stop > partition * ranks:
            raise mixed_saves(
                f"it ends at element {stop:,} of its group's row, and {ranks} ranks with {partition:,} elements each share that row",
                f"{name} in {where}",
                "param_shapes and the optimizer's flat buffers are from different saves",
            )
        first_rank = start // partition if elements else 0
        edges = range((first_rank + 1) * partition, stop, partition) if elements else ()
        bounds = (0, *(edge - start for edge in edges), elements)
        yield FlatSlice(name, shape, bounds, first_rank, first_offset=start - first_rank * partition, later_offset=0)
        start = stop + (alignments[number] if number < len(alignments) else 0)


def whole_slices(slices: Sequence[FlatSlice], ranks: int) -> tuple[list[FlatSlice], list[int]]:
    """A group's parameters in rows that hold, whole and end to end, every parameter of which a rank has an element; and the rows' lengths.

    So lies the momentum of DeepSpeed's Muon (ZeRO-1, 2 without offload), whose updates are of whole matrices. slices: the result of
    `zero2_slices`. Source: deepspeed/runtime/zero/stage_1_and_2.py (_muon_momentum_buffer) of 0.19.8.
    """
    lengths = [0] * ranks
    whole: list[FlatSlice] = []
    for parameter in slices:
        elements, first = math.prod(parameter.shape), parameter.first_rank
        whole.append(FlatSlice(parameter.name, parameter.shape, (0, elements), first, lengths[first], later_offset=0))
        for rank in range(first, first + len(parameter.bounds) - 1):
            lengths[rank] += elements
    return whole, lengths


def zero3_slices(parameters: Parameters, ranks: int) -> Iterator[FlatSlice]:
    """A sub-group's parameters in the rows of `ranks` ranks (ZeRO-3)."""
    start = 0
    for name, shape in parameters:
        yield zero3_slice(name, shape, ranks, start)
        start += zero3_part_size(shape, ranks)


def zero3_slice(name: str, shape: Shape, ranks: int, start: int = 0) -> FlatSlice:
    """A parameter split over `ranks` ranks; its part starts at element `start` of each rank's row (ZeRO-3)."""
    return FlatSlice(name, shape, _zero3_bounds(math.prod(shape), ranks), first_rank=0, first_offset=start, later_offset=start)


@lru_cache(maxsize=4096)
def _zero3_bounds(elements: int, ranks: int) -> tuple[int, ...]:
    part = -(-elements // ranks)
    return tuple(min(rank * part, elements) for rank in range(ranks + 1))


def zero3_part_size(shape: Shape, ranks: int) -> int:
    """How many elements of each rank's row a parameter takes, padding included (ZeRO-3)."""
    return -(-math.prod(shape) // ranks)
