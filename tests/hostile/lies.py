"""One builder per way in which a file can lie. Each returns the bytes of a file; the honest ones come first.

Nothing here is harmful: the pickles that try to run something try to create one empty file, the sentinel.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
from pathlib import Path

# ---------------------------------------------------------------- safetensors

HONEST_HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def safetensors(header: object = None, data: bytes = bytes(32), *, claimed: int | None = None) -> bytes:
    """A file with that header (JSON, or raw bytes) and data; `claimed` is what its first eight bytes say."""
    header = HONEST_HEADER if header is None else header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + data


def safetensors_entry(**changes: object) -> bytes:
    """The honest file with b's entry changed."""
    return safetensors(HONEST_HEADER | {"b": HONEST_HEADER["b"] | changes})


# ---------------------------------------------------------------- pickles

P2 = b"\x80\x02"


def name(module: str, attribute: str) -> bytes:
    """The opcode that asks for a class or function."""
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def value(thing: object) -> bytes:
    """The opcodes that push a plain value."""
    return pickle.dumps(thing, 2)[2:-1]


def call(function: bytes, *args: bytes) -> bytes:
    """The opcodes that call a function."""
    return function + b"(" + b"".join(args) + b"tR"


def running(code: bytes) -> bytes:
    return P2 + code + b"."


class Evil:
    """What a pickle of this object runs when it is loaded by pickle.load."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call  # type: ignore[return-value]


def gadgets(sentinel: Path) -> dict[str, bytes]:
    """Pickles that create `sentinel` when loaded by pickle.load, or would with a slightly naive reader."""
    shell, python = f"touch {sentinel}", f"open({str(sentinel)!r}, 'w')"
    system, plain = name("os", "system"), name("torch", "Tensor")
    rebuild = name("torch._tensor", "_rebuild_from_type_v2")
    return {
        "os.system by __reduce__": pickle.dumps(Evil(os.system, shell), 2),
        "os.system at protocol 4": pickle.dumps(Evil(os.system, shell), 4),
        "subprocess": pickle.dumps(Evil(subprocess.check_call, ["touch", str(sentinel)]), 4),
        "eval": pickle.dumps(Evil(eval, python), 2),
        "exec": pickle.dumps(Evil(exec, python), 4),
        "getattr of a module": running(call(call(name("__builtin__", "getattr"), name("os", "path"), value("os.system")), value(shell))),
        "old INST opcode": b"(" + value(shell) + b"ios\nsystem\n.",
        "old OBJ opcode": running(b"(" + name("os", "system") + value(shell) + b"o"),
        "NEWOBJ": running(name("subprocess", "Popen") + b"(" + value(["touch", str(sentinel)]) + b"t\x81"),
        "copyreg": running(call(name("copyreg", "__newobj__"), name("subprocess", "Popen"), value(["touch", str(sentinel)]))),
        "inside a tensor": running(call(rebuild, system, plain, value((shell,)), b"N")),
        "as a tensor's class": running(call(rebuild, name("torch._utils", "_rebuild_tensor_v2"), system, value((shell,)), b"N")),
        "as a default factory": running(call(name("collections", "defaultdict"), system)),
        "dotted name": b"\x80\x04" + value("os")[:-2] + b"\x94" + value("path.os.system")[:-2] + b"\x94\x93(" + value(shell) + b"tR.",
        "torch.load": running(call(name("torch", "load"), value(str(sentinel)))),
        "runpy": running(call(name("runpy", "_run_code"), value(python), b"}")),
    }


def poisons() -> dict[str, bytes]:
    """Pickles that use BUILD to change what the reader handed them."""
    attributes = b"N}" + value("__code__") + b"Ns\x86b"
    return {
        "a dtype": running(name("torch", "float32") + value(["F32", 1, "float32", "FloatStorage", True]) + b"b"),
        "a storage class": running(name("torch", "FloatStorage") + value({"name": "x"}) + b"b"),
        "a function": running(name("torch", "Size") + attributes),
        "a constructor": running(name("collections", "OrderedDict") + attributes),
        "a class": running(name("some", "Class") + attributes),
    }


def bombs() -> dict[str, bytes]:
    """Short pickles that ask for a lot of memory or time."""
    return {
        "memo number": P2 + b"Nr\xff\xff\xff\x7f.",
        "memo number in text": P2 + b"Np2000000000\n.",
        "long string": P2 + b"X\xff\xff\xff\x7fabc.",
        "bytes of a number": running(call(name("__builtin__", "bytes"), value(10**12))),
        "bytearray of a number": running(call(name("__builtin__", "bytearray"), value(10**12))),
        "a list copied often": P2 + b"]q\x01(" + b"N" * 100_000 + b"e(" + call(name("__builtin__", "list"), b"h\x01") * 5_000 + b"t.",
        "range": running(call(name("__builtin__", "list"), call(name("__builtin__", "range"), value(10**12)))),
    }


def old_file(
    *,
    protocol: object = 1001,
    system: object = None,
    keys: object = None,
    count: int = 6,
    data: bytes | None = None,
    code: bytes | None = None,
) -> bytes:
    """The honest tensor in torch's container from before 1.6, but for what is given."""
    system = {"little_endian": True} if system is None else system
    parts = [0x1950A86A20F9469CFC6C, protocol, system]
    head = b"".join(pickle.dumps(part, 2) for part in parts)
    storages = struct.pack("<q", count) + TENSOR_BYTES if data is None else data
    return head + running(code or tensor(where=old_storage())) + pickle.dumps(["0"] if keys is None else keys, 2) + storages


