"""Schedule: what one rank sends or receives in an update, as columns. It is computed once and used for every step.

A way is what travels from one source rank to one target rank: boxes, in an order that both know. A box is an array that lies strided in a
tensor of the source and strided in a tensor of the target. On the wire it is row-major, and the boxes of a way follow each other:

    source tensor   box at `source_start`, strides of its form     \
                                                                    wire: box 0 | box 1 | box 2 | ...
    target tensor   box at `target_start`, strides of its form     /

Boxes of all layers share a few forms: sizes, strides and element types. Offsets, sizes and strides count elements of the tensor on
that side; `runs` gives the same in bytes.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from reshard.geometry.dtypes import DType, from_safetensors
from reshard.geometry.quantities import plural
from reshard.geometry.sections import Columns
from reshard.geometry.value import value


@value
class HeldTensor:
    """A tensor in the memory of one rank."""

    name: str
    """The name by which the rank's own program knows it."""
    dtype: DType
    """Its element type."""
    shape: tuple[int, ...]
    """Its local shape."""
    strides: tuple[int, ...]
    """The distance between neighbours along each axis, in elements."""

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, {list(self.shape)})"


@value
class Derived:
    """How a source computes what it sends: codes or scales of whole blocks of a weight [out, in], by a recipe."""

    recipe: str
    """The recipe, one of reshard.engine.origins.on_tensors.TENSOR_RECIPES."""
    is_scale: bool
    """Whether it sends the scales; False: the codes."""
    sizes: tuple[int, ...]
    """Elements of the weight along each axis."""
    dtype: DType
    """The element type in which the recipe gives them, and in which they travel."""


@value
class BoxForm:
    """What many boxes have in common."""

    sizes: tuple[int, ...]
    """Elements along each axis, of what travels."""
    source_strides: tuple[int, ...]
    """The distance between neighbours in the source's tensor, in elements."""
    target_strides: tuple[int, ...]
    """The same in the target's tensor."""
    source: DType
    """The element type in the source."""
    target: DType
    """The element type in the target."""
    derived: Derived | None = None
    """How the source computes the box from one of a weight; None: it copies or casts elements."""

    @property
    def wire(self) -> DType:
        """The element type that travels. The side computes a cast or a function of which fewer bytes travel: the source if the target's
        type is narrower, else the target."""
        if self.derived:
            return self.derived.dtype
        return self.target if self.target.itemsize < self.source.itemsize else self.source

    @property
    def held(self) -> tuple[int, ...]:
        """Elements along each axis, of what the source holds."""
        return self.derived.sizes if self.derived else self.sizes

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """The bytes on the wire."""
        return self.elements * self.wire.itemsize


@value
class ByteRun:
    """Contiguous bytes that occur several times at fixed distances, on both sides. Offsets count bytes from the start of the tensor."""

    source_tensor: str
    """The name of the tensor on the source's side."""
    source_offset: int
    """Where the first run starts in it."""
    target_tensor: str
    """The name of the tensor on the target's side."""
    target_offset: int
    """Where the first run starts in it."""
    length: int
    """Bytes of one run."""
    counts: tuple[int, ...]
    """How often the run occurs along each axis that it does not fill, outermost first; empty for a single run."""
    source_strides: tuple[int, ...]
    """Bytes from one run to the next along each of these axes, in the source."""
    target_strides: tuple[int, ...]
    """The same in the target."""


_WORDS = attrgetter(*(field.name for field in fields(ByteRun)))


@value(slots=False, eq=False)
class Way:
    """The boxes that travel from one source rank to one target rank, in the order in which they travel. n boxes."""

    source_rank: int
    """The rank that sends."""
    target_rank: int
    """The rank that receives."""
    forms: Columns
    """[n]: the form of each box, as an index into the schedule's forms."""
    source_tensors: Columns
    """[n]: the tensor of the source, as an index into the schedule's sources."""
    source_starts: Columns
    """[n]: where the box starts in it, in elements from its first element."""
    target_tensors: Columns
    """[n]: the tensor of the target, as an index into the schedule's targets."""
    target_starts: Columns
    """[n]: where the box starts in it, in elements from its first element."""

    def __len__(self) -> int:
        return len(self.forms)

    def __repr__(self) -> str:
        return f"Way({self.source_rank} -> {self.target_rank}, {plural(len(self), 'box', 'boxes')})"


