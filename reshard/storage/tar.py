"""Tar archives as folders: an uncompressed tar is read in place, and its members are the files."""

from __future__ import annotations

import io
import os
import posixpath
from collections.abc import Iterator, Sequence

from reshard.errors import CheckpointError
from reshard.storage.claims import HasClaims
from reshard.storage.files import Files, LocalFiles, entries_of, read_each_run
from reshard.storage.system_calls import is_url
from reshard.storage.trees import FilesElsewhere, chain_of

_SUFFIXES = (".nemo", ".tar")
_GZIP = b"\x1f\x8b"


def open_tree(path: str | os.PathLike[str]) -> Files:
    """The files of a directory, or of a tar archive if `path` is one or is a directory that holds one tar and nothing else.

    A tar archive is recognised by its suffix, .tar or .nemo.

    Raises: RequestError if the path does not exist, CheckpointError if the archive cannot be read.
    """
    return in_archive(open_files(path))


def open_base(path: str | os.PathLike[str]) -> Files:
    """The files of a checkpoint; of `BASE+DELTA`, those of the base. Raises as `open_tree` does."""
    return open_tree(chain_of(path)[0])


def in_archive(files: Files) -> Files:
    """The files of a tar archive, if a tree is one or holds one tar and nothing else; else the tree. Raises as `open_tree` does."""
    listing = files.list()
    if len(listing) == 1 and listing[0].endswith(_SUFFIXES) and files.size(listing[0]):
        return TarFiles(files, listing[0])
    return files


def open_files(path: str | os.PathLike[str]) -> Files:
    """The files of a directory or of one file, which may be a URL. Raises RequestError if there is nothing."""
    if not is_url(path):
        return LocalFiles(path)
    from reshard.storage.stores.remote_files import RemoteFiles

    return RemoteFiles(os.fspath(path))


class TarFiles(HasClaims, FilesElsewhere):
    """`Files` of a tar archive: its regular members. Raises CheckpointError if the file is not a tar, or is compressed."""

    is_file = False

    def __init__(self, files: Files, path: str) -> None:
        self._main, self._archive = files, path
        self.root = files.root if files.root.endswith(path) else f"{files.root.rstrip('/')}/{path}"
        stream = _FileStream(files, path)
        if stream.read(2) == _GZIP:
            raise CheckpointError(
                "the archive is compressed, so its files cannot be read in place",
                where=path,
                do=f"Unpack it and use the folder: mkdir unpacked && tar xf {path} -C unpacked",
            )
        stream.seek(0)
        self._members = dict(_members(stream, path))

    def parent(self) -> None:
        return None

    def list(self, folder: str = "") -> tuple[str, ...]:
        return entries_of(self._members, folder)

    def size(self, path: str) -> int | None:
        return self._members[path][1] if path in self._members else None

    def written(self, path: str) -> float | None:
        return super().written(path) if path in self._members else None

    def decoded(self, path: str, start: int, nbytes: int, codecs: tuple[str, ...], *, limit: int) -> str:
        raise CheckpointError(
            f"its bytes are encoded with {', '.join(codecs)}, which cannot be decoded inside an archive",
            where=path,
            do="Unpack the archive first",
        )

    def read_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        read_each_run(self, path, byte_offsets, buffer)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        if path not in self._members:
            raise CheckpointError("the archive has no such file", where=f"{path} in {self._archive}", do="Copy the archive again")
        offset, size = self._members[path]
        if byte_offset < 0 or byte_offset + len(buffer) > size:
            raise CheckpointError(
                f"bytes {byte_offset:,}..{byte_offset + len(buffer):,} are needed, the file ends at {size:,}",
                where=f"{path} in {self._archive}",
                why="The file was cut short",
                do="Copy the archive again",
            )
        self._main.read_into(self._archive, offset + byte_offset, buffer)

    def _find(self, path: str) -> tuple[Files, str]:
        return self._main, self._archive


def _members(stream: _FileStream, path: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, (byte offset of the content, length)) of each regular file. Sparse members and names outside of the archive are skipped."""
    import tarfile

    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                name = posixpath.normpath(member.name)
                if member.isfile() and not member.issparse() and not (name.startswith("/") or name.split("/", 1)[0] == ".."):
                    if member.offset_data + member.size > stream.size:
                        raise CheckpointError(
                            f"the archive ends within {name}", where=path, why="The file was cut short", do="Copy the archive again"
                        )
                    yield name, (member.offset_data, member.size)
    except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the file is not a tar archive: {error}", where=path, do="Get the file again") from None


class _FileStream(io.RawIOBase):
    """A file of a tree as a raw stream, which Python's tarfile reads."""

    def __init__(self, files: Files, path: str) -> None:
        self._files, self._path, self._at = files, path, 0
        self.size = files.size(path) or 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + {0: 0, 1: self._at, 2: self.size}[whence])
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self.size - self._at))
        self._files.read_into(self._path, self._at, memoryview(buffer)[:count])
        self._at += count
        return count
