"""Fold: tensors that are alike but for the numbers in their names, such as one weight in layers 3..60 for experts 0..255.

What is said or proven of one tensor of a fold holds for all: they have the same kind, element type and shape, and are cut into the same
boxes. Checks run once per fold, and tables and JSON show a fold as one row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reshard.geometry.quantities import plural
from reshard.index.index import Tensor

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """Tensors that are alike but for the numbers in their names."""

    tensors: tuple[Tensor, ...]
    """The tensors, at least one, in the order of the index."""

    @property
    def first(self) -> Tensor:
        """The tensor that stands for all."""
        return self.tensors[0]

    @property
    def name(self) -> str:
        """One name for all, such as "model.layers.{3..60}.mlp.experts.{0..255}.up_proj.weight"."""
        return folded_name([tensor.name for tensor in self.tensors])

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Fold({self.name!r}, {plural(len(self), 'tensor')})"


def folds(tensors: Iterable[Tensor]) -> tuple[Fold, ...]:
    """The tensors in folds, in the order of the first tensor of each."""
    found: dict[tuple[object, ...], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((name_pattern(tensor.name), tensor.kind, tensor.dtype.name, *cut_of(tensor)), []).append(tensor)
    return tuple(Fold(tuple(alike)) for alike in found.values())


def name_pattern(name: str) -> str:
    """A name with its numbers replaced."""
    return _NUMBER.sub("#", name)


def cut_of(tensor: Tensor) -> tuple[object, ...]:
    """The shape of a tensor and its boxes, in a form that is equal for tensors that are cut in the same way."""
    shards = tensor.shards
    primary = shards.primary
    return tensor.shape, shards.offsets.tobytes(), shards.sizes.tobytes(), None if primary is None else primary.tobytes()


def folded_name(names: Sequence[str]) -> str:
    """One name for several: a number that varies becomes {first..last}, or {a,b} if its values are not consecutive."""
    rows = [_NUMBER.findall(name) for name in names]
    words = _NUMBER.split(names[0])
    text = words[0]
    for column, word in zip(zip(*rows, strict=True), words[1:], strict=True):
        text += _range_text(sorted({int(number) for number in column})) + word
    return text


def _range_text(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers[:6])) + (",..." if len(numbers) > 6 else "") + "}"
