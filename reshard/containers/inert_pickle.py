"""Unpickling that imports nothing and runs nothing.

A pickle is a small program: it names classes and functions, and the unpickler calls them. Here a name becomes one of a few functions of
this module, which build plain values (sets, sizes, dtypes, paths), or else a class of stand-ins that accept any arguments and any state
and do nothing: `Inert`. So a file of any framework opens without the framework, and a file that names `os.system` gets an Inert called
"os.system".

The unpickler is the C one, which is as fast as pickle.load: it reads a DCP .metadata with 128,000 entries in about 3 s. Two things that it
does not check are checked before it starts: memo numbers, because ten bytes can make it allocate 30 GB, and extension codes, because they
are the only way to a real object that does not pass through `find_class`.

The BUILD opcode sets attributes of any object that the pickle has made. No object that outlives loading may be changed in this way: results
are plain values, Inerts, or classes that refuse BUILD (`sealed`).

Known globals: those in every kind of file that torch 2.2..2.13, DeepSpeed 0.14..0.19 and Megatron-Core write.
"""

from __future__ import annotations

import gc
import io
import pickle
import pickletools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from reshard.errors import CheckpointError, ReshardError
from reshard.geometry.dtypes import from_torch

T = TypeVar("T", bound=type[Any])

Rebuild = Mapping[str, Callable[..., object]]


class Inert:
    """A stand-in for an instance of a class that was not imported.

    Two Inerts are equal only if they are the same object, because pickles use them as dict keys before their state is set.
    """

    __slots__ = ("_items", "_mapping", "args", "state")
    class_name: ClassVar[str] = "?"
    """The class, as "module.name"."""
    args: tuple[Any, ...]
    """The arguments of the call that made it."""
    state: Any
    """The state that BUILD set: a dict of attributes, with those of __slots__ merged in, or any other value that the class pickles."""
    _items: list[Any] | None
    _mapping: dict[Any, Any] | None

    def __new__(cls, *args: Any, **attributes: Any) -> Inert:
        self = object.__new__(cls)
        self.args = args
        self.state = attributes or None
        self._items = self._mapping = None
        return self

    def __call__(self, *args: Any) -> Inert:
        """A stand-in for the result of calling this one, as in functools.partial(...)(). Its first argument is this one."""
        return inert_class(f"{self.class_name[:1000]}()")(self, *args)

    def get(self, attribute: str, default: Any = None) -> Any:
        """The attribute of that name; `default` if it does not exist or the state is not a dict."""
        return self.state.get(attribute, default) if isinstance(self.state, dict) else default

    @property
    def items(self) -> list[Any]:
        """The values that were appended."""
        return self._items if self._items is not None else []

    @property
    def mapping(self) -> dict[Any, Any]:
        """The values that were set by key."""
        return self._mapping if self._mapping is not None else {}

    def append(self, item: Any) -> None:
        """Called by the opcode APPEND."""
        self.extend((item,))

    def extend(self, items: Any) -> None:
        """Called by the opcode APPENDS."""
        if self._items is None:
            self._items = []
        self._items.extend(items)

    add = append  # the opcode ADDITEMS of sets calls it

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._mapping is None:
            self._mapping = {}
        self._mapping[key] = value

    def __setstate__(self, state: Any) -> None:
        # Classes with __slots__ pickle the pair (None or the __dict__, the slots).
        if type(state) is tuple and len(state) == 2 and isinstance(state[1], dict) and isinstance(state[0], dict | None):
            state = {**(state[0] or {}), **state[1]}
        self.state = {**self.state, **state} if isinstance(self.state, dict) and isinstance(state, dict) else state

    def __repr__(self) -> str:
        return f"<inert {self.class_name}>"


class Dict(dict[Any, Any]):
    """A dict, OrderedDict or defaultdict that the pickle makes by a call. Its attributes, such as the _metadata of a
    model's state dict, are dropped: nothing needs them."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class DTypeName(str):
    """`torch.bfloat16` in a pickle: the name without the module. `dtypes.from_torch` knows it."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes torch.{self}")


