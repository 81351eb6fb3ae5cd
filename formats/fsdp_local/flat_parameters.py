"""Flat parameters: the parameters of a wrapped unit laid end to end in one row of elements. Each rank holds a run of that row.

    | parameter a      | pad | parameter b                | pad | c | pad to a multiple of the ranks |
    | rank 0                | rank 1                | rank 2                | rank 3               |

The parameters are in the model's order, each row-major. With use_orig_params each starts at a multiple of 16 bytes, and the end is padded
so that all ranks hold the same number of elements.
Source: torch/distributed/fsdp/_flat_param.py, FlatParamHandle._init_flat_param_and_metadata; measured on torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from reshard.adapter.state_dicts import elements_of
from reshard.containers.distributed_tensors import LocalTensor
from reshard.containers.torch_zip import AnyTensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Shape, flat_boxes, row_major
from reshard.geometry.value import value

# FSDP aligns to 16 bytes of the dtype that it computes in, which the files do not name: 16, 8, 4 or 2 elements.
_ALIGNMENTS = (16, 8, 4, 2)


@value
class Slot:
    """The place of a parameter in a flat parameter."""

    name: str
    """The parameter's name."""
    shape: Shape
    """The parameter's shape."""
    start: int
    """The element of the flat parameter at which it starts."""

    @property
    def stop(self) -> int:
        """The element of the flat parameter after its last one."""
        return self.start + math.prod(self.shape)


@value
class FlatRun:
    """Consecutive elements of a flat parameter, as one rank's file holds them."""

    rank: int
    """The rank."""
    path: str
    """Its file."""
    start: int
    """The first element, counted in the flat parameter."""
    stored: AnyTensor
    """Where the file holds them."""

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.stored.shape)


@value
class FlatParameter:
    """A row of elements that the ranks share. A parameter that is kept under its own name is a row with one slot."""

    slots: tuple[Slot, ...]
    """The parameters in it, by start."""
    runs: tuple[FlatRun, ...]
    """The runs of the ranks."""

    def parts(self, runs: Iterable[FlatRun]) -> Iterator[tuple[str, FlatRun, LocalTensor]]:
        """(parameter, run, boxes) for each parameter with elements in a run."""
        for run in runs:
            for slot in self.slots:
                start, stop = max(slot.start, run.start), min(slot.stop, run.start + run.count)
                if start < stop:
                    skip, shards = start - run.start, []
                    for box in flat_boxes(slot.shape, start - slot.start, stop - slot.start):
                        shards.append((box, elements_of(run.stored, skip, box.sizes, row_major(slot.shape))))
                        skip += box.volume
                    yield slot.name, run, LocalTensor(run.stored.dtype, slot.shape, tuple(shards))

    def counts(self, ranks: Iterable[int]) -> Shape:
        """The number of elements that each rank holds."""
        return tuple(sum(run.count for run in self.runs if run.rank == rank) for rank in ranks)


def find_slots(parameters: Sequence[tuple[str, Shape]], elements: int, ranks: int, *, where: str) -> tuple[Slot, ...]:
    """The slots of these parameters, in order, in a flat parameter of `elements` elements that `ranks` ranks share.

    Raises: CheckpointError if the parameters fill it neither end to end nor aligned, or if several alignments fit.
    """
    packed, end = _aligned(parameters, 1)
    if end == elements:
        return packed
    aligned = (_aligned(parameters, alignment) for alignment in _ALIGNMENTS)
    fitting = {slots for slots, stop in aligned if -(-stop // ranks) * ranks == elements}
    if len(fitting) == 1:
        return fitting.pop()
    members = f"{len(parameters)} parameters, from {parameters[0][0]} to {parameters[-1][0]}" if parameters else "no parameters"
    raise CheckpointError(
        f"the flat parameter has {elements:,} elements; the model's {members}, have {end:,}"
        + (", and more than one alignment would explain the difference" if fitting else ", and no alignment explains the difference"),
        where=where,
        why="Only the config tells the names and shapes in a flat parameter, and this config does not fit",
        do="Give the config that the model was trained with by `model=DIR`",
    )


def _aligned(parameters: Sequence[tuple[str, Shape]], alignment: int) -> tuple[tuple[Slot, ...], int]:
    """The slots if each starts at a multiple of `alignment` elements, and the element after the last one."""
    slots, end = [], 0
    for name, shape in parameters:
        slots.append(Slot(name, shape, -(-end // alignment) * alignment))
        end = slots[-1].stop
    return tuple(slots), end
