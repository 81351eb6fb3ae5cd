"""Decoded ranges: byte ranges of files that are compressed or otherwise encoded, readable at any offset of the decoded bytes.

An encoded range can only be decoded from its start. It is decoded as a whole into an unnamed temporary file (in TMPDIR) and read from
there, so memory stays constant. Only a few of the most recently used files are kept, to bound the use of the disk and of descriptors; a
range whose file was closed is decoded again.
"""

from __future__ import annotations

import re
import threading
from codecs import getincrementaldecoder
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import Any

from reshard.errors import CheckpointError
from reshard.geometry.value import mutable, value
from reshard.storage.system_calls import open_files_at_once, read_at, system_errors

Read = Callable[[str, int, memoryview], None]
"""A function with the signature of `Files.read_into`: path, byte offset, buffer to fill."""

_CHUNK = 1 << 20
_MAX_DECODED = 16
"""The most temporary files that are kept; fewer if the process may open few files."""
# The path of a range, as `DecodedRanges.add` makes it: the file, start, length, codecs.
_NAME = re.compile(r"(.*)\0(\d+)\+(\d+) \((.*) undone\)", re.DOTALL)


def _zstd() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


class _Latin1:
    """Undoes how a pickle of protocol 2 writes bytes: as text, in which a byte above 127 takes two."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")()

    def decompress(self, data: bytes) -> bytes:
        return self._decoder.decode(data).encode("latin1")


# The names by which torch registers its extensions: torch/distributed/checkpoint/_extension.py, ZStandard.registry_name. Each makes a
# decompressor; if its input consists of frames, it has `eof`, which is true after the end of the frame.
_EXTENSIONS: dict[str, Callable[[], Any]] = {"stream.zstd/1": _zstd, "stream.zstd": _zstd}
# What else encodes a range: the elements of a numpy array in a pickle.
_CODECS: dict[str, Callable[[], Any]] = {**_EXTENSIONS, "latin1": _Latin1}


def check_known(names: Sequence[str], *, where: str) -> None:
    """Raises CheckpointError for a codec that reshard cannot decode."""
    if unknown := [name for name in names if name not in _EXTENSIONS]:
        raise CheckpointError(
            f"its bytes were encoded by the unknown stream extension {unknown[0]!r}",
            where=where,
            why=f"Known extensions are {', '.join(_EXTENSIONS)}; without decoding, the bytes would be read as garbage",
            do="Save the checkpoint without that stream extension",
        )


@value(eq=False)
class _Range:
    """An encoded byte range."""

    path: str
    """The file that holds the encoded bytes."""
    start: int
    """The byte offset of the range in that file."""
    nbytes: int
    """The length of the range before decoding."""
    codecs: tuple[str, ...]
    """The codecs in the order in which they encoded the bytes."""
    limit: int
    """The most bytes that decoding may produce."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the range is decoded."""


@mutable(eq=False)
class _DecodedFile:
    """An open temporary file with decoded bytes, which is closed when nobody refers to it any more."""

    file: Any
    size: int = 0

    def __del__(self) -> None:
        self.file.close()


