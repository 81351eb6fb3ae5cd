"""Fold: a checkpoint as a tree of names. Layers, and experts, that are alike share one branch.

    model.layers.0.mlp.up_proj.weight  ...  model.layers.31.mlp.up_proj.weight
    -> model > layers.{0..31} > mlp > up_proj.weight: 32 tensors

Things are alike if their tensors have the same names, kinds, element types, shapes and cuts. Tables, documents and pictures read this one
value; checks look at each cut once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from reshard.geometry.value import value
from reshard.index.index import Tensor

_NUMBER = re.compile(r"\d+")
# A number that is a whole part of a name: that of a layer, an expert, an entry of a list.
_NUMBERED_PART = re.compile(r"(?<![^.])(\d+)(?![^.])")


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


@value
class Fold:
    """A branch of the tree of names. It stands for everything below it, and for all its alike copies."""

    name: str
    """The part of the name, such as "layers.{0..31}" or "up_proj.weight"; empty for the whole tree."""
    numbers: tuple[int, ...]
    """The numbers that the branch stands for, such as those of layers; empty for a branch without a number."""
    names: int
    """How many names it stands for: those of weights, where it has weights."""
    tensors: int
    """How many tensors have these names, optimizer state included."""
    elements: int
    """The number of their elements."""
    nbytes: int
    """Their bytes, stored once."""
    stored: tuple[Tensor, ...] = ()
    """For a leaf: the tensors of the first name that it stands for, the weight first; empty for a branch."""
    children: tuple[Fold, ...] = ()
    """The branches below, in the model's order; empty for a leaf."""

    def __repr__(self) -> str:
        return f"Fold({self.name!r}, {self.names} names, {self.tensors} tensors, {self.nbytes} bytes)"

    @property
    def count(self) -> int | str:
        """How many names it stands for, and how many tensors each has if not one, such as "32 x4" with two moments and a step count."""
        if self.names == self.tensors:
            return self.names
        per_name, rest = divmod(self.tensors, self.names)
        return f"{self.names:,} ({self.tensors:,} tensors)" if rest else f"{self.names:,} x{per_name}"

    @property
    def state(self) -> str:
        """What a leaf's name has besides its first tensor, such as "moment1, moment2 (F32)"."""
        by_dtype: dict[str, list[str]] = {}
        for tensor in self.stored[1:]:
            by_dtype.setdefault(tensor.dtype.name, []).append(tensor.kind)
        return "; ".join(f"{', '.join(kinds)} ({dtype})" for dtype, kinds in by_dtype.items())

    def walk(self, depth: int | None = None) -> Iterator[tuple[int, Fold]]:
        """The branches below this one with their level, each before its own branches. depth: levels to descend."""
        for child in self.children if depth is None or depth > 0 else ():
            yield 0, child
            yield from ((level + 1, branch) for level, branch in child.walk(None if depth is None else depth - 1))

    def sorted_by_bytes(self) -> Fold:
        """The same tree, the largest branch of each level first."""
        ordered = sorted((child.sorted_by_bytes() for child in self.children), key=lambda child: -child.nbytes)
        return replace(self, children=tuple(ordered))


def fold(tensors: Iterable[Tensor], order: Iterable[str] = ()) -> Fold:
    """The tree of tensors. order: names in the order of the model; names that it lacks follow in the order of `tensors`."""
    by_name: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        by_name.setdefault(tensor.name, []).append(tensor)
    classes, number_of = _Classes(), _Numbers()
    first_names: dict[str, str] = {}
    patterns: dict[str, Any] = {}
    for name, same in by_name.items():
        parts = _NUMBERED_PART.split(name)
        pattern = name if len(parts) == 1 else "#".join(parts[::2])
        by_number = patterns.get(pattern)
        if by_number is None:
            by_number = patterns[pattern] = {}
            first_names[name] = pattern
        # The class of a leaf under its numbers; a name without a number has it under None.
        numbers: list[int | None] = [number_of[part] for part in parts[1::2]] or [None]
        for number in numbers[:-1]:
            by_number = by_number.setdefault(number, {})
        by_number[numbers[-1]] = classes.number_of(pattern, same)
    in_order = dict.fromkeys([name for name in order if name in first_names]) | first_names
    items = [(tuple(pattern.split(".")), patterns[pattern]) for pattern in map(first_names.__getitem__, in_order)]
    children = tuple(_branches([(words, data if "#" in words else data[None]) for words, data in items], 1, classes))
    return _branch("", (), children)


