"""Decoded ranges: byte ranges of files that are compressed or otherwise encoded, readable at any offset of the decoded bytes.

An encoded range can only be decoded from its start. It is decoded as a whole into an unnamed temporary file (in TMPDIR) and read from
there, so memory stays constant. Only a few of the most recently used files are kept, to bound the use of the disk and of descriptors; a
range whose file was closed is decoded again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import Any

from reshard.errors import CheckpointError
from reshard.geometry.value import mutable
from reshard.storage.system_calls import open_files_at_once, read_at, system_errors

Read = Callable[[str, int, memoryview], None]
"""A function with the signature of `Files.read_into`: path, byte offset, buffer to fill."""

_CHUNK = 1 << 20
_MAX_DECODED = 16
"""The most temporary files that are kept; fewer if the process may open few files."""


def _zstd() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


# The names by which torch registers its extensions: torch/distributed/checkpoint/_extension.py, ZStandard.registry_name. Each makes a
# decompressor; if its input consists of frames, it has `eof`, which is true after the end of the frame.
_CODECS: dict[str, Callable[[], Any]] = {"stream.zstd/1": _zstd, "stream.zstd": _zstd}


def check_known(names: Sequence[str], *, where: str) -> None:
    """Raises CheckpointError for a codec that reshard cannot decode."""
    if unknown := [name for name in names if name not in _CODECS]:
        raise CheckpointError(
            f"its bytes were encoded by the unknown stream extension {unknown[0]!r}",
            where=where,
            why=f"Known extensions are {', '.join(_CODECS)}; without decoding, the bytes would be read as garbage",
            do="Save the checkpoint without that stream extension",
        )


@mutable(eq=False)
class _Range:
    """An encoded byte range, and its decoded bytes while they are on the disk."""

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
    """Held while the decoded file is written, read or closed."""
    file: Any = None
    """The open temporary file with the decoded bytes; None if there is none at the moment."""
    size: int = 0
    """The number of decoded bytes, once they have been decoded."""


class DecodedRanges:
    """The decoded ranges of a tree of files. Each has a path of its own, with a NUL byte, so that it cannot be the path of a file."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._ranges: dict[str, _Range] = {}
        self._recent: OrderedDict[str, _Range] = OrderedDict()
        self._lock, self._most = threading.Lock(), min(_MAX_DECODED, open_files_at_once() // 4)

    def __contains__(self, path: str) -> bool:
        return path in self._ranges

    def add(self, path: str, start: int, nbytes: int, codecs: tuple[str, ...], *, limit: int) -> str:
        """The path under which bytes [start, start + nbytes) of a file can be read decoded, with `codecs` undone from last to first.

        limit: the most bytes that the decoded range may have; reading a larger one raises CheckpointError.
        """
        name = f"{path}\0{start}+{nbytes} ({', '.join(codecs)} undone)"
        self._ranges.setdefault(name, _Range(path, start, nbytes, codecs, limit))
        return name

    def size(self, path: str) -> int:
        """The number of decoded bytes of a range. Raises CheckpointError as `read_into` does."""
        return int(self._with_file(path, lambda encoded: encoded.size))

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill the buffer with decoded bytes from `byte_offset` on.

        Raises: CheckpointError if the range cannot be decoded, decodes to more than its limit, or ends before the buffer is full.
        """

        def fill(encoded: _Range) -> None:
            if byte_offset + len(buffer) > encoded.size:
                raise CheckpointError(
                    f"it decodes to {encoded.size:,} bytes, {byte_offset + len(buffer):,} are needed", where=_shown_path(path)
                )
            done = 0
            while done < len(buffer):
                done += read_at(encoded.file.fileno(), buffer[done:], byte_offset + done)

        self._with_file(path, fill)

    def _with_file(self, path: str, use: Callable[[_Range], Any]) -> Any:
        import tempfile

        encoded = self._ranges[path]
        with encoded.lock:
            if encoded.file is None:
                with system_errors("written", tempfile.gettempdir()):
                    self._decode_to_file(encoded, path)
            result = use(encoded)
        self._note_use(path, encoded)
        return result

    def _note_use(self, path: str, encoded: _Range) -> None:
        """Make a range the most recently used one, and close the file of the least recently used one if there are too many."""
        with self._lock:
            self._recent[path] = encoded
            self._recent.move_to_end(path)
            old = self._recent.popitem(last=False)[1] if len(self._recent) > self._most else None
        if old is not None:
            with old.lock:
                if old.file is not None:
                    old.file.close()
                old.file = None

    def _decode_to_file(self, encoded: _Range, path: str) -> None:
        import tempfile

        file = tempfile.TemporaryFile(prefix="reshard-")  # noqa: SIM115  # `_note_use` closes it
        size = 0
        try:
            for data in self._decoded_bytes(encoded, path):
                size += len(data)
                if size > encoded.limit:
                    raise CheckpointError(
                        f"it decodes to more than {encoded.limit:,} bytes, the most that it should have",
                        where=_shown_path(path),
                        why="The file does not belong to its metadata, or was made to fill the disk",
                    )
                file.write(data)
            file.flush()
        except BaseException:
            file.close()
            raise
        encoded.file, encoded.size = file, size

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
