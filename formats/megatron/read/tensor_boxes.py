"""From a stored tensor and the array that it is to the boxes of canonical tensors, for the collector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from reshard.containers.distributed_tensors import LocalTensor
from reshard.containers.torch_zip import AnyTensor, StoredTensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, flat_boxes, row_major
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.stored import Section

from ..layout.tensors import MegatronTensor

Shape = tuple[int, ...]


def array_of(tensor: MegatronTensor, stored: Shape, tp: int, rank: int, where: str) -> Mosaic:
    """The array of a rank that a stored tensor of that shape is.

    What Megatron cuts in one version and keeps whole in another (MLA's down projections) is told apart by its shape.
    Raises: CheckpointError if it is neither.
    """
    if tensor.axis is not None and tp > 1 and stored == tensor.shape:
        return tensor.whole
    try:
        array = tensor.of_rank(tp, rank)
    except ValueError as error:
        raise CheckpointError(f"{tp} tensor-parallel ranks cannot share it: {error}", where=where) from None
    if fits(array, stored):
        return array
    raise misfit(stored, array, where)


def misfit(stored: Shape, array: Mosaic, where: str) -> CheckpointError:
    return CheckpointError(
        f"it is stored as {list(stored)}, and of this model a rank holds {list(array.shape)}",
        where=where,
        why="The settings, or the config given with --model, are of another model, or a file is of another save",
        do="Give the config that this model was trained with by --model DIR",
    )


def fits(array: Mosaic, stored: Shape) -> bool:
    """Whether a stored tensor of that shape can be the array: it has its shape, or is its memory under another one."""
    return array.shape == stored or (len(array.shape) > len(stored) and math.prod(array.shape) == math.prod(stored))


def pieces(array: Mosaic, stored: AnyTensor) -> Iterator[tuple[str, Box, AnyTensor]]:
    """Every box of a canonical tensor in a stored one: its name, itself, and its bytes.

    Raises: CheckpointError if the array is the memory of the tensor, and that is not contiguous.
    """
    strides = stored.strides
    if array.shape != stored.shape:
        if stored.strides != row_major(stored.shape):
            raise CheckpointError(f"a tensor with strides {stored.strides} cannot be viewed as {list(array.shape)}", where=stored.path)
        strides = row_major(array.shape)
    for section in array.sections(strides):
        yield section.name, section.box, view(stored, section.start, section.box.sizes, section.strides)


def flat_sections(array: Mosaic, start: int, stop: int, at: int) -> Iterator[Section]:
    """The elements start..stop of an array's row-major memory as sections of a run that has them from its element `at` on."""
    for box in flat_boxes(array.shape, start, stop):
        part = array
        for axis, (begin, width) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.cut(axis, begin, begin + width)
        # The box is itself a run of the memory, so it is row-major.
        for section in part.sections(row_major(part.shape)):
            yield Section(section.name, section.box, at + section.start, section.strides)
        at += box.volume


def view(stored: AnyTensor, start: int, sizes: Shape, strides: Shape) -> AnyTensor:
    """Elements of a stored tensor, from element `start` of its memory on."""
    skipped = start * stored.dtype.itemsize
    if isinstance(stored, StoredTensor):
        return replace(stored, byte_offset=stored.byte_offset + skipped, shape=sizes, strides=strides)
    return replace(stored, skipped=stored.skipped + skipped, shape=sizes, strides=strides)


def locals_of(array: Mosaic, stored: AnyTensor, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, LocalTensor]]:
    """The parts of canonical tensors that a stored one holds, by name."""
    found: dict[str, list[tuple[Box, AnyTensor]]] = {}
    for name, box, held in pieces(array, stored):
        found.setdefault(name, []).append((box, held))
    for name, shards in found.items():
        yield name, LocalTensor(stored.dtype, shapes[name], tuple(shards))