class _Numbers(dict[str, int]):
    """The number that a part of a name spells. The same few occur in many names."""

    def __missing__(self, part: str) -> int:
        return self.setdefault(part, int(part))


class _Classes:
    """The classes of alike leaves, by number."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self.stored: list[tuple[Tensor, ...]] = []
        """By number, the tensors of the first leaf."""

    def number_of(self, pattern: str, same_name: list[Tensor]) -> int:
        """The number of the class of a leaf."""
        first = same_name[0]
        key: tuple[object, ...] = (pattern, first.kind, first.dtype.name, first.shape, _cut_key(first))
        if len(same_name) > 1:
            same_name = sorted(same_name, key=lambda tensor: tensor.kind != "weight")
            key = (pattern, *((tensor.kind, tensor.dtype.name, tensor.shape, _cut_key(tensor)) for tensor in same_name))
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self.stored):
            self.stored.append(tuple(same_name))
        return number


def _cut_key(tensor: Tensor) -> object:
    """How a tensor is cut. A tensor in one piece is whole, as nothing may be missing."""
    return None if len(tensor.shards) == 1 else cut_of(tensor)


def _branch(name: str, numbers: tuple[int, ...], children: tuple[Fold, ...]) -> Fold:
    return Fold(
        name,
        numbers,
        sum(child.names for child in children),
        sum(child.tensors for child in children),
        sum(child.elements for child in children),
        sum(child.nbytes for child in children),
        children=children,
    )


def _branches(items: Sequence[tuple[tuple[str, ...], Any]], times: int, classes: _Classes) -> Iterator[Fold]:
    """The branches of patterns. items: the remaining words of each pattern, and the class under the remaining numbers. times: the number of
    alike branches that these stand for."""
    by_head: dict[str, list[tuple[tuple[str, ...], Any]]] = {}
    for words, data in items:
        by_head.setdefault(words[0], []).append((words[1:], data))
    for head, rest in by_head.items():
        if head == "#":
            yield from _numbered(rest, times, classes)
            continue
        for words, data in rest:
            if not words:
                yield _leaf(head, (), data, times, classes)
        deeper = [(words, data) for words, data in rest if words]
        children = tuple(_branches(deeper, times, classes)) if deeper else ()
        if len(children) == 1 or (children and all(child.numbers for child in children)):
            yield from (replace(child, name=f"{head}.{child.name}") for child in children)
        elif children:
            yield _branch(head, (), children)


def _numbered(items: Sequence[tuple[tuple[str, ...], Any]], times: int, classes: _Classes) -> Iterator[Fold]:
    """The branches of numbers: alike ones are one branch."""
    frozen: dict[object, int] = {}
    alike: dict[tuple[int, ...], list[int]] = {}
    columns = [{number: _frozen(value, frozen) for number, value in data.items()} for _, data in items]
    for number in sorted(set().union(*columns)):
        alike.setdefault(tuple(column.get(number, -1) for column in columns), []).append(number)
    for numbers in alike.values():
        name, count = _range_text(numbers), times * len(numbers)
        below = [(words, data[numbers[0]]) for words, data in items if numbers[0] in data]
        for words, data in below:
            if not words:
                yield _leaf(name, tuple(numbers), data, count, classes)
        children = tuple(_branches([(words, data) for words, data in below if words], count, classes))
        if children:
            yield _branch(name, tuple(numbers), children)


def _frozen(value: Any, known: dict[object, int]) -> int:
    """A number for a class, or for a dict of classes; equal for equal values."""
    if isinstance(value, dict):
        return known.setdefault(tuple(sorted((number, _frozen(inner, known)) for number, inner in value.items())), -2 - len(known))
    return int(value)


def _leaf(name: str, numbers: tuple[int, ...], number: int, times: int, classes: _Classes) -> Fold:
    stored = classes.stored[number]
    elements, nbytes = sum(tensor.elements for tensor in stored), sum(tensor.nbytes for tensor in stored)
    return Fold(name, numbers, times, times * len(stored), times * elements, times * nbytes, stored)
