"""Optimizer state in 8 or 4 bits, as torchao pickles it: a class around codes, a scale for each block, and mostly a table of values.

    OptimState8bit    codes U8 of the state's shape                                    value = qmap[code] * scale of the block
    OptimState4bit    codes U8 [elements / 2], the first of two in the high bits       value = qmap[code] * scale of the block
    OptimStateFp8     codes F8_E4M3 of the state's shape                               value = code * scale of the block

A block is a run of elements of the rank's part, in row-major order. Source: torchao/optim/subclass_8bit.py and its neighbours, 0.18.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from reshard.containers.inert_pickle import Inert
from reshard.containers.torch_zip import AnyTensor, is_plain_tensor
from reshard.geometry.boxes import Box, Shape
from reshard.geometry.dtypes import DType
from reshard.geometry.value import value

# By class: the values of one code.
_CLASSES = {"OptimState8bit": 1, "OptimState4bit": 2, "OptimStateFp8": 1}


@value
class PackedState:
    """The part of a state that one instance holds."""

    class_name: str
    """The class, with its module."""
    shape: Shape
    """The shape of the part, in elements."""
    stored: Mapping[str, AnyTensor]
    """The stored tensors: "codes", "scale", and mostly "qmap"."""
    block: int
    """The number of elements with the same scale."""
    per_code: int
    """The number of elements in a code: with more than one, codes have one axis."""

    @classmethod
    def of(cls, instance: Any) -> PackedState | None:
        """The state in an instance of one of the classes; None for any other value, or if its tensors contradict one another."""
        per_code = _CLASSES.get(instance.class_name.rpartition(".")[2]) if isinstance(instance, Inert) else None
        shape = instance.args[2] if per_code and len(instance.args) > 2 else None
        if not per_code or not isinstance(shape, tuple) or not all(type(size) is int and size > 0 for size in shape):
            return None
        stored = {name: part for name in ("codes", "scale", "qmap") if (part := instance.get(name)) is not None}
        if not all(map(is_plain_tensor, stored.values())) or not {"codes", "scale"} <= stored.keys():
            return None
        elements, codes, scale = math.prod(shape), stored["codes"].shape, stored["scale"].shape
        if len(scale) != 1 or scale[0] < 1 or codes != (shape if per_code == 1 else (elements // per_code,)):
            return None
        block = elements // scale[0]
        is_whole = block * scale[0] == elements and block % per_code == 0
        return cls(instance.class_name, shape, stored, block, per_code) if is_whole else None

    def layout(self, shape: Shape) -> dict[str, tuple[DType, Shape]] | None:
        """The element type and the shape of each stored tensor of a whole state of the given shape; None if blocks do not fill it."""
        boxes = self.boxes(Box.whole(shape), shape)
        return None if boxes is None else {name: (self.stored[name].dtype, box.sizes) for name, box in boxes.items()}

    def boxes(self, box: Box, shape: Shape) -> dict[str, Box] | None:
        """The box of each stored tensor in that of a whole state of the given shape, for the part at `box`; None if the part is not whole
        rows that begin and end with blocks."""
        start = box.offsets[0] * math.prod(shape[1:]) if shape else 0
        if box.sizes[1:] != shape[1:] or start % self.block or box.volume % self.block:
            return None

        def run(per: int) -> Box:
            return Box((start // per,), (box.volume // per,))

        boxes = {"codes": box if self.per_code == 1 else run(self.per_code), "scale": run(self.block)}
        return {name: boxes.get(name) or Box.whole(part.shape) for name, part in self.stored.items()}
