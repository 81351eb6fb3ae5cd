"""Index: which box of which tensor lies in which bytes of which file, and what is known about the run that wrote the checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Literal

from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, F32, DType
from reshard.geometry.extents import Piece
from reshard.geometry.meshes import Distribution, Mesh
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.index.shards import Shards
from reshard.models.stored_forms import BlockShape, Component

if TYPE_CHECKING:
    from reshard.index.patches import DeltaFacts, Patches

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


@value(eq=False)
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
    encoding: Encoding | None = None
    """The stored tensors that its values are computed from; None if it is stored as its elements, or is copied without dequantization."""
    derivation: Derivation | None = None
    """The weight from whose values it is computed, if it is a component of a weight that is being quantized."""

    updates: tuple[Update, ...] = ()
    """What changes its values, or those that it is computed from: a merged adapter, or the same tensor of other checkpoints."""
    also_named: str | None = None
    """The other name under which it is stored as well, if the config ties the two."""
    patches: Patches | None = None
    """What deltas change in its stored elements; None if there are none."""

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors that are read for it: itself, those of its encoding, or those of the weight that it is computed from."""
        if self.derivation:
            return self.derivation.weight.stored
        return tuple(part.tensor for part in self.encoding.parts) if self.encoding else (self,)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element types that are read for it, and those in which its values are computed."""
        return (self.dtype, *(tensor.dtype for tensor in self.stored), *(dtype for update in self.updates for dtype in update.dtypes))

    @property
    def values_dtype(self) -> DType:
        """An element type that holds every value."""
        return self.encoding.exact_dtype if self.encoding else self.dtype

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


@value(eq=False)
class EncodedPart:
    """One of the stored tensors of a quantized tensor."""

    tensor: Tensor
    """The stored tensor."""
    component: Component
    """What it is for, and how its values are packed."""
    block_shape: BlockShape
    """Elements of the quantized tensor per value, along each axis. None: one value for the whole axis."""
    axes: tuple[int, ...]
    """For each axis of the quantized tensor, the axis of the stored tensor. Empty if the stored tensor is one number."""

    def __repr__(self) -> str:
        return f"EncodedPart({self.component.use}, {self.tensor!r})"

    @property
    def packed_axis(self) -> int | None:
        """The axis of the stored tensor along which several values share a word."""
        packing = self.component.packing
        return len(self.axes) - 2 + (packing.axis ^ self.component.transposed) if packing else None

    @property
    def grid(self) -> BlockShape:
        """Elements of the quantized tensor per stored element, along each of its axes."""
        count = self.component.packing.count if self.component.packing else 1
        at = self.packed_axis
        return tuple(size * count if size and axis == at else size for size, axis in zip(self.block_shape, self.axes, strict=True))

    def box_of(self, box: Box) -> Box:
        """The box of the stored tensor that belongs to a box of elements: all of it, if it is one number."""
        shape = self.tensor.shape
        if not self.axes:
            return Box.whole(shape)
        starts, stops = [0] * len(shape), list(shape)
        for size, axis, start, stop in zip(self.grid, self.axes, box.offsets, box.stops, strict=True):
            if size is not None:
                run = self.component.packing.run if self.component.packing and axis == self.packed_axis else 1
                starts[axis], stops[axis] = start // size * run, -(-stop // size) * run
        return Box(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


@value(eq=False)
class Encoding:
    """How the values of a quantized tensor follow from stored tensors."""

    name: str
    """What the form is called, such as "MXFP4"."""
    parts: tuple[EncodedPart, ...]
    """The stored tensors: the codes, then their scales and zero points."""
    dtype: DType
    """The element type of the values, unless another one is asked for."""

    @property
    def exact_dtype(self) -> DType:
        """An element type that holds every value: bfloat16 for 4-bit floats that are scaled by powers of two, which end at its smallest
        number, 2^-133; otherwise float32."""
        codes, *beside = (part.component for part in self.parts)
        return BF16 if codes.packing and codes.packing.name == "FP4" and all(each.exponents for each in beside) else F32

    def __repr__(self) -> str:
        return f"Encoding({self.name}, {plural(len(self.parts), 'part')})"


@value(eq=False)
class Derivation:
    """How a component of a quantized weight follows from the weight's values."""

    weight: Tensor
    """The weight [out, in]."""
    recipe: str
    """The name of the recipe, one of engine/recipes."""
    component: Component
    """Which component it is."""

    def __repr__(self) -> str:
        return f"Derivation({self.recipe}, {self.component.kind} of {self.weight.name})"


