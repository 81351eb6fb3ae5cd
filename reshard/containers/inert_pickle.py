"""Unpickling that imports nothing and runs nothing.

A pickle is a small program: it names classes and functions, and the unpickler calls them. Here every name becomes either one
of a few functions of our own, which build plain values (sets, sizes, dtypes, paths), or a class of stand-ins that take any
arguments and any state and do nothing: `Inert`. So a file of any framework opens without the framework, and a file that asks
for `os.system` gets an Inert called "os.system".

The unpickler is the C one, which is as fast as pickle.load: a DCP .metadata with 128,000 entries in about 3 s. Two things that
it does not check are checked before: memo numbers (ten bytes can make it allocate 30 GB), and the registry of extension codes,
the one way to a real object that does not pass through `find_class`.

Whatever lives on after loading must not be open to the BUILD opcode, which sets attributes of any object that the pickle has
made: results are plain values, Inerts, or refuse it (`sealed`).

Known globals: every kind of file that torch 2.2..2.13, DeepSpeed 0.14..0.19 and Megatron-Core write.
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

    `class_name` is "module.name"; `args` what it was called with; `state` what BUILD gave it: a dict of attributes (those of
    __slots__ merged in), or whatever else the class pickles; `items` what was appended, `mapping` what was set by key.
    Two are equal only if they are the same: pickles use them as dict keys before their state is there.
    """

    __slots__ = ("_items", "_mapping", "args", "state")
    class_name: ClassVar[str] = "?"
    args: tuple[Any, ...]
    state: Any
    _items: list[Any] | None
    _mapping: dict[Any, Any] | None

    def __new__(cls, *args: Any, **attributes: Any) -> Inert:
        self = object.__new__(cls)
        self.args = args
        self.state = attributes or None
        self._items = self._mapping = None
        return self

    def __call__(self, *args: Any) -> Inert:
        """A stand-in for what a stand-in returns (functools.partial(...)()); the first of its args is what was called."""
        return inert_class(f"{self.class_name[:1000]}()")(self, *args)

    def get(self, attribute: str, default: Any = None) -> Any:
        """The attribute of that name; `default` if there is none, or if the state is no dict."""
        return self.state.get(attribute, default) if isinstance(self.state, dict) else default

    @property
    def items(self) -> list[Any]:
        return self._items if self._items is not None else []

    @property
    def mapping(self) -> dict[Any, Any]:
        return self._mapping if self._mapping is not None else {}

    def append(self, item: Any) -> None:
        self.extend((item,))

    def extend(self, items: Any) -> None:
        if self._items is None:
            self._items = []
        self._items.extend(items)

    add = append  # sets: ADDITEMS falls back to it

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
    """An OrderedDict or defaultdict of the file. A model's state dict carries attributes (_metadata), which say nothing that we need."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class DTypeName(str):
    """`torch.bfloat16` in a pickle: the name without the module, one that `dtypes.from_torch` knows."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes torch.{self}")


