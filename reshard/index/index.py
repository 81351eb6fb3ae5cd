"""Index: which box of which tensor lies in which bytes of which file, and what is known about the run that wrote the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from reshard.errors import CheckpointError, IncompleteTensor
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Piece
from reshard.geometry.meshes import Distribution, Mesh
from reshard.geometry.quantities import plural
from reshard.index.shards import Columns, Shards, primary_rows

Kind = Literal["weight", "buffer", "adapter", "other", "master", "moment1", "moment2", "step", "state"]
"""What a tensor is for in the training run. (A *role* is what a weight does in the model, such as attention.q.)"""
KINDS: dict[Kind, str] = {
    "weight": "weights of the model",
    "buffer": "tensors of the model that are not trained, such as running_mean",
    "adapter": "parts of a LoRA adapter",
    "other": "tensors of another model in the checkpoint, such as an EMA",
    "master": "full-precision copies kept by the optimizer",
    "moment1": "optimizer: first moments",
    "moment2": "optimizer: second moments",
    "step": "optimizer: step counts",
    "state": "other state of the run",
}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A canonical tensor and its pieces."""

    name: str
    """The canonical name."""
    dtype: DType
    """The element type in which it is stored."""
    shape: tuple[int, ...]
    """The global shape."""
    kind: Kind
    """What it is for in the run: a weight, a master, optimizer state, ..."""
    shards: Shards
    """Its pieces."""
    distribution: Distribution | None = None
    """How it was distributed on the run's mesh; None if the files do not say."""
    scaling: Scaling | None = None
    """The scales that turn its quantized elements into values; None if it is not quantized, or is copied without dequantization."""

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element types that are read for it: its own and that of its scales."""
        return (self.dtype, self.scaling.scales.dtype) if self.scaling else (self.dtype,)

    @property
    def elements(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor, stored once."""
        return self.elements * self.dtype.itemsize

    def pieces(self) -> Iterator[Piece]:
        """Its pieces, made one at a time. Raises CheckpointError if a header that tells where a piece lies cannot be read."""
        return (self.shards.piece(i) for i in range(len(self.shards)))

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype}, {list(self.shape)}, {self.kind}, {plural(len(self.shards), 'piece')})"


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """The scales of a quantized tensor: an element times its scale is its value."""

    scales: Tensor
    """The tensor of scales."""
    block_shape: tuple[int | None, ...]
    """Elements per scale along each axis; None: one scale for the whole axis."""

    def box_of(self, box: Box) -> Box:
        """The box of the scales that belong to a box of elements; all scales if they have another number of axes."""
        shape = self.scales.shape
        if len(shape) != len(box.sizes):
            return Box.whole(shape)
        spans = [
            (0, 1) if step is None else (start // step, -(-stop // step))
            for step, start, stop in zip(self.block_shape, box.offsets, box.stops, strict=True)
        ]
        return Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of the checkpoint."""

    path: str
    """Its path, relative to the checkpoint."""
    nbytes: int
    """Its length in bytes."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A range of bytes that a format prescribes, such as a scale that is always 1, or padding rows of zeros."""

    name: str
    """The stored tensor that the bytes belong to."""
    path: str
    """The file."""
    byte_offset: int
    """Where the range starts in the file."""
    nbytes: int
    """The length of the range."""
    expected: bytes
    """The prescribed bytes, repeated over the range."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the files tell about the run that wrote them. A fact that they do not tell is None or empty."""

    producer: str | None = None
    """The framework that wrote the files."""
    version: str | None = None
    """The version of that framework."""
    step: int | None = None
    """The training step."""
    parallel: Mapping[str, int] = field(default_factory=dict)
    """Parallel sizes by name, such as {"tp": 8}."""
    config: Mapping[str, Any] | None = None
    """The model's Hugging Face config."""
    notes: tuple[str, ...] = ()
    """Sentences for a reader of the index."""
    mesh: Mesh | None = None
    """The run's device mesh."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Plain values that the run needs to continue: counters, the state of its schedule."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Alias -> the name under which the weight is stored, for every weight that has two names."""
    buffers: tuple[str, ...] | None = None
    """Tensors of the model that no optimizer updates; None if the files do not say."""
    roots: tuple[str, ...] = ()
    """Keys beside the model in the saved state dict. The names of the tensors under such a key start with it."""
    unanswered: tuple[str, ...] = ()
    """Facts that the user must give before the checkpoint can be converted, each with the option that gives it."""

    def __repr__(self) -> str:
        sizes = (f"{name} {size}" for name, size in self.parallel.items())
        facts = [self.producer, self.version, f"step {self.step}" if self.step is not None else None, *sizes]
        return f"RunFacts({', '.join(filter(None, facts))})"


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A param group of the optimizer."""

    names: tuple[str, ...]
    """The names of its parameters."""
    settings: Mapping[str, Any]
    """Its settings ("lr", "betas", ...) as plain values."""

    def __repr__(self) -> str:
        return f"ParamGroup({plural(len(self.names), 'parameter')}, {plural(len(self.settings), 'setting')})"


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """One checkpoint: which box of which tensor lies in which bytes of which file."""

    format: str
    """The name of the format."""
    tensors: tuple[Tensor, ...]
    """The tensors; a name occurs once per kind."""
    files: tuple[StoredFile, ...]
    """The files that hold the tensors and objects."""
    facts: RunFacts
    """What is known about the run."""
    objects: tuple[str, ...] = ()
    """The names of stored objects that are not tensors."""
    constants: tuple[Constant, ...] = ()
    """Ranges of bytes that the format prescribes."""
    param_groups: Callable[[], tuple[ParamGroup, ...]] = tuple
    """Reads the param groups of the optimizer."""

    def by_kind(self, kind: Kind) -> dict[str, Tensor]:
        """The tensors of one kind by name."""
        return {tensor.name: tensor for tensor in self.tensors if tensor.kind == kind}

    def check(self) -> None:
        """Raises CheckpointError for the first tensor whose name occurs twice in its kind, or that its primary boxes do not cover exactly
        once (`check_coverage`)."""
        names: set[tuple[str, str]] = set()
        # Tensors that are cut in the same way may share their columns. Shared columns are checked once.
        covered: set[tuple[object, ...]] = set()
        for tensor in self.tensors:
            if (tensor.kind, tensor.name) in names:
                raise CheckpointError("two tensors have this name", where=tensor.name, why="Nothing tells which of the two is meant")
            if not tensor.name.isascii() and not _is_text(tensor.name):
                raise CheckpointError(
                    "its name is not Unicode text", where=tensor.name, why="No format can store the name", do="Copy the checkpoint again"
                )
            names.add((tensor.kind, tensor.name))
            columns = id(tensor.shards.offsets), id(tensor.shards.sizes), id(tensor.shards.primary), tensor.shape
            if columns not in covered:
                check_coverage(tensor)
                covered.add(columns)

    def __repr__(self) -> str:
        return f"Index({self.format}, {plural(len(self.tensors), 'tensor')}, {plural(len(self.files), 'file')})"


def _is_text(name: str) -> bool:
    """Whether a name can be written as UTF-8. Pickles and JSON can hold halves of a surrogate pair, which cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_coverage(tensor: Tensor) -> None:
    """Raises CheckpointError unless the primary boxes of a tensor cover it exactly once. Replicas do not count."""
    shards, shape = tensor.shards, np.array(tensor.shape, np.int64)
    if len(shards) == 1 and shards.box(0) == Box.whole(tensor.shape):
        return
    rows = np.flatnonzero(primary_rows(shards) & (shards.sizes > 0).all(axis=1))
    # The columns of a tensor without pieces do not tell the number of axes, so they are reshaped.
    offsets, sizes = (column[rows].reshape(len(rows), len(shape)) for column in (shards.offsets, shards.sizes))
    stops = offsets + sizes
    if (stops > shape).any():
        row = int(rows[np.flatnonzero((stops > shape).any(axis=1))[0]])
        raise IncompleteTensor(
            f"the box {shards.box(row)} in {shards.path(row)} reaches beyond the tensor's shape {list(tensor.shape)}", where=tensor.name
        )
    region = Box.whole(tensor.shape)
    if _is_cut_once(offsets, stops, shape):
        return
    if region.volume and (fault := _first_fault(offsets, stops, rows, region, 0)):
        box, holders = fault
        if not len(holders):
            raise IncompleteTensor(
                f"{box} of {list(tensor.shape)} is in no file",
                where=tensor.name,
                why=f"The {len(rows)} stored boxes are in {_some(sorted({shards.path(int(row)) for row in rows}))}; "
                "a part of the weight would be left unset",
                do="Copy the missing rank's file from where the checkpoint was written, or save it again",
            )
        first, second = (int(row) for row in holders[:2])
        raise IncompleteTensor(
            f"two stored boxes overlap without being equal: {shards.box(first)} in {shards.path(first)} and "
            f"{shards.box(second)} in {shards.path(second)}",
            where=tensor.name,
            why="They were saved under different shardings, or one of the files belongs to another save",
            do="Remove the files that do not belong to this save",
        )


def _is_cut_once(starts: Columns, stops: Columns, shape: Columns) -> bool:
    """Whether the boxes follow each other along one axis and are whole along the others. This is the common case, and quick to check."""
    cut = np.flatnonzero((stops - starts != shape).any(axis=0))
    if not len(starts) or len(cut) > 1:
        return False
    if not len(cut):
        return len(starts) == 1
    order = np.argsort(starts[:, cut[0]])
    begin, end = starts[order, cut[0]], stops[order, cut[0]]
    return bool(begin[0] == 0 and end[-1] == shape[cut[0]] and (begin[1:] == end[:-1]).all())


def _first_fault(starts: Columns, stops: Columns, rows: Columns, region: Box, axis: int) -> tuple[Box, Columns] | None:
    """The first box inside `region` that no row covers or several rows cover, with those rows; None if every element has one row.

    starts, stops: [n, ndim], the boxes of the rows. rows: [n], their numbers. axis: every row covers `region` along the axes before it.
    """
    if axis == len(region.sizes):
        return None if len(rows) == 1 else (region, rows)
    if not len(rows):
        return region, rows
    cuts = np.unique(np.concatenate([starts[:, axis], stops[:, axis], [0, region.sizes[axis]]]))
    order = np.argsort(starts[:, axis], kind="stable")
    starts, stops, rows = starts[order], stops[order], rows[order]
    if len(cuts) == 2:
        return _first_fault(starts, stops, rows, region, axis + 1)
    begin, checked = np.searchsorted(starts[:, axis], cuts[1:], side="left"), None
    for i in range(len(cuts) - 1):
        covering = np.flatnonzero(stops[: begin[i], axis] > cuts[i])
        slab = region.narrow(axis, int(cuts[i]), int(cuts[i + 1]))
        key = rows[covering].tobytes()
        if key == checked and len(covering):
            continue  # the same rows cover the slab before this one
        checked = key
        if fault := _first_fault(starts[covering], stops[covering], rows[covering], slab, axis + 1):
            return fault
    return None


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def sharding_text(tensor: Tensor) -> str:
    """How a tensor is cut, for messages: "whole", "4 along axis 0", "2 x 4 along axes 0, 1" or "7 boxes, cut between elements".

    The number of replicas follows, if there are any: "whole, 7 replicas". A tensor without elements is "empty".
    """
    shards = tensor.shards
    rows = np.flatnonzero(primary_rows(shards) & (shards.sizes > 0).all(axis=1))
    if not len(rows):
        return "empty"
    parts = [len(np.unique(shards.offsets[rows, axis])) for axis in range(len(tensor.shape))]
    cut = [axis for axis, count in enumerate(parts) if count > 1]
    text = "whole"
    if cut:
        text = " x ".join(str(parts[axis]) for axis in cut) + f" along {'axis' if len(cut) == 1 else 'axes'} {', '.join(map(str, cut))}"
        if math.prod(parts) != len(rows):  # a flat buffer is cut between any two elements: a part of a row, rows, a part of a row
            text = f"{len(rows)} boxes, cut between elements"
    stored = int((shards.sizes > 0).all(axis=1).sum())
    return text if stored == len(rows) else f"{text}, {plural(stored - len(rows), 'replica')}"
