"""Flat parameters: several tensors laid end to end in one long row of elements, of which every rank holds a run.

FSDP1 makes one per wrapped unit: the unit's parameters in the model's order, each row-major. With use_orig_params each starts at
a multiple of 16 bytes, and the end is padded so that all ranks hold equally much.
Source: torch/distributed/fsdp/_flat_param.py, FlatParamHandle._init_flat_param_and_metadata; measured on torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from reshard.containers.torch_zip import AnyTensor, UnlocatedTensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, flat_boxes, row_major

# FSDP aligns to 16 bytes of the dtype that it computes in, which the files do not name: 16, 8, 4 or 2 elements.
_ALIGNMENTS = (16, 8, 4, 2)


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter and the element of the flat parameter that it starts at."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def slots(parameters: Sequence[tuple[str, tuple[int, ...]]], elements: int, ranks: int, *, where: str) -> tuple[Slot, ...]:
    """Where the parameters lie in a flat parameter of that many elements, shared by that many ranks.

    Raises: CheckpointError if they do not fill it, neither end to end nor aligned, or if two alignments fit.
    """
    packed, end = _laid(parameters, 1)
    if end == elements:
        return packed
    fitting = {laid for alignment in _ALIGNMENTS for laid, stop in [_laid(parameters, alignment)] if -(-stop // ranks) * ranks == elements}
    if len(fitting) == 1:
        return fitting.pop()
    found = f"{len(parameters)} parameters, from {parameters[0][0]} to {parameters[-1][0]}" if parameters else "no parameters"
    raise CheckpointError(
        f"the flat parameter has {elements:,} elements; the model's {found}, have {end:,}"
        + (", and more than one alignment would explain the difference" if fitting else ", and no alignment explains the difference"),
        where=where,
        why="Names and shapes of a flat parameter are in the config only, and this one does not fit",
        do="Give the config that the model was trained with by --model DIR",
    )


def _laid(parameters: Sequence[tuple[str, tuple[int, ...]]], alignment: int) -> tuple[tuple[Slot, ...], int]:
    found, end = [], 0
    for name, shape in parameters:
        found.append(Slot(name, shape, -(-end // alignment) * alignment))
        end = found[-1].stop
    return tuple(found), end


def boxes_of(shape: tuple[int, ...], start: int, stored: AnyTensor, skip: int, count: int) -> Iterator[tuple[Box, AnyTensor]]:
    """The boxes of the elements start..start + count of a row-major tensor, which are the elements skip..skip + count of `stored`."""
    for box in flat_boxes(shape, start, start + count):
        yield box, _view(stored, skip, box.sizes, row_major(shape))
        skip += box.volume


def _view(stored: AnyTensor, skip: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> AnyTensor:
    nbytes = skip * stored.dtype.itemsize
    if isinstance(stored, UnlocatedTensor):
        return replace(stored, skipped=stored.skipped + nbytes, shape=sizes, strides=strides)
    return replace(stored, byte_offset=stored.byte_offset + nbytes, shape=sizes, strides=strides)
