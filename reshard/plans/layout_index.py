"""The index of stored tensors: every section becomes a piece of its canonical tensor, every fill a constant.

A plan for many ranks has a million sections. They are collected as columns and sorted once; no object is made per section.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from reshard.geometry.dtypes import DType
from reshard.geometry.sections import Columns, Pattern
from reshard.index.index import Constant, Index, RunFacts, StoredFile, Tensor
from reshard.index.shards import Located, PieceTable, Shards
from reshard.plans.layout import FileSections, Layout, PlacedTensor, TargetFile


def index_of(
    format_name: str,
    placed: Iterable[tuple[TargetFile, PlacedTensor]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    files: tuple[TargetFile, ...],
    facts: RunFacts,
) -> Index:
    """The index of stored tensors.

    placed: each tensor with the file that holds it. shapes: the global shapes of the canonical tensors. files: all files of the index.
    """
    tables = _Tables(files)
    for file, item in placed:
        sections = item.tensor.sections
        tables.add(file.path, [item], [FileSections(sections.names, sections.pattern, item.tensor.dtype, item.byte_offset)])
    return tables.index(format_name, shapes, facts)


def index_of_layout(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> Index:
    """The index of the files of a layout once they are written. shapes: the global shapes of the canonical tensors."""
    tables = _Tables(layout.files)
    for file in layout.files:
        if file.form:
            tables.number(file.form.names)
        tables.add(file.path, file.filled, file.sections())
    return tables.index(layout.format, shapes, RunFacts())


# Some sections of a file: the numbers of their canonical tensors, where they lie in their stored tensor, where that starts in the file, its
# element type, and the number of the file.
_Rows = tuple[Columns, Pattern, int, DType, int]


class _Tables:
    """Collects stored tensors, and sorts their sections by canonical tensor at the end."""

    def __init__(self, files: tuple[TargetFile, ...]) -> None:
        self._stored = tuple(StoredFile(file.path, file.nbytes) for file in files)
        self._paths = tuple(file.path for file in files)
        self._files = {path: i for i, path in enumerate(self._paths)}
        self._constants: list[Constant] = []
        self._numbers: dict[str, int] = {}
        # Ranks share their lists of names.
        self._numbers_of: dict[tuple[str, ...], Columns] = {}
        # By the number of axes.
        self._rows: dict[int, list[_Rows]] = {}

    def add(self, path: str, filled: Iterable[PlacedTensor], sections: Iterable[FileSections]) -> None:
        """Add tensors of a file that hold fill, and sections."""
        for item in filled:
            self._constants.extend(_constants(path, item))
        for section in sections:
            if len(section.names):
                numbers = self.number(section.names)
                for ndim, chosen, pattern in section.pattern.with_ndim():
                    row = numbers[chosen], pattern, section.byte_offset, section.dtype, self._files[path]
                    self._rows.setdefault(ndim, []).append(row)

    def number(self, names: tuple[str, ...]) -> Columns:
        """The numbers of canonical tensors. New ones get the next numbers, in whose order the index has them."""
        numbers = self._numbers_of.get(names)
        if numbers is None:
            known = self._numbers
            numbers = self._numbers_of[names] = np.array([known.setdefault(name, len(known)) for name in names], np.int64)
        return numbers

    def index(self, format_name: str, shapes: Mapping[str, tuple[int, ...]], facts: RunFacts) -> Index:
        """The index of everything that was added."""
        return Index(format_name, self._tensors(shapes), self._stored, facts, constants=tuple(self._constants))

    def _tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Tensor, ...]:
        """The canonical tensors, in the order in which they were first added."""
        names, tensors = list(self._numbers), dict[int, Tensor]()
        while self._rows:
            _, rows = self._rows.popitem()
            table, dtypes, starts, stops, numbers = _sorted(rows, self._paths)
            for number, dtype, start, stop in zip(numbers, dtypes, starts, stops, strict=True):
                name = names[number]
                tensors[number] = Tensor(name, dtype, shapes[name], "weight", Shards(table, start, stop))
        return tuple(map(tensors.__getitem__, range(len(names))))


def _sorted(rows: list[_Rows], paths: tuple[str, ...]) -> tuple[PieceTable, Iterable[DType], list[int], list[int], list[int]]:
    """One table of the sections, sorted by canonical tensor. For each of these: its element type, its first row, the row after its last,
    and its number."""
    numbers, patterns, _, dtypes_of_rows, files_of_rows = zip(*rows, strict=True)
    counts = np.array([len(pattern) for pattern in patterns])
    tensors = np.concatenate(numbers)
    order = np.argsort(tensors, kind="stable")
    tensors = tensors[order]
    byte_offsets = np.concatenate([base + pattern.starts * dtype.itemsize for _, pattern, base, dtype, _ in rows])[order]
    files = np.repeat(np.array(files_of_rows, np.int32), counts)[order]
    dtypes = _dtype_column(dtypes_of_rows, counts, order)
    offsets, sizes, strides = (
        np.concatenate([getattr(pattern, column) for pattern in patterns])[order] for column in ("offsets", "sizes", "strides")
    )
    located = Located(paths, files, byte_offsets, strides, dtypes)
    table = PieceTable(paths, offsets, sizes, files, byte_offsets, located)
    starts = np.flatnonzero(np.concatenate([[True], tensors[1:] != tensors[:-1]]))
    stops = np.append(starts[1:], len(tensors))
    of_tensors = [dtypes] * len(starts) if isinstance(dtypes, DType) else dtypes[starts].tolist()
    return table, of_tensors, starts.tolist(), stops.tolist(), tensors[starts].tolist()


def _dtype_column(dtypes: Sequence[DType], counts: Columns, order: Columns) -> DType | npt.NDArray[np.object_]:
    """The element type of all rows if they have one, otherwise that of each row."""
    if all(dtype is dtypes[0] for dtype in dtypes):
        return dtypes[0]
    column = np.empty(len(dtypes), np.object_)
    column[:] = dtypes
    of_rows: npt.NDArray[np.object_] = np.repeat(column, counts)[order]
    return of_rows


def _constants(path: str, item: PlacedTensor) -> Iterator[Constant]:
    """The ranges of a stored tensor that hold its fill: the bytes before, between and after the spans of its sections. Sections that are
    interleaved, such as gate and up of transposed experts, fill their common span."""
    stored, itemsize = item.tensor, item.tensor.dtype.itemsize
    if not stored.filled:
        return
    fill = stored.fill * itemsize if len(stored.fill) == 1 else stored.fill
    pattern, end = stored.sections.pattern, 0
    rows = np.flatnonzero(pattern.volumes > 0)
    ranges = sorted(zip(pattern.starts[rows].tolist(), (pattern.lasts[rows] + 1).tolist(), strict=True))
    for start, stop in [*ranges, (stored.nbytes // itemsize,) * 2]:
        if start > end:
            yield Constant(stored.name, path, item.byte_offset + end * itemsize, (start - end) * itemsize, fill, stored.is_unset)
        end = max(end, stop)
