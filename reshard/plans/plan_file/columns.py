"""Columns in one file: named columns of integers, bytes and JSON values, each compressed, and a digest of everything.

    "reshard columns\n"   8 bytes: length of the header   header (JSON)   column column ...   digest (32 bytes)

    header = {"kind": ..., "version": ..., "columns": {name: [type, number of items, stored bytes], ...}}

The types are i1, i2, i4 and i8 (little-endian, the narrowest that holds all values), "bytes" and "json". A column is decoded when it is
asked for, so that a large one that is not needed costs nothing. The file is hostile input: what is not as described raises CheckpointError.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.sections import Columns
from reshard.plans.digests import CURRENT
from reshard.storage.system_calls import system_errors

_MAGIC = b"reshard columns\n"
_START = len(_MAGIC) + 8
_MOST_BYTES, _MOST_HEADER, _MOST_DECODED = 1 << 32, 1 << 26, 1 << 33
_INTEGERS = ("i1", "i2", "i4", "i8")


class ColumnsWriter:
    """Collects columns and writes them. kind, version: what the file holds."""

    def __init__(self, kind: str, version: int) -> None:
        self._kind, self._version = kind, version
        self._types: dict[str, tuple[str, int, int]] = {}
        self._stored: list[bytes] = []

    def integers(self, name: str, values: npt.ArrayLike) -> None:
        """Add a column of integers; an array of more axes is stored row by row."""
        array = np.asarray(values, np.int64).reshape(-1)
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        code = next(code for code in _INTEGERS if np.iinfo(code).min <= low and high <= np.iinfo(code).max)
        self._add(name, code, array.size, array.astype(f"<{code}").tobytes())

    def raw(self, name: str, content: bytes) -> None:
        """Add a column of bytes."""
        self._add(name, "bytes", len(content), content)

    def value(self, name: str, value: object) -> None:
        """Add a column of one JSON value. Text that is not valid Unicode survives."""
        content = json.dumps(value, separators=(",", ":")).encode()
        self._add(name, "json", len(content), content)

    def content(self) -> bytes:
        """The content of the file."""
        header = json.dumps({"kind": self._kind, "version": self._version, "columns": self._types}).encode()
        content = b"".join((_MAGIC, struct.pack("<Q", len(header)), header, *self._stored))
        return content + CURRENT.block(memoryview(content))

    def _add(self, name: str, code: str, count: int, content: bytes) -> None:
        assert name not in self._types
        stored = zlib.compress(content, 1)
        self._types[name] = code, count, len(stored)
        self._stored.append(stored)


class ColumnsFile:
    """The columns of a file. Everything that is wrong with it raises CheckpointError, except its version: UnsupportedError."""

    def __init__(self, path: str, content: bytes, kind: str, version: int) -> None:
        self.path = path
        """The path of the file, for messages."""
        self._content = memoryview(content)
        self._places: dict[str, tuple[str, int, int, int]] = {}
        self._decoded = 0
        header = self._header(kind, version)
        end, start = len(self._content) - 32, _START + self._header_length
        for name, entry in header.items():
            if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], str) and all(map(_is_count, entry[1:]))):
                raise self.damaged(f"the header does not describe the column {name[:100]!r}")
            code, count, nbytes = entry
            if code not in (*_INTEGERS, "bytes", "json") or nbytes > end - start:
                raise self.damaged(f"the header does not describe the column {name[:100]!r}")
            self._places[name] = code, count, start, nbytes
            start += nbytes
        if start != end:
            raise self.damaged(f"the columns end at byte {start:,}, the file at {end:,}")

    @classmethod
    def at(cls, path: str | os.PathLike[str], kind: str, version: int) -> ColumnsFile:
        """The file at a path."""
        with system_errors("read", Path(path)), open(path, "rb") as file:
            content = file.read() if os.fstat(file.fileno()).st_size <= _MOST_BYTES else b""
        return cls(os.fspath(path), content, kind, version)

    def integers(self, name: str, *, most: int = 1 << 50) -> Columns:
        """A column of integers between 0 and `most`."""
        code, count, content = self._column(name, *_INTEGERS)
        if len(content) != count * int(code[1]):
            raise self.damaged(f"the column {name} has another length than the header says")
        found = np.frombuffer(content, f"<{code}").astype(np.int64)
        if found.size and (found.min() < 0 or found.max() > most):
            raise self.damaged(f"the column {name} holds numbers below 0 or above {most:,}")
        return found

    def raw(self, name: str) -> bytes:
        """A column of bytes."""
        return self._column(name, "bytes")[2]

    def value(self, name: str) -> Any:
        """The value of a column of JSON."""
        content = self._column(name, "json")[2]
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise self.damaged(f"the column {name} is not valid JSON") from None

    def length(self, name: str) -> int:
        """The number of items of a column, as the header says."""
        if name not in self._places:
            raise self.damaged(f"there is no column {name}")
        return self._places[name][1]

    def damaged(self, what: str) -> CheckpointError:
        """The error for a file that does not hold what it should."""
        return CheckpointError(
            what, where=self.path, why="The file was damaged, or another program wrote it", do="Copy the file again, or write it again"
        )

    def _column(self, name: str, *codes: str) -> tuple[str, int, bytes]:
        self.length(name)
        code, count, start, nbytes = self._places[name]
        length = count * (int(code[1]) if code in _INTEGERS else 1)
        self._decoded += length
        if code not in codes or self._decoded > _MOST_DECODED:
            raise self.damaged(f"the column {name} is of another type than expected, or too long")
        decoder = zlib.decompressobj()
        try:
            content = decoder.decompress(self._content[start : start + nbytes], length + 1)
        except zlib.error as error:
            raise self.damaged(f"the column {name} cannot be decompressed: {error}") from None
        if len(content) != length or not (decoder.eof or not length):
            raise self.damaged(f"the column {name} has another length than the header says")
        return code, count, content

    def _header(self, kind: str, version: int) -> dict[str, Any]:
        """The columns of the header. The digest is checked before anything is parsed."""
        content = self._content
        if len(content) < _START + 32 or bytes(content[: len(_MAGIC)]) != _MAGIC:
            raise self.damaged(f"it is not a file of columns, or has more than {_MOST_BYTES:,} bytes")
        if CURRENT.block(content[:-32]) != bytes(content[-32:]):
            raise self.damaged("its content does not match its digest")
        (length,) = struct.unpack("<Q", content[len(_MAGIC) : _START])
        if length > min(_MOST_HEADER, len(content) - _START - 32):
            raise self.damaged(f"the header claims {length:,} bytes, the file has {len(content):,}")
        self._header_length = length
        try:
            header = json.loads(bytes(content[_START : _START + length]))
        except (ValueError, RecursionError):
            raise self.damaged("the header is not valid JSON") from None
        if not isinstance(header, dict) or header.get("kind") != kind or not isinstance(header.get("columns"), dict):
            raise self.damaged(f"it does not hold a {kind}")
        if header.get("version") != version:
            raise UnsupportedError(
                f"its version is {header.get('version')!r}, and this version of reshard reads {version}",
                where=self.path,
                do="Write the file again with this version of reshard",
            )
        columns: dict[str, Any] = header["columns"]
        return columns


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40
