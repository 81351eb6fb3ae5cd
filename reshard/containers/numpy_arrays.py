"""Arrays of numpy in a pickle, where their elements are bytes among the other values:

    _reconstruct(class, (0,), b"b"), then the state (version, shape, dtype, is Fortran order, elements)
    _frombuffer(elements, dtype, shape, "C" or "F")     protocol 5
    scalar(dtype, elements)

dtype is the call dtype("f4", False, True) with the state (3, byte order, ...); for types of ml_dtypes, such as bfloat16, the first argument
is their class. Arrays of objects, texts, dates and records, masked arrays and big-endian ones stay stand-ins: no type of torch holds their
elements.
Source: array_reduce in numpy/_core/src/multiarray/methods.c, and numpy/_core/numeric.py; measured on numpy 2.4 with protocols 2 to 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from reshard.containers.inert_pickle import Inert, NestedTuple
from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import DType, from_numpy

Make = Callable[[bytes, DType, tuple[int, ...], tuple[int, ...]], object]
"""(elements, element type, shape, strides in elements) -> what stands for the array; None: nothing."""

# Limits the nesting that is followed. An array that is nested deeper stays a stand-in.
_DEEPEST = 32


def with_arrays(root: Any, make: Make) -> Any:
    """The root object of a pickle with what `make` returns in place of each array of numpy. Containers are changed in place."""
    done: dict[int, tuple[Any, Any]] = {}

    def walk(value: Any, depth: int) -> Any:
        if not isinstance(value, dict | list | tuple | Inert) or depth > _DEEPEST:
            return value
        if id(value) not in done:
            done[id(value)] = value, value  # a container can hold itself
            done[id(value)] = value, replaced(value, depth + 1)
        return done[id(value)][1]

    def replaced(value: Any, depth: int) -> Any:
        if isinstance(value, tuple):
            parts = [walk(part, depth) for part in value]
            return value if all(part is old for part, old in zip(parts, value, strict=True)) else NestedTuple(parts)
        if isinstance(value, Inert):
            if (array := _made(value, make)) is not None:
                return array
            value.args, value.state = walk(value.args, depth), walk(value.state, depth)
        for held in (value,) if isinstance(value, dict | list) else (value.items, value.mapping):
            for key, part in held.items() if isinstance(held, dict) else enumerate(held):
                held[key] = walk(part, depth)
        return value

    return walk(root, 0)


def _made(stored: Inert, make: Make) -> object:
    """What stands for the array that `stored` is; None for any other value, and for elements without a type of torch."""
    package, _, maker = stored.class_name.rpartition(".")
    args, state = stored.args, stored.state
    if not package.startswith("numpy."):
        return None
    if maker == "_reconstruct" and isinstance(state, tuple) and len(state) == 5:
        _, shape, form, is_fortran, data = state
    elif maker == "_frombuffer" and len(args) == 4:
        data, form, shape, is_fortran = *args[:3], args[3] == "F"
    elif maker == "scalar" and len(args) == 2:
        form, data, shape, is_fortran = *args, (), False
    else:
        return None
    is_known = isinstance(form, Inert) and form.args and isinstance(form.state, tuple) and form.state[1:2] != (">",)
    code = form.args[0] if is_known else None
    dtype = from_numpy(code if isinstance(code, str) else getattr(code, "class_name", ""))
    data = data.encode("latin1", "replace") if isinstance(data, str) else data  # Python 2
    are_sizes = isinstance(shape, tuple) and all(type(size) is int and 0 <= size < 1 << 62 for size in shape)
    if dtype is None or not are_sizes or not isinstance(data, bytes | bytearray) or math.prod(shape) * dtype.itemsize != len(data):
        return None
    strides = row_major(shape[::-1])[::-1] if is_fortran else row_major(shape)
    return make(bytes(data), dtype, tuple(shape), strides)
