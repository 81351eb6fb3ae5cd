"""Unpickling that imports nothing and runs nothing.

A pickle is a small program: it names classes and functions, and the unpickler calls them. Here a name becomes one of a few functions of
this module, which build plain values (sets, sizes, dtypes, paths), or else a class of stand-ins that accept any arguments and any state
and do nothing: `Inert`. So a file of any framework opens without the framework, and a file that names `os.system` gets an Inert called
"os.system".

The unpickler is the C one, which is as fast as pickle.load: it reads a DCP .metadata with 128,000 entries in about 3 s. What it does not
check is checked before it starts, by one walk over the opcodes (`_walk`): memo numbers, because ten bytes can make it allocate 30 GB;
extension codes, because they are the only way to a real object that does not pass through `find_class`; the number of empty containers.

Hashing is the other danger, because C code cannot be interrupted: the hash of a tuple walks through all tuples inside, which crashes when
they are nested deeply and never ends when they are shared. Thus only small flat tuples have a hash. `_walk` finds the tuples that are
neither made from numbers nor taken up by a call at once, and `load` inserts two opcodes behind each, which show it to
`_Unpickler.persistent_load`; there a nested or long tuple becomes a `NestedTuple`, which has no hash. Tuples of arguments are checked by
the functions that are called with them (`_check_arguments`).

The BUILD opcode sets attributes of any object that the pickle has made. No object that outlives loading may be changed in this way: results
are plain values, Inerts, or classes that refuse BUILD (`sealed`).

Known globals: those in every kind of file that torch 2.2..2.13, DeepSpeed 0.14..0.19 and Megatron-Core write.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from reshard.errors import CheckpointError, ReshardError
from reshard.geometry.dtypes import from_torch
from reshard.storage.system_calls import gc_paused

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
        if args:
            _check_arguments(args)
        self = object.__new__(cls)
        self.args = args
        self.state = attributes or None
        self._items = self._mapping = None
        return self

    def __call__(self, *args: Any) -> Inert:
        """A stand-in for the result of calling this one, as in functools.partial(...)(). Its first argument is this one."""
        return inert_class(f"{self.class_name[:1000].removesuffix('()')}()")(self, *args)

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
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) and isinstance(state[0], dict | None):
            state = _merged(state[0], state[1])
        self.state = _merged(self.state, state) if isinstance(self.state, dict) and isinstance(state, dict) else state

    def __repr__(self) -> str:
        return f"<inert {self.class_name}>"


def _merged(first: dict[Any, Any] | None, second: dict[Any, Any]) -> dict[Any, Any]:
    """Both dicts in one. A pickle can merge the same dicts again and again, so only a dict of few entries is copied."""
    if not first:
        return second
    if len(first) + len(second) > _ATTRIBUTES:
        raise pickle.UnpicklingError(f"it sets {len(first):,} and then {len(second):,} attributes of one object")
    return {**first, **second}


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


class NestedTuple(tuple[Any, ...]):
    """A tuple with tuples inside, or a long one: a value like any other tuple, but not a dict key."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


class _Integer(int):
    """An integer whose hash is not that of an integer: integers can be chosen so that all their hashes are the same."""

    def __hash__(self) -> int:
        return hash((_SALT, str(int(self))))