class StorageClass(str):
    """`torch.FloatStorage` in a pickle: the name of the class without the module."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes torch.{self}")


class Function:
    """A function that a pickle may call: one of this module, or of the `rebuild` argument of `load`."""

    __slots__ = ("_function", "class_name")

    def __init__(self, class_name: str, function: Callable[..., object]) -> None:
        self.class_name, self._function = class_name, function

    def __call__(self, *args: Any) -> object:
        return self._function(*args)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes {self.class_name}")


def sealed(cls: T) -> T:
    """The frozen dataclass `cls`, changed so that the BUILD opcode cannot set its fields. Instances can still be pickled.

    A slotted frozen dataclass has a __setstate__ that writes its fields without any check, and BUILD calls __setstate__. A file could
    redirect a tensor to another file after the tensor has been checked.
    """

    def refuse(self: object, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes a {cls.__name__}")

    def reduce(self: object) -> tuple[type[Any], tuple[Any, ...]]:
        return cls, tuple(getattr(self, field.name) for field in fields(cls))

    cls.__setstate__ = refuse
    cls.__reduce__ = reduce  # type: ignore[assignment]
    return cls


def load(data: bytes, *, where: str, storage: Callable[[tuple[Any, ...]], object] | None = None, rebuild: Rebuild | None = None) -> Any:
    """The root object of a pickle, as plain values and Inerts.

    storage: returns the value for a persistent id, which in torch refers to tensor data. rebuild: further functions that the pickle may
    call, by full name such as "torch._utils._rebuild_tensor".

    Raises: CheckpointError, naming `where`, if the unpickler fails, or for a persistent id if `storage` is None.
    """
    try:
        if (stop := end_of_pickle(data)) != len(data):
            raise pickle.UnpicklingError(f"it ends at byte {stop:,}, but {len(data) - stop:,} more bytes follow")
        with gc_paused():
            unpickler = _Unpickler(data, storage, rebuild or {})
            try:
                return unpickler.load()
            finally:
                unpickler.close()
    except ReshardError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the pickle ({len(data):,} bytes) cannot be read: {_reason(error)}",
            where=where,
            why="The file was cut short, damaged, or made by hand; none of its code was run",
            do="Copy the file again",
        ) from error


@contextmanager
def gc_paused() -> Iterator[None]:
    """A context in which the garbage collector is off: it would scan all new objects again and again without finding garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def end_of_pickle(data: bytes, start: int = 0) -> int:
    """The byte offset at which the pickle that starts at `start` ends, exclusive.

    Raises: EOFError if the data ends first; pickle.UnpicklingError for bytes that are not a pickle, for memo numbers that are larger than
    a pickle of that length can need, and for extension codes.
    """
    at = start
    try:
        while True:
            if run := _PLAIN_RUN.match(data, at):
                at = run.end()
            if data[at] == _STOP:
                return at + 1
            length = _LENGTHS[data[at]]
            at = at + length if length > 0 else _after(data, at)
    except IndexError:
        raise EOFError(f"it does not end within its {len(data) - start:,} bytes") from None


_STOP = pickle.STOP[0]