@value(eq=False)
class LowRankUpdate:
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
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors that are read for it."""
        return tuple(factor for factor in (self.rows, self.columns, self.magnitude) if factor is not None)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element type in which it is computed."""
        return (F32,)

    @property
    def names(self) -> tuple[str, ...]:
        """What it comes from, for messages: the names of the adapter's tensors."""
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def identity(self) -> str:
        """A text that differs if the result does."""
        return f"{self.box}\0{self.scale!r}\0" + "".join(f"{tensor.name}\0{tensor.shape}\0" for tensor in self.tensors)


Rule = Literal["average", "task-arithmetic", "slerp", "equal"]
"""How the tensors of several checkpoints become one (engine/recipes/combiner.py); "equal": all must hold the same elements."""


@value(eq=False)
class CombinedInput:
    """The tensor of one of the checkpoints that are combined."""

    checkpoint: str
    """The path of the checkpoint, as the caller gave it."""
    tensor: Tensor
    """The tensor, under the paths that its files have in the joined tree."""

    def __repr__(self) -> str:
        return f"CombinedInput({self.checkpoint!r}, {self.tensor!r})"


@value(eq=False)
class Combination:
    """The same tensor of several checkpoints, from which the values of one are computed."""

    rule: Rule
    """How they are computed."""
    inputs: tuple[CombinedInput, ...]
    """The tensors, in the order of the checkpoints; the first is the one that has this update."""
    weights: tuple[float, ...]
    """The weight of each input; of slerp the angle's parts `1 - t` and `t`."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors that are read for it, besides those of the first input."""
        return tuple(tensor for each in self.inputs[1:] for tensor in each.tensor.stored)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element types that are read for it. (It is computed in few float64 at a time.)"""
        return tuple(dtype for each in self.inputs for dtype in each.tensor.dtypes)

    @property
    def names(self) -> tuple[str, ...]:
        """What it comes from, for messages: the other checkpoints."""
        return tuple(each.checkpoint for each in self.inputs[1:])

    @property
    def identity(self) -> str:
        """A text that differs if the result does."""
        inputs = (f"{each.tensor.dtype} {len(each.tensor.shards)} {[t.name for t in each.tensor.stored]}" for each in self.inputs)
        return f"{self.rule}\0{self.weights!r}\0" + "\0".join(inputs)

    def __repr__(self) -> str:
        return f"Combination({self.rule}, {plural(len(self.inputs), 'input')})"


Update = LowRankUpdate | Combination
"""What changes the values of a tensor."""


@value
class StoredFile:
    """One file of the checkpoint."""

    path: str
    """Its path, relative to the checkpoint."""
    nbytes: int
    """Its length in bytes."""


@value
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


def about_left_out(left_out: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each reason for which weights of the model are not there."""
    by_reason: dict[str, list[str]] = {}
    for name, why in left_out.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        yield f"{plural(len(names), 'weight')} of the model {'are' if len(names) > 1 else 'is'} not there, such as {names[0]}: {why}"


@value
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
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Weights of the model that files of this format do not have on purpose -> why."""
    headers: Mapping[str, str | None] = field(default_factory=dict)
    """The texts in the headers of the files, such as the classes of quantized tensors, by key; None: the files disagree."""
    delta: DeltaFacts | None = None
    """What the files say about themselves if they are a delta, whose tensors are frames; None for a checkpoint."""

    def __repr__(self) -> str:
        sizes = (f"{name} {size}" for name, size in self.parallel.items())
        facts = [self.producer, self.version, f"step {self.step}" if self.step is not None else None, *sizes]
        return f"RunFacts({', '.join(filter(None, facts))})"


@value
class ParamGroup:
    """A param group of the optimizer."""

    names: tuple[str, ...]
    """The names of its parameters."""
    settings: Mapping[str, Any]
    """Its settings ("lr", "betas", ...) as plain values."""

    def __repr__(self) -> str:
        return f"ParamGroup({plural(len(self.names), 'parameter')}, {plural(len(self.settings), 'setting')})"


@value(eq=False)
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

    @property
    def element_types(self) -> dict[str, str]:
        """The element type of every weight by name, as safetensors names it."""
        return {tensor.name: tensor.dtype.name for tensor in self.tensors if tensor.kind == "weight"}

    def by_kind(self, kind: Kind) -> dict[str, Tensor]:
        """The tensors of one kind by name."""
        return {tensor.name: tensor for tensor in self.tensors if tensor.kind == kind}

    def noting(self, *notes: str) -> Index:
        """The index with further notes about the run."""
        return replace(self, facts=replace(self.facts, notes=(*self.facts.notes, *notes))) if notes else self

    @property
    def keeps_both_copies(self) -> bool:
        """Whether a weight has a full-precision master beside it."""
        return bool(self.by_kind("master").keys() & self.by_kind("weight").keys())

    def __repr__(self) -> str:
        return f"Index({self.format}, {plural(len(self.tensors), 'tensor')}, {plural(len(self.files), 'file')})"
