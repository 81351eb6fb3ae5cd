"""Layout: the files of a checkpoint that does not exist yet, and the tensors in them. The checkpoint's Index follows from the layout.

A format makes a layout from a Content and a Target. Nothing here reads or writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Extent, Piece, span_elements
from reshard.geometry.meshes import chunk
from reshard.geometry.parallel import ONE_RANK, Parallel
from reshard.geometry.quantities import plural
from reshard.geometry.stored import StoredTensor
from reshard.index.index import Constant, Index, RunFacts, StoredFile, Tensor
from reshard.index.shards import Shards


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A stored tensor in a file."""

    tensor: StoredTensor
    """The tensor."""
    byte_offset: int
    """Where it starts in the file."""


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to be written: framing, such as a header, and tensors."""

    path: str
    """Its path, relative to the target."""
    nbytes: int
    """Its length in bytes."""
    literals: tuple[tuple[int, bytes], ...]
    """The framing, as (byte offset, bytes)."""
    tensors: tuple[PlacedTensor, ...]
    """The tensors that it holds."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """The rank that reads it, such as {"pp": 0, "tp": 3}; empty if the file belongs to no rank."""

    def __repr__(self) -> str:
        ranks = "".join(f", {axis} rank {number}" for axis, number in self.ranks.items())
        return f"TargetFile({self.path!r}, {plural(self.nbytes, 'byte')}, {plural(len(self.tensors), 'tensor')}{ranks})"


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A small file whose whole content is known: config, tokenizer, index."""

    path: str
    """Its path, relative to the target."""
    content: bytes
    """Its bytes."""

    def __repr__(self) -> str:
        return f"Sidecar({self.path!r}, {plural(len(self.content), 'byte')})"


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of a target."""

    format: str
    """The name of the format."""
    files: tuple[TargetFile, ...]
    """The files that hold tensors."""
    sidecars: tuple[Sidecar, ...]
    """The other files. They are written after `files`, in this order."""
    parallel: Parallel = ONE_RANK
    """The parallel sizes."""
    notes: tuple[str, ...] = ()
    """Sentences for a reader of the plan."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Canonical tensors that are stored once under another name: alias -> stored name. All are compared when they are read."""
    inlined_scalars: tuple[str, ...] = ()
    """Canonical tensors of one element whose value is stored in the framing."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Canonical tensors that the target does not store, with the reason."""

    def index(self, shapes: Mapping[str, tuple[int, ...]]) -> Index:
        """The index of the files once they are written. shapes: the global shapes of the canonical tensors."""
        return index_of(self.format, ((file, placed) for file in self.files for placed in file.tensors), shapes, files=self.files)

    def __repr__(self) -> str:
        tensors = sum(len(file.tensors) for file in self.files)
        return f"Layout({self.format}, {self.parallel}, {plural(tensors, 'stored tensor')}, {plural(len(self.files), 'file')})"


def row_shard(shape: tuple[int, ...], ranks: int, rank: int) -> Box | None:
    """The rows of a tensor that one of `ranks` data-parallel ranks holds, as FSDP2 cuts them: runs of ceil(rows / ranks), the last ones
    shorter. The first rank holds scalars. None if the rank holds nothing."""
    if not shape:
        return Box((), ()) if rank == 0 else None
    start, size = chunk(shape[0], ranks, rank)
    box = Box.whole(shape).narrow(0, start, start + size)
    return box if size or (rank == 0 and not shape[0]) else None


def index_of(
    format_name: str,
    placed: Iterator[tuple[TargetFile, PlacedTensor]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    files: tuple[TargetFile, ...],
    facts: RunFacts | None = None,
) -> Index:
    """The index of stored tensors: every section becomes a piece of its canonical tensor, every fill a constant.

    placed: each tensor with the file that holds it. shapes: the global shapes of the canonical tensors. files: all files of the index.
    """
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
    tensors = tuple(Tensor(name, dtypes[name], shapes[name], "weight", Shards.of(of_tensor)) for name, of_tensor in pieces.items())
    stored_files = tuple(StoredFile(file.path, file.nbytes) for file in files)
    return Index(format_name, tensors, stored_files, facts or RunFacts(), constants=tuple(constants))


def _constants(path: str, item: PlacedTensor) -> Iterator[Constant]:
    """The ranges of a stored tensor that hold its fill: the bytes before, between and after the spans of its sections. Sections that are
    interleaved, such as gate and up of transposed experts, fill their common span."""
    stored, itemsize = item.tensor, item.tensor.dtype.itemsize
    if not stored.filled:
        return
    fill = stored.fill * itemsize if len(stored.fill) == 1 else stored.fill
    end = 0
    spans = ((section.start, span_elements(section.box.sizes, section.strides)) for section in stored.sections if section.box.volume)
    ranges = sorted((start, start + length) for start, length in spans)
    for start, stop in [*ranges, (stored.nbytes // itemsize,) * 2]:
        if start > end:
            yield Constant(stored.name, path, item.byte_offset + end * itemsize, (start - end) * itemsize, fill)
        end = max(end, stop)
