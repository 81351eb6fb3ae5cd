"""Zip directory: where the members of an uncompressed zip lie, read from the central directory and checked.

    | local header, name, extra, payload | ... | central directory | [end record 64, locator] | end record |

torch.save writes local headers without sizes (flag bit 3), pads their extra field so that payloads start at multiples of 64 bytes, and
always adds the 64-bit end record. So sizes come from the central directory, and the start of a payload from its local header. The zip may
be a byte range of a larger file, such as an entry of a DCP file. Measured on torch 2.13; older files have fewer members.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterator
from operator import attrgetter
from typing import NoReturn

from reshard.containers import magic_bytes
from reshard.errors import CheckpointError, TruncatedFile, WrongChecksum
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.storage.claims import Claims, Listing
from reshard.storage.files import Files, cut_short, missing, read_range

_END, _END64, _LOCATOR, _CENTRAL, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_METHODS = {1: "shrink", 6: "implode", 8: "deflate", 9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstd", 95: "xz"}
# A member takes 46 bytes and its name, so a directory of this size lists more than a million tensors.
_MAX_DIRECTORY = 1 << 28
_TAIL, _AHEAD = 4096, 2048


@value
class Member:
    """A member of a zip."""

    name: str
    """Its path inside the zip."""
    header_offset: int
    """The byte offset of its local header, counted from the start of the zip."""
    nbytes: int
    """The length of its payload."""
    crc32: int
    """The CRC-32 of its payload; 0 if the writer has computed none (torch.serialization.set_crc32_options)."""


class Range:
    """The bytes [start, start + nbytes) of a file. A small read fetches some bytes more, because the next read is usually nearby.

    Raises: CheckpointError if the file is missing or ends before the range does.
    """

    def __init__(self, files: Files, path: str, start: int = 0, nbytes: int | None = None) -> None:
        size = files.size(path)
        if size is None:
            raise missing(files, path)
        if nbytes is None:
            nbytes = size - start
        if start < 0 or nbytes < 0 or start + nbytes > size:
            raise cut_short(path, start, start + nbytes, size)
        self.files, self.path, self.start, self.nbytes = files, path, start, nbytes
        self._near: list[tuple[int, bytes]] = []

    @property
    def where(self) -> str:
        """The name of the range in messages."""
        return self.path if not self.start else f"{self.path} (bytes {self.start:,}..{self.start + self.nbytes:,})"

    @property
    def claims(self) -> Claims:
        """What is claimed of the file."""
        return self.files.claims(self.path)

    def read(self, byte_offset: int, nbytes: int, *, ahead: int = _AHEAD) -> bytes:
        """Bytes [byte_offset, byte_offset + nbytes) of the range; the caller has checked that they lie in it.

        ahead: fetch at least this many bytes at once.
        """
        for near, data in self._near:
            if near <= byte_offset and byte_offset + nbytes <= near + len(data):
                return data[byte_offset - near : byte_offset - near + nbytes]
        data = read_range(self.files, self.path, self.start + byte_offset, min(max(nbytes, ahead), self.nbytes - byte_offset))
        if len(data) <= 16 * _TAIL:
            self._near = [*self._near[-1:], (byte_offset, data)]
        return data[:nbytes]

    def refuse(self, what: str, *, do: str = "Copy the file again") -> NoReturn:
        """Raises CheckpointError about this range."""
        raise CheckpointError(what, where=self.where, do=do)


@value
class Directory:
    """The central directory of a zip."""

    members: dict[str, Member]
    """The members by name."""
    byte_offset: int
    """Where the payloads end and the directory starts, counted from the start of the zip."""

    def __repr__(self) -> str:
        return f"Directory({plural(len(self.members), 'member')})"


def read_directory(source: Range) -> Directory:
    """The directory of the zip that fills `source`. Takes one read if the directory lies in the last 4096 bytes.

    Every member has been checked: it is not compressed or encrypted, and it lies between the start of the zip and its directory.

    Raises: CheckpointError. If the bytes are not a zip, the message says what they look like.
    """
    count, byte_offset, directory = read_records(source)
    members: dict[str, Member] = {}
    for member in members_of(source, directory, count):
        if member.name in members:
            source.refuse(f"the zip holds two members called {member.name!r}")
        if member.header_offset + 30 + member.nbytes > byte_offset:
            source.refuse(
                f"the zip's member {member.name!r} claims {member.nbytes:,} bytes from {member.header_offset:,} on, "
                f"the payloads end at {byte_offset:,}"
            )
        members[member.name] = member
    return Directory(members, byte_offset)


def read_records(source: Range) -> tuple[int, int, bytes]:
    """The records of the directory of the zip that fills `source`: their number, where they start, and their bytes, which are not checked.

    Raises: CheckpointError. If the bytes are not a zip, the message says what they look like.
    """
    tail_offset = max(0, source.nbytes - _TAIL)
    tail = source.read(tail_offset, source.nbytes - tail_offset)
    end = _find_end(tail)
    if end < 0:
        _refuse_no_end(source)
    count, size, byte_offset, stop = _end_record(source, tail, tail_offset, end)
    if byte_offset + size != stop:
        source.refuse(f"the zip's directory claims bytes {byte_offset:,}..{byte_offset + size:,}, but must end at {stop:,}")
    if size > _MAX_DIRECTORY or 46 * count > size:
        source.refuse(f"the zip's directory claims {count:,} members in {size:,} bytes")
    return count, byte_offset, source.read(byte_offset, size)


def payload(source: Range, directory: Directory, member: Member) -> int:
    """The byte offset of a member's payload, counted from the start of the zip.

    Raises: CheckpointError if its local header is not where the directory says, or its payload reaches into the directory.
    """
    name = member.name.encode()
    header = source.read(member.header_offset, min(30 + len(name), directory.byte_offset - member.header_offset))
    if header[:4] != _LOCAL or header[30:] != name:
        source.refuse(f"the zip's directory places {member.name!r} at byte {member.header_offset:,}, where no such header lies")
    name_length, extra_length = struct.unpack_from("<HH", header, 26)
    start = member.header_offset + 30 + name_length + extra_length
    if name_length != len(name) or start + member.nbytes > directory.byte_offset:
        source.refuse(
            f"the zip's member {member.name!r} has bytes {start:,}..{start + member.nbytes:,}, "
            f"the payloads end at {directory.byte_offset:,}"
        )
    return int(start)


def content(source: Range, directory: Directory, member: Member) -> bytes:
    """The payload of a small member. Raises: as `payload` does; WrongChecksum if it does not have its CRC-32."""
    data = source.read(payload(source, directory, member), member.nbytes)
    if member.crc32 and (crc := zlib.crc32(data)) != member.crc32:
        raise wrong_crc32(source.where, member.name, crc, member.crc32)
    return data


def wrong_crc32(where: str, member: str, crc: int, expected: int, why: str | None = None) -> WrongChecksum:
    """The error for a member of a zip whose bytes have another CRC-32 than the zip's directory says. why: what uses these bytes."""
    return WrongChecksum(
        f"its bytes have the CRC-32 {crc:08x}, and {expected:08x} was saved with them",
        where=f"{member} in {where}",
        why=why or "The file has changed since it was saved",
        do="Copy the file again from where it was written; `reshard doctor --deep` reads all checksums of a checkpoint",
    )