def old_storage(key: str = "0", count: object = 6, view: object = None) -> bytes:
    return b"(" + value("storage") + name("torch", "FloatStorage") + value(key) + value("cpu") + value(count) + value(view) + b"tQ"


def second_directory() -> bytes:
    """A zip in a zip: the locator names a directory hidden in a payload, in which data/0 is other bytes."""
    real = torch_file()

    def hidden(start: int) -> bytes:
        listed = real[real.index(b"PK\1\2") : real.index(b"PK\6\6")]
        count = listed.count(b"PK\1\2")
        return listed + struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(listed), start)

    def whole(start: int) -> bytes:
        members = {"archive/data.pkl": running(tensor()), "archive/byteorder": b"little", "archive/data/0": TENSOR_BYTES}
        directory = hidden(start)
        at = start + directory.index(b"PK\6\6")
        wide = {"count": 0xFFFF, "size": 0xFFFFFFFF, "offset": 0xFFFFFFFF}
        return archive(members | {"archive/version": b"3\n", "archive/z": directory}, end=wide, end64={"at": at})

    return whole(whole(0).index(b"PK\1\2"))


def damaged() -> dict[str, bytes]:
    """Pickles that end early, or are no pickles."""
    good = pickle.dumps({"weight": list(range(100)), "name": "x" * 300}, 2)
    return {
        "cut": good[:200],
        "without its stop": good[:-1],
        "empty": b"",
        "with more after it": good + b"more",
        "of no known opcode": P2 + b"\xff.",
        "with an empty stack": P2 + b"R.",
        "with a persistent id": P2 + value("key") + b"Q.",
        "with an extension code": P2 + b"\x82\x01.",
        "with a tuple of no mark": P2 + b"t.",
        "with an unhashable key": P2 + b"}]Ns.",
        "with a name that is not text": P2 + b"\x80\x04" + b"NN\x93.",
        "of a future protocol": b"\x80\x63N.",
    }


# ---------------------------------------------------------------- torch.save's zip

TENSOR_BYTES = bytes(range(24))


def storage(key: str = "0", count: object = 6, kind: str = "FloatStorage") -> bytes:
    """The opcodes that refer to a storage."""
    return b"(" + value("storage") + name("torch", kind) + value(key) + value("cpu") + value(count) + b"tQ"


def tensor(
    *,
    where: bytes | None = None,
    offset: object = 0,
    size: object = (2, 3),
    stride: object = (3, 1),
    hooks: bytes = b"}",
    more: bytes = b"",
) -> bytes:
    """The opcodes of one tensor; as given, the honest one."""
    function = name("torch._utils", "_rebuild_tensor_v2")
    return call(function, where or storage(), value(offset), value(size), value(stride), b"\x89", hooks, more)


def torch_file(code: bytes | None = None, **lies: object) -> bytes:
    """A torch.save file whose root is what the opcodes make: one tensor, as given. See `archive` for the lies."""
    members = {
        "archive/data.pkl": running(code or tensor()),
        "archive/byteorder": b"little",
        "archive/data/0": TENSOR_BYTES,
        "archive/version": b"3\n",
    }
    return archive(members, **lies)  # type: ignore[arg-type]