def _lengths() -> list[int]:
    """By opcode: its length in bytes, including its argument; 0 if the length varies, in which case `_after` finds it."""
    lengths = [0] * 256
    for opcode in pickletools.opcodes:
        argument = opcode.arg.n if opcode.arg else 0
        lengths[ord(opcode.code)] = 1 + argument if argument >= 0 else 0
    for special in (pickle.STOP, pickle.LONG_BINPUT, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        lengths[special[0]] = 0
    return lengths


_LENGTHS = _lengths()


def _plain_run() -> re.Pattern[bytes]:
    """A pattern for any number of opcodes of fixed length, and of memo numbers below 65,536, which never need much memory."""
    by_length: dict[int, bytes] = {}
    for code, length in enumerate(_LENGTHS):
        if length > 0:
            by_length[length] = by_length.get(length, b"") + re.escape(bytes([code]))
    fixed = (b"[" + codes + b"]" + b"[\\x00-\\xff]" * (length - 1) for length, codes in sorted(by_length.items()))
    memo = re.escape(pickle.LONG_BINPUT) + b"[\\x00-\\xff]{2}\\x00\\x00"
    return re.compile(b"(?:" + b"|".join([*fixed, memo]) + b")+")


_PLAIN_RUN = _plain_run()
# Opcodes whose argument starts with its own length: the number of bytes of that length.
_COUNTED = {
    ord(opcode.code): {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }[opcode.arg.n]
    for opcode in pickletools.opcodes
    if opcode.arg and opcode.arg.n < pickletools.UP_TO_NEWLINE
}
# Opcodes whose arguments are lines of text: the number of lines.
_LINES = {
    ord(opcode.code): 2 if opcode.code in "ci" else 1
    for opcode in pickletools.opcodes
    if opcode.arg and opcode.arg.n == pickletools.UP_TO_NEWLINE
}


def _after(data: bytes, at: int) -> int:
    """The byte after the opcode at `at`, which has no fixed length."""
    code = data[at]
    if width := _COUNTED.get(code):
        return at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
    if code == pickle.LONG_BINPUT[0]:
        _check_memo(int.from_bytes(data[at + 1 : at + 5], "little"), data)
        return at + 5
    if lines := _LINES.get(code):
        stop = at
        for _ in range(lines):
            stop = data.find(b"\n", stop + 1)
            if stop < 0:
                raise IndexError
        if code == pickle.PUT[0]:
            _check_memo(int(data[at + 1 : stop]), data)
        return stop + 1
    if code in (pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0]):
        raise pickle.UnpicklingError(f"byte {at:,} refers to an object of this machine by an extension code")
    raise pickle.UnpicklingError(f"byte {at:,} is 0x{code:02x}, which is not a pickle opcode")


def _check_memo(number: int, data: bytes) -> None:
    # The unpickler's memo is an array twice as long as the highest number. A pickler numbers objects from 0, and each object takes at least
    # one byte of the pickle.
    if number > len(data):
        raise pickle.UnpicklingError(f"it numbers an object {number:,}, which needs {16 * number:,} bytes of memory")


class _Unpickler(pickle.Unpickler):
    """The C unpickler. Names and persistent ids are resolved here."""

    def __init__(self, data: bytes, storage: Callable[[tuple[Any, ...]], object] | None, rebuild: Rebuild) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        self._storage = storage
        self._rebuild = rebuild
        self._stand_ins: dict[tuple[str, str], object] = {}
        # A pickle can refer to one long list a thousand times, with two bytes each time. So copies of values are rationed.
        self._copies_left = 1_000_000 + 64 * len(data)

    def close(self) -> None:
        """Release all objects. The unpickler and its functions refer to each other, so they would live until the next collection."""
        self.memo.clear()
        self._stand_ins.clear()

    def persistent_load(self, pid: Any) -> object:
        if self._storage is None:
            raise pickle.UnpicklingError(f"it refers to external data by {shown(pid)}")
        if not isinstance(pid, tuple):
            raise pickle.UnpicklingError(f"it refers to tensor data by {shown(pid)}, not by a tuple")
        return self._storage(pid)

    def find_class(self, module: str, name: str) -> object:
        stand_in = self._stand_ins.get((module, name))
        if stand_in is None:
            stand_in = self._stand_ins[module, name] = self._stand_in(module, name)
        return stand_in

    def _stand_in(self, module: str, name: str) -> object:
        full = f"{_RENAMED.get(module, module)}.{name}"
        if function := self._rebuild.get(full) or _FUNCTIONS.get(full):
            return Function(full, function)
        if function := _COPYING.get(full):
            return Function(full, self._counted(function))
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return Function(full, self._counted(_path))
        if module in ("torch", "torch.cuda", "torch.storage") and name.endswith("Storage"):
            return StorageClass(name)
        return _dtype_name(full) or inert_class(full)

    def _counted(self, function: Callable[..., object]) -> Callable[..., object]:
        """The function, which raises UnpicklingError once all arguments together are much larger than the pickle."""

        def counted(*args: Any) -> object:
            self._copies_left -= sum(len(arg) for arg in args if hasattr(arg, "__len__"))
            if self._copies_left < 0:
                raise pickle.UnpicklingError("it copies the same values over and over again")
            return function(*args)

        return counted


