"""Layout: the files of a checkpoint that does not exist yet, and the tensors in them. Its Index follows from the layout (layout_index.py).

A format makes a layout from a Content and a Target. Nothing here reads or writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.geometry.boxes import Box
from reshard.geometry.meshes import chunk
from reshard.geometry.parallel import ONE_RANK, Parallel
from reshard.geometry.quantities import plural
from reshard.geometry.stored import StoredTensor


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
