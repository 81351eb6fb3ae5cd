"""Recorder: what happens to tensors while it is on.

Tensors on `meta` have no elements, but their views keep the storage, the offset and the strides, so that a copy says exactly which section
of which array goes where.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .strided import Shape, StridedCopy, copy_of

# New arrays that hold what another one holds.
_COPIES = {"clone", "_to_copy", "contiguous", "_reshape_copy", "view_copy", "lift_fresh_copy"}
# New arrays whose elements nobody has set.
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_FILLED = {"zeros": 0.0, "new_zeros": 0.0, "zeros_like": 0.0, "ones": 1.0, "new_ones": 1.0, "ones_like": 1.0}
# Operations in place that do not touch elements.
_VIEWS_IN_PLACE = {"detach_", "requires_grad_", "t_", "transpose_", "squeeze_", "unsqueeze_", "resize_", "set_", "as_strided_"}


@dataclass(frozen=True, slots=True)
class Write:
    """One write into an array. Sections are of arrays in memory."""

    time: int
    """Its number: a write with a larger number is later."""
    kind: Literal["copy", "fill", "real", "operation"]
    """copy: of another array. fill: one value. real: elements that the array itself has. operation: computed from checkpoint tensors."""
    copy: StridedCopy
    """The section that is written, and for a copy the section that is read."""
    source: int = 0
    """The storage that is read."""
    value: float = 0.0
    """The value of a fill."""
    operation: str = ""
    """The name of the operation, as of a function of one tensor that has been applied to what is copied."""
    dtype: str = ""
    """The element type that is read."""


@dataclass(slots=True)
class Array:
    """An array in memory: one storage, and what was written into it."""

    storage: object
    """Keeps the storage alive, so that no other one gets its number."""
    shape: Shape
    """The shape in which it was first seen as a whole."""
    itemsize: int
    """Bytes per element."""
    root: str = ""
    """The checkpoint tensor that it is; empty for others."""
    is_set: bool = False
    """Whether its elements were known when it was first seen."""
    writes: list[Write] = field(default_factory=list)
    """The writes, in order."""


def number_of(tensor: torch.Tensor) -> int:
    """The number of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def section(tensor: torch.Tensor) -> tuple[int, Shape, Shape]:
    """Where a tensor lies in its storage: offset, sizes and strides, in elements."""
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _is_view(func: Any) -> bool:
    """Whether an operation only makes a view of its input."""
    returns = func._schema.returns
    return bool(returns) and all(returned.alias_info is not None and not returned.alias_info.is_write for returned in returns)


