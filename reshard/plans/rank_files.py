"""Files of ranks that are alike: where the tensors lie is computed for one rank, and only the boxes differ for the others.

A plan for a thousand data-parallel ranks has a million stored tensors. A FileForm holds those of one rank; AlikeTensors makes those of
another one on demand, and its sections as columns. Framing, such as a pickle of each rank, is made when the file is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import overload

import numpy as np

from reshard.geometry.dtypes import DType
from reshard.geometry.sections import Columns, Pattern, Sections
from reshard.geometry.value import value
from reshard.plans.placed import FileSections, Literal, PlacedTensor


@value(slots=False, eq=False)
class FileForm:
    """What the files of some ranks have in common."""

    tensors: tuple[PlacedTensor, ...]
    """The tensors of the first of these ranks."""
    steps: tuple[int, ...]
    """[tensors]: how far the boxes of a tensor move along their first axis from one rank to the next."""
    framing: tuple[tuple[int, int], ...]
    """The framing as (byte offset, length); its bytes differ from rank to rank."""

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
        groups: dict[tuple[DType, int], list[tuple[PlacedTensor, int]]] = {}
        for item, step in zip(self.tensors, self.steps, strict=True):
            if len(item.tensor.sections):
                groups.setdefault((item.tensor.dtype, item.tensor.sections.pattern.sizes.shape[1]), []).append((item, step))
        return tuple(_joined(dtype, alike) for (dtype, _), alike in groups.items())


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
class AlikeTensors(Sequence[PlacedTensor]):
    """The tensors of the file of one of the ranks of a form."""

    form: FileForm
    """What the file has in common with the others."""
    number: int
    """How many ranks after the first one of the form."""

    def sections(self) -> Iterator[FileSections]:
        """The sections of all tensors, with starts from the start of the file."""
        for found, steps in self.form.sections:
            yield replace(found, pattern=_moved(found.pattern, steps * self.number))

    def __len__(self) -> int:
        return len(self.form.tensors)

    @overload
    def __getitem__(self, index: int) -> PlacedTensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PlacedTensor]: ...

    def __getitem__(self, index: int | slice) -> PlacedTensor | Sequence[PlacedTensor]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        item, by = self.form.tensors[index], self.form.steps[index] * self.number
        sections = item.tensor.sections
        if not by or not len(sections):
            return item
        moved = Sections(sections.names, _moved(sections.pattern, np.full(len(sections), by, np.int64)))
        return replace(item, tensor=replace(item.tensor, sections=moved))


def _moved(pattern: Pattern, by: Columns) -> Pattern:
    """The pattern with boxes that lie further along their first axis. by: [n], in elements."""
    if not pattern.offsets.shape[1]:
        return pattern
    offsets = pattern.offsets.copy()
    offsets[:, 0] += by
    return replace(pattern, offsets=offsets)


@value(eq=False)
class LazyFraming(Sequence[Literal]):
    """The framing of a file, which is made anew whenever it is needed: a thousand pickles do not fit into memory."""

    places: tuple[tuple[int, int], ...]
    """(byte offset, length) of each literal."""
    make: Callable[[], Sequence[Literal]]
    """Makes the literals."""

    def __iter__(self) -> Iterator[Literal]:
        made = self.make()
        assert tuple((offset, len(data)) for offset, data in made) == self.places, "the framing has the length that was planned"
        return iter(made)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Literal: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Literal]: ...

    def __getitem__(self, index: int | slice) -> Literal | Sequence[Literal]:
        return tuple(self)[index]