class _Float(float):
    """A float whose hash is not that of a float, for the same reason."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash((_SALT, self.hex()))


_SALT = os.urandom(8)


class Function:
    """A function that a pickle may call: one of this module, or of the `rebuild` argument of `load`."""

    __slots__ = ("_function", "class_name")

    def __init__(self, class_name: str, function: Callable[..., object]) -> None:
        self.class_name, self._function = class_name, function

    def __call__(self, *args: Any) -> object:
        _check_arguments(args)
        return self._function(*args)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes {self.class_name}")


class _SizeFunction(Function):
    """`torch.Size`: the tuple itself. A .metadata calls it three times for each entry, so the usual case is one call and one loop."""

    __slots__ = ()

    def __call__(self, *args: Any) -> object:
        (value,) = args or ((),)
        if not isinstance(value, tuple):
            raise TypeError("torch.Size is made from a value that is not a tuple")
        for size in value:
            if size.__class__ is not int:
                _check_arguments(args)
        return value


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
    return load_with_memo(data, where=where, storage=storage, rebuild=rebuild, memo=None)


def load_with_memo(
    data: bytes,
    *,
    where: str,
    storage: Callable[[tuple[Any, ...]], object] | None,
    memo: dict[int, object] | None,
    rebuild: Rebuild | None = None,
) -> Any:
    """`load`, which also puts the values that the pickle numbers into `memo`, by number."""
    try:
        stop, shown_values = _walk(data)
        if stop != len(data):
            raise pickle.UnpicklingError(f"it ends at byte {stop:,}, but {len(data) - stop:,} more bytes follow")
        with gc_paused():
            unpickler = _Unpickler(_showing(data, shown_values), storage, rebuild or {})
            try:
                root = unpickler.load()
                if memo is not None:
                    memo.update(unpickler.memo.copy())
                return root
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


def end_of_pickle(data: bytes, start: int = 0) -> int:
    """The byte offset at which the pickle that starts at `start` ends, exclusive.

    Raises: EOFError if the data ends first; pickle.UnpicklingError for bytes that are not a pickle, and for what `_walk` refuses.
    """
    return _walk(data, start)[0]


def _walk(data: bytes, start: int = 0) -> tuple[int, list[int]]:
    """Where the pickle ends, and the byte offsets behind the values that `_Unpickler.persistent_load` has to see.

    Raises: EOFError, and pickle.UnpicklingError for bytes that are not a pickle, for extension codes, and for memo numbers, integers and
    numbers of values that a pickle of that length does not need.
    """
    at, values, numbers = start, list[int](), list[int]()
    try:
        while True:
            if run := _PLAIN_RUN.match(data, at):
                at = run.end()
            code, began = data[at], at
            if code == _STOP:
                at += 1
                break
            length = _LENGTHS[code]
            at = at + length if length > 0 else _after(data, at)
            if code in _SHOWN:
                values.append(at)
                _check_empty(len(values), at - start)
            elif (usual := _USUAL_NUMBER.get(code)) is not None and at - began > usual:
                numbers.append(at)
    except IndexError:
        raise EOFError(f"it does not end within its {len(data) - start:,} bytes") from None
    _check_empty(sum(data.count(code, start, at) for code in (pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_SET)), at - start)
    if len(numbers) > _LONG_NUMBERS:
        values = sorted(values + numbers)
    return at, values


def _check_empty(count: int, length: int) -> None:
    # A container takes one byte of the pickle at least, and up to 232 bytes of memory.
    if count > _CONTAINERS and count > length // 8:
        raise pickle.UnpicklingError(f"about {count:,} of its {length:,} bytes are containers without content")


def _showing(data: bytes, places: list[int]) -> bytes:
    """The pickle with opcodes inserted that replace the value before each of the places by what `persistent_load((value,))` returns.

    All of it is one frame, which the unpickler reads at once; otherwise it would ask for single bytes, and not expect longer frames.
    """
    shown = pickle.TUPLE1 + pickle.BINPERSID
    if places:
        data = shown.join(data[start:stop] for start, stop in zip([0, *places], [*places, len(data)], strict=True))
    return pickle.FRAME + len(data).to_bytes(8, "little") + data


# Limits that no checkpoint reaches. A real pickle names some 20 classes, its tuples have up to 10 elements, its objects 50 attributes.
_NAMES = 4096
_ELEMENTS = 256
_ATTRIBUTES = 256
_CONTAINERS = 1_000_000
_LONG_NUMBERS = 10_000  # of 60 bits or more; so many equal hashes cost half a second
_DIGITS = 1024  # bytes of one integer
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


# Opcodes that make a tuple or a frozenset, which load has to see if _plain_run does not know it as harmless.
_TUPLES = pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
_SHOWN = frozenset(_TUPLES + pickle.FROZENSET)
# Opcodes of numbers: a number that takes more bytes than this can have 60 bits or more. Of BINFLOAT, _plain_run takes the usual ones.
_USUAL_NUMBER = {pickle.LONG1[0]: 9, pickle.LONG4[0]: 5, pickle.INT[0]: 18, pickle.LONG[0]: 18, pickle.FLOAT[0]: 0, pickle.BINFLOAT[0]: 0}


def _plain_run() -> re.Pattern[bytes]:
    """A pattern for any number of opcodes that need no look: those of fixed length, memo numbers below 65,536, which never need much
    memory, tuples of up to 3 numbers, and tuples that the next opcode takes as the arguments of a call or as a persistent id."""

    def any_bytes(count: int) -> bytes:
        return b"[\\x00-\\xff]{%d}" % count if count else b""

    numbers = pickle.BININT1 + pickle.BININT2 + pickle.BININT
    by_length: dict[int, bytes] = {}
    for code, length in enumerate(_LENGTHS):
        if length > 0 and code not in _SHOWN and code not in numbers and code != pickle.BINFLOAT[0]:
            by_length[length] = by_length.get(length, b"") + bytes([code])
    fixed = [b"[" + re.escape(codes) + b"]" + (any_bytes(length - 1) or b"++") for length, codes in sorted(by_length.items())]
    put = re.escape(pickle.LONG_BINPUT) + any_bytes(2) + b"\\x00\\x00"
    memo = b"(?:\\x94|q%b|%b)?" % (any_bytes(1), put)
    taken = b"[" + re.escape(_TUPLES) + b"]" + memo + b"(?=[" + re.escape(pickle.REDUCE + pickle.NEWOBJ + pickle.BINPERSID) + b"])"
    # Below 2^61: the sign and the first 7 bits of the exponent.
    real = re.escape(pickle.BINFLOAT) + b"[\\x00-\\x42\\x80-\\xc2]" + any_bytes(7)
    number = b"(?:K%b|M%b|J%b|%b%b|%b)" % (any_bytes(1), any_bytes(2), any_bytes(4), re.escape(pickle.LONG1 + b"\5"), any_bytes(5), real)
    flat = [number * count + re.escape(code) for count, code in ((1, pickle.TUPLE1), (2, pickle.TUPLE2), (3, pickle.TUPLE3))]
    # The order counts for the speed: what needs no second look comes first.
    return re.compile(b"(?:" + b"|".join([*fixed, taken, *flat, number, put]) + b")++")


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


def after_opcode(data: bytes, at: int) -> int:
    """The byte after the opcode at `at`. Raises: IndexError if the data ends first; pickle.UnpicklingError as `_walk` does."""
    length = _LENGTHS[data[at]]
    return at + length if length else _after(data, at)


def _after(data: bytes, at: int) -> int:
    """The byte after the opcode at `at`, which has no fixed length."""
    code = data[at]
    if width := _COUNTED.get(code):
        length = int.from_bytes(data[at + 1 : at + 1 + width], "little")
        if code == pickle.LONG4[0] and length > _DIGITS:
            raise pickle.UnpicklingError(f"byte {at:,} starts an integer of {length:,} bytes")
        return at + 1 + width + length
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
        self._copies_left = 1_000_000 + 4 * len(data)
        self._complex_left = _LONG_NUMBERS

    def close(self) -> None:
        """Release all objects. The unpickler and its functions refer to each other, so they would live until the next collection."""
        self.memo.clear()
        self._stand_ins.clear()

    def persistent_load(self, pid: Any) -> object:
        if type(pid) is tuple and len(pid) == 1 and type(pid[0]) in _EXCHANGED:
            return _EXCHANGED[type(pid[0])](pid[0])
        if self._storage is None:
            raise pickle.UnpicklingError(f"it refers to external data by {shown(pid)}")
        if not isinstance(pid, tuple):
            raise pickle.UnpicklingError(f"it refers to tensor data by {shown(pid)}, not by a tuple")
        return self._storage(pid)

    def find_class(self, module: str, name: str) -> object:
        stand_in = self._stand_ins.get((module, name))
        if stand_in is None:
            if len(self._stand_ins) >= _NAMES:
                raise pickle.UnpicklingError(f"it names more than {_NAMES:,} classes")
            stand_in = self._stand_ins[module, name] = self._stand_in(module, name)
        return stand_in

    def _stand_in(self, module: str, name: str) -> object:
        full = f"{_RENAMED.get(module, module)}.{name}"
        if function := self._rebuild.get(full) or _FUNCTIONS.get(full):
            return Function(full, function)
        if function := _COPYING.get(full):
            return Function(full, self._counted(function))
        if full == "torch.Size":
            return _SizeFunction(full, tuple)
        if full == "builtins.complex":
            return Function(full, self._complex)
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return Function(full, self._counted(_path))
        if module in ("torch", "torch.cuda", "torch.storage") and name.endswith("Storage"):
            return StorageClass(name)
        return _dtype_name(full) or inert_class(full)

    def _complex(self, *args: Any) -> complex:
        self._complex_left -= 1
        if self._complex_left < 0 or not all(isinstance(arg, int | float) for arg in args):
            raise pickle.UnpicklingError("complex numbers are made from values that are not numbers, or are too many")
        return complex(*args)

    def _counted(self, function: Callable[..., object]) -> Callable[..., object]:
        """The function, which raises UnpicklingError once all arguments together are much larger than the pickle."""

        def counted(*args: Any) -> object:
            self._copies_left -= sum(len(arg) for arg in args if hasattr(arg, "__len__"))
            if self._copies_left < 0:
                raise pickle.UnpicklingError("it copies the same values over and over again")
            return function(*args)

        return counted


def _check_arguments(args: tuple[Any, ...]) -> None:
    """Raises UnpicklingError for arguments that would make the hash of their tuple expensive: the pickle may use that tuple as a key.

    A tuple among the arguments that has a tuple inside and is not a NestedTuple can only be that of other arguments, or of a storage.
    """
    if len(args) > _ELEMENTS:
        raise pickle.UnpicklingError(f"it calls something with {len(args):,} arguments")
    for arg in args:
        if arg.__class__ is tuple:
            for part in arg:
                if part.__class__ is tuple or part.__class__ is frozenset:
                    _check_flat(part)


def _check_flat(value: Collection[Any]) -> None:
    if len(value) > _ELEMENTS or any(part.__class__ in (tuple, frozenset) for part in value):
        raise pickle.UnpicklingError("the arguments of a call are arguments of another one again")


def _hashable_tuple(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tuple itself if it is short and flat; otherwise one without a hash."""
    flat = len(value) <= _ELEMENTS and not any(isinstance(part, tuple | frozenset) for part in value)
    return value if flat else NestedTuple(value)


