"""Layout: the files of a checkpoint that does not exist yet, and the tensors in them. Its Index follows from the layout (layout_index.py).

A format makes a layout from a Content and a Target. Nothing here reads or writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from reshard.geometry.boxes import Box
from reshard.geometry.meshes import chunk
from reshard.geometry.parallel import ONE_RANK, Parallel
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.plans.placed import FileSections, Literal, PlacedTensor
from reshard.plans.rank_files import AlikeTensors, FileForm


@value
class TargetFile:
    """A file to be written: framing, such as a header, and tensors."""

    path: str
    """Its path, relative to the target."""
    nbytes: int
    """Its length in bytes."""
    literals: Sequence[Literal]
    """The framing, as (byte offset, bytes)."""
    tensors: Sequence[PlacedTensor]
    """The tensors that it holds."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """The rank that reads it, such as {"pp": 0, "tp": 3}; empty if the file belongs to no rank."""

    @property
    def form(self) -> FileForm | None:
        """What the file has in common with those of other ranks; None if it was laid out alone."""
        return self.tensors.form if isinstance(self.tensors, AlikeTensors) else None

    @property
    def stored_nbytes(self) -> int:
        """The bytes of its tensors."""
        return self.form.nbytes if self.form else sum(item.tensor.nbytes for item in self.tensors)

    @property
    def filled(self) -> Sequence[PlacedTensor]:
        """Its tensors that hold fill."""
        return self.form.filled if self.form else [item for item in self.tensors if item.tensor.filled]

    def sections(self) -> Iterator[FileSections]:
        """The sections of its tensors, as columns."""
        if isinstance(self.tensors, AlikeTensors):
            yield from self.tensors.sections()
            return
        for item in self.tensors:
            if len(item.tensor.sections):
                yield FileSections(item.tensor.sections.names, item.tensor.sections.pattern, item.tensor.dtype, item.byte_offset)

    def __repr__(self) -> str:
        ranks = "".join(f", {axis} rank {number}" for axis, number in self.ranks.items())
        return f"TargetFile({self.path!r}, {plural(self.nbytes, 'byte')}, {plural(len(self.tensors), 'tensor')}{ranks})"


@value
class Sidecar:
    """A small file whose whole content is known: config, tokenizer, index."""

    path: str
    """Its path, relative to the target."""
    content: bytes
    """Its bytes."""

    def __repr__(self) -> str:
        return f"Sidecar({self.path!r}, {plural(len(self.content), 'byte')})"


@value
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
