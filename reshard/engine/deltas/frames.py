"""Making frames: what changed in each tensor of two checkpoints, as zstd frames (index/deltas.py says what a frame holds).

Both checkpoints are read once, block by block in the tensor's order, and what changed is compressed while they are compared, so memory is
constant. A tensor is the work of one thread. A safetensors file begins with the lengths of all frames, and a frame's length is known at its
end. So frames are kept in unnamed temporary files until all are made: a percent of the checkpoint's size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from reshard.engine.casts import Overflow, overflow, values_beyond
from reshard.engine.checks.reading import Reading
from reshard.engine.compare import PairDigests
from reshard.engine.origins.patched import new_checksum
from reshard.engine.origins.reader import reader
from reshard.engine.pool import Effort, run_jobs
from reshard.engine.transfer import Worker, bytes_of, strips
from reshard.errors import UnsupportedError
from reshard.geometry.boxes import blocks
from reshard.geometry.value import value
from reshard.index.deltas import DeltaEncoding
from reshard.index.index import Tensor
from reshard.storage.files import Files
from reshard.storage.system_calls import system_errors

LEVEL = 1
"""The level of zstd: the fastest was the best for such bytes (slime, docs/en/advanced/delta-weight-sync.md)."""
CHECKSUM = "blake3"
"""The algorithm of the checksums that are written."""
# Positions have four bytes.
_MOST_BYTES_OF_OVERWRITE = (1 << 32) - 1
_PART = 1 << 20
Bytes = npt.NDArray[np.uint8]


@value(eq=False)
class MadeFrame:
    """What changed in one tensor."""

    number: int
    """The number of the tensor among the pairs."""
    changed: int
    """The number of elements that changed."""
    nbytes: int
    """The length of the frame; 0 if nothing changed."""
    checksum: str
    """The checksum of the new bytes."""
    digests: tuple[dict[int, bytes], dict[int, bytes]]
    """The digests of the old and the new blocks, by their numbers."""
    spool: IO[bytes]
    """The file that holds the frame."""
    byte_offset: int
    """Where it starts there."""

    def content(self) -> Iterator[bytes]:
        """The frame, in parts. One thread at a time may read a spool."""
        self.spool.seek(self.byte_offset)
        for start in range(0, self.nbytes, _PART):
            yield self.spool.read(min(_PART, self.nbytes - start))


def made_frames(
    pairs: Sequence[tuple[Tensor, Tensor]],
    files: tuple[Files, Files],
    encoding: DeltaEncoding,
    effort: Effort,
    folder: Path,
    reading: Reading,
) -> Iterator[MadeFrame]:
    """What changed in each pair of tensors (old, new) of one name and shape, in the order in which they are finished. New values are cast
    to the element type of the old ones.

    files: of the old and the new checkpoint. folder: where there is room for the frames. reading: compares what is read with the checksums
    of the files.

    Raises: UnsupportedError for `overwrite` and a tensor of 4 GiB or more; what reading raises.
    """
    largest = max((old for old, _ in pairs), key=lambda tensor: tensor.nbytes, default=None)
    if encoding == "overwrite" and largest is not None and largest.nbytes > _MOST_BYTES_OF_OVERWRITE:
        raise UnsupportedError(
            f"it has {largest.nbytes:,} bytes, and positions of `overwrite` have four bytes",
            where=largest.name,
            why="A position can be 4,294,967,295 at most",
            do="Use `encoding=xor`",
        )
    itemsize = max((tensor.dtype.itemsize for pair in pairs for tensor in pair), default=1)

    seen = [reading.of(side_files, partial(map, itemgetter(side), pairs)) for side, side_files in enumerate(files)]

    def make_worker() -> Callable[[int], MadeFrame]:
        readers, spool = [Worker(side_files, itemsize) for side_files in seen], _temporary(folder)

        def perform(number: int) -> MadeFrame:
            start = spool.seek(0, 2)
            old, new = pairs[number]
            encoder = _Xor(old.nbytes, spool) if encoding == "xor" else _Overwrite(spool, folder)
            with system_errors("written", folder):
                changed, checksum, digests = _compared(old, new, readers, encoder)
                encoder.finish()
            return MadeFrame(number, changed, spool.seek(0, 2) - start, checksum, digests, spool, start)

        return perform

    # Long tensors first, so that at the end no thread waits for one of them.
    order = sorted(range(len(pairs)), key=lambda number: -pairs[number][0].nbytes)
    for made in run_jobs(order, make_worker, effort.threads(itemsize, buffers=4)):
        effort.report(pairs[made.number][1].nbytes)
        yield made
    reading.complete()


def _compared(
    old: Tensor, new: Tensor, readers: Sequence[Worker], encoder: _Xor | _Overwrite
) -> tuple[int, str, tuple[dict[int, bytes], dict[int, bytes]]]:
    """Read both tensors and feed an encoder: (number of changed elements, checksum of the new bytes, digests of the blocks of each)."""
    changed, checksum, digests = 0, new_checksum(CHECKSUM), (dict[int, bytes](), dict[int, bytes]())
    sides = reader(old, old.dtype), reader(new, old.dtype)
    values_beyond()
    for number, box in enumerate(blocks(old.shape)):
        of_block = PairDigests((True, True))
        for strip, pieces in strips(box, *sides):
            a, b = (side.read(reader, slab_pieces, strip) for side, reader, slab_pieces in zip(sides, readers, pieces, strict=True))
            count = int(np.count_nonzero(a != b))
            of_block.add(a, b, is_equal=not count)
            checksum.update(bytes_of(b))
            encoder.add(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8), is_equal=not count)
            changed += count
        for of_side, digest in zip(digests, of_block.result(), strict=True):
            assert digest is not None
            of_side[number] = digest
    if beyond := values_beyond():
        do = "Convert the new step with `allow_overflow=True`, or give a base of a wider type"
        raise overflow(Overflow({(new.name, old.dtype): beyond}), do)
    return changed, checksum.hexdigest(), digests


def _temporary(folder: Path) -> IO[bytes]:
    """A file without a name, which is gone when it is closed or the process ends."""
    return tempfile.TemporaryFile(dir=folder)  # it lives as long as the frames in it


class _Stream:
    """A zstd frame of so many bytes that is written to the end of a file."""

    def __init__(self, nbytes: int, spool: IO[bytes]) -> None:
        import zstandard

        self._spool = spool
        self._running = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True).compressobj(size=nbytes)

    def add(self, data: Any) -> None:
        self._spool.write(self._running.compress(data))

    def finish(self) -> None:
        self._spool.write(self._running.flush())


class _Xor:
    """The differences of all bytes. Nothing is compressed before the first change."""

    def __init__(self, nbytes: int, spool: IO[bytes]) -> None:
        self._nbytes, self._spool, self._before = nbytes, spool, 0
        self._stream: _Stream | None = None

    def add(self, old: Bytes, new: Bytes, *, is_equal: bool) -> None:
        """Add consecutive bytes."""
        if self._stream is None and is_equal:
            self._before += len(old)
            return
        if self._stream is None:
            self._stream, zeros = _Stream(self._nbytes, self._spool), bytes(_PART)
            for start in range(0, self._before, _PART):
                self._stream.add(zeros[: min(_PART, self._before - start)])
        self._stream.add((old ^ new).data)

    def finish(self) -> None:
        """End the frame, if there is one."""
        if self._stream:
            self._stream.finish()


class _Overwrite:
    """The positions of changed bytes, and the new bytes. Both are kept in temporary files, as their number comes first."""

    def __init__(self, spool: IO[bytes], folder: Path) -> None:
        self._spool, self._folder, self._at, self._count = spool, folder, 0, 0
        self._kept: tuple[IO[bytes], IO[bytes]] | None = None

    def add(self, old: Bytes, new: Bytes, *, is_equal: bool) -> None:
        """Add consecutive bytes."""
        if not is_equal:
            positions = np.flatnonzero(old != new)
            self._kept = self._kept or (_temporary(self._folder), _temporary(self._folder))
            self._kept[0].write((positions + self._at).astype("<u4").data)
            self._kept[1].write(new[positions].data)
            self._count += len(positions)
        self._at += len(old)

    def finish(self) -> None:
        """Write the frame, if anything changed."""
        if self._kept is None:
            return
        stream = _Stream(4 + 5 * self._count, self._spool)
        stream.add(self._count.to_bytes(4, "little"))
        for kept in self._kept:
            kept.seek(0)
            while part := kept.read(_PART):
                stream.add(part)
            kept.close()
        stream.finish()
