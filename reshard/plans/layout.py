"""Target: the request that a format lays out. Layout: its answer, the files and tensors of a checkpoint that does not exist yet.

A format makes a layout from a Content and a Target. Nothing here reads or writes. The layout's Index follows from it (layout_index.py).

Files of ranks may be alike: where the tensors lie is computed for one rank, and only the boxes, or the experts, differ for the others. A
plan for a thousand data-parallel ranks has a million stored tensors. A FileForm holds those of one rank; AlikeTensors makes those of
another one on demand, and its sections as columns. Framing, such as a pickle of each rank, is made when the file is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.canonical.globs import matches
from reshard.containers import safetensors
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import ONE_RANK, Parallel, chunk
from reshard.geometry.quantities import grouped, plural
from reshard.geometry.sections import Columns, Pattern, Sections, StoredTensor
from reshard.geometry.value import value
from reshard.index.origin import Encoded, Tensor

if TYPE_CHECKING:
    from reshard.storage.checksums import StoredChecksum


@value
class Target:
    """A request for a target: a format, parallel sizes, element types, and the format's own options."""

    format: str
    """The format's name."""
    parallel: Parallel = ONE_RANK
    """The parallel sizes."""
    dtype: DType | None = None
    """Cast floating-point weights to this type; None: each weight keeps its own type."""
    keep_dtype: tuple[str, ...] = ()
    """Globs of tensors that `dtype` does not cast."""
    dtype_kept_for: frozenset[str] = frozenset()
    """Names of tensors that `dtype` never casts: quantized weights and their scales."""
    allow_overflow: bool = False
    """Whether casts may make finite values infinite."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The format's own options, parsed."""
    only_rank: Mapping[str, int] = field(default_factory=dict)
    """The one rank that is requested, such as {"tp": 3, "pp": 0}; a layout may leave out the files of other ranks. Empty: all ranks."""

    @property
    def engine_version(self) -> str | None:
        """The version of the serving engine that will load the files; None for the newest known version."""
        return self.options.get("engine_version")

    @property
    def max_shard_size(self) -> int | None:
        """The most bytes of tensors in one file; None for no limit."""
        return self.options.get("max_shard_size")

    def wants(self, ranks: Mapping[str, int]) -> bool:
        """Whether the files of a rank, such as {"tp": 3, "pp": 0}, are requested. An axis that `ranks` does not name counts as rank 0; an
        axis that `only_rank` does not name does not matter."""
        return all(ranks.get(axis, 0) == rank for axis, rank in self.only_rank.items())

    def dtype_of(self, tensor: Tensor) -> DType:
        """The element type in which the target stores a tensor. Where a source holds a function of a weight, it is that of the weight."""
        if isinstance(tensor.origin, Encoded):
            return tensor.dtype
        if decoded := tensor.origin.decoded:
            return self.dtype or decoded.dtype
        if (
            self.dtype is None
            or not tensor.dtype.floating
            or tensor.kind not in ("weight", "buffer", "adapter", "other", "master")
            or tensor.name in self.dtype_kept_for
            or matches(tensor.name, self.keep_dtype)
        ):
            return tensor.dtype.of("")
        return self.dtype

    def __repr__(self) -> str:
        return f"Target({self.format}, {self.parallel}, dtype {self.dtype or 'kept'}, {plural(len(self.options), 'option')})"


@value
class PlacedTensor:
    """A stored tensor in a file."""

    tensor: StoredTensor
    """The tensor."""
    byte_offset: int
    """Where it starts in the file."""


@value(eq=False)
class FileSections:
    """Sections of one or more tensors of a file."""

    names: tuple[str, ...]
    """[n]: the canonical tensor of each section."""
    pattern: Pattern
    """Where they lie. Starts count from `byte_offset`."""
    dtype: DType
    """The element type of the tensors."""
    byte_offset: int
    """The byte of the file from which starts count."""


Literal = tuple[int, bytes]
"""A range of framing: (byte offset, bytes)."""


