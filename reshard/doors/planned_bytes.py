"""Planned bytes: any range of any file of a plan, computed from the source when somebody asks for it. A plan, read backwards:

    bytes [start, stop) of a file -> framing, fill, and pieces of tensors that lie there
    piece                         -> boxes whose elements lie in the range -> the readers of the origins, as in a conversion

A box costs what its bytes cost. Values that cost more than their bytes, such as those of a dequantized weight, a merged adapter, an average
or a delta, are computed in blocks of a file, and the last blocks are kept, as the tiles of a quantizer are (engine/origins/reader.py).

An example: a file holds a weight [4, 6] of two bytes from byte 100 on, and bytes 110 to 130 are wanted: elements 5 to 14, which are the
boxes [0:1, 5:6], [1:2, 0:6] and [2:3, 0:3].
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from reshard.doors.places import FilePieces, TargetPiece, TargetPlaces, boxes_between
from reshard.doors.watched_files import WatchedFiles
from reshard.engine.blocks import widest_element
from reshard.engine.casts import Overflow, overflow, values_beyond
from reshard.engine.checks.reading import Reading
from reshard.engine.origins.reader import Reader, Tiles, reader
from reshard.engine.transfer import SharedPatches, Worker, strips
from reshard.errors import UnsupportedError
from reshard.geometry.extents import Extent, is_row_major
from reshard.geometry.quantities import grouped, nbytes_text
from reshard.index.origin import Encoded, Stored
from reshard.plans.layout import TargetFile
from reshard.plans.manifest import FixedBytes
from reshard.plans.plan import Plan
from reshard.storage.checksums import FileChecksums
from reshard.storage.crc32 import crc32

CHUNK = 1 << 20
"""The most bytes that are computed at once."""
# One byte of scales stands for up to 16,384 weights: a client that waits for a mebibyte of them would lose its patience.
_CHUNK_OF_SCALES = 1 << 14
# What is read and sent at once stays in the processor's cache.
_CHUNK_OF_COPIES = 1 << 19
# The most bytes of blocks, of framing and of checksums that are kept, and of readers.
_MOST_BLOCKS, _MOST_FRAMING, _MOST_READERS, _MOST_CHECKSUMS = 32 << 20, 32 << 20, 256, 1 << 20
# A client waits while the checksums of one run of framing are computed, such as the directory of a zip: 4 GiB take some seconds.
_MOST_FOR_FRAMING = 4 << 30
# No element has more bytes, and tensors lie at multiples of the second number.
_LONGEST_ELEMENT, _ALIGNED = 16, 64


class PlannedBytes:
    """The bytes of the files of a plan. Threads may share it.

    Raises: UnsupportedError for a file whose framing would need everything that it holds, more than 4 GiB, to be read first.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._files = {file.path: file for file in plan.layout.files}
        for file in plan.layout.files:
            _check_framing(file)
        self.source = WatchedFiles(plan.source_files)
        """The files of the source. Reading them tells when they have changed."""
        self._places, self._constants = TargetPlaces(plan), grouped(plan.target_index.constants, attrgetter("path"))
        self._threads_of: tuple[int, ThreadPoolExecutor] | None = None
        self._copies: dict[tuple[int, int], Extent | None] = {}
        self._begin()

    def _begin(self) -> None:
        """Begin in this process: a copy of it, such as a worker of torch's DataLoader, has no threads."""
        threads = min(8, max(2, os.cpu_count() or 1))
        files = self._read_files = Reading().of_plan(replace(self._plan, source_files=self.source))
        shared, itemsize = SharedPatches(files, threads), widest_element(self._plan)
        self._of_thread = threading.local()
        self._make_worker: Callable[[], Worker] = partial(Worker, files, itemsize, None, shared)
        self._tiles, self._checksums = Tiles(), dict[str, FileChecksums]()
        self._blocks, self._framing, self._readers = KeptValues(_MOST_BLOCKS), KeptValues(_MOST_FRAMING), KeptValues(_MOST_READERS)
        self._crcs = KeptValues(_MOST_CHECKSUMS)
        self._threads_of = os.getpid(), ThreadPoolExecutor(threads, "reshard-door")

    @property
    def _threads(self) -> ThreadPoolExecutor:
        if self._threads_of is None or self._threads_of[0] != os.getpid():
            self._begin()
        assert self._threads_of is not None
        return self._threads_of[1]

    def chunks(self, path: str, start: int, stop: int, most: int = CHUNK) -> Iterator[memoryview]:
        """Bytes [start, stop) of a file, in order. The next chunk is computed while one is used. most: bytes in each, at most `CHUNK`.

        Raises: CheckpointError if the source cannot be read or has changed, ValuesOverflow if a cast makes values infinite.
        """
        under_way: Future[memoryview] | None = None
        while start < stop:
            step, is_copy = self._step(path, start)
            last = min(stop, (start // min(step, most) + 1) * min(step, most))
            following = None if is_copy else self._threads.submit(self._chunk, path, start, last)
            if under_way:
                yield under_way.result()
            if is_copy:
                yield self._chunk(path, start, last)
            under_way, start = following, last
        if under_way:
            yield under_way.result()

    def checksums_of(self, file: TargetFile) -> list[int | None]:
        """The checksums in the framing of a file, which is read for them. Raises: as `chunks` does."""
        for _ in self.chunks(file.path, 0, file.nbytes):
            pass
        return self._checksums[file.path].known

    def close(self) -> None:
        """End the threads."""
        if self._threads_of:
            self._threads_of[1].shutdown(wait=False, cancel_futures=True)

    def _step(self, path: str, at: int) -> tuple[int, bool]:
        """The bytes that are computed at once from a place on, and whether they are only read: then nothing is gained by a thread."""
        rows, routes = self._places.of(path).meeting(at, at + CHUNK), self._plan.routes
        if not self._files[path].checksums and self.source.store is None and all(self._copied_from(number, row) for number, row in rows):
            return _CHUNK_OF_COPIES, True
        origins = (routes[number].source.origin for number, _ in rows)
        is_slow = any(isinstance(origin, Encoded) and origin.component.is_scale for origin in origins)
        return _CHUNK_OF_SCALES if is_slow else CHUNK, False

    def _copied_from(self, number: int, row: int) -> Extent | None:
        """As `_looked_up`, which is asked for each chunk again."""
        if (number, row) not in self._copies:
            self._copies[number, row] = self._looked_up(number, row)
        return self._copies[number, row]

    def _looked_up(self, number: int, row: int) -> Extent | None:
        """Where the bytes of a piece lie in the source, if it has the bytes of a whole tensor that is stored in one piece; else None."""
        source, target = self._plan.routes[number].source, self._plan.routes[number].target
        is_whole = len(source.shards) == len(target.shards) == 1 and type(source.origin) is Stored and not self._plan.routes[number].is_cast
        if not is_whole or target.shards.box(row) != (piece := source.shards.piece(0)).box:
            return None
        strides = piece.extent.strides, target.shards.extent(row).strides
        return piece.extent if all(is_row_major(piece.box.sizes, steps) for steps in strides) else None

    def _chunk(self, path: str, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a file, in a thread of this object's."""
        values_beyond()
        base = max(0, start - _LONGEST_ELEMENT) // _ALIGNED * _ALIGNED
        buffer = self._filled(path, base, start, stop)
        part = memoryview(buffer)[start - base : stop - base]
        self.source.check_read()
        if (file := self._files[path]).checksums:
            self._with_checksums(file, start, part)
        return part.toreadonly()

    def _filled(self, path: str, base: int, start: int, stop: int) -> bytearray:
        """The bytes of a file from `base` on, of which those in [start, stop) are known: framing without checksums, fill and tensors."""
        file, pieces = self._files[path], self._places.of(path)
        end = min(file.nbytes, stop + _LONGEST_ELEMENT)
        buffer = self._fixed(file).content(base, end)
        for number, row in pieces.meeting(start, stop):
            self._fill(pieces, TargetPiece.of(self._plan.routes[number].target, row), number, (start, stop), buffer, base)
        return buffer

    def _fill(self, file: FilePieces, piece: TargetPiece, number: int, wanted: tuple[int, int], buffer: bytearray, base: int) -> None:
        """Fill in what a piece holds of a range. number: of its route. base: where the buffer starts in the file."""
        if extent := self._copied_from(number, piece.row):
            start, end = max(wanted[0], piece.byte_offset), min(wanted[1], piece.byte_offset + piece.span * piece.itemsize)
            self._read_files.read_into(
                extent.path, extent.byte_offset + start - piece.byte_offset, memoryview(buffer)[start - base : end - base]
            )
            return
        first, stop = piece.elements(*wanted)
        if not self._is_kept(number, piece):
            self._read(number, piece, (first, stop), buffer, base)
            return
        length = CHUNK // piece.itemsize
        for block in range(first // length, -(-stop // length)):
            begin, end = block * length, min((block + 1) * length, piece.span)
            made = self._blocks.get((file.path, number, piece.row, block), partial(self._block, number, piece, begin, end))
            for box in boxes_between(piece.sizes, piece.strides, max(first, begin), min(stop, end)):
                piece.view(buffer, base, box)[...] = piece.view(made, piece.byte_offset + begin * piece.itemsize, box)

    def _is_kept(self, number: int, piece: TargetPiece) -> bool:
        """Whether a piece is computed in blocks, which are kept: its values cost more than their bytes, or its rows are columns of the
        source."""
        return type(self._plan.routes[number].source.origin) not in (Stored, Encoded) or not piece.is_row_major

    def _block(self, number: int, piece: TargetPiece, begin: int, end: int) -> bytearray:
        made = bytearray((end - begin) * piece.itemsize)
        self._read(number, piece, (begin, end), made, piece.byte_offset + begin * piece.itemsize)
        return made

    def _read(self, number: int, piece: TargetPiece, elements: tuple[int, int], buffer: bytearray, base: int) -> None:
        """Read elements of a piece into a buffer. Raises ValuesOverflow."""
        route, values, worker = self._plan.routes[number], self._reader(number), self._worker()
        for box in boxes_between(piece.sizes, piece.strides, *elements):
            for strip, (pieces,) in strips(box.shifted(piece.box.offsets), values):
                values.read(
                    worker, pieces, strip, piece.lines(buffer, base, strip.box.relative_to(piece.box.offsets), strip.axis, strip.sizes)
                )
        if (beyond := values_beyond()) and not self._plan.target.allow_overflow:
            do = "Choose a wider type, such as `dtype=bf16`, leave the tensor as it is with `keep_dtype=`, or say `allow_overflow=True`"
            raise overflow(Overflow({(route.name, route.target.dtype): beyond}), do)

    def _reader(self, number: int) -> Reader:
        route = self._plan.routes[number]
        made: Reader = self._readers.get(number, lambda: reader(route.source, route.target.dtype, self._tiles), cost=lambda _: 1)
        return made

    def _worker(self) -> Worker:
        if "worker" not in self._of_thread.__dict__:
            self._of_thread.worker = self._make_worker()
        worker: Worker = self._of_thread.worker
        return worker

    def _fixed(self, file: TargetFile) -> FixedBytes:
        fixed: FixedBytes = self._framing.get(
            file.path, lambda: FixedBytes(file, self._constants.get(file.path, ())), cost=lambda made: made.nbytes
        )
        return fixed

    def _with_checksums(self, file: TargetFile, start: int, part: memoryview) -> None:
        """Fill in the checksums that lie in bytes [start, ...) of a file, and add what the bytes tell about others."""
        checksums = self._checksums.setdefault(file.path, FileChecksums(file.checksums))
        stop = start + len(part)
        for number in checksums.stored_in(start, stop):
            if checksums.known[number] is None:
                checksum = file.checksums[number]
                compute = partial(self._crc, file.path, checksum.start, checksum.stop)
                checksums.known[number] = self._crcs.get((file.path, number), compute, cost=lambda _: 1)
        part[:] = checksums.filled_in(start, bytes(part))
        if not start % CHUNK and (len(part) == CHUNK or stop == file.nbytes):  # other ranges would be many small parts
            checksums.add(start, part)

    def _crc(self, path: str, start: int, stop: int) -> int:
        """The CRC-32 of bytes of a file."""
        crc = 0
        for at in range(start, stop, CHUNK):
            last, base = min(at + CHUNK, stop), max(0, at - _LONGEST_ELEMENT) // _ALIGNED * _ALIGNED
            crc = crc32(memoryview(self._filled(path, base, at, last))[at - base : last - base], crc)
            self.source.check_read()
        return crc


def _check_framing(file: TargetFile) -> None:
    """Raises UnsupportedError if a run of a file's framing has the checksums of more bytes than a client can wait for."""
    if not file.checksums:
        return
    starts = np.array([at for at, _ in _runs(file)], np.int64)
    needed = np.zeros(len(starts), np.int64)
    for checksum in file.checksums:
        needed[np.unique(np.searchsorted(starts, checksum.places, "right") - 1)] += checksum.stop - checksum.start
    if int(needed.max()) > _MOST_FOR_FRAMING:
        raise UnsupportedError(
            f"its framing holds checksums of {nbytes_text(int(needed.max()))}, which would have to be read first",
            where=file.path,
            why="A client that asks for the directory of a zip would wait for all of it",
            do="Write the files with `reshard convert`, or ask for `to=hf` or another format of safetensors",
        )


def _runs(file: TargetFile) -> Sequence[tuple[int, int]]:
    """The runs of framing of a file, as (byte offset, length), in order."""
    places: Sequence[tuple[int, int]] | None = getattr(file.literals, "places", None)
    return sorted((at, len(data)) for at, data in file.literals) if places is None else sorted(places)


class KeptValues:
    """The values that were computed last, by key. Threads share it; one that needs what another is computing waits for it."""

    def __init__(self, most: int) -> None:
        """most: the sum of the costs of what is kept."""
        self._most, self._cost = most, 0
        self._values: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._under_way: set[Any] = set()
        self._changed = threading.Condition()

    def get(self, key: Any, compute: Callable[[], Any], cost: Callable[[Any], int] = len) -> Any:
        """The value of a key, computed if it is not kept. cost: of the value, by default its length."""
        with self._changed:
            while key in self._under_way:
                self._changed.wait()
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            self._under_way.add(key)
        try:
            made = compute()
            with self._changed:
                self._values[key] = made, cost(made)
                self._cost += self._values[key][1]
                while self._cost > self._most and len(self._values) > 1:
                    self._cost -= self._values.popitem(last=False)[1][1]
        finally:
            with self._changed:
                self._under_way.remove(key)
                self._changed.notify_all()
        return made
