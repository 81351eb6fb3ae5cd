"""Beside: what lies in a target rank's memory beside its load form during an update, because the load form follows from it.

values    of blocks that several sources share: the rank computes codes and scales from them (blocks.py)
merged    a base weight and the factors of its LoRA adapter: the rank merges them (merging.py)
whole     tensors that no plan cuts: the engine's own loader takes them (fallback="whole")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import DType, from_safetensors
from reshard.geometry.value import value
from reshard.index.shards import Located, PieceTable, Shards
from reshard.live.plan.schedule import HeldTensor
from reshard.plans.layout import TargetFile

ALIGNMENT = 64
"""Tensors beside the load form start at multiples of so many bytes."""


@value
class ComputedPart:
    """Where a target puts the codes, or the scales, of values."""

    tensor: str
    """The tensor of the load form."""
    start: int
    """Where they start in it, in elements."""
    strides: tuple[int, ...]
    """The distance between neighbours along each axis, in elements."""
    is_scale: bool
    """Whether they are the scales; False: the codes."""
    dtype: DType
    """The element type in which the recipe gives them."""
    target: DType
    """The element type of the tensor."""
    rows: int
    """Rows of the values for each of their rows."""


@value
class Computed:
    """What a target computes from values that it has received: whole blocks of a weight."""

    values: HeldTensor
    """The values [rows, columns], in the element type that the recipe takes. They lie beside the load form."""
    recipe: str
    """The recipe, one of reshard.engine.origins.encoded.RECIPES."""
    parts: tuple[ComputedPart, ...]
    """The codes and the scales."""


@value
class Factors:
    """The factors of one update of a box."""

    rows: HeldTensor
    """[rows of the box, r]."""
    columns: HeldTensor
    """[r, columns of the box]."""
    scale: float
    """The factor of their product."""


@value
class MergedBox:
    """A box of a weight that a target merges with updates."""

    base: HeldTensor
    """The values [rows, columns] without updates, in the element type of the source."""
    factors: tuple[Factors, ...]
    """The updates, in their order."""
    tensor: str
    """The tensor of the load form that gets the result."""
    start: int
    """Where the result starts in it, in elements."""
    strides: tuple[int, ...]
    """The distance between neighbours along each axis, in elements."""
    target: DType
    """The element type of the tensor."""

    @property
    def tensors(self) -> tuple[HeldTensor, ...]:
        """All that it is merged from."""
        return (self.base, *(held for factor in self.factors for held in (factor.rows, factor.columns)))


@value(eq=False)
class Beside:
    """What a target rank receives beside its load form."""

    computes: tuple[Computed, ...] = ()
    """What it computes from values."""
    whole: tuple[HeldTensor, ...] = ()
    """Whole tensors, under the names that the engine's own loader knows."""
    merges: tuple[MergedBox, ...] = ()
    """What it merges with an adapter."""

    @property
    def tensors(self) -> tuple[HeldTensor, ...]:
        """All tensors beside the load form."""
        return (*(computed.values for computed in self.computes), *self.whole, *(held for merge in self.merges for held in merge.tensors))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "computes": _computed_to_json(self.computes),
            "whole": [_held_to_json(tensor) for tensor in self.whole],
            "merges": [
                [
                    _held_to_json(merge.base),
                    [[_held_to_json(of.rows), _held_to_json(of.columns), of.scale] for of in merge.factors],
                    [merge.tensor, merge.start, merge.strides, merge.target.name],
                ]
                for merge in self.merges
            ],
        }

    @staticmethod
    def of(document: Mapping[str, Any]) -> Beside:
        """What `to_json` has written."""
        merges = tuple(
            MergedBox(
                _contiguous(*base),
                tuple(Factors(_contiguous(*rows), _contiguous(*columns), float(scale)) for rows, columns, scale in factors),
                tensor,
                start,
                tuple(strides),
                from_safetensors(target, where=tensor),
            )
            for base, factors, (tensor, start, strides, target) in document["merges"]
        )
        return Beside(_computed_from_json(document["computes"]), tuple(_contiguous(*held) for held in document["whole"]), merges)


class BesideFiles:
    """Places beside the load form, in the memory of the target's ranks: after the end of each file of a layout."""

    def __init__(self, files: Sequence[TargetFile]) -> None:
        self._paths, self._ends = tuple(file.path for file in files), [file.nbytes for file in files]
        self.tensors: dict[int, list[tuple[HeldTensor, int]]] = {}
        """By the number of a file: each tensor, and the byte at which it starts, from the start of the file."""

    def add(self, file: int, held: HeldTensor) -> int:
        """The byte at which a tensor gets its place."""
        address = -(-self._ends[file] // ALIGNMENT) * ALIGNMENT
        self._ends[file] = address + held.nbytes
        self.tensors.setdefault(file, []).append((held, address))
        return address

    def end(self, file: int) -> int:
        """The byte after the last tensor beside a file."""
        return self._ends[file]

    def shards(self, dtype: DType, places: Sequence[tuple[Box, int, int]]) -> Shards:
        """Boxes of a tensor as pieces that lie there: each with the number of its file, and the byte at which it starts."""
        offsets, sizes = (np.array([getattr(box, name) for box, _, _ in places], np.int64) for name in ("offsets", "sizes"))
        files, starts = (np.array([row[i] for row in places], np.int64) for i in (1, 2))
        strides = np.array([row_major(box.sizes) for box, _, _ in places], np.int64).reshape(offsets.shape)
        return Shards(PieceTable(self._paths, offsets, sizes, files, starts, Located(self._paths, files, starts, strides, dtype)))


def _contiguous(name: str, dtype: str, shape: Iterable[int]) -> HeldTensor:
    return HeldTensor(name, from_safetensors(dtype, where=name), tuple(shape), row_major(tuple(shape)))


def _held_to_json(held: HeldTensor) -> list[Any]:
    return [held.name, held.dtype.name, held.shape]


def _computed_to_json(computes: Iterable[Computed]) -> list[Any]:
    """Plain values."""
    return [
        [
            _held_to_json(made.values),
            made.recipe,
            [[part.tensor, part.start, part.strides, part.is_scale, part.dtype.name, part.target.name, part.rows] for part in made.parts],
        ]
        for made in computes
    ]


def _computed_from_json(document: Iterable[Any]) -> tuple[Computed, ...]:
    """What `_computed_to_json` has written."""

    def part(tensor: str, start: int, strides: list[int], is_scale: bool, dtype: str, target: str, rows: int) -> ComputedPart:
        made, held = (from_safetensors(name, where=tensor) for name in (dtype, target))
        return ComputedPart(tensor, start, tuple(strides), is_scale, made, held, rows)

    return tuple(Computed(_contiguous(*values), recipe, tuple(part(*row) for row in parts)) for values, recipe, parts in document)
