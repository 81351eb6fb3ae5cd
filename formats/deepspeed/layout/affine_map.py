"""Affine maps: a model file's description of tensor-parallel splits by strided views.

    {"version": 1, "params": {<pattern over names>: {
        "logical_shape": shape of the whole parameter,
        "ranks": {tensor-parallel rank: {"pieces": [{"shape": sizes, "source": view of the whole, "dest": view of the rank's part,
                                                     "scale": 1.0}, ...]}}}}}

A view is (offset, strides) in elements. Each piece must be a box of both tensors. Source: deepspeed/checkpoint/affine.py (0.19.8).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard.containers.inert_pickle import Inert
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box, row_major

from .states import Shape

# A box of a rank's part, and the offsets of that box in the whole parameter.
Move = tuple[Box, tuple[int, ...]]


def attributes(value: Any) -> Mapping[Any, Any]:
    """The entries of a dict, or the attributes of an object such as SubparamShape; empty for anything else."""
    if isinstance(value, Inert):
        return value.state if isinstance(value.state, Mapping) else {}
    return value if isinstance(value, Mapping) else {}


def described_shape(description: Any) -> Shape:
    """The shape of the whole parameter."""
    return tuple(attributes(description).get("logical_shape") or ())


def described_moves(name: str, description: Any, parts: Sequence[Shape]) -> tuple[tuple[Move, ...], ...]:
    """For each tensor-parallel rank, where the boxes of its part lie in the whole parameter. parts: one shape per rank.

    Raises: CheckpointError for a piece that is scaled, or is not a box.
    """
    ranks, shape = attributes(description).get("ranks") or {}, described_shape(description)
    pieces = (attributes(ranks.get(rank, ranks.get(str(rank)))).get("pieces") or () for rank in range(len(parts)))
    return tuple(tuple(_moves(name, shape, rank, parts[rank], of_rank)) for rank, of_rank in enumerate(pieces))


def _moves(name: str, shape: Shape, rank: int, part: Shape, pieces: Iterable[Any]) -> Iterator[Move]:
    for piece in map(attributes, pieces):
        if piece.get("scale", 1.0) != 1.0:
            raise CheckpointError(
                f"its tensor-parallel rank {rank} holds the values times {piece['scale']}",
                where=name,
                why="Undoing the scale would change bits, and reshard copies bits",
                do="Convert the checkpoint with DeepSpeed's ds_to_universal first",
            )
        sizes = _numbers(piece.get("shape"))
        (whole_offset, whole_strides), (part_offset, part_strides) = _view(piece.get("source")), _view(piece.get("dest"))
        if sizes is None or whole_strides is None or part_strides is None or not len(sizes) == len(whole_strides) == len(part_strides):
            raise CheckpointError(
                f"the model file describes a piece of it on tensor-parallel rank {rank} without the shape and strides of a view",
                where=name,
                why="Its place in the whole parameter is not known",
                do="Copy the model files again",
            )
        if not math.prod(sizes):
            continue
        whole_box, part_box = box_of_view(shape, whole_offset, sizes, whole_strides), box_of_view(part, part_offset, sizes, part_strides)
        if whole_box is None or part_box is None or whole_box.sizes != part_box.sizes:
            raise CheckpointError(f"a piece of {sizes} elements on tensor-parallel rank {rank} is not a box of the whole", where=name)
        yield part_box, whole_box.offsets


def _numbers(value: Any) -> tuple[int, ...] | None:
    """The value if it is a list or tuple of non-negative whole numbers."""
    is_list = isinstance(value, tuple | list) and all(type(number) is int and number >= 0 for number in value)
    return tuple(value) if is_list else None


def _view(value: Any) -> tuple[int, tuple[int, ...] | None]:
    """The offset and the strides of a view; None in place of the strides if the value is not a view."""
    is_pair = isinstance(value, tuple | list) and len(value) == 2 and type(value[0]) is int and value[0] >= 0
    return (value[0], _numbers(value[1])) if is_pair else (0, None)


def box_of_view(shape: Shape, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Box | None:
    """The box of a row-major tensor that a strided view walks through in order; None if the view is not a box."""
    first = _coordinates(shape, offset)
    last = _coordinates(shape, offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)))
    if first is None or last is None or any(start > end for start, end in zip(first, last, strict=True)):
        return None
    box = Box(first, tuple(end - start + 1 for start, end in zip(first, last, strict=True)))
    return box if _merged_axes(box.sizes, row_major(shape)) == _merged_axes(sizes, strides) else None


def _coordinates(shape: Shape, offset: int) -> tuple[int, ...] | None:
    """The coordinates of an element of a row-major tensor; None if the element lies outside."""
    coordinates = []
    for stride in row_major(shape):
        coordinate, offset = divmod(offset, stride)
        coordinates.append(coordinate)
    is_inside = not offset and all(0 <= coordinate < size for coordinate, size in zip(coordinates, shape, strict=True))
    return tuple(coordinates) if is_inside else None


def _merged_axes(sizes: Iterable[int], strides: Iterable[int]) -> list[tuple[int, int]]:
    """(size, stride) per axis. Neighbouring axes that are contiguous count as one axis; axes of one element are left out."""
    axes: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    return axes
