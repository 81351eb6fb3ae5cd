"""Store: a place with files that are not on a local disk: an object store, a model hub, a web server, or what fsspec knows.

Five verbs: size, list, read a range, stream a file out, create exclusively. Files in a store are written from front to back,
appear when they are complete, and are never renamed. A Store counts its requests and bytes, and repeats what failed for a reason that
passes.

A Backend says how one kind of store does this. obstore_backend.py serves object stores and web servers, fsspec_backend.py the rest.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from reshard.errors import CheckpointError, LostObject, ReshardError, SystemRefusal, TargetError
from reshard.geometry.value import mutable, value
from reshard.secrets import masked

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Value = TypeVar("Value")
LOGGER = logging.getLogger("reshard")

REQUESTS_AT_ONCE = 64
"""The most requests that are under way at a time. S3 answers one request with 85 to 90 MB/s, so that many fill 40 Gb/s."""
_ATTEMPTS, _FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST = 10, 0.1, 10.0, 60.0
# A store that does not answer is spoken of after so many seconds, and then again as seldom.
_SILENCE = 3.0


@value
class Entry:
    """A file in a store."""

    path: str
    """Its path, relative to the store's URL."""
    nbytes: int
    """Its length in bytes."""
    stamp: str
    """A text that changes whenever the file is written: the ETag, or what the store has instead."""
    written: float | None = field(default=None, compare=False)
    """When it was written, in seconds since 1970; None if the store does not tell. Listings tell it more exactly than other requests."""


class Upload(Protocol):
    """A file that is being written from front to back. It appears when it is closed."""

    def write(self, data: bytes) -> None:
        """Append bytes. Waits while as many parts are under way as the caller of `Backend.upload` allows."""

    def close(self) -> None:
        """Complete the file."""

    def abort(self) -> None:
        """Give up the file: nothing of it is left in the store."""


class Backend(Protocol):
    """How one kind of store is asked. Paths are relative to the URL with which the backend was opened.

    Raises: FileNotFoundError, FileExistsError, PermissionError, and `ObjectChanged`; any other exception may pass when repeated.
    """

    def list(self, folder: str, *, below: bool) -> Iterator[Entry]:
        """The files in a folder; `below`: also those in folders below it. Else folders are entries whose path ends in a slash."""

    def look(self, path: str) -> Entry | None:
        """The file; None if it does not exist."""

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a file. Raises ObjectChanged if the file is not the one that was listed."""

    def upload(self, path: str, *, part: int, at_once: int) -> Upload:
        """Begin a file. part: bytes of each request. at_once: the most requests of this file that are under way at a time."""

    def create(self, path: str, content: bytes) -> None:
        """Write a small file that does not exist yet. Raises FileExistsError."""

    def remove(self, paths: Sequence[str]) -> None:
        """Remove these files, those that exist."""


class ObjectChanged(Exception):
    """A file is not the one that was listed: somebody wrote it since."""


@mutable
class StoreTraffic:
    """What a store was asked for."""

    requests: int = 0
    """The number of requests that list, read or write. Repeated attempts and the parts of an upload count."""
    read: int = 0
    """Bytes that were read."""
    written: int = 0
    """Bytes that were written."""
    repeated: int = 0
    """Requests that failed and were repeated by reshard; the client below it repeats some on its own."""

    def to_json(self) -> dict[str, int]:
        """The counts as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        repeated = f", {self.repeated:,} repeated" if self.repeated else ""
        return f"{self.requests:,} requests, {self.read:,} bytes read, {self.written:,} bytes written{repeated}"


