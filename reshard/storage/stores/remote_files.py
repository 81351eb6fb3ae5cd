"""RemoteFiles: the files of a checkpoint in a store, readable at any offset.

Every request takes tens of milliseconds, so that bytes are fetched before they are asked for:

    metadata    Readers read the start or the end of one file after the other. What the first one needs is fetched of all files like it.
    weights     Who knows what will be read says so (`fetch`), and gives it back when it has been read (`release`).

Whatever is read and was not fetched is asked for then: fetching changes how long reading takes, and never what is read.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from reshard.errors import RequestError
from reshard.geometry.value import mutable
from reshard.storage.claims import HasClaims
from reshard.storage.decoded_ranges import DecodedRanges
from reshard.storage.files import Change, cut_short, entries_of, missing, read_each_run
from reshard.storage.stores.similar_files import SimilarFiles
from reshard.storage.stores.store import Entry, Store
from reshard.storage.stores.urls import open_store

if TYPE_CHECKING:
    from concurrent.futures import Future

# A small read in the middle of a file fetches this much, because the next one is usually nearby; a longer one, of weights, this much more.
_NEARBY, _FURTHER = 32 << 10, 4 << 20
# Longer reads are cut into ranges.
_LONGEST_RANGE = 16 << 20
_MOST_METADATA = 128 << 20


@mutable(eq=False)
class Fetched:
    """Bytes [start, stop) of a file, which are there or on their way."""

    path: str
    start: int
    stop: int
    content: Future[memoryview]


class RemoteFiles(HasClaims):
    """`Files` of a folder in a store, or of one file there. Raises RequestError if there is nothing at the URL."""

    MERGED_GAP = 1 << 20
    """Two ranges of a file that are at most this far apart are read as one: that is sooner done than a second request."""

    def __init__(self, url: str, *, lists: bool = True) -> None:
        """lists: list the whole folder now, in which case it must hold something; else each file is looked for when it is asked for."""
        self.root, self._store = url, open_store(url)
        self._only_file: str | None = None
        self._entries: dict[str, Entry | None] = {}
        self._sorted: list[str] = []
        self._is_listed, self._is_opening = lists, True
        self._fetched: dict[str, list[Fetched]] = {}
        self._metadata: deque[Fetched] = deque()
        self._metadata_bytes = 0
        self._lock, self._similar_lock = threading.Lock(), threading.Lock()
        self._decoded = DecodedRanges(self.read_into)
        self._similar = SimilarFiles(lambda: [entry for entry in self._entries.values() if entry is not None])
        if lists:
            self._list_all(url)

    @property
    def store(self) -> Store:
        """The store, which counts what it was asked for."""
        return self._store

    def opened(self) -> None:
        """The metadata has been read: from now on, what is read of one file says nothing about the files like it."""
        self._is_opening = False

    @property
    def is_file(self) -> bool:
        """Whether the URL is that of one file."""
        return self._only_file is not None

    def parent(self) -> RemoteFiles | None:
        """The folder that contains the root; None for the root of a bucket."""
        above, _, name = self.root.rstrip("/").rpartition("/")
        return RemoteFiles(above, lists=False) if name and not above.endswith("/") else None

    def list(self, folder: str = "") -> tuple[str, ...]:
        prefix = folder.rstrip("/") + "/" if folder else ""
        if self._only_file is not None:
            return (self._only_file,) if not folder else ()
        if not self._is_listed:
            entries = self._store.list(folder, below=False)
            self._entries.update((entry.path, entry) for entry in entries if not entry.path.endswith("/"))
            return tuple(entry.path for entry in entries)
        # A run is listed once, and has many folders.
        first, last = (bisect_left(self._sorted, end) for end in (prefix, prefix + "\U0010ffff"))
        return entries_of(self._sorted[first:last], folder)

    def size(self, path: str) -> int | None:
        if path in self._decoded:
            return self._decoded.size(path)
        entry = self._entry(path)
        return None if entry is None else entry.nbytes

    def stamp(self, path: str) -> str:
        entry = self._entry(path)
        if entry is None:
            raise missing(self, path)
        return entry.stamp

    def trace(self, path: str) -> str:
        return ""

    def changed(self, path: str) -> Change:
        entry = self._entries.get(path)
        return "written" if entry is not None and self._store.look(path) != entry else ""

    def written(self, path: str) -> float | None:
        entry = self._entry(path)
        return None if entry is None else entry.written

    def decoded(self, path: str, start: int, nbytes: int, codecs: tuple[str, ...], *, limit: int) -> str:
        return self._decoded.add(path, start, nbytes, codecs, limit=limit)

    def read_runs(self, path: str, byte_offsets: Sequence[int], buffer: memoryview) -> None:
        entry, length = self._entry(path), len(buffer) // len(byte_offsets)
        if entry is not None and path not in self._decoded:
            # Runs that are close together are fetched with what is between them.
            for start, stop in _joined(byte_offsets, length):
                at = start
                while at < min(stop, entry.nbytes):
                    at = (self._covering(path, at) or self._fetch_metadata(entry, at, stop)).stop
        read_each_run(self, path, byte_offsets, buffer)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        if path in self._decoded:
            self._decoded.read_into(path, byte_offset, buffer)
            return
        entry, at, stop = self._entry(path), byte_offset, byte_offset + len(buffer)
        if entry is None:
            raise missing(self, path)
        if byte_offset < 0 or stop > entry.nbytes:
            raise cut_short(path, byte_offset, stop, entry.nbytes)
        if self._is_opening:
            self._similar.asked_again(entry, at, stop)
        while at < stop:
            fetched = self._covering(path, at) or self._fetch_around(entry, at, stop)
            content = fetched.content.result()
            last = min(stop, fetched.stop)
            buffer[at - byte_offset : last - byte_offset] = content[at - fetched.start : last - fetched.start]
            at = last

    def can_fetch(self, path: str) -> bool:
        """Whether the bytes of a path lie in the store as they are read, and not encoded."""
        return path not in self._decoded

    def fetch(self, path: str, start: int, stop: int) -> Fetched:
        """Begin to fetch bytes [start, stop) of a file, which exist. They are kept until they are released."""
        entry = self._entry(path)
        assert entry is not None and stop <= entry.nbytes
        return self._begin(entry, start, stop)

    def release(self, fetched: Iterable[Fetched]) -> None:
        """Forget what was fetched."""
        with self._lock:
            for piece in fetched:
                self._fetched[piece.path].remove(piece)

    def _list_all(self, url: str) -> None:
        self._entries.update((entry.path, entry) for entry in self._store.list() if entry.path)
        self._sorted = sorted(self._entries)
        if self._entries:
            return
        above, _, name = url.rstrip("/").rpartition("/")
        if name and not above.endswith("/"):
            store = open_store(above)
            entry = store.look(name)
            if entry is not None:
                self._only_file, self._store, self._entries, self._is_listed = name, store, {name: entry}, False
                return
        raise RequestError(
            f"there is no file or folder {url!r}",
            do="Check the URL, and the region and endpoint of the store; of a web server, give the URL of one file",
            id="not-found",
        )

    def _entry(self, path: str) -> Entry | None:
        if path not in self._entries:
            if self._is_listed:
                return None
            self._entries[path] = self._store.look(path)
        return self._entries[path]

    def _covering(self, path: str, at: int) -> Fetched | None:
        """What was fetched from a file and holds the byte `at`."""
        # A copy of the list, because other threads change it.
        return next((fetched for fetched in tuple(self._fetched.get(path, ())) if fetched.start <= at < fetched.stop), None)

    def _begin(self, entry: Entry, start: int, stop: int) -> Fetched:
        fetched = Fetched(entry.path, start, stop, self._store.later(lambda: self._store.read(entry, start, stop)))
        with self._lock:
            self._fetched.setdefault(entry.path, []).append(fetched)
        return fetched

    def _fetch_around(self, entry: Entry, at: int, stop: int) -> Fetched:
        """Fetch bytes [at, stop) of a file, or the first of them, and what lies around them. If they are metadata, also fetch the metadata
        of the files like it."""
        if not self._is_opening:
            return self._fetch_metadata(entry, at, max(stop, at + (_NEARBY if stop - at < _NEARBY else _FURTHER)))
        return self._fetch_similar(entry, at, stop) or self._fetch_metadata(entry, at, max(stop, at + _NEARBY))

    def _fetch_similar(self, entry: Entry, at: int, stop: int) -> Fetched | None:
        """Fetch the metadata of a file, and that of the files like it, if bytes [at, stop) are metadata; else None."""
        with self._similar_lock:
            if fetched := self._covering(entry.path, at):
                return fetched
            similar = self._similar.asked(entry, at, stop)
            if similar is None:
                return None
            begun = [*self._begin_missing(entry, similar.parts(entry))]
            room = _MOST_METADATA // 3  # a file has up to three parts, and none is forgotten before it was read
            for other in similar.others(entry):
                if room <= 0:
                    break
                for fetched in self._begin_missing(other, similar.parts(other)):
                    room -= fetched.stop - fetched.start
                    begun.append(fetched)
            self._keep(begun)
        return self._covering(entry.path, at)

    def _begin_missing(self, entry: Entry, parts: Iterable[tuple[int, int]]) -> Iterator[Fetched]:
        """Begin to fetch what was not fetched yet of parts of a file."""
        for start, stop in parts:
            first, last = start, stop
            while first < last and (fetched := self._covering(entry.path, first)):
                first = fetched.stop
            while first < last and (fetched := self._covering(entry.path, last - 1)):
                last = fetched.start
            if first < last:
                yield self._begin(entry, first, last)

    def _fetch_metadata(self, entry: Entry, at: int, stop: int) -> Fetched:
        """Fetch bytes of one file up to `stop`, or to what was fetched already."""
        later = (fetched.start for fetched in tuple(self._fetched.get(entry.path, ())) if fetched.start > at)
        fetched = self._begin(entry, at, min(stop, at + _LONGEST_RANGE, entry.nbytes, *later))
        self._keep([fetched])
        return fetched

    def _keep(self, begun: Iterable[Fetched]) -> None:
        """Keep metadata, and forget the oldest if there is too much."""
        old = []
        with self._lock:
            for fetched in begun:
                self._metadata.append(fetched)
                self._metadata_bytes += fetched.stop - fetched.start
            while self._metadata_bytes > _MOST_METADATA:
                old.append(self._metadata.popleft())
                self._metadata_bytes -= old[-1].stop - old[-1].start
        self.release(old)


def _joined(byte_offsets: Sequence[int], length: int) -> Iterator[tuple[int, int]]:
    """The ranges that hold runs of that length, each at most as long as one request."""
    start = stop = byte_offsets[0]
    for byte_offset in byte_offsets:
        if not 0 <= byte_offset - stop <= RemoteFiles.MERGED_GAP or byte_offset + length - start > _LONGEST_RANGE:
            yield start, stop
            start = byte_offset
        stop = byte_offset + length
    yield start, stop
