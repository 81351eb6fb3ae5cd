"""Files of torch.save: the content of the pickle, with every tensor replaced by where its bytes lie.

Since torch 1.6 such a file is a zip:

    <root>/data.pkl            protocol 2; a tensor names its storage by a persistent id and its view by offset, size, stride
    <root>/byteorder           "little"; absent in old files
    <root>/data/<key>          the raw bytes of one storage; tensors that share memory share it
    <root>/version, ...

<root> is the name under which the file was saved, or "archive". A DCP file (.distcp) is many such zips end to end. Before torch 1.6, and
with _use_new_zipfile_serialization=False, a file is a sequence of pickles, and then for each storage its count and bytes (`_read_old`).

Nothing is imported or run (inert_pickle.py), and no tensor data is read. Measured on torch 2.13; sources of 2.2..2.9 were read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from pickle import UnpicklingError
from typing import Any, NamedTuple, TypeGuard

from reshard.containers import magic_bytes
from reshard.containers.inert_pickle import (
    DTypeName,
    Function,
    Inert,
    Rebuild,
    StorageClass,
    end_of_pickle,
    inert_class,
    load,
    sealed,
    shown,
)
from reshard.containers.numpy_arrays import with_arrays
from reshard.containers.zip_directory import SAVE_STATE_DICT, Directory, Range, content, listing, payload, payload_start, read_directory
from reshard.errors import UnsupportedError
from reshard.geometry.dtypes import DType, from_storage, from_torch
from reshard.geometry.value import value
from reshard.storage.files import Files, read_range


@sealed
@value
class LocatedTensor:
    """A tensor in a file: element (i, j, ...) is at byte_offset + itemsize * (i * strides[0] + j * strides[1] + ...).

    Every element lies inside the storage; this has been checked.
    """

    path: str
    """The file."""
    byte_offset: int
    """Where the first element starts in the file. Without meaning if the tensor has no elements."""
    dtype: DType
    """The element type."""
    shape: tuple[int, ...]
    """The shape."""
    strides: tuple[int, ...]
    """The distance between neighbours along each axis, in elements."""
    storage: str
    """The key of the storage. Tensors of one file with the same key share memory."""


@sealed
@value
class UnlocatedTensor:
    """A tensor in a file whose zip member is known, but not where the member's payload starts. `Locations` looks that up."""

    path: str
    """The file."""
    member: int
    """The byte offset in the file of the member's local header."""
    skipped: int
    """The number of bytes between the start of the payload and the first element."""
    dtype: DType
    """The element type."""
    shape: tuple[int, ...]
    """The shape."""
    strides: tuple[int, ...]
    """The distance between neighbours along each axis, in elements."""
    storage: str
    """The key of the storage. Tensors of one file with the same key share memory."""


AnyTensor = LocatedTensor | UnlocatedTensor


def is_plain_tensor(value: Any) -> TypeGuard[AnyTensor]:
    """Whether a value that `read` returned is a plain tensor: a LocatedTensor or an UnlocatedTensor."""
    return isinstance(value, LocatedTensor | UnlocatedTensor)


def memory_of(tensor: AnyTensor) -> tuple[object, ...]:
    """A key that is equal for tied tensors of one file: the storage, the start of the tensor in it, and the shape."""
    return tensor.storage, tensor.skipped if isinstance(tensor, UnlocatedTensor) else tensor.byte_offset, tensor.shape


Attributes = dict[str, Any]
"""By the key of a tensor's storage: the attributes that were set on the tensor and saved with it."""


def read(
    files: Files, path: str, *, start: int = 0, nbytes: int | None = None, locate: bool = True, attributes: Attributes | None = None
) -> Any:
    """The root object of a torch.save file, or of the bytes [start, start + nbytes) of a file that are a torch.save file.

    Tensors, Parameters, arrays of numpy and tensors of classes that wrap one of them are LocatedTensors. A tensor of another class is an
    Inert with the `state` of that tensor. If the class wraps other tensors (ShardedTensor, DTensor), the `args` of the Inert are those of
    _rebuild_wrapper_subclass; otherwise its only argument is a LocatedTensor. Other objects are plain values and Inerts. Tensors of one
    element among the settings of an optimizer's param groups, such as the learning rate, are numbers.

    locate: find the start of each storage, with a small read for each. If False, the tensors of a zip are UnlocatedTensors.
    attributes: a dict to which the attributes of plain tensors are added.

    Raises: CheckpointError. If the file is not a torch.save file, the message says what it looks like.
    """
    source = Range(files, path, start, nbytes)
    if source.read(0, min(len(_OLD_MAGIC), source.nbytes)) == _OLD_MAGIC:
        return _read_old(source, attributes)
    return _read_zip(source, locate=locate, attributes=attributes)