class Store:
    """The files below one URL. Threads may share it."""

    def __init__(self, url: str, backend: Backend) -> None:
        self.url, self.traffic = url.rstrip("/"), StoreTraffic()
        self._backend, self._lock = backend, threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._warned = 0.0

    def list(self, folder: str = "", *, below: bool = True) -> tuple[Entry, ...]:
        """The files in a folder, and in those below it, sorted by path. Empty if there is no such folder."""

        def ask() -> tuple[Entry, ...]:
            entries = tuple(sorted(self._backend.list(folder, below=below), key=lambda entry: entry.path))
            self._count(requests=len(entries) // 1000)
            return entries

        return self._asked(ask, "listed", folder) or ()

    def look(self, path: str) -> Entry | None:
        """The file; None if it does not exist."""
        return self._asked(lambda: self._backend.look(path), "read", path)

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a file.

        Raises: CheckpointError if the file is gone or was written since it was listed, SystemRefusal if the store does not answer.
        """

        def ask() -> memoryview:
            content = self._backend.read(entry, start, stop)
            if len(content) != stop - start:
                raise OSError(f"{stop - start:,} bytes were asked for, {len(content):,} came")
            return content

        content = self._asked(ask, "read", entry.path)
        if content is None:
            raise CheckpointError("the file is gone", where=self.place(entry.path), do="Copy it from where the checkpoint was written")
        self._count(read=stop - start, requests=0)
        return content

    def later(self, ask: Callable[[], Value]) -> Future[Value]:
        """The result of a call that runs in one of this store's threads. As many run at a time as there may be requests."""
        with self._lock:
            if self._threads is None:
                from concurrent.futures import ThreadPoolExecutor

                self._threads = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="reshard-store")
        return self._threads.submit(ask)

    def upload(self, path: str, nbytes: int, *, part: int, at_once: int) -> CheckedUpload:
        """Begin a file of that length. part: bytes of each request. at_once: the most of its requests under way at a time."""
        upload = self._asked(lambda: self._backend.upload(path, part=part, at_once=at_once), "written", path)
        assert upload is not None
        return CheckedUpload(self, path, nbytes, upload, part)

    def put(self, path: str, content: bytes) -> Entry:
        """Write a small file, which may exist. Returns it."""

        def ask() -> None:
            upload = self._backend.upload(path, part=max(8 << 20, len(content) + 1), at_once=1)
            try:
                upload.write(content)
                upload.close()
            except BaseException:
                upload.abort()
                raise

        self._asked(ask, "written", path)
        self._count(written=len(content), requests=0)
        return self._written(path, len(content))

    def create(self, path: str, content: bytes) -> None:
        """Write a small file that does not exist yet. Raises TargetError if it exists with another content: another run was first."""

        def ask() -> None:
            try:
                self._backend.create(path, content)
            except FileExistsError:
                # The answer to an earlier attempt of ours may have been lost.
                entry = self._backend.look(path)
                if entry is None or entry.nbytes != len(content) or bytes(self._backend.read(entry, 0, len(content))) != content:
                    raise

        self._asked(ask, "written", path)
        self._count(written=len(content), requests=0)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove these files, those that exist."""
        listed = list(paths)
        if listed:
            self._asked(lambda: self._backend.remove(listed), "removed", listed[0])

    def place(self, path: str) -> str:
        """The URL of a file."""
        return f"{self.url}/{path}" if path else self.url

    def _written(self, path: str, nbytes: int) -> Entry:
        """The file that was just written. Raises LostObject if the store does not have it in full."""
        entry = self.look(path)
        if entry is None or entry.nbytes != nbytes:
            present = "nothing" if entry is None else f"{entry.nbytes:,} bytes"
            raise LostObject(
                f"{nbytes:,} bytes were written, the store has {present}", where=self.place(path), do="Run it again with `resume=True`"
            )
        return entry

    def _asked(self, ask: Callable[[], Value], action: str, path: str) -> Value | None:
        """What `ask` returns; None if there is no such file. Failures that may pass are repeated with growing pauses."""
        began = time.monotonic()
        for attempt in range(_ATTEMPTS):
            self._count()
            try:
                return ask()
            except ReshardError:
                raise
            except FileNotFoundError:
                return None
            except FileExistsError:
                raise TargetError(
                    "the file exists already", where=self.place(path), why="Another run has written it first", do="Choose another target"
                ) from None
            except ObjectChanged:
                raise CheckpointError(
                    "the file was written since it was listed",
                    where=self.place(path),
                    why="A part of the result would be from before and a part from after",
                    do="Wait until the checkpoint has been saved, then run it again",
                ) from None
            except Exception as error:
                is_final = isinstance(error, PermissionError | NotImplementedError | ValueError)
                if is_final or attempt == _ATTEMPTS - 1 or time.monotonic() - began > _LONGEST:
                    raise self._refusal(error, action, path) from error
                self._count(requests=0, repeated=1)
                self._say_repeated(began, attempt + 2)
                time.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt) * random.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")

    def _say_repeated(self, began: float, attempt: int) -> None:
        """Warn that the store is asked again, unless a request has waited for a moment only or a warning was just given."""
        now = time.monotonic()
        with self._lock:
            if now - max(began, self._warned) < _SILENCE:
                return
            self._warned = now
        url = masked(self.url)
        text = f"no answer from {url}, trying again ({attempt} of {_ATTEMPTS})"
        LOGGER.warning(text, extra={"event": "no-answer", "fields": {"store": url, "attempt": attempt, "of": _ATTEMPTS}})

    def _refusal(self, error: Exception, action: str, path: str) -> SystemRefusal:
        text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        text = text.partition(": <?xml")[0][:300]
        advice = (
            "Check the credentials and permissions"
            if isinstance(error, PermissionError)
            else "Check the URL, the network and `storage_option=`"
        )
        return SystemRefusal(
            f"cannot be {action}: {text}", where=self.place(path), do=f"{advice}; an interrupted conversion continues with `resume=True`"
        )

    def _count(self, *, requests: int = 1, read: int = 0, written: int = 0, repeated: int = 0) -> None:
        with self._lock:
            traffic = self.traffic
            traffic.requests += requests
            traffic.read += read
            traffic.written += written
            traffic.repeated += repeated


class CheckedUpload:
    """An upload that knows how long its file becomes, and whether the store has it."""

    def __init__(self, store: Store, path: str, nbytes: int, upload: Upload, part: int) -> None:
        self._store, self._path, self._nbytes, self._upload, self._part = store, path, nbytes, upload, part
        self._done = 0

    def write(self, data: bytes) -> None:
        """Append bytes. Raises SystemRefusal if the store refuses them."""
        with self._failing():
            self._upload.write(data)
        parts = (self._done + len(data)) // self._part - self._done // self._part
        self._done += len(data)
        self._store._count(requests=parts, written=len(data))

    def close(self) -> Entry:
        """Complete the file, and return it. Raises SystemRefusal if the store does not have all of it."""
        assert self._done == self._nbytes, f"{self._path}: {self._done} of {self._nbytes} bytes"
        try:
            with self._failing():
                self._upload.close()
        except SystemRefusal as refusal:
            # The store may have completed the file, and its answer was lost.
            try:
                entry = self._store.look(self._path)
            except SystemRefusal:
                raise refusal from None
            if entry is None or entry.nbytes != self._nbytes:
                raise
        self._store._count(requests=2)
        return self._store._written(self._path, self._nbytes)

    def abort(self) -> None:
        """Give up the file: nothing of it is left in the store, unless the store does not answer."""
        try:
            self._upload.abort()
        except Exception:  # `reshard clean` finds what is left
            return

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.abort()
            raise self._store._refusal(error, "written", self._path) from error