class Recorder(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """Records copies, constants and operations between arrays. Checkpoint tensors are named with `root` before it is used."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.arrays: dict[int, Array] = {}
        self._time = 0
        # Operation -> its name; empty for those that only make views.
        self._names: dict[Any, str] = {}

    def root(self, tensor: torch.Tensor, name: str) -> None:
        """Call the array of this tensor a checkpoint tensor."""
        self.note(tensor, is_set=True).root = name

    def note(self, tensor: torch.Tensor, *, is_set: bool = True) -> Array:
        """The array of a tensor, made if it was not seen before. is_set: whether the elements of a new one are known."""
        number, storage = number_of(tensor), tensor.untyped_storage()
        array = self.arrays.get(number)
        if array is None:
            elements = storage.nbytes() // tensor.element_size()
            is_whole = tensor.is_contiguous() and elements == tensor.numel()
            shape = (tuple(tensor.shape) or (1,)) if is_whole else (elements,)
            array = self.arrays[number] = Array(storage, shape, tensor.element_size(), is_set=is_set)
        return array

    def _is_live(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's array holds something of the checkpoint, or is in no memory."""
        array = self.arrays.get(number_of(tensor))
        return array is not None and bool(array.root or any(write.kind in ("copy", "operation") for write in array.writes))

    def _write(self, target: torch.Tensor, kind: Any, **facts: Any) -> None:
        array = self.note(target, is_set=False)
        self._time += 1
        if array.itemsize != target.element_size():
            facts, kind = {"operation": "an element type of another size"}, "operation"
        where = section(target)
        array.writes.append(Write(self._time, kind, **{"copy": copy_of(where, where), **facts}))

    def _copy(self, target: torch.Tensor, source: torch.Tensor, operation: str = "") -> None:
        """Record target <- source, which is broadcast to the target's shape."""
        array = self.note(source)
        if source.shape != target.shape:
            source = source.expand(target.shape)
        if array.itemsize != source.element_size():
            self._write(target, "operation", operation="an element type of another size")
            return
        copy = copy_of(section(target), section(source))
        dtype = str(source.dtype).removeprefix("torch.")
        self._write(target, "copy", copy=copy, source=number_of(source), operation=operation, dtype=dtype)

    def _copy_of_known(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Record target <- a tensor that holds nothing of the checkpoint."""
        if target.device.type != "meta":
            self._write(target, "real")
        elif source.device.type == "meta" or number_of(source) in self.arrays:
            self._copy(target, source)
        elif source.numel() and bool((source == source.reshape(-1)[0]).all()):
            self._write(target, "fill", value=float(source.reshape(-1)[0]))
        else:
            self._write(target, "operation", operation="values that the model computes")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = "" if _is_view(func) else func._schema.name.removeprefix("aten::")
        if not name:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if name == "copy_":
            target, source = args[0], args[1]
            if target.device.type == source.device.type == "cpu":
                func(*args, **kwargs)
            self._copy(target, source) if source.device.type == "meta" or self._is_live(source) else self._copy_of_known(target, source)
            return target
        if name == "_to_copy" and args[0].device.type == "meta":
            kwargs = {**kwargs, "device": args[0].device}  # a scalar that is assigned to an element; its value is in no memory
        out = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name.endswith("_") and inputs and isinstance(args[0], torch.Tensor) and not name.startswith("_"):
            self._in_place(name, args)
            return out
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        known = {number_of(tensor) for tensor in inputs}
        live = [tensor for tensor in inputs if self._is_live(tensor)]
        for tensor in outputs:
            if tensor.numel() and number_of(tensor) not in known:
                self._new(name, tensor, args, live, inputs)
        return out

    def _in_place(self, name: str, args: Any) -> None:
        target = args[0]
        if name in _VIEWS_IN_PLACE:
            return
        if target.device.type != "meta" and not any(self._is_live(argument) for argument in args if isinstance(argument, torch.Tensor)):
            self._write(target, "real")
        elif name == "zero_":
            self._write(target, "fill", value=0.0)
        elif name == "fill_" and not isinstance(args[1], torch.Tensor):
            self._write(target, "fill", value=float(args[1]))
        else:
            self._write(target, "operation", operation=name)

    def _new(self, name: str, tensor: torch.Tensor, args: Any, live: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """Record what a new array holds."""
        if name in _EMPTY:
            self.note(tensor, is_set=False)
        elif name in _FILLED:
            self._write(tensor, "fill" if tensor.device.type == "meta" else "real", value=_FILLED[name])
        elif name in ("full", "new_full", "full_like") and tensor.device.type == "meta":
            self._write(tensor, "fill", value=float(args[2] if name == "new_full" else args[1]))
        elif name in _COPIES and inputs:
            source = inputs[0]
            if live or source.device.type == "meta":
                self._copy(tensor, source if source.shape == tensor.shape else source.reshape(tensor.shape))
            else:
                self._copy_of_known(tensor, source)
        elif name in ("cat", "stack") and (live or tensor.device.type == "meta"):
            self._joined(name, tensor, args)
        elif live:
            same = next((operand for operand in live if operand.shape == tensor.shape), None)
            numbers = [str(number) for number in args[1:] if isinstance(number, int | float)]
            called = f"{name}({', '.join(['x', *numbers])}) in {str(live[0].dtype).removeprefix('torch.')}"
            if same is not None and len(live) == 1:
                self._copy(tensor, same, called)
            else:
                self._write(tensor, "operation", operation=called)
        elif tensor.device.type == "meta":
            self._write(tensor, "operation", operation=f"{name}, computed by the model")

    def _joined(self, name: str, tensor: torch.Tensor, args: Any) -> None:
        axis, start = (args[1] if len(args) > 1 else 0), 0
        for part in args[0]:
            if name == "stack":
                self._copy(tensor.select(axis, start), part)
                start += 1
            elif part.numel():
                self._copy(tensor.narrow(axis, start, part.shape[axis]), part)
                start += part.shape[axis]
