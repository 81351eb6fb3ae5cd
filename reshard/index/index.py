"""Index: which box of which tensor lies in which bytes of which file, and what is known about the run that wrote the checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import F32, DType
from reshard.geometry.extents import Piece
from reshard.geometry.light_dataclass import light_dataclass
from reshard.geometry.meshes import Distribution, Mesh
from reshard.geometry.quantities import plural
from reshard.index.shards import Shards

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


@light_dataclass(frozen=True, slots=True, eq=False)
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
    updates: tuple[Update, ...] = ()
    """What a merged adapter adds to its values."""

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element types that are read for it: its own, that of its scales, and float32 if values are computed."""
        return (self.dtype, *((self.scaling.scales.dtype,) if self.scaling else ()), *((F32,) if self.updates else ()))

    @property
    def elements(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor, stored once."""
        return self.elements * self.dtype.itemsize

    def without_replicas(self) -> Tensor:
        """The tensor with its primary pieces alone."""
        return replace(self, shards=self.shards.without_replicas())

    def pieces(self) -> Iterator[Piece]:
        """Its pieces, made one at a time. Raises CheckpointError if a header that tells where a piece lies cannot be read."""
        return (self.shards.piece(i) for i in range(len(self.shards)))

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype}, {list(self.shape)}, {self.kind}, {plural(len(self.shards), 'piece')})"


def element_count(tensors: Iterable[Tensor]) -> int:
    """The number of elements of all tensors, each stored once. Most share a few shapes."""
    return sum(math.prod(shape) * count for shape, count in Counter(tensor.shape for tensor in tensors).items())


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


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What a merged LoRA adapter adds to a box of a tensor: scale * (rows x columns), in float32.

    The last two axes of the box are the rows and the columns; axes before them have one element. A vector is one row of columns.
    """

    box: Box
    """The box, in the coordinates of the tensor."""
    rows: Tensor | None
    """[rows of the box, r]: the factor of each row; None: ones."""
    columns: Tensor
    """[r, columns of the box]: the factor of each column."""
    scale: float
    """The factor of the product."""
    magnitude: Tensor | None = None
    """[rows of the box] with DoRA: each row is then scaled to this length; None without DoRA."""

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The tensors that are read for it."""
        return tuple(factor for factor in (self.rows, self.columns, self.magnitude) if factor is not None)


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

    def __repr__(self) -> str:
        return f"Index({self.format}, {plural(len(self.tensors), 'tensor')}, {plural(len(self.files), 'file')})"