# Of a setting that is a list of tensors, such as betas.
_MOST_NUMBERS = 16


class Locations:
    """The byte offsets of tensors in their files. The payload of a zip member is looked up once, on first use."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._starts: dict[tuple[str, int], int] = {}

    def of(self, tensor: AnyTensor) -> int:
        """The byte offset of the tensor's first element. Raises CheckpointError if no storage lies there."""
        if isinstance(tensor, LocatedTensor):
            return tensor.byte_offset
        return self.start(tensor.path, tensor.member) + tensor.skipped

    def start(self, path: str, member: int) -> int:
        """The byte offset in the file of a member's payload. member: the byte offset of the member's local header.

        Raises: CheckpointError if no storage lies there.
        """
        if (path, member) not in self._starts:
            start = self._starts[path, member] = member + payload_start(Range(self._files, path, member), 0, "/data/")
            self._files.claims(path).add(start, member, lambda: listing(Range(self._files, path)))
        return self._starts[path, member]


def entry_tensor(files: Files, path: str, start: int, nbytes: int) -> LocatedTensor:
    """The one tensor of a DCP entry, which is a zip at bytes [start, start + nbytes) of a .distcp file. Takes two or three small reads.

    Raises: CheckpointError if the entry does not hold exactly one tensor; UnsupportedError if it is an array of a class that is not read.
    """
    tensor = read(files, path, start=start, nbytes=nbytes)
    source = Range(files, path, start, nbytes)
    if class_name := class_of_array(tensor):
        why = "Only the code of that class knows which values its parts stand for"
        raise UnsupportedError(f"it is stored as {class_name}, which reshard does not read", where=source.where, why=why, do=_SAVE_PLAIN)
    if not isinstance(tensor, LocatedTensor):
        source.refuse(f"the entry should be one tensor, it holds {shown(tensor)}")
    return tensor


_SAVE_PLAIN = "Save plain tensors, for example by `.dequantize()`, or leave it out with `exclude=`"


def class_of_array(value: Any) -> str:
    """The class of a value that `read` returned and that is array-like, but no plain tensor; "" for any other value.

    Array-like is what holds a tensor or a storage, and what makes an array without one: of objects, on the meta device.
    """
    if is_plain_tensor(value):
        return ""
    name = value.class_name if isinstance(value, Inert) else STORAGE if isinstance(value, _Storage) else type(value).__name__
    if _RANDOM.search(name) or not (_MAKES_ARRAY.search(name) or next(tensors_in(value), None)):
        return ""
    made_of = value.args[:1] if isinstance(value, Inert) and name.startswith("numpy.") else ()
    if made_of and isinstance(made_of[0], type):
        return str(made_of[0].class_name)  # type: ignore[attr-defined]
    if made_by := _TRANSFORMER_ENGINE.search(name):
        return name[: made_by.start()] + _MAKES.get(made_by[1], "")
    return name.replace("_utils._rebuild_", "")


# A tensor of Transformer Engine is pickled as the call of a function, in older versions of a method of its class (2026-08-22).
_TRANSFORMER_ENGINE = re.compile(r"\._make_(?:(\w+)_)?in_reduce_ex$")
_MAKES: dict[str | None, str] = {
    "float8_tensor": ".Float8Tensor",
    "float8_blockwise_tensor": ".Float8BlockwiseQTensor",
    "mxfp8_tensor": ".MXFP8Tensor",
    "nvfp4_tensor": ".NVFP4Tensor",
    "hybrid_quantized_tensor": ".HybridQuantizedTensor",
    "identity_tensor": ".IdentityTensor",
}
# The class of a storage that lies in a state dict without a tensor.
STORAGE = "torch.storage"
# What makes an array whose pickle need not hold a tensor; and generators of random numbers, whose state is an array.
_MAKES_ARRAY = re.compile(r"\._rebuild_|_m?a?reconstruct(_array)?$|^numpy\.\w+\.\w+\.(_frombuffer|scalar)$|\.Uninitialized\w+$")
_RANDOM = re.compile(r"(^|\.)random\b|Generator|RandomState")


def tensors_in(*values: Any) -> Iterator[Any]:
    """The plain tensors in values that `read` returned, and storages that no tensor views."""
    return (value for value in _walked(*values) if is_plain_tensor(value) or isinstance(value, _Storage))