@value
class TargetFile:
    """A file to be written: framing, such as a header, and tensors."""

    path: str
    """Its path, relative to the target."""
    nbytes: int
    """Its length in bytes."""
    literals: Iterable[Literal]
    """The framing, as (byte offset, bytes)."""
    tensors: Sequence[PlacedTensor] | AlikeTensors
    """The tensors that it holds."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """The rank that reads it, such as {"pp": 0, "tp": 3}; empty if the file belongs to no rank."""
    checksums: Sequence[StoredChecksum] = ()
    """The checksums in its framing of tensors, in ascending order. The framing has zeros in their places."""

    def sealed(self, known: Sequence[int | None]) -> TargetFile:
        """The file with its checksums in its framing. known: their values."""
        from reshard.storage.checksums import FileChecksums

        checksums = FileChecksums(self.checksums, known)
        return replace(self, literals=tuple((at, checksums.filled_in(at, data)) for at, data in self.literals))

    @property
    def form(self) -> FileForm | None:
        """What the file has in common with those of other ranks; None if it was laid out alone."""
        return self.tensors.form if isinstance(self.tensors, AlikeTensors) else None

    @property
    def stored_nbytes(self) -> int:
        """The bytes of its tensors."""
        return self.form.nbytes if self.form else sum(item.tensor.nbytes for item in self.tensors)

    @property
    def filled(self) -> Iterable[PlacedTensor]:
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
class LeftFile:
    """A file that lies beside the source's weights, or an entry of their headers, and is not carried into the target."""

    path: str
    """Its path, below the folder that it lies in; the key of an entry."""
    kind: str
    """Its kind, such as "log"."""
    reason: str
    """Why it is left."""


@value(eq=False)
class BesideWeights:
    """What lies beside the weights."""

    carried: Mapping[str, bytes]
    """The content of each file that goes along, by its name: the path below the folder."""
    left: tuple[LeftFile, ...]
    """The others."""


def left_by_kind(files: Iterable[LeftFile]) -> dict[str, int]:
    """How many files of each kind are left."""
    return dict(Counter(file.kind for file in files))


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
    headers: frozenset[str] = frozenset()
    """The entries of the source's headers that the target's have, too."""
    left: tuple[LeftFile, ...] = ()
    """What lies beside the source's weights and is not carried."""

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


@value(slots=False, eq=False)
class FileForm:
    """What the files of some ranks have in common."""

    tensors: tuple[PlacedTensor, ...]
    """The tensors of the first of these ranks."""
    steps: tuple[int, ...]
    """[tensors]: how far the boxes of a tensor move along their first axis from one rank to the next."""
    framing: tuple[tuple[int, int], ...]
    """The framing as (byte offset, length); its bytes differ from rank to rank."""

    @property
    def first(self) -> AlikeTensors:
        """The tensors of the first rank."""
        return AlikeTensors(self, 0)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the tensors of one file."""
        return sum(item.tensor.nbytes for item in self.tensors)

    @cached_property
    def filled(self) -> tuple[PlacedTensor, ...]:
        """The tensors that hold fill."""
        return tuple(item for item in self.tensors if item.tensor.filled)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The canonical tensors of all sections, in the order of the stored tensors."""
        return tuple(name for item in self.tensors for name in item.tensor.sections.names)

    @cached_property
    def sections(self) -> tuple[tuple[FileSections, Columns], ...]:
        """The sections of the first file, those of one element type and number of axes together, and the step of each section."""
        items = [(item, step) for item, step in zip(self.tensors, self.steps, strict=True) if len(item.tensor.sections)]
        alike = grouped(items, lambda row: (row[0].tensor.dtype, row[0].tensor.sections.pattern.sizes.shape[1]))
        return tuple(_joined(dtype, group) for (dtype, _), group in alike.items())