def listing(source: Range) -> Listing:
    """The members of the zip that fills `source`, as columns. Raises: as `read_directory` does."""
    members = sorted(read_directory(source).members.values(), key=attrgetter("header_offset"))
    headers = array("q", [source.start + member.header_offset for member in members])
    return headers, array("q", [member.nbytes for member in members]), array("I", [member.crc32 for member in members])


def member_name(source: Range) -> str:
    """The name of the member whose local header lies at the start of `source`, for messages."""
    header = source.read(0, min(30 + 256, source.nbytes), ahead=0)
    return header[30 : 30 + int.from_bytes(header[26:28], "little")].decode("utf-8", "replace")


def payload_start(source: Range, header_offset: int, holding: str) -> int:
    """The byte offset in `source` of the payload after the local header at `header_offset`, without a directory.

    Only for members that a directory has listed: the local header does not give the length of the payload, so the length is not checked.
    holding: a part of the member's name.

    Raises: CheckpointError if no local header lies there, or the member's name does not contain `holding`.
    """
    header = source.read(header_offset, min(30 + 256, source.nbytes - header_offset), ahead=0)
    if len(header) < 30 or header[:4] != _LOCAL:
        source.refuse(f"a zip member's header should lie at byte {header_offset:,}, where no such header lies")
    name_length, extra_length = struct.unpack_from("<HH", header, 26)
    if holding.encode() not in header[30 : 30 + name_length]:
        source.refuse(f"the zip member at byte {header_offset:,} is called {header[30 : 30 + name_length]!r}; a storage was expected")
    return int(header_offset + 30 + name_length + extra_length)


def _find_end(tail: bytes) -> int:
    """The position of the end record in the tail; -1 if no end record has a comment that ends where the zip ends."""
    end = len(tail)
    while (end := tail.rfind(_END, 0, end)) >= 0:
        if len(tail) - end >= 22 and end + 22 + int.from_bytes(tail[end + 20 : end + 22], "little") == len(tail):
            return end
    return -1