class StorageClass(str):
    """`torch.FloatStorage` in a pickle: the name of the class without the module."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes torch.{self}")


class Function:
    """A function of ours under the name that a pickle calls."""

    __slots__ = ("_function", "class_name")

    def __init__(self, class_name: str, function: Callable[..., object]) -> None:
        self.class_name, self._function = class_name, function

    def __call__(self, *args: Any) -> object:
        return self._function(*args)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes {self.class_name}")


def sealed(cls: T) -> T:
    """A frozen dataclass that pickles well, but whose fields the BUILD opcode cannot set.

    A slotted frozen dataclass has a __setstate__ that writes its fields past all checks, and BUILD calls just that: a tensor,
    checked when it was built, could be sent to another file.
    """

    def refuse(self: object, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes a {cls.__name__}")

    def reduce(self: object) -> tuple[type[Any], tuple[Any, ...]]:
        return cls, tuple(getattr(self, field.name) for field in fields(cls))

    cls.__setstate__ = refuse
    cls.__reduce__ = reduce  # type: ignore[assignment]
    return cls


def load(data: bytes, *, where: str, storage: Callable[[tuple[Any, ...]], object] | None = None, rebuild: Rebuild | None = None) -> Any:
    """What the pickle holds, as plain values and Inerts.

    `storage` answers persistent ids (torch: references to tensor data), `rebuild` names further functions that may be called.
    Raises: CheckpointError, naming `where`, for persistent ids without `storage` and whatever the unpickler stumbles over.
    """
    try:
        if (stop := end_of(data)) != len(data):
            raise pickle.UnpicklingError(f"it ends at byte {stop:,}, but {len(data) - stop:,} more follow")
        with uncollected():
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
            why="It was cut short, damaged, or made by hand; nothing of it was run",
            do="Copy the file again",
        ) from error


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, which would walk through all that was made so far again and again, and find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def end_of(data: bytes, start: int = 0) -> int:
    """The byte after the pickle that starts at `start`.

    Raises: EOFError if the data ends first; pickle.UnpicklingError for bytes that are no pickle, memo numbers beyond what a
    pickle of that length can need, and extension codes.
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
        raise EOFError(f"it goes on after its {len(data) - start:,} bytes") from None


_STOP = pickle.STOP[0]