def _walked(*values: Any) -> Iterator[Any]:
    """These values, and all that they hold: in containers, and in the arguments and the state of stand-ins."""
    left, visited = list(values), set[int]()
    while left:
        value = left.pop()
        yield value
        if isinstance(value, dict | list | tuple | Inert) and not isinstance(value, _Storage) and id(value) not in visited:
            visited.add(id(value))
            inside = (value.args, value.state, value.items, value.mapping) if isinstance(value, Inert) else value
            left.extend(inside.values() if isinstance(inside, dict) else inside)


def as_setting(files: Files, value: Any) -> Any:
    """A setting with numbers, as their shortest decimals, in place of tensors of one element; also in a list, such as betas."""
    if isinstance(value, list | tuple) and len(value) < _MOST_NUMBERS and any(map(is_plain_tensor, value)):
        return type(value)(as_setting(files, part) for part in value)
    if not is_plain_tensor(value) or math.prod(value.shape) != 1:
        return value
    number = value.dtype.number(read_range(files, value.path, Locations(files).of(value), value.dtype.itemsize))
    return value if number is None else number


def _read_settings(files: Files, root: Any) -> None:
    """Put numbers in place of the tensors of one element among the settings of param groups, in all optimizers' state dicts in `root`: an
    optimizer keeps its learning rate and betas as either."""
    for value in _walked(root):
        if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
            for group in (group for group in value["param_groups"] if isinstance(group, dict)):
                group.update({key: as_setting(files, setting) for key, setting in group.items()})


class _Storage(NamedTuple):
    """A storage: a range of bytes that tensors are views of."""

    key: str
    """Its name in the file."""
    dtype: DType | None
    """The element type; None for bytes without a type."""
    byte_offset: int
    """Where its bytes start in the file; or, with `is_member`, where the local header of its zip member starts."""
    nbytes: int
    """The length of its bytes."""
    is_member: bool = False
    """Whether `byte_offset` is that of a local header."""


def _read_zip(source: Range, *, locate: bool, attributes: Attributes | None = None) -> Any:
    directory = read_directory(source)
    root = _root(source, directory)
    # The pickle is read first, because the same read fetches the members that follow it.
    pickle = content(source, directory, directory.members[root + "data.pkl"])
    order = directory.members.get(root + "byteorder")
    if order and order.nbytes < 100 and (text := content(source, directory, order)) != b"little":
        source.refuse(f"the file's byte order is {text.decode('latin1')!r}; reshard reads little-endian files only", do=_SAVE_AGAIN)
    storages: dict[str, _Storage] = {}

    def storage(pid: tuple[Any, ...]) -> object:
        key, dtype, count = _reference(pid, source)
        if key not in storages:
            member = directory.members.get(f"{root}data/{key}")
            if member is None:
                source.refuse(f"the storage {key!r} of a tensor is not in the file: there is no member {root}data/{key}")
            at = payload(source, directory, member) if locate else member.header_offset
            if locate:
                source.claims.add(source.start + at, source.start + member.header_offset, (member.nbytes, member.crc32))
            storages[key] = _Storage(key, dtype, source.start + at, member.nbytes, is_member=not locate)
        return _claimed(storages[key], dtype, count, source)

    root_object = load(pickle, where=source.where, storage=storage, rebuild=_rebuild_functions(source, attributes))
    return _finished(root_object, source, pickle, payload(source, directory, directory.members[root + "data.pkl"]))


def _finished(root: Any, source: Range, pickle: bytes, start: int) -> Any:
    """The root object of a pickle at byte `start` of the source, with arrays of numpy as tensors, and with the settings of optimizers."""
    if b"numpy" in pickle:
        root = with_arrays(root, _Elements(source, pickle, start).place)
    if b"param_groups" in pickle:
        _read_settings(source.files, root)
    return root