class DecodedRanges:
    """The decoded ranges of a tree of files. Each has a path of its own, with a NUL byte, so that it cannot be the path of a file."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._ranges: dict[str, _Range] = {}
        self._recent: OrderedDict[str, _DecodedFile] = OrderedDict()
        self._lock, self._most = threading.Lock(), min(_MAX_DECODED, open_files_at_once() // 4)

    def __contains__(self, path: str) -> bool:
        return "\0" in path

    def add(self, path: str, start: int, nbytes: int, codecs: tuple[str, ...], *, limit: int) -> str:
        """The path under which bytes [start, start + nbytes) of a file can be read decoded, with `codecs` undone from last to first.

        limit: the most bytes that the decoded range may have; reading a larger one raises CheckpointError.
        """
        name = f"{path}\0{start}+{nbytes} ({', '.join(codecs)} undone)"
        self._ranges.setdefault(name, _Range(path, start, nbytes, codecs, limit))
        return name

    def size(self, path: str) -> int:
        """The number of decoded bytes of a range. Raises CheckpointError as `read_into` does."""
        return self._decoded(path).size

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill the buffer with decoded bytes from `byte_offset` on.

        Raises: CheckpointError if the range cannot be decoded, decodes to more than its limit, or ends before the buffer is full.
        """
        decoded, done = self._decoded(path), 0
        if byte_offset + len(buffer) > decoded.size:
            raise CheckpointError(
                f"it decodes to {decoded.size:,} bytes, {byte_offset + len(buffer):,} are needed", where=_shown_path(path)
            )
        while done < len(buffer):
            done += read_at(decoded.file.fileno(), buffer[done:], byte_offset + done)

    def _decoded(self, path: str) -> _DecodedFile:
        """The decoded bytes of a range, which become those that were used last."""
        import tempfile

        encoded = self._ranges.get(path) or self._of_name(path)
        with encoded.lock, system_errors("written", tempfile.gettempdir()):
            decoded = self._recent.get(path) or self._decode(encoded, path)
            with self._lock:
                self._recent[path] = decoded
                self._recent.move_to_end(path)
                if len(self._recent) > self._most:
                    self._recent.popitem(last=False)
        return decoded

    def _of_name(self, path: str) -> _Range:
        """The range of a path that another process added. Decoding makes no more bytes of it than it has."""
        match = _NAME.fullmatch(path)
        if match is None or not (names := tuple(match[4].split(", "))) or not _CODECS.keys() - _EXTENSIONS.keys() >= set(names):
            raise CheckpointError("no file has such a path", where=_shown_path(path))
        return self._ranges.setdefault(path, _Range(match[1], int(match[2]), int(match[3]), names, int(match[3])))

    def _decode(self, encoded: _Range, path: str) -> _DecodedFile:
        import tempfile

        decoded = _DecodedFile(tempfile.TemporaryFile(prefix="reshard-"))  # noqa: SIM115
        for data in self._decoded_bytes(encoded, path):
            decoded.size += len(data)
            if decoded.size > encoded.limit:
                raise CheckpointError(
                    f"it decodes to more than {encoded.limit:,} bytes, the most that it should have",
                    where=_shown_path(path),
                    why="The file does not belong to its metadata, or was made to fill the disk",
                )
            decoded.file.write(data)
        decoded.file.flush()
        return decoded

    def _decoded_bytes(self, encoded: _Range, path: str) -> Iterator[bytes]:
        data: Iterator[bytes] = self._encoded_bytes(encoded)
        for name in reversed(encoded.codecs):
            data = _decompressed(data, _CODECS[name](), _shown_path(path))
        return data

    def _encoded_bytes(self, encoded: _Range) -> Iterator[bytes]:
        for at in range(0, encoded.nbytes, _CHUNK):
            buffer = bytearray(min(_CHUNK, encoded.nbytes - at))
            self._read(encoded.path, encoded.start + at, memoryview(buffer))
            yield bytes(buffer)


def _decompressed(data: Iterator[bytes], decoder: Any, where: str) -> Iterator[bytes]:
    # Inputs are small because a decoder returns the whole output of an input at once, and zeros compress a thousandfold.
    for chunk in data:
        for at in range(0, len(chunk), 1 << 14):
            try:
                yield decoder.decompress(chunk[at : at + (1 << 14)])
            except Exception as error:
                raise CheckpointError(
                    f"it cannot be decompressed: {str(error).splitlines()[0]}", where=where, why="The file is damaged", do="Copy it again"
                ) from None
            if getattr(decoder, "eof", False):
                return
    if not getattr(decoder, "eof", True):
        raise CheckpointError("its compressed bytes end too early", where=where, why="The file was cut short", do="Copy it again")


def _shown_path(path: str) -> str:
    return path.replace("\0", " bytes ")