def shown(value: Any) -> str:
    """A short text for a value of a pickle in a message. Containers are not printed: they can be deep, or huge, or both."""
    if isinstance(value, Inert):
        return value.class_name
    if isinstance(value, str):
        return repr(value[:100])
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    if isinstance(value, tuple) and len(value) <= 16 and all(isinstance(part, str | int | None) for part in value):
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, type) and issubclass(value, Inert):
        return f"the class {value.class_name}"
    return f"a {type(value).__name__}"


@lru_cache(maxsize=4096)
def inert_class(name: str) -> type[Inert]:
    """The class of Inerts called `name`. A pickle cannot change a class, so all pickles share it."""
    return type("Inert", (Inert,), {"__slots__": (), "class_name": name})


def _dtype_name(full: str) -> DTypeName | None:
    module, _, name = full.rpartition(".")
    if module != "torch":
        return None
    try:
        return DTypeName(from_torch(name, where="").torch)
    except CheckpointError:
        return None


def _attribute(owner: Any, name: str) -> type[Inert]:
    """The stand-in for `getattr(Outer, "Inner")`, by which protocol 2 names a class inside a class."""
    full = f"{getattr(owner, 'class_name', type(owner).__name__)}.{name}"
    if not isinstance(name, str) or len(full) > 1000:
        raise TypeError("getattr takes a short name")
    return inert_class(full)


def _new(cls: Any, *args: Any) -> Inert:
    """An instance of a class, as the functions of copyreg make it."""
    if not (isinstance(cls, type) and issubclass(cls, Inert)):
        raise TypeError("an instance is made of something that is not a class")
    return cls(*args)


def _encode(text: Any, encoding: Any = "utf-8") -> bytes:
    """Encoded text; protocol 2 writes bytes in this way."""
    if type(text) is not str or type(encoding) is not str or encoding.replace("-", "").lower() not in ("latin1", "utf8"):
        raise TypeError(f"text is encoded as {shown(encoding)}")
    return text.encode(encoding)


def _bytes(value: Any = b"", encoding: Any = "latin1") -> bytes:
    """The bytes of b"...", of ("...", "latin1") or of [1, 2]. A number is refused: bytes(10**12) would allocate as many bytes."""
    if isinstance(value, str):
        return _encode(value, encoding)
    if not isinstance(value, bytes | bytearray | list):
        raise TypeError(f"bytes are made from {type(value).__name__}")
    return bytes(value)


def _size(value: Any = ()) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise TypeError("torch.Size is made from a value that is not a tuple")
    return value


def _device(kind: Any, index: Any = None) -> str:
    if not isinstance(kind, str) or not isinstance(index, int | None):
        raise TypeError(f"a device has the name {shown(kind)}, {shown(index)}")
    return kind if index is None else f"{kind}:{index}"


def _path(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("a path is made from values that are not text")
    root = "/" if parts and parts[0] == "/" else ""
    return root + "/".join(part for part in parts if part != "/")


def _complex(*args: Any) -> complex:
    if not all(isinstance(arg, int | float) for arg in args):
        raise TypeError("a complex number is made from values that are not numbers")
    return complex(*args)


def _default_dict(*args: Any) -> Dict:
    """An empty dict. The first argument is the factory of default values, which is never called."""
    return Dict()


# Protocols 0 to 2 name the modules as in Python 2.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "builtins.complex": _complex,
    "collections.defaultdict": _default_dict,
    "copyreg._reconstructor": _new,
    "copyreg.__newobj__": _new,
    "torch.Size": _size,
    "torch.device": _device,
}
# Functions whose result is as large as their arguments. Containers can be made from containers only, because no other value is iterable.
_COPYING: dict[str, Callable[..., object]] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.list": list,
    "builtins.tuple": tuple,
    "builtins.dict": Dict,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.getattr": _attribute,
    "collections.OrderedDict": Dict,
    "_codecs.encode": _encode,
}


def _reason(error: Exception) -> str:
    """The message of an exception of the unpickler, in one line."""
    text = str(error).strip().splitlines()
    kind = {MemoryError: "it needs more memory than this machine has", RecursionError: "it is nested too deeply"}.get(type(error))
    return kind or (text[0][:200] if text else type(error).__name__)
