"""Index: which box of which tensor lies in which bytes of which file, and what is known about the run that wrote the checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from reshard.geometry.meshes import Mesh
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.index.origin import Kind as Kind
from reshard.index.origin import Tensor as Tensor

if TYPE_CHECKING:
    from reshard.index.deltas import DeltaFacts

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


def element_count(tensors: Iterable[Tensor]) -> int:
    """The number of elements of all tensors, each stored once. Most share a few shapes."""
    return sum(math.prod(shape) * count for shape, count in Counter(tensor.shape for tensor in tensors).items())


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
    is_unset: bool = False
    """Whether the bytes mean nothing: they are written, and files of others have any bytes there."""


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
    layers_of_stages: tuple[int, ...] = ()
    """The number of layers on each pipeline stage, in files of ranks of several stages."""

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