class _Elements:
    """Where the elements of arrays of numpy lie among the bytes of a pickle. They stand there in the order in which `with_arrays` asks."""

    def __init__(self, source: Range, pickle: bytes, start: int) -> None:
        self._source, self._pickle, self._start = source, pickle, start
        self._count, self._last, self._budget = 0, 0, 1 << 30

    def place(self, data: bytes, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]) -> LocatedTensor | None:
        """The array as a tensor; None if its elements are not found."""
        for as_text in (True, False) if self._pickle[1] < 3 else (False, True):
            stored = data.decode("latin1").encode() if as_text else data
            if (at := self._find(stored)) is not None:
                break
        else:
            return None
        self._count += 1
        path, offset = self._source.path, self._source.start + self._start + at
        if stored != data:
            path, offset = self._source.files.decoded(path, offset, len(stored), ("latin1",), limit=len(data)), 0
        return LocatedTensor(path, offset, dtype, shape, strides, f"array {self._count}")

    def _find(self, stored: bytes) -> int | None:
        """Where the bytes stand in the pickle."""
        for first in (self._last, 0):
            at = self._pickle.find(stored, first) if self._budget > 0 else -1
            if at >= 0:
                self._last = at + len(stored)
                return at
            self._budget -= len(self._pickle)  # a pickle made by hand can have a million arrays in another order
        return None


_SAVE_AGAIN = "Load it with torch on a machine without secrets, and save the tensors again"


def _root(source: Range, directory: Directory) -> str:
    """The folder inside the zip that holds all members, with a slash at its end."""
    names = [name for name in directory.members if name.endswith("/data.pkl")]
    if len(names) != 1:
        content = f"{len(names)} members called data.pkl" if names else "no data.pkl"
        source.refuse(f"the file is a zip, but not torch.save's: it holds {content}", do="Get the file again")
    root = names[0].removesuffix("data.pkl")
    if root + "constants.pkl" in directory.members:
        source.refuse("the file is a TorchScript archive, not a checkpoint", do=SAVE_STATE_DICT)
    return root


def _reference(pid: tuple[Any, ...], source: Range) -> tuple[str, DType | None, int]:
    """Key, element type and count of elements of the persistent id ('storage', class, key, location, count)."""
    if len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], StorageClass) or type(pid[2]) is not str or not _is_count(pid[4]):
        source.refuse(f"a tensor's storage has the id {shown(pid)}, expected ('storage', class, key, device, count)")
    dtype = None if pid[1] == "UntypedStorage" else from_storage(pid[1], where=source.where)
    return pid[2], dtype, pid[4]


def _claimed(storage: _Storage, dtype: DType | None, count: int, source: Range) -> _Storage:
    """The storage with the element type and count of one reference to it: two references may name different types."""
    nbytes = count * (dtype.itemsize if dtype else 1)
    if nbytes > storage.nbytes:
        source.refuse(
            f"the storage {storage.key!r} claims {count:,} x {dtype or 'bytes'}, which is {nbytes:,} bytes; the file has {storage.nbytes:,}"
        )
    return storage._replace(dtype=dtype, nbytes=nbytes)


def _rebuild_functions(source: Range, attributes: Attributes | None) -> Rebuild:
    """By name, the functions of torch that make tensors. Here they make LocatedTensors and UnlocatedTensors."""

    def tensor(storage: Any, offset: Any, size: Any, stride: Any, dtype: DType | None = None, metadata: Any = None) -> Any:
        if not isinstance(storage, _Storage):
            source.refuse(f"a tensor's storage is {shown(storage)}")
        if (dtype := dtype or storage.dtype) is None:
            source.refuse("neither a tensor nor its storage has an element type")
        view = _view(source, storage, offset, size, stride, dtype)
        # {"conj": True}: the values must be conjugated after reading; {"neg": True}: negated.
        return inert_class(f"torch.Tensor ({', '.join(map(shown, metadata))})")(view) if metadata else view

    def tensor_v2(
        storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any = None, hooks: Any = None, metadata: Any = None
    ) -> Any:
        return tensor(storage, offset, size, stride, metadata=metadata)

    def tensor_v3(
        storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
    ) -> Any:
        name = dtype if isinstance(dtype, DTypeName) else getattr(dtype, "class_name", shown(dtype))
        return tensor(storage, offset, size, stride, from_torch(str(name), where=source.where), metadata)

    def parameter(data: Any, *_: Any) -> Any:
        return data

    def from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
        value = _from_type(function, kind, args, state)
        if attributes is not None and is_plain_tensor(value):
            attributes[value.storage] = state
        return value

    return {
        "torch._utils._rebuild_tensor": tensor_v2,
        "torch._utils._rebuild_tensor_v2": tensor_v2,
        "torch._utils._rebuild_tensor_v3": tensor_v3,
        "torch._utils._rebuild_parameter": parameter,
        "torch._utils._rebuild_parameter_with_state": parameter,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": parameter,
        "torch._tensor._rebuild_from_type": from_type,
        "torch._tensor._rebuild_from_type_v2": from_type,
    }


