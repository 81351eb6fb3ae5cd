"""Ranges of files that were compressed or otherwise encoded as a whole, readable at any place as if they were not.

Such a range cannot be entered in the middle. It is decoded once, from its start, into an unnamed temporary file (in TMPDIR), and
read from there; a few of them are kept. So memory stays constant, and the disk holds some entries more.
"""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from reshard.errors import CheckpointError
from reshard.storage.system_calls import read_at

Read = Callable[[str, int, memoryview], None]

_CHUNK = 1 << 20
_KEPT = 16


class _Decoder(Protocol):
    """Bytes in, bytes out. One with frames also has `eof`, true once its frame has ended."""

    def decompress(self, data: bytes) -> bytes: ...


def _zstd() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


# The names that torch's extensions give themselves: torch/distributed/checkpoint/_extension.py, ZStandard.registry_name.
_CODECS: dict[str, Callable[[], Any]] = {"stream.zstd/1": _zstd, "stream.zstd": _zstd}


def check_known(names: Sequence[str], *, where: str) -> None:
    """Raises CheckpointError, naming it, for a codec that cannot be undone."""
    if unknown := [name for name in names if name not in _CODECS]:
        raise CheckpointError(
            f"its bytes went through {unknown[0]!r} when they were saved, which is not known",
            where=where,
            why=f"Known are {', '.join(_CODECS)}; anything else would be read as garbage",
            do="Save the checkpoint without that stream extension",
        )


@dataclass(slots=True, eq=False)
class _Range:
    path: str
    start: int
    nbytes: int
    codecs: tuple[str, ...]
    limit: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    file: Any = None
    size: int = 0


class DecodedRanges:
    """The decoded ranges of a tree of files, each under a path of its own, which no file can have."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._ranges: dict[str, _Range] = {}
        self._kept: OrderedDict[str, _Range] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, path: str) -> bool:
        return path in self._ranges

    def add(self, path: str, start: int, nbytes: int, codecs: tuple[str, ...], *, limit: int) -> str:
        """The path of bytes [start, start + nbytes) of a file with `codecs` undone, the last one first; at most `limit` bytes."""
        name = f"{path}\0{start}+{nbytes} ({', '.join(codecs)} undone)"
        self._ranges.setdefault(name, _Range(path, start, nbytes, codecs, limit))
        return name

    def size(self, path: str) -> int:
        return int(self._with_file(path, lambda found: found.size))

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        def fill(found: _Range) -> None:
            if byte_offset + len(buffer) > found.size:
                raise CheckpointError(f"decoded it has {found.size:,} bytes, {byte_offset + len(buffer):,} are wanted", where=_shown(path))
            done = 0
            while done < len(buffer):
                done += read_at(found.file.fileno(), buffer[done:], byte_offset + done)

        self._with_file(path, fill)

    def _with_file(self, path: str, use: Callable[[_Range], Any]) -> Any:
        found = self._ranges[path]
        with found.lock:
            if found.file is None:
                self._decode(found, path)
            result = use(found)
        self._keep(path, found)
        return result

    def _keep(self, path: str, found: _Range) -> None:
        with self._lock:
            self._kept[path] = found
            self._kept.move_to_end(path)
            old = self._kept.popitem(last=False)[1] if len(self._kept) > _KEPT else None
        if old is not None:
            with old.lock:
                if old.file is not None:
                    old.file.close()
                old.file = None

    def _decode(self, found: _Range, path: str) -> None:
        file = tempfile.TemporaryFile(prefix="reshard-")  # noqa: SIM115  # closed when it is no longer kept
        size = 0
        try:
            for data in self._decoded(found, path):
                size += len(data)
                if size > found.limit:
                    raise CheckpointError(
                        f"decoded it has more than the {found.limit:,} bytes that it should hold",
                        where=_shown(path),
                        why="The file does not belong to its metadata, or was made to fill the disk",
                    )
                file.write(data)
            file.flush()
        except BaseException:
            file.close()
            raise
        found.file, found.size = file, size

    def _decoded(self, found: _Range, path: str) -> Iterator[bytes]:
        data: Iterator[bytes] = self._raw(found)
        for name in reversed(found.codecs):
            data = _undone(data, _CODECS[name](), _shown(path))
        return data

    def _raw(self, found: _Range) -> Iterator[bytes]:
        for at in range(0, found.nbytes, _CHUNK):
            buffer = bytearray(min(_CHUNK, found.nbytes - at))
            self._read(found.path, found.start + at, memoryview(buffer))
            yield bytes(buffer)


def _undone(data: Iterator[bytes], decoder: _Decoder, where: str) -> Iterator[bytes]:
    # Small inputs: a decoder returns all that one input holds at once, and zeros shrink a thousandfold.
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


def _shown(path: str) -> str:
    return path.replace("\0", " bytes ")
