"""The layout of a torch.save file to be written: the tensors in its pickle, the zip, and where the bytes of each storage go.

Tensors are only described, and torch is not needed. In the pickle they become calls of torch's rebuild functions, as
torch.Tensor.__reduce_ex__ makes them (torch/_tensor.py).

    <root>/data.pkl  <root>/.format_version  <root>/.storage_alignment  <root>/byteorder  <root>/data/0 ...  <root>/version  directory

The members are those of torch 2.13, in the same order. Their payloads start at multiples of 64 bytes, counted from the start of the zip.
The checksum of a storage is known when its bytes have been written. So its local header has zeros (flag bit 3), and the checksum stands in
a data descriptor behind the payload, as torch writes it, and in the directory (APPNOTE.TXT 6.3.10, 4.3.9). torch reads no checksum; zipfile
and `unzip -t` do.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from itertools import accumulate

from reshard.containers import pickle_writer
from reshard.containers.pickle_writer import Call, Name, PersistentId
from reshard.errors import RequestError
from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import DType
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.storage.checksums import StoredChecksum

ALIGNMENT = 64
_WIDE = 0xFFFFFFFF
_MOST_BYTES = (1 << 63) - 1
_UTF8, _HAS_DESCRIPTOR = 0x0800, 0x0008
# Where the CRC-32 stands in a record of the directory and in a data descriptor.
_CRC_IN_RECORD, _CRC_IN_DESCRIPTOR = 16, 4


@value(eq=False)
class Plain:
    """A row-major tensor in a storage of its own. Two Plain objects are never equal: each is one tensor."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        total = self.dtype.itemsize
        for size in self.shape:
            total *= size
        return total