def _hashable_set(value: frozenset[Any]) -> frozenset[Any]:
    """The frozenset itself. Comparing frozensets inside of frozensets can take forever, so they are refused."""
    for part in value:
        if isinstance(part, frozenset) or (isinstance(part, tuple) and any(isinstance(inner, tuple | frozenset) for inner in part)):
            raise pickle.UnpicklingError("a frozenset holds frozensets or nested tuples")
    return value


_EXCHANGED: dict[type[Any], Callable[[Any], object]] = {
    tuple: _hashable_tuple,
    frozenset: _hashable_set,
    int: _Integer,
    float: _Float,
}


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


def _device(kind: Any, index: Any = None) -> str:
    if not isinstance(kind, str) or not isinstance(index, int | None):
        raise TypeError(f"a device has the name {shown(kind)}, {shown(index)}")
    return kind if index is None else f"{kind}:{index}"


def _path(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("a path is made from values that are not text")
    root = "/" if parts and parts[0] == "/" else ""
    return root + "/".join(part for part in parts if part != "/")


def _default_dict(*args: Any) -> Dict:
    """An empty dict. The first argument is the factory of default values, which is never called."""
    return Dict()


# Protocols 0 to 2 name the modules as in Python 2.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "collections.defaultdict": _default_dict,
    "copyreg._reconstructor": _new,
    "copyreg.__newobj__": _new,
    "torch.device": _device,
}
# Functions whose result is as large as their arguments. Containers can be made from containers only, because no other value is iterable.
_COPYING: dict[str, Callable[..., object]] = {
    "builtins.set": set,
    "builtins.frozenset": lambda *args: _hashable_set(frozenset(*args)),
    "builtins.list": list,
    "builtins.tuple": lambda *args: _hashable_tuple(tuple(*args)),
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
