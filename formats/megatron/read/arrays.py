"""The array of the model that a stored tensor holds, and where the canonical tensors lie in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.adapter.state_dicts import elements_of
from reshard.containers.distributed_tensors import Decoder, LocalTensor
from reshard.containers.torch_zip import AnyTensor, is_plain_tensor
from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.boxes import Box, flat_boxes, row_major
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.sections import Section

from ..layout.chunks import ChunkTensor
from ..layout.tensors import MegatronTensor

Shape = tuple[int, ...]


def stored_shard(tensor: MegatronTensor, stored_shape: Shape, tp: int, tp_rank: int, where: str) -> Mosaic:
    """The array of the model that a rank's stored tensor of this shape holds.

    Some Megatron versions split a tensor that others replicate (the down projections of latent attention): the shape tells which.
    Raises: CheckpointError if the shape is neither the whole tensor's nor the shard's, nor has fewer axes and as many elements.
    """
    if tensor.axis is not None and tp > 1 and stored_shape == tensor.shape:
        return tensor.whole
    try:
        array = tensor.shard(tp, tp_rank)
    except ValueError as error:
        raise CheckpointError(f"{tp} tensor-parallel ranks cannot share it: {error}", where=where) from None
    has_fewer_axes = len(stored_shape) < len(array.shape) and math.prod(stored_shape) == math.prod(array.shape)
    if stored_shape != array.shape and not has_fewer_axes:
        raise wrong_shape(array.shape, stored_shape, where)
    return array


def wrong_shape(shape: Shape, stored_shape: Shape, where: str) -> CheckpointError:
    """The error for a stored tensor that has another shape than the model's."""
    return CheckpointError(
        f"its stored shape is {list(stored_shape)}, the model's shape is {list(shape)}",
        where=where,
        why="The settings, or the config given with `model=`, belong to another model, or the file belongs to another save",
        do="Give the config that this model was trained with by `model=DIR`",
    )


def shared_expert(where: str) -> UnsupportedError:
    """The error for an adapter of an expert that tensor-parallel ranks share."""
    return UnsupportedError(
        "tensor-parallel ranks shared the adapter of this expert",
        where=where,
        why="Megatron Bridge (0.3.1, and main of August 2026) computes something else than the product of the two factors there",
        do="Train experts whole on each rank (expert tensor-parallel size 1), or leave the experts out",
    )


def local_tensors(array: Mosaic, stored: AnyTensor, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, LocalTensor]]:
    """(name, its boxes) of every canonical tensor in a stored tensor that holds this array. shapes: the canonical tensors' global shapes.

    Raises: CheckpointError if the two have different shapes and the stored tensor is not contiguous.
    """
    if array.shape != stored.shape and stored.strides != row_major(stored.shape):
        raise CheckpointError(f"a tensor with strides {stored.strides} cannot be viewed as {list(array.shape)}", where=stored.path)
    boxes: dict[str, list[tuple[Box, AnyTensor]]] = {}
    for section in array.sections(stored.strides if array.shape == stored.shape else row_major(array.shape)):
        boxes.setdefault(section.name, []).append((section.box, elements_of(stored, section.start, section.box.sizes, section.strides)))
    for name, shards in boxes.items():
        yield name, LocalTensor(stored.dtype, shapes[name], tuple(shards))


def state_tensors(parameter: ChunkTensor, stored: Any, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, LocalTensor]]:
    """(name, its boxes) of every canonical tensor in a tensor of optimizer state. shapes: the weights' global shapes.

    A state of another shape than its parameter, such as a step count, belongs to each canonical tensor that is fused in the parameter, and
    so does what stands for an array of another class.
    """
    if is_plain_tensor(stored) and stored.shape == parameter.shape:
        return local_tensors(parameter.array, stored, shapes)
    local = Decoder(parameter.name).decode("its state", stored)
    return ((name, local) for name in parameter.array.names if local)


def whole_tensor(stored: AnyTensor) -> LocalTensor:
    """A stored tensor as a whole tensor, in one box."""
    return LocalTensor(stored.dtype, stored.shape, ((Box.whole(stored.shape), stored),))


def flat_sections(array: Mosaic, start: int, stop: int, position: int) -> Iterator[Section]:
    """Elements start..stop of an array's row-major memory, as sections of a flat tensor. Element `start` is element `position` there."""
    for box in flat_boxes(array.shape, start, stop):
        part = array
        for axis, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.cut(axis, offset, offset + size)
        # Each box is contiguous in the array's memory, so the sections of the part are row-major.
        yield from part.sections(row_major(part.shape)).moved(position)
        position += box.volume