# Classes whose instances differ from a plain tensor only by attributes, such as FSDP's _has_been_cloned.
_PLAIN = {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter", "torch.nn.parameter.Buffer"}


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor of class `kind` that `function(*args)` builds: the plain tensor if `kind` is in _PLAIN, otherwise an Inert."""
    if not (isinstance(kind, type) and issubclass(kind, Inert)) or not isinstance(args, tuple):
        raise TypeError(f"a tensor of class {shown(kind)} with arguments {shown(args)}")
    if kind.class_name in _PLAIN:
        return function(*args)
    # A plain function of torch builds the tensor itself. A class that wraps other tensors has them in its state.
    stand_in = kind(function(*args)) if isinstance(function, Function) else kind(*args)
    stand_in.__setstate__(state)
    return _wrapped(stand_in)


# Classes that say which part of a global tensor they hold; the decoder of distributed tensors reads them.
DISTRIBUTED = ("DTensor", "ShardedTensor")
# Attributes that only cache something: the scale of a weight's next cast to FP8 (torchao/float8/fsdp_utils.py).
_CACHED = ("_precomputed_scale",)


def _wrapped(stand_in: Inert) -> Any:
    """The one tensor that an instance of a class wraps; the stand-in itself if it wraps several, or its tensor has another element type or
    size than the class shows: then only the class knows what its values are. An instance that wraps none is a tensor itself, with
    attributes that may change the meaning of its elements.
    """
    if stand_in.class_name.endswith(DISTRIBUTED):
        return stand_in
    state, args = stand_in.state, stand_in.args
    attributes = [value for key, value in state.items() if key not in _CACHED] if isinstance(state, dict) else [state]
    inside = list(tensors_in(args, *attributes))
    if len(inside) != 1 or not is_plain_tensor(tensor := inside[0]):
        return stand_in
    as_shown = args[1:3] == (tensor.dtype.torch, tensor.shape) if len(args) > 2 else not state and tensor.dtype.floating
    return tensor if as_shown else stand_in


def _view(source: Range, storage: _Storage, offset: Any, size: Any, stride: Any, dtype: DType) -> AnyTensor:
    """The tensor, after a check that its first and its last element lie in the storage."""
    sizes, strides = _as_counts(size), _as_counts(stride)
    if sizes is None or strides is None or len(sizes) != len(strides) or len(sizes) > 64 or not _is_count(offset):
        source.refuse(f"a tensor of storage {storage.key!r} claims offset {shown(offset)}, size {shown(size)}, strides {shown(stride)}")
    if math.prod(sizes) * dtype.itemsize >= 1 << 63:
        source.refuse(f"a tensor of storage {storage.key!r} claims the size {sizes}, which is more than any memory can hold")
    if 0 in sizes:
        return _placed(source, storage, 0, dtype, sizes, strides)
    last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if (last + 1) * dtype.itemsize > storage.nbytes:
        source.refuse(
            f"a tensor of size {sizes}, strides {strides}, offset {offset:,} needs {(last + 1) * dtype.itemsize:,} bytes ({dtype}); "
            f"its storage {storage.key!r} has {storage.nbytes:,}"
        )
    return _placed(source, storage, offset * dtype.itemsize, dtype, sizes, strides)


def _placed(source: Range, storage: _Storage, skipped: int, dtype: DType, sizes: tuple[int, ...], strides: tuple[int, ...]) -> AnyTensor:
    """The tensor that starts `skipped` bytes after the start of the storage."""
    if storage.is_member:
        return UnlocatedTensor(source.path, storage.byte_offset, skipped, dtype, sizes, strides, storage.key)
    return LocatedTensor(source.path, storage.byte_offset + skipped, dtype, sizes, strides, storage.key)


def _as_counts(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, tuple | list) and all(map(_is_count, value)) else None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


# The first pickle of an old file: the number 0x1950a86a20f9469cfc6c.
_OLD_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_OLD_LIMIT = 1 << 30


def _read_old(source: Range, attributes: Attributes | None) -> Any:
    """The root object of an old file:

    | magic | protocol 1001 | system | object | list of storage keys | per key: int64 count of elements, bytes |

    The pickle of the object is read twice, first only for the element types of the storages: without them the storages cannot be found.

    Source: torch/serialization.py, _legacy_save.
    """
    pickles, data = _leading_pickles(source, 5)
    _, protocol, system, root, key_list = pickles

    def plain(pickle: bytes) -> Any:
        return load(pickle, where=source.where)

    if (version := plain(protocol)) != 1001:
        source.refuse(f"the old torch container has protocol {shown(version)}, expected 1001")
    system_facts = plain(system)
    if not isinstance(system_facts, dict) or system_facts.get("little_endian") is not True:
        source.refuse("the file's byte order is big-endian; reshard reads little-endian files only", do=_SAVE_AGAIN)

    types: dict[str, DType | None] = {}

    def note_type(pid: tuple[Any, ...]) -> object:
        if pid[:1] == ("module",):  # ("module", class, file, source text), the id of a pickled nn.Module
            return pid[1] if len(pid) > 1 else None
        key, dtype, _ = _reference(pid, source)
        types.setdefault(key, dtype)
        return pid

    load(root, where=source.where, storage=note_type, rebuild={})
    storages = _old_storages(source, plain(key_list), types, data)

    def storage(pid: tuple[Any, ...]) -> object:
        if pid[:1] == ("module",):
            return note_type(pid)
        key, dtype, count = _reference(pid, source)
        if key not in storages:
            source.refuse(f"the storage {key!r} of a tensor is not in the file")
        return _claimed(_old_view(storages[key], dtype, pid, source), dtype, count, source)

    root_object = load(root, where=source.where, storage=storage, rebuild=_rebuild_functions(source, attributes))
    return _finished(root_object, source, root, sum(map(len, pickles[:3])))


def _leading_pickles(source: Range, count: int) -> tuple[list[bytes], int]:
    """The first `count` pickles of the range and the byte after them. The window that is read grows until they fit."""
    window = 1 << 16
    while True:
        data = source.read(0, min(window, source.nbytes))
        try:
            return _split(data, count)
        except EOFError:
            if len(data) == source.nbytes or window >= _OLD_LIMIT:
                source.refuse(f"the old torch container's {count} pickles do not end within {len(data):,} bytes")
        except (UnpicklingError, ValueError) as error:
            looks_like = magic_bytes.describe(data[:262])
            source.refuse(f"this is not a torch.save file; it looks like {looks_like}: {error}", do="Get the file again")
        window *= 4


def _split(data: bytes, count: int) -> tuple[list[bytes], int]:
    """The first `count` pickles of the data and the byte after them."""
    pickles, stop = [], 0
    for _ in range(count):
        start, stop = stop, end_of_pickle(data, stop)
        pickles.append(data[start:stop])
    return pickles, stop


def _old_storages(source: Range, keys: Any, types: dict[str, DType | None], data: int) -> dict[str, _Storage]:
    """The storages by key, which start at byte `data` and follow each other in the order of `keys`."""
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        source.refuse("the list of storage keys is not a list of names")
    storages: dict[str, _Storage] = {}
    for key in keys:
        if key not in types:
            source.refuse(f"the storage {key!r} is listed, but no tensor tells its element type, so the storages after it cannot be found")
        if data + 8 > source.nbytes:
            source.refuse(f"the storage {key!r} should start at byte {data:,}, the file ends at {source.nbytes:,}")
        (count,) = struct.unpack("<q", source.read(data, 8, ahead=8))
        dtype = types[key]
        nbytes = count * (dtype.itemsize if dtype else 1)
        if count < 0 or data + 8 + nbytes > source.nbytes:
            source.refuse(f"the storage {key!r} claims {count:,} elements from byte {data:,} on, the file ends at {source.nbytes:,}")
        storages[key] = _Storage(key, dtype, source.start + data + 8, nbytes)
        data += 8 + nbytes
    return storages


def _old_view(storage: _Storage, dtype: DType | None, pid: tuple[Any, ...], source: Range) -> _Storage:
    """The part of a storage that element 5 of a persistent id selects: (key of the view, offset, count). torch < 0.4 wrote views."""
    if len(pid) < 6 or pid[5] is None:
        return storage
    view = pid[5]
    if not isinstance(view, tuple) or len(view) != 3 or not _is_count(view[1]) or not _is_count(view[2]):
        source.refuse(f"the storage {storage.key!r} has a view {shown(view)}, expected (key, offset, count)")
    itemsize = dtype.itemsize if dtype else 1
    start, nbytes = view[1] * itemsize, view[2] * itemsize
    if start + nbytes > storage.nbytes:
        source.refuse(f"a view of the storage {storage.key!r} ends at byte {start + nbytes:,} of {storage.nbytes:,}")
    return storage._replace(byte_offset=storage.byte_offset + start, nbytes=nbytes)
