"""Layout: a checkpoint that does not exist yet. Its files, what each holds where, and so its Index.

Pure functions from a model, parallel sizes and an engine's rules; nothing here reads or writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Extent, Piece
from reshard.geometry.meshes import chunk
from reshard.geometry.parallel import ONE_RANK, Parallel
from reshard.geometry.stored import StoredTensor
from reshard.index.index import Constant, Index, RunFacts, StoredFile, Tensor
from reshard.index.shards import Shards


@dataclass(frozen=True, slots=True)
class Placed:
    """A stored tensor and the byte of its file that it starts at."""

    tensor: StoredTensor
    byte_offset: int


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to be written: its length, the framing bytes that are known already, and the tensors between them.

    `ranks` says for whom it is, such as {"pp": 0, "tp": 3}; empty where a file is nobody's in particular.
    """

    path: str
    nbytes: int
    literals: tuple[tuple[int, bytes], ...]
    tensors: tuple[Placed, ...]
    ranks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A small file that goes along: config, tokenizer, index."""

    path: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """All files of a target. `files` hold the weights; `sidecars` are written after them, the last one last.

    copies: canonical tensors that have no place of their own, as another one, which is there once, stands for them; when they are read, all
    must be equal. told: canonical tensors of one element, whose value is part of the framing.
    left_out: canonical tensors that the target has no place for, and why that is right.
    """

    format: str
    files: tuple[TargetFile, ...]
    sidecars: tuple[Sidecar, ...]
    parallel: Parallel = ONE_RANK
    notes: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    inlined_scalars: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def index(self, shapes: Mapping[str, tuple[int, ...]]) -> Index:
        """The index of what will be there; `shapes` are the canonical tensors' global shapes."""
        return index_of(self.format, ((file, placed) for file in self.files for placed in file.tensors), shapes, files=self.files)


def row_shard(shape: tuple[int, ...], ranks: int, rank: int) -> Box | None:
    """The rows of a tensor that one of so many data-parallel ranks holds, as FSDP2 cuts them: runs of ceil(n / ranks), the last ones
    shorter. None where it holds nothing; scalars are the first rank's."""
    if not shape:
        return Box((), ()) if rank == 0 else None
    start, size = chunk(shape[0], ranks, rank)
    box = Box.whole(shape).narrow(0, start, start + size)
    return box if size or (rank == 0 and not shape[0]) else None


def index_of(
    format_name: str,
    placed: Iterator[tuple[TargetFile, Placed]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    files: tuple[TargetFile, ...],
    facts: RunFacts | None = None,
) -> Index:
    """The index of stored tensors: every section becomes a piece of its canonical tensor, every fill a constant."""
    pieces: dict[str, list[Piece]] = {}
    dtypes: dict[str, DType] = {}
    constants: list[Constant] = []
    for file, item in placed:
        stored = item.tensor
        constants.extend(_constants(file.path, item))
        for section in stored.sections:
            extent = Extent(file.path, item.byte_offset + section.start * stored.dtype.itemsize, section.strides, stored.dtype)
            pieces.setdefault(section.name, []).append(Piece(section.box, extent))
            dtypes.setdefault(section.name, stored.dtype)
    tensors = tuple(Tensor(name, dtypes[name], shapes[name], "weight", Shards.of(found)) for name, found in pieces.items())
    stored_files = tuple(StoredFile(file.path, file.nbytes) for file in files)
    return Index(format_name, tensors, stored_files, facts or RunFacts(), constants=tuple(constants))


def _constants(path: str, item: Placed) -> Iterator[Constant]:
    """The ranges of a stored tensor that hold its fill. Padding lies between and after sections that are whole runs of rows."""
    stored, itemsize = item.tensor, item.tensor.dtype.itemsize
    if not stored.filled:
        return
    fill = stored.fill * itemsize if len(stored.fill) == 1 else stored.fill
    end = 0
    for start, stop in [*sorted((s.start, s.start + s.box.volume) for s in stored.sections), (stored.nbytes // itemsize,) * 2]:
        if start > end:
            yield Constant(stored.name, path, item.byte_offset + end * itemsize, (start - end) * itemsize, fill)
        end = stop
