"""Index: which box of which tensor lies in which bytes of which file, and what is known about the run that wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import Piece
from reshard.geometry.meshes import Distribution, Mesh
from reshard.index.shards import Columns, Shards, primary_rows

Kind = Literal["weight", "master", "moment1", "moment2", "step", "state"]
KINDS: dict[Kind, str] = {
    "weight": "model weights and buffers",
    "master": "full-precision copies kept by the optimizer",
    "moment1": "optimizer: first moments",
    "moment2": "optimizer: second moments",
    "step": "optimizer: step counts",
    "state": "other state of the run",
}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A canonical tensor: name, element type, global shape, what it is to the run, and its pieces.

    distribution: how it lay on the run's mesh, where the files tell. scaling: what its elements are multiplied with to be values; None if
    they are values themselves, or are to stay as they are.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kind: Kind
    shards: Shards
    distribution: Distribution | None = None
    scaling: Scaling | None = None

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element types that are read for it: its own, and that of its scales."""
        return (self.dtype, self.scaling.scales.dtype) if self.scaling else (self.dtype,)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def pieces(self) -> Iterator[Piece]:
        return (self.shards.piece(i) for i in range(len(self.shards)))


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """Factors that make values of quantised elements: a tensor of them, and per axis for how many elements one stands (None: all)."""

    scales: Tensor
    block_shape: tuple[int | None, ...]

    def box_of(self, box: Box) -> Box:
        """The factors of a box of elements."""
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
    """One file of the checkpoint and its length in bytes."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Constant:
    """Bytes that a format demands beside the weights: a scale that is always 1, rows of zeros. `expected` repeats."""

    name: str
    path: str
    byte_offset: int
    nbytes: int
    expected: bytes


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the files tell about the run that wrote them, as far as they do.

    `parallel` maps words such as "tp" to sizes; `mesh` is the run's device mesh; `config` is the Hugging Face config; `notes` are
    sentences for a reader. `state` holds plain values that the run would need to go on: counters, its schedule's state. `tied` maps
    second names of weights to the first, `buffers` names what no optimizer sees; None where the files do not tell. `asks` names, with the
    options that say it, what must be known before anything is made of the checkpoint.
    """

    producer: str | None = None
    version: str | None = None
    step: int | None = None
    parallel: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    mesh: Mesh | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] | None = None
    unanswered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A param group of the optimizer: its parameters' names, and its settings ("lr", "betas", ...) as plain values."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """One checkpoint: its tensors, its files and the run's facts. `objects` names what is stored but is no tensor.

    param_groups: of the optimizer, read when asked for.
    """

    format: str
    tensors: tuple[Tensor, ...]
    files: tuple[StoredFile, ...]
    facts: RunFacts
    objects: tuple[str, ...] = ()
    constants: tuple[Constant, ...] = ()
    param_groups: Callable[[], tuple[ParamGroup, ...]] = tuple

    def by_kind(self, role: Kind) -> dict[str, Tensor]:
        """The tensors of one role by name."""
        return {tensor.name: tensor for tensor in self.tensors if tensor.kind == role}

    def check(self) -> None:
        """Raises CheckpointError for the first tensor that has a hole or pieces that overlap without being equal."""
        seen: set[tuple[str, str]] = set()
        # Tensors that are cut alike may share their columns, which then have been checked.
        covered: set[tuple[object, ...]] = set()
        for tensor in self.tensors:
            if (tensor.kind, tensor.name) in seen:
                raise CheckpointError("two tensors have this name", where=tensor.name, why="Which one is meant cannot be known")
            seen.add((tensor.kind, tensor.name))
            columns = id(tensor.shards.offsets), id(tensor.shards.sizes), id(tensor.shards.primary), tensor.shape
            if columns not in covered:
                check_coverage(tensor)
                covered.add(columns)


def check_coverage(tensor: Tensor) -> None:
    """Raises CheckpointError unless the tensor's boxes, replicas aside, cover it exactly once."""
    shards, shape = tensor.shards, np.array(tensor.shape, np.int64)
    if len(shards) == 1 and shards.box(0) == Box.whole(tensor.shape):
        return
    rows = np.flatnonzero(primary_rows(shards) & (shards.sizes > 0).all(axis=1))
    # Without a single piece the columns do not know how many axes there are.
    offsets, sizes = (column[rows].reshape(len(rows), len(shape)) for column in (shards.offsets, shards.sizes))
    stops = offsets + sizes
    if (stops > shape).any():
        row = int(rows[np.flatnonzero((stops > shape).any(axis=1))[0]])
        raise CheckpointError(
            f"the box {shards.box(row)} in {shards.path(row)} reaches beyond the tensor's shape {list(tensor.shape)}", where=tensor.name
        )
    region = Box.whole(tensor.shape)
    if _is_cut_once(offsets, stops, shape):
        return
    if region.volume and (fault := _first_fault(offsets, stops, rows, region, 0)):
        box, holders = fault
        if not len(holders):
            raise CheckpointError(
                f"{box} of {list(tensor.shape)} is in no file",
                where=tensor.name,
                why=f"The {len(rows)} stored boxes lie in {_some(sorted({shards.path(int(r)) for r in rows}))}; "
                "without the rest the weight would be left partly unset",
                do="Copy the missing rank's file from where the checkpoint was written, or save it again",
            )
        first, second = (int(row) for row in holders[:2])
        raise CheckpointError(
            f"two stored boxes overlap without being equal: {shards.box(first)} in {shards.path(first)} and "
            f"{shards.box(second)} in {shards.path(second)}",
            where=tensor.name,
            why="They were saved under different shardings, or one of the files belongs to another save",
            do="Remove what does not belong to this save",
        )