class Tensors:
    """The tensors of a pickle."""

    def __init__(self) -> None:
        self.storages: list[Plain | bytes] = []
        """Element i is the content of the storage with the key i: the tensor that fills it, or its bytes."""

    def add(self, tensor: Plain, content: bytes | None = None) -> Call:
        """The call that makes the tensor when it is unpickled. The tensor gets the next storage.

        content: the bytes of the tensor if the pickle's file holds them anyway; None: the tensor is filled later.
        """
        key, dtype = str(len(self.storages)), tensor.dtype
        self.storages.append(tensor if content is None else content)
        view = (0, tensor.shape, row_major(tensor.shape), False, Call(Name("collections", "OrderedDict")))
        if dtype.has_storage_class:
            storage = PersistentId(("storage", Name("torch", dtype.storage), key, "cpu", tensor.nbytes // dtype.itemsize))
            return Call(Name("torch._utils", "_rebuild_tensor_v2"), (storage, *view))
        storage = PersistentId(("storage", Name("torch.storage", "UntypedStorage"), key, "cpu", tensor.nbytes))
        return Call(Name("torch._utils", "_rebuild_tensor_v3"), (storage, *view, Name("torch", dtype.torch)))


def tensor_pickle(tensor: Plain) -> tuple[bytes, list[Plain | bytes]]:
    """The pickle of one tensor, and its storages (`Tensors.storages`)."""
    tensors = Tensors()
    return pickle_writer.dumps(tensors.add(tensor)), tensors.storages


@value
class TorchFrame:
    """The layout of a torch.save file, without the bytes of its storages. All offsets count from the start of the file."""

    literals: tuple[tuple[int, bytes], ...]
    """The bytes around the storages, as (byte offset, bytes)."""
    storages: tuple[int, ...]
    """The byte offset of each storage."""
    nbytes: int
    """The byte offset at which the zip ends. This is the length of the file only if the zip starts at byte 0."""
    checksums: tuple[StoredChecksum, ...] = ()
    """Those of the storages that are filled later, in ascending order."""

    def __repr__(self) -> str:
        return f"TorchFrame({plural(len(self.storages), 'storage')}, ends at byte {self.nbytes:,})"


def frame(root: str, pickle: bytes, storages: Sequence[Plain | bytes], *, start: int = 0) -> TorchFrame:
    """The layout of a torch.save file, as a zip that starts at byte `start` of its file.

    root: the folder inside the zip. storages: element i is the content of storage <root>/data/i: the tensor that fills it, or its bytes.
    """
    return _Zip(root, start).whole(pickle, [content.nbytes if isinstance(content, Plain) else content for content in storages])


class _Zip:
    """A zip under construction. Bytes between two storages are collected in `_pending` and become one literal."""

    def __init__(self, root: str, start: int) -> None:
        self._root, self._start = root, start
        self._at = 0
        self._pending = bytearray()
        self._pending_at = 0
        self._literals: list[tuple[int, bytes]] = []
        self._directory: list[bytes] = []
        self._described: list[tuple[int, int, int]] = []
        """The members with a data descriptor: (number, where the payload starts, where the descriptor starts)."""

    def whole(self, pickle: bytes, storages: Sequence[int | bytes]) -> TorchFrame:
        self._member("data.pkl", pickle)
        self._member(".format_version", b"1")
        self._member(".storage_alignment", str(ALIGNMENT).encode())
        self._member("byteorder", b"little")
        byte_offsets = [self._member(f"data/{key}", content) for key, content in enumerate(storages)]
        self._member("version", b"3\n")
        checksums = self._end()
        self._flush()
        return TorchFrame(tuple(self._literals), tuple(byte_offsets), self._start + self._at, checksums)

    def _member(self, name: str, content: int | bytes) -> int:
        """Add a member, and return the byte offset of its payload in the file. content: its bytes, or only their number."""
        full, header_offset = f"{self._root}/{name}".encode(), self._at
        if isinstance(content, int):
            nbytes, told, crc, flags = content, 0, 0, _UTF8 | _HAS_DESCRIPTOR
        else:
            nbytes, told, crc, flags = len(content), len(content), zlib.crc32(content), _UTF8
        if nbytes > _MOST_BYTES - self._at:
            raise RequestError(
                f"its torch.save file would have more than {_MOST_BYTES:,} bytes",
                where=self._root,
                why="No file can; a size in the source or in the request is wrong",
                do="Compare the model's config with the sizes that were asked for",
            )
        wide = struct.pack("<HHQQ", 1, 16, told, told) if nbytes >= _WIDE else b""
        payload = header_offset + 30 + len(full) + len(wide) + 4
        padding = -payload % ALIGNMENT
        extra = wide + struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        narrow = _WIDE if wide else told
        self._write(struct.pack("<4s5HLLLHH", b"PK\3\4", 0, flags, 0, 0, 0, crc, narrow, narrow, len(full), len(extra)) + full + extra)
        byte_offset = self._start + self._at
        if isinstance(content, int):
            self._skip(nbytes)
            if nbytes:  # the CRC-32 of nothing is 0
                self._described.append((len(self._directory), byte_offset, byte_offset + nbytes))
            self._write(struct.pack("<4sLQQ" if wide else "<4sLLL", b"PK\7\x08", 0, nbytes, nbytes))
        else:
            self._write(content)
        self._directory.append(_central(full, flags, crc, nbytes, header_offset))
        return byte_offset

    def _end(self) -> tuple[StoredChecksum, ...]:
        """Add the directory. Returns the checksums that are not known."""
        start, count = self._at, len(self._directory)
        records = [self._start + at for at in accumulate(map(len, self._directory), initial=start)]
        checksums = tuple(
            StoredChecksum(payload, descriptor, (descriptor + _CRC_IN_DESCRIPTOR, records[number] + _CRC_IN_RECORD))
            for number, payload, descriptor in self._described
        )
        self._write(b"".join(self._directory))
        size, stop = self._at - start, self._at
        self._write(struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 0x31E, 45, 0, 0, count, count, size, start))
        self._write(struct.pack("<4sLQL", b"PK\6\7", 0, stop, 1))
        narrow_count = min(count, 0xFFFF)
        self._write(struct.pack("<4s4HLLH", b"PK\5\6", 0, 0, narrow_count, narrow_count, min(size, _WIDE), min(start, _WIDE), 0))
        return checksums

    def _write(self, data: bytes) -> None:
        self._pending += data
        self._at += len(data)

    def _skip(self, nbytes: int) -> None:
        self._flush()
        self._at += nbytes
        self._pending_at = self._at

    def _flush(self) -> None:
        if self._pending:
            self._literals.append((self._start + self._pending_at, bytes(self._pending)))
        self._pending = bytearray()
        self._pending_at = self._at


def _central(name: bytes, flags: int, crc: int, nbytes: int, header_offset: int) -> bytes:
    """The entry of a member in the central directory."""
    wide = b""
    if nbytes >= _WIDE:
        wide += struct.pack("<QQ", nbytes, nbytes)
    if header_offset >= _WIDE:
        wide += struct.pack("<Q", header_offset)
    extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
    narrow = min(nbytes, _WIDE)
    fixed = (0, 0, flags, 0, 0, 0, crc, narrow, narrow, len(name), len(extra), 0, 0, 0, 0, min(header_offset, _WIDE))
    return struct.pack("<4s6H3L5H2L", b"PK\1\2", *fixed) + name + extra
