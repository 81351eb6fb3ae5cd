"""Writing pickles that name classes and functions which are not installed here: the opposite of inert_pickle.

Protocol 2, as torch.save writes it; bytes by an opcode of protocol 4, which unpicklers take in every protocol. Only text, names and
`Shared` values are memoised, because they repeat thousands of times.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from typing import Any

from reshard.geometry.value import value


@value
class Name:
    """A class or function such as torch.Size. The unpickler imports the module and takes the attribute."""

    module: str
    """The module, such as "torch"."""
    name: str
    """The attribute of the module, such as "Size"."""


@value(eq=False)
class Call:
    """The result of calling `function` with `args`."""

    function: Name
    args: tuple[Any, ...] = ()


@value(eq=False)
class Instance:
    """An object of a class, made by its __new__ and then given its state."""

    kind: Name
    """The class."""
    state: Any = None
    """A dict of attributes, or what the __setstate__ of the class takes; None: it gets no state."""
    args: tuple[Any, ...] = ()
    """The arguments of __new__, as a named tuple has them."""


@value(eq=False)
class PersistentId:
    """A persistent id, whose meaning is defined by the reader; for torch it names a storage."""

    value: Any


@value(eq=False)
class Shared:
    """A value that occurs several times and becomes one object."""

    value: Any


def dumps(value: Any) -> bytes:
    """The pickle of a value made of the classes above, numbers, text, bytes, None, tuples, lists, dicts and OrderedDicts.

    Raises: TypeError for anything else.
    """
    writer = _Writer()
    writer.write(value)
    return b"\x80\x02" + b"".join(writer.parts) + pickle.STOP


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._memo: dict[str | Name | Shared, bytes] = {}

    def write(self, value: Any) -> None:
        put = self.parts.append
        kind = type(value)
        if kind is str or kind is Name or kind is Shared:
            self._repeated(value)
        elif value is None or kind is bool:
            put(pickle.NONE if value is None else pickle.NEWTRUE if value else pickle.NEWFALSE)
        elif kind is int:
            put(_int(value))
        elif kind is float:
            put(pickle.BINFLOAT + struct.pack(">d", value))
        elif kind is bytes:
            put(pickle.BINBYTES8 + struct.pack("<Q", len(value)) + value)
        elif kind is tuple:
            self._tuple(value)
        elif kind is list:
            put(pickle.EMPTY_LIST + pickle.MARK)
            for item in value:
                self.write(item)
            put(pickle.APPENDS)
        elif kind is dict or kind is OrderedDict:
            if kind is dict:
                put(pickle.EMPTY_DICT)
            else:
                self._object(Call(Name("collections", "OrderedDict")))
            put(pickle.MARK)
            for key, item in value.items():
                self.write(key)
                self.write(item)
            put(pickle.SETITEMS)
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        if isinstance(value, Call):
            self.write(value.function)
            self._tuple(value.args)
            self.parts.append(pickle.REDUCE)
        elif isinstance(value, Instance):
            self.write(value.kind)
            self._tuple(value.args)
            self.parts.append(pickle.NEWOBJ)
            if value.state is not None:
                self.write(value.state)
                self.parts.append(pickle.BUILD)
        elif isinstance(value, PersistentId):
            self.write(value.value)
            self.parts.append(pickle.BINPERSID)
        else:
            raise TypeError(f"a value of type {type(value).__name__} cannot be written to a pickle")

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if len(value) > 3:
            self.parts.append(pickle.MARK)
        for item in value:
            self.write(item)
        self.parts.append((pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)[len(value)] if len(value) < 4 else pickle.TUPLE)

    def _repeated(self, value: str | Name | Shared) -> None:
        if (from_memo := self._memo.get(value)) is not None:
            self.parts.append(from_memo)
            return
        if isinstance(value, str):
            raw = value.encode("utf-8", "surrogatepass")
            self.parts.append(pickle.BINUNICODE + struct.pack("<I", len(raw)) + raw)
        elif isinstance(value, Shared):
            self.write(value.value)
        else:
            self.parts.append(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        number = len(self._memo)
        self.parts.append(pickle.BINPUT + bytes([number]) if number < 256 else pickle.LONG_BINPUT + struct.pack("<I", number))
        self._memo[value] = pickle.BINGET + bytes([number]) if number < 256 else pickle.LONG_BINGET + struct.pack("<I", number)


def _int(value: int) -> bytes:
    if 0 <= value < 256:
        return pickle.BININT1 + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return pickle.BININT + struct.pack("<i", value)
    raw = pickle.encode_long(value)
    return pickle.LONG1 + bytes([len(raw)]) + raw