def _refuse_no_end(source: Range) -> NoReturn:
    head = source.read(0, min(source.nbytes, 262))
    if head[:4] == _LOCAL:
        raise TruncatedFile(
            f"the file starts as a zip, but its {source.nbytes:,} bytes do not end with a zip's directory",
            where=source.where,
            why="It was cut short, or is still being written",
            do="Copy the file again",
        )
    source.refuse(f"this is not a zip, and so not a torch.save file; it looks like {magic_bytes.describe(head)}", do="Get the file again")


def _end_record(source: Range, tail: bytes, tail_offset: int, end: int) -> tuple[int, int, int, int]:
    """The directory's number of members, its length, its byte offset, and the byte where it must end."""
    disk, first, here, count, size, byte_offset = struct.unpack_from("<4H2L", tail, end + 4)
    if disk or first not in (0, 0xFFFF) or here != count:
        source.refuse("the zip is one part of several")
    if end < 20 or tail[end - 20 : end - 16] != _LOCATOR:
        return count, size, byte_offset, tail_offset + end
    (stop,) = struct.unpack_from("<Q", tail, end - 12)
    if stop + 56 != tail_offset + end - 20 or stop < tail_offset or tail[stop - tail_offset :][:4] != _END64:
        source.refuse(f"the zip's 64-bit end record should lie at byte {tail_offset + end - 76:,}, the locator says {stop:,}")
    wide: tuple[int, int, int] = struct.unpack_from("<3Q", tail, stop - tail_offset + 32)
    for narrow, full, limit in zip((count, size, byte_offset), wide, (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF), strict=True):
        if narrow not in (full, limit):
            source.refuse(f"the zip's two end records disagree: {(count, size, byte_offset)} and {wide}")
    return *wide, stop


SAVE_STATE_DICT = "Load it with torch, and save its state_dict with torch.save"
"""What to do with a program that holds weights."""


def members_of(source: Range, directory: bytes, count: int) -> Iterator[Member]:
    """The members that the records of a directory list, each checked. Raises: CheckpointError."""
    at = 0
    for number in range(count):
        if directory[at : at + 4] != _CENTRAL or len(directory) < at + 46:
            source.refuse(f"the zip's directory claims {count:,} members, but is damaged at member number {number:,}")
        flags, method, crc32, nbytes, length, name_length, extra_length, comment_length = struct.unpack_from("<8xHH4xLLLHHH", directory, at)
        (header_offset,) = struct.unpack_from("<L", directory, at + 42)
        name_stop = at + 46 + name_length
        extra = directory[name_stop : name_stop + extra_length]
        at = name_stop + extra_length + comment_length
        if at > len(directory):
            source.refuse(f"the zip's directory ends within member number {number:,}")
        name = directory[name_stop - name_length : name_stop].decode("utf-8", "replace")
        if flags & 1:
            source.refuse(f"the zip's member {name!r} is encrypted", do="Save it again without encryption")
        if "/code/" in name or name.endswith("/model_weights_config.json"):
            program = "a TorchScript archive" if "/code/" in name else "a program of torch.export"
            source.refuse(f"the file is {program}, not a checkpoint", do=SAVE_STATE_DICT)
        if method:
            source.refuse(
                f"the zip's member {name!r} is compressed ({_METHODS.get(method, method)}), so its bytes cannot be read in place",
                do="Save it again without compression: torch.save and numpy.savez do not compress",
            )
        length, nbytes, header_offset = _wide(source, name, extra, (length, nbytes, header_offset))
        if length != nbytes:
            source.refuse(f"the zip's member {name!r} is not compressed, but claims {nbytes:,} bytes for {length:,}")
        yield Member(name, header_offset, length, crc32)
    if at != len(directory):
        source.refuse(f"the zip's directory has {len(directory) - at:,} bytes more than its {count:,} members")


def _wide(source: Range, name: str, extra: bytes, narrow: tuple[int, int, int]) -> tuple[int, int, int]:
    """Length, stored length and header offset. Each that is 0xFFFFFFFF is taken from the 64-bit extra field, which holds them in this
    order."""
    if 0xFFFFFFFF not in narrow:
        return narrow
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and length >= 8 * narrow.count(0xFFFFFFFF) and at + 4 + length <= len(extra):
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            first, second, third = (next(values) if value == 0xFFFFFFFF else value for value in narrow)
            return first, second, third
        at += 4 + length
    raise CheckpointError(f"the zip's member {name!r} says that its size is in a 64-bit field, but has no such field", where=source.where)