def _is_cut_once(starts: Columns, stops: Columns, shape: Columns) -> bool:
    """Whether the boxes follow each other along one axis and are whole along the others: the common case, decided at once."""
    cut = np.flatnonzero((stops - starts != shape).any(axis=0))
    if not len(starts) or len(cut) > 1:
        return False
    if not len(cut):
        return len(starts) == 1
    order = np.argsort(starts[:, cut[0]])
    begin, end = starts[order, cut[0]], stops[order, cut[0]]
    return bool(begin[0] == 0 and end[-1] == shape[cut[0]] and (begin[1:] == end[:-1]).all())


def _first_fault(starts: Columns, stops: Columns, rows: Columns, region: Box, axis: int) -> tuple[Box, Columns] | None:
    """The first box of `region` that no row covers, or several do, with those rows; None if each element has one."""
    if axis == len(region.sizes):
        return None if len(rows) == 1 else (region, rows)
    if not len(rows):
        return region, rows
    cuts = np.unique(np.concatenate([starts[:, axis], stops[:, axis], [0, region.sizes[axis]]]))
    order = np.argsort(starts[:, axis], kind="stable")
    starts, stops, rows = starts[order], stops[order], rows[order]
    if len(cuts) == 2:
        return _first_fault(starts, stops, rows, region, axis + 1)
    begin, known = np.searchsorted(starts[:, axis], cuts[1:], side="left"), None
    for i in range(len(cuts) - 1):
        held = np.flatnonzero(stops[: begin[i], axis] > cuts[i])
        within = region.narrow(axis, int(cuts[i]), int(cuts[i + 1]))
        key = rows[held].tobytes()
        if key == known and len(held):
            continue
        known = key
        if fault := _first_fault(starts[held], stops[held], rows[held], within, axis + 1):
            return fault
    return None


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def sharding_text(tensor: Tensor) -> str:
    """How a tensor is cut: "whole", "4 along axis 0", "2 x 4 along axes 0, 1", "7 boxes, cut between elements"; with replicas."""
    shards = tensor.shards
    rows = np.flatnonzero(primary_rows(shards) & (shards.sizes > 0).all(axis=1))
    if not len(rows):
        return "empty"
    parts = [len(np.unique(shards.offsets[rows, axis])) for axis in range(len(tensor.shape))]
    cut = [axis for axis, count in enumerate(parts) if count > 1]
    text = "whole"
    if cut:
        text = " x ".join(str(parts[axis]) for axis in cut) + f" along {'axis' if len(cut) == 1 else 'axes'} {', '.join(map(str, cut))}"
        if math.prod(parts) != len(rows):  # flat buffers are cut between any two elements: a part of a row, rows, a part of a row
            text = f"{len(rows)} boxes, cut between elements"
    filled = int((shards.sizes > 0).all(axis=1).sum())
    return text if filled == len(rows) else f"{text}, {filled} copies of {len(rows)} boxes"