@value(slots=False, eq=False)
class Schedule:
    """The ways that start or end at one rank."""

    rank: int
    """The rank: of the sources, or of the targets."""
    sources: tuple[HeldTensor, ...]
    """The tensors of source ranks that the ways name."""
    targets: tuple[HeldTensor, ...]
    """The tensors of target ranks that the ways name."""
    forms: tuple[BoxForm, ...]
    """The forms of the boxes."""
    ways: tuple[Way, ...]
    """The ways, by the rank at the other end."""

    @cached_property
    def form_nbytes(self) -> Columns:
        """[forms]: the bytes of a box of each form on the wire."""
        return np.array([form.nbytes for form in self.forms], np.int64)

    def nbytes_of(self, way: Way) -> int:
        """The bytes of a way on the wire."""
        return int(self.form_nbytes[way.forms].sum())

    @property
    def nbytes(self) -> int:
        """The bytes of all ways on the wire."""
        return sum(map(self.nbytes_of, self.ways))

    def runs(self, way: Way) -> Iterator[ByteRun]:
        """The boxes of a way as runs of bytes, in their order. A box whose element type changes has runs of single elements. Boxes that a
        recipe computes have no runs."""
        for i in range(len(way)):
            form = self.forms[way.forms[i]]
            if form.derived:
                continue
            source, target = self.sources[way.source_tensors[i]], self.targets[way.target_tensors[i]]
            starts = int(way.source_starts[i]) * source.dtype.itemsize, int(way.target_starts[i]) * target.dtype.itemsize
            yield _run(form, source.name, starts[0], target.name, starts[1])

    def to_json(self) -> list[dict[str, Any]]:
        """The ways as plain values, with their runs."""
        return [{"to": way.target_rank, "bytes": self.nbytes_of(way), "runs": [*map(_WORDS, self.runs(way))]} for way in self.ways]

    def to_bytes(self) -> bytes:
        """The schedule as bytes: a safe container of plain numbers and JSON, no pickle."""
        about = {
            "rank": self.rank,
            "sources": [[tensor.name, _words(tensor.dtype), tensor.shape, tensor.strides] for tensor in self.sources],
            "targets": [[tensor.name, _words(tensor.dtype), tensor.shape, tensor.strides] for tensor in self.targets],
            "forms": [_form_to_json(form) for form in self.forms],
            "ways": [[way.source_rank, way.target_rank, len(way)] for way in self.ways],
        }
        columns = np.concatenate([np.stack(_columns(way)) for way in self.ways], axis=1) if self.ways else np.zeros((5, 0), np.int64)
        text, buffer = json.dumps(about, separators=(",", ":")).encode(), io.BytesIO()
        np.savez_compressed(buffer, about=np.frombuffer(text, np.uint8), columns=columns)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Schedule:
        """The schedule that `to_bytes` has written."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            about: Mapping[str, Any] = json.loads(arrays["about"].tobytes())
            columns = arrays["columns"]
        sources, targets = (
            tuple(HeldTensor(name, _dtype(words), tuple(shape), tuple(strides)) for name, words, shape, strides in about[side])
            for side in ("sources", "targets")
        )
        forms = tuple(map(_form_from_json, about["forms"]))
        ways, start = [], 0
        for source_rank, target_rank, count in about["ways"]:
            ways.append(Way(source_rank, target_rank, *columns[:, start : start + count]))
            start += count
        return cls(about["rank"], sources, targets, forms, tuple(ways))

    def __repr__(self) -> str:
        return f"Schedule(rank {self.rank}, {plural(len(self.ways), 'way')}, {plural(self.nbytes, 'byte')})"


def _words(dtype: DType) -> list[str]:
    return [dtype.name, dtype.function]


def _dtype(words: Sequence[str]) -> DType:
    return from_safetensors(words[0], where="a schedule").of(words[1])


def _form_to_json(form: BoxForm) -> list[Any]:
    computed = form.derived and [form.derived.recipe, form.derived.is_scale, form.derived.sizes, _words(form.derived.dtype)]
    return [form.sizes, form.source_strides, form.target_strides, _words(form.source), _words(form.target), computed]


def _form_from_json(document: Sequence[Any]) -> BoxForm:
    sizes, a, b, source, target, computed = document
    derived = Derived(computed[0], computed[1], tuple(computed[2]), _dtype(computed[3])) if computed else None
    return BoxForm(tuple(sizes), tuple(a), tuple(b), _dtype(source), _dtype(target), derived)


def _columns(way: Way) -> tuple[Columns, ...]:
    return way.forms, way.source_tensors, way.source_starts, way.target_tensors, way.target_starts


def _run(form: BoxForm, source: str, source_offset: int, target: str, target_offset: int) -> ByteRun:
    sizes, a, b = list(form.sizes), list(form.source_strides), list(form.target_strides)
    elements = 1
    if form.source == form.target:
        # Axes that lie without gaps on both sides, innermost first, make one run.
        while axis := next((i + 1 for i in range(len(sizes)) if sizes[i] == 1 or a[i] == b[i] == elements), 0):
            elements *= sizes.pop(axis - 1)
            del a[axis - 1], b[axis - 1]
    return ByteRun(
        source,
        source_offset,
        target,
        target_offset,
        elements * form.source.itemsize,
        tuple(sizes),
        tuple(stride * form.source.itemsize for stride in a),
        tuple(stride * form.target.itemsize for stride in b),
    )