def _lengths() -> list[int]:
    """The length of every opcode with its argument; 0 where it is not the same for all (`_after` finds it)."""
    lengths = [0] * 256
    for opcode in pickletools.opcodes:
        argument = opcode.arg.n if opcode.arg else 0
        lengths[ord(opcode.code)] = 1 + argument if argument >= 0 else 0
    for special in (pickle.STOP, pickle.LONG_BINPUT, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        lengths[special[0]] = 0
    return lengths


_LENGTHS = _lengths()


def _plain_run() -> re.Pattern[bytes]:
    """Opcodes of fixed length, as many as follow each other; and memo numbers below 65,536, which never need much."""
    by_length: dict[int, bytes] = {}
    for code, length in enumerate(_LENGTHS):
        if length > 0:
            by_length[length] = by_length.get(length, b"") + re.escape(bytes([code]))
    fixed = (b"[" + codes + b"]" + b"[\\x00-\\xff]" * (length - 1) for length, codes in sorted(by_length.items()))
    memo = re.escape(pickle.LONG_BINPUT) + b"[\\x00-\\xff]{2}\\x00\\x00"
    return re.compile(b"(?:" + b"|".join([*fixed, memo]) + b")+")


_PLAIN_RUN = _plain_run()
# Opcodes whose argument says its own length: how many bytes that takes.
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
# Opcodes whose arguments are lines of text: how many.
_LINES = {
    ord(opcode.code): 2 if opcode.code in "ci" else 1
    for opcode in pickletools.opcodes
    if opcode.arg and opcode.arg.n == pickletools.UP_TO_NEWLINE
}


def _after(data: bytes, at: int) -> int:
    """The byte after the opcode at `at`, one of those without a fixed length."""
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
        raise pickle.UnpicklingError(f"it asks at byte {at:,} for an object of this machine by an extension code")
    raise pickle.UnpicklingError(f"byte {at:,} is 0x{code:02x}, which is no pickle opcode")


def _check_memo(number: int, data: bytes) -> None:
    # The memo is an array of twice the highest number. Picklers count from 0, one per object, and an object takes a byte or more.
    if number > len(data):
        raise pickle.UnpicklingError(f"it numbers an object {number:,}, which needs {16 * number:,} bytes of memory")


class _Unpickler(pickle.Unpickler):
    """The C unpickler, with names and persistent ids answered by us."""

    def __init__(self, data: bytes, storage: Callable[[tuple[Any, ...]], object] | None, rebuild: Rebuild) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        self._storage = storage
        self._rebuild = rebuild
        self._known: dict[tuple[str, str], object] = {}
        # A pickle can name one long list a thousand times; what copies it may not be had for two bytes each.
        self._copies_left = 1_000_000 + 64 * len(data)

    def close(self) -> None:
        """Let go of everything: its functions refer to it, and it would keep all objects until the collector comes."""
        self.memo.clear()
        self._known.clear()

    def persistent_load(self, pid: Any) -> object:
        if self._storage is None:
            raise pickle.UnpicklingError(f"it refers to {shown(pid)} outside of itself")
        if not isinstance(pid, tuple):
            raise pickle.UnpicklingError(f"it refers to tensor data by {shown(pid)}, not by a tuple")
        return self._storage(pid)

    def find_class(self, module: str, name: str) -> object:
        found = self._known.get((module, name))
        if found is None:
            found = self._known[module, name] = self._stand_in(module, name)
        return found

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
        """The function, for as long as the sizes of all its arguments stay in proportion to the pickle's."""

        def counted(*args: Any) -> object:
            self._copies_left -= sum(len(arg) for arg in args if hasattr(arg, "__len__"))
            if self._copies_left < 0:
                raise pickle.UnpicklingError("it copies the same values over and over")
            return function(*args)

        return counted


def shown(value: Any) -> str:
    """A value of a pickle in a message: short, and never by a repr of containers, which can be deep, huge or both."""
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
    """The class of Inerts called `name`. Nothing can change a class, so pickles may share it."""
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
    """`getattr(Outer, "Inner")`: how protocol 2 names a class inside a class."""
    full = f"{getattr(owner, 'class_name', type(owner).__name__)}.{name}"
    if not isinstance(name, str) or len(full) > 1000:
        raise TypeError("getattr takes a short name")
    return inert_class(full)


def _new(cls: Any, *args: Any) -> Inert:
    """copyreg's ways to make an instance of a class."""
    if not (isinstance(cls, type) and issubclass(cls, Inert)):
        raise TypeError("an instance of something that is no class")
    return cls(*args)


def _encode(text: Any, encoding: Any = "utf-8") -> bytes:
    """How protocol 2 writes bytes."""
    if type(text) is not str or type(encoding) is not str or encoding.replace("-", "").lower() not in ("latin1", "utf8"):
        raise TypeError(f"text is encoded as {shown(encoding)}")
    return text.encode(encoding)


def _bytes(value: Any = b"", encoding: Any = "latin1") -> bytes:
    """bytes(b"..."), bytes("...", "latin1"), bytes([1, 2]); bytes(10**12) would allocate as much."""
    if isinstance(value, str):
        return _encode(value, encoding)
    if not isinstance(value, bytes | bytearray | list):
        raise TypeError(f"bytes are made from {type(value).__name__}")
    return bytes(value)


def _size(value: Any = ()) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise TypeError("torch.Size is made from something else than a tuple")
    return value


def _device(kind: Any, index: Any = None) -> str:
    if not isinstance(kind, str) or not isinstance(index, int | None):
        raise TypeError(f"a device is called {shown(kind)}, {shown(index)}")
    return kind if index is None else f"{kind}:{index}"


def _path(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("a path is made from something else than names")
    root = "/" if parts and parts[0] == "/" else ""
    return root + "/".join(part for part in parts if part != "/")


def _complex(*args: Any) -> complex:
    if not all(isinstance(arg, int | float) for arg in args):
        raise TypeError("a complex number is made from something else than numbers")
    return complex(*args)


def _default_dict(*args: Any) -> Dict:
    """The first argument is the factory: not ours to call."""
    return Dict()


# Protocols 0 to 2 spell the modules as Python 2 did.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "builtins.complex": _complex,
    "collections.defaultdict": _default_dict,
    "copyreg._reconstructor": _new,
    "copyreg.__newobj__": _new,
    "torch.Size": _size,
    "torch.device": _device,
}
# Those whose result is as large as their arguments. Containers are made from containers only: nothing else here is iterable.
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
    """What an exception of the unpickler says, in one line."""
    text = str(error).strip().splitlines()
    kind = {MemoryError: "it asks for more memory than there is", RecursionError: "it nests too deeply"}.get(type(error))
    return kind or (text[0][:200] if text else type(error).__name__)