def archive(
    members: dict[str, bytes],
    *,
    local: dict[str, object] | None = None,
    central: dict[str, object] | None = None,
    end: dict[str, int] | None = None,
    end64: dict[str, int] | None = None,
    of: str = "archive/data/0",
    twice: str | None = None,
) -> bytes:
    """A stored zip as torch writes it (no sizes in local headers, 64-bit end record), but for the fields named in
    `local` and `central` (of the member `of`), `end` and `end64`."""
    body, directory, count = b"", b"", 0
    for member, data in [*members.items(), *([(twice, b"")] if twice else [])]:
        mine = {"name": member} | ((local or {}) if member == of else {})
        theirs = {"flags": 0x0808, "method": 0, "stored": len(data), "size": len(data), "offset": len(body), "name": member, "extra": b""}
        theirs |= (central or {}) if member == of else {}
        body += _local(mine, data)
        directory += _central(theirs)
        count += 1
    wide = {"count": count, "size": len(directory), "offset": len(body), "at": len(body) + len(directory)} | (end64 or {})
    narrow = {"count": count, "size": len(directory), "offset": len(body)} | (end or {})
    record = struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, wide["count"], wide["count"], wide["size"], wide["offset"])
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, wide["at"], 1)
    last = struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, narrow["count"], narrow["count"], narrow["size"], narrow["offset"], 0)
    return body + directory + record + locator + last


def _local(fields: dict[str, object], data: bytes) -> bytes:
    text = str(fields["name"]).encode()
    extra = b"FB\x03\x00ZZZ"
    header = struct.pack(
        "<4sHHHHHLLLHH",
        b"PK\3\4",
        0,
        0x0808,
        0,
        0,
        0,
        0,
        0,
        0,
        fields.get("name_length", len(text)),
        fields.get("extra_length", len(extra)),
    )
    return header + text + extra + data


def _central(fields: dict[str, object]) -> bytes:
    text, extra = str(fields["name"]).encode(), bytes(fields["extra"])  # type: ignore[call-overload]
    numbers = fields["flags"], fields["method"], 0, 0, 0, fields["stored"], fields["size"], len(text), len(extra), 0, 0, 0, 0
    return struct.pack("<4sHHHHHHLLLHHHHHLL", b"PK\1\2", 0, 0, *numbers, fields["offset"]) + text + extra


# ---------------------------------------------------------------- DCP metadata

_DCP = "torch.distributed.checkpoint.metadata"


def _object(module: str, kind: str, state: bytes) -> bytes:
    return name(module, kind) + b")\x81" + state + b"b"


def _attributes(**attributes: bytes) -> bytes:
    return b"}(" + b"".join(value(key) + code for key, code in attributes.items()) + b"u"


def size(*numbers: object) -> bytes:
    return call(name("torch", "Size"), value(numbers))


def chunk(offsets: tuple[object, ...], sizes: tuple[object, ...]) -> bytes:
    return _object(_DCP, "ChunkStorageMetadata", _attributes(offsets=size(*offsets), sizes=size(*sizes)))


def entry(
    fqn: object = "w",
    offsets: tuple[object, ...] | None = (0, 0),
    *,
    path: object = "__0_0.distcp",
    start: object = 0,
    nbytes: object = 1600,
    **more: object,
) -> bytes:
    """One key and value of storage_data."""
    index = {"fqn": value(fqn)} | ({"offset": size(*offsets)} if offsets is not None else {})
    place = {"relative_path": path, "offset": start, "length": nbytes} | more
    info = {key: value(thing) for key, thing in place.items()}
    return _object(_DCP, "MetadataIndex", _attributes(**index)) + _object(
        "torch.distributed.checkpoint.filesystem", "_StorageInfo", _attributes(**info)
    )


def dcp_metadata(
    *,
    shape: tuple[object, ...] = (4, 6),
    chunks: list[bytes] | None = None,
    entries: list[bytes] | None = None,
    dtype: bytes | None = None,
    planner: object = None,
) -> bytes:
    """A .metadata with one tensor `w` of [4, 6] in two chunks of two rows, as given."""
    chunks = [chunk((0, 0), (2, 6)), chunk((2, 0), (2, 6))] if chunks is None else chunks
    entries = [entry(), entry(offsets=(2, 0), path="__1_0.distcp")] if entries is None else entries
    properties = _object(_DCP, "TensorProperties", b"(" + (dtype or name("torch", "float32")) + b"NNNNt")
    tensor = _object(
        _DCP, "TensorStorageMetadata", _attributes(properties=properties, size=size(*shape), chunks=b"](" + b"".join(chunks) + b"e")
    )
    root = _attributes(
        state_dict_metadata=_attributes(w=tensor), storage_data=b"}(" + b"".join(entries) + b"u", planner_data=value(planner)
    )
    return running(_object(_DCP, "Metadata", root))