def _joined(dtype: DType, items: list[tuple[PlacedTensor, int]]) -> tuple[FileSections, Columns]:
    patterns = [item.tensor.sections.pattern for item, _ in items]
    bases = [item.byte_offset // dtype.itemsize for item, _ in items]
    assert all(item.byte_offset % dtype.itemsize == 0 for item, _ in items), "tensors are aligned to their elements"
    starts = np.concatenate([pattern.starts + base for pattern, base in zip(patterns, bases, strict=True)])
    offsets, sizes, strides = (np.concatenate([getattr(pattern, name) for pattern in patterns]) for name in ("offsets", "sizes", "strides"))
    names = tuple(name for item, _ in items for name in item.tensor.sections.names)
    steps = np.repeat([step for _, step in items], [len(pattern) for pattern in patterns])
    return FileSections(names, Pattern(offsets, sizes, starts, strides), dtype, 0), steps


@value(eq=False)
class AlikeTensors:
    """The tensors of the file of one of the ranks of a form."""

    form: FileForm
    """What the file has in common with the others."""
    number: int
    """How many ranks after the first one of the form."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Canonical tensors of the first rank, such as its experts -> what this rank holds in their places; the others are the same."""

    def sections(self) -> Iterator[FileSections]:
        """The sections of all tensors, with starts from the start of the file."""
        for sections, steps in self.form.sections:
            yield replace(sections, names=self._named(sections.names), pattern=_moved(sections.pattern, steps * self.number))

    def __len__(self) -> int:
        return len(self.form.tensors)

    def __iter__(self) -> Iterator[PlacedTensor]:
        for item, step in zip(self.form.tensors, self.form.steps, strict=True):
            sections, by = item.tensor.sections, step * self.number
            if (by or self.names) and len(sections):
                moved = Sections(self._named(sections.names), _moved(sections.pattern, np.full(len(sections), by, np.int64)))
                item = replace(item, tensor=replace(item.tensor, sections=moved))
            yield item

    def _named(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple([self.names.get(name, name) for name in names]) if self.names else names


def _moved(pattern: Pattern, by: Columns) -> Pattern:
    """The pattern with boxes that lie further along their first axis. by: [n], in elements."""
    if not pattern.offsets.shape[1]:
        return pattern
    offsets = pattern.offsets.copy()
    offsets[:, 0] += by
    return replace(pattern, offsets=offsets)


@value(eq=False)
class LazyFraming:
    """The framing of a file, which is made anew whenever it is needed: a thousand pickles do not fit into memory."""

    places: tuple[tuple[int, int], ...]
    """(byte offset, length) of each literal."""
    make: Callable[[], Sequence[Literal]]
    """Makes the literals."""

    def __iter__(self) -> Iterator[Literal]:
        made = self.make()
        assert tuple((offset, len(data)) for offset, data in made) == self.places, "the framing has the length that was planned"
        return iter(made)


# transformers and the serving engines look for it; "pt" stands for torch.
_METADATA = {"format": "pt"}


def framed(
    path: str, stored: Iterable[StoredTensor], ranks: Mapping[str, int] | None = None, *, metadata: Mapping[str, str] = _METADATA
) -> TargetFile:
    """A file that holds these tensors. ranks: the rank that loads the file, if only one does; see TargetFile. metadata: of the header."""
    # The widest element types come first, so that every tensor is aligned to its element size. The safetensors library does the same.
    ordered = sorted(stored, key=lambda tensor: -tensor.dtype.itemsize)
    frame = safetensors.frame(((tensor.name, tensor.dtype, tensor.shape) for tensor in ordered), metadata)
    placed = tuple(PlacedTensor(tensor, entry.byte_offset) for tensor, entry in zip(ordered, frame.entries, strict=True))
    return TargetFile(path, frame.nbytes, ((0, frame.header),), placed, ranks or {})


ALIGNMENT = 64
"""Bytes at whose multiples the tensors start in the memory of a rank, as it is described."""


def unframed(path: str, stored: Iterable[StoredTensor], ranks: Mapping[str, int]) -> TargetFile:
    """The memory of a rank that holds these tensors, as a file without framing."""
    placed, end = list[PlacedTensor](), 0
    for tensor in stored:
        placed.append(PlacedTensor(tensor, end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return TargetFile(path, end, (), FileForm(tuple(placed), (0,) * len(placed), ()).first, ranks)
