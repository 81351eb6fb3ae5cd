"""The .metadata file of torch.distributed.checkpoint (DCP), as columns.

A checkpoint is a folder of `__<rank>_<i>.distcp` files, each of which is many torch.save zips (entries) end to end, and one pickle that
says what each entry holds:

    Metadata
      state_dict_metadata: {fqn: TensorStorageMetadata{properties, size, chunks: [{offsets, sizes}]} | BytesStorageMetadata}
      storage_data:        {MetadataIndex{fqn, offset}: _StorageInfo{relative_path, offset, length[, transform_descriptors]}}
      planner_data:        {flat fqn: (key, key or list index, ...)}; some writers leave it out or store None

A chunk and its entry have the same (fqn, offsets). `parse` checks that every chunk has an entry and every entry a chunk. It does not check
whether the chunks of a tensor cover it. Measured on torch 2.13; sources of 2.2..2.9 were read: storage_meta, version, planner_data and
transform_descriptors may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, NoReturn, TypeGuard

import numpy as np
import numpy.typing as npt

from reshard.containers.inert_pickle import Inert, load, shown
from reshard.containers.pickle_objects import NotColumnsError, ObjectTable, Run, load_objects
from reshard.errors import CheckpointError
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.quantities import plural
from reshard.geometry.sections import distinct
from reshard.geometry.value import value
from reshard.storage.files import inside
from reshard.storage.system_calls import gc_paused

Numbers = npt.NDArray[np.int64]
_Integers = npt.NDArray[Any]

_CHUNK, _INDEX, _INFO = "ChunkStorageMetadata", "MetadataIndex", "_StorageInfo"
_TENSOR, _BYTES = ".TensorStorageMetadata", ".BytesStorageMetadata"
_MOST_AXES = 64


@value
class Chunks:
    """The stored boxes of one tensor, one row each, sorted by offsets. Rows with the same box are replicas."""

    offsets: Numbers
    """[n, ndim]: where each box starts."""
    sizes: Numbers
    """[n, ndim]: how long each box is."""
    files: npt.NDArray[np.int32]
    """[n]: the file of each box, as an index into `DcpMetadata.paths`."""
    entry_offsets: Numbers
    """[n]: the byte offset of each entry in its file."""
    entry_nbytes: Numbers
    """[n]: the length of each entry in bytes."""

    def __len__(self) -> int:
        return len(self.files)

    def __repr__(self) -> str:
        return f"Chunks({plural(len(self), 'box', 'boxes')} in {plural(len(np.unique(self.files)), 'file')})"


@value
class TensorItem:
    """A tensor of the checkpoint."""

    fqn: str
    """Its fully qualified name."""
    dtype: DType
    """Its element type."""
    shape: tuple[int, ...]
    """Its global shape."""
    chunks: Chunks
    """Its stored boxes."""
    transforms: tuple[str, ...] = ()
    """The stream extensions that encoded each of its entries, in the order in which the metadata lists them."""


@value
class BytesItem:
    """An object of the checkpoint that is not a tensor. One entry holds it as a torch.save file."""

    fqn: str
    """Its fully qualified name."""
    path: str
    """The file of the entry, relative to the folder of the checkpoint."""
    entry_offset: int
    """The byte offset of the entry in the file."""
    entry_nbytes: int
    """The length of the entry in bytes."""
    transforms: tuple[str, ...] = ()
    """The stream extensions that encoded the entry, in the order in which the metadata lists them."""


@value
class DcpMetadata:
    """The content of a .metadata file."""

    tensors: dict[str, TensorItem]
    """The tensors by fully qualified name."""
    objects: dict[str, BytesItem]
    """The other objects by fully qualified name."""
    paths: tuple[str, ...]
    """The files to which `Chunks.files` refers, relative to the folder of the checkpoint."""
    planner: dict[str, tuple[str | int, ...]] | None
    """For each flat name, the path of keys in the nested state dict; None if the writer did not store it."""
    version: str | None
    """The version of the metadata; None if the writer did not store it."""

    def __repr__(self) -> str:
        content = f"{plural(len(self.tensors), 'tensor')}, {plural(len(self.objects), 'object')}"
        return f"DcpMetadata({content}, {plural(len(self.paths), 'file')})"


def parse(data: bytes, *, where: str) -> DcpMetadata:
    """The content of a .metadata file, given as bytes; see `read`."""
    return read(lambda: data, where=where)


def read(content: Callable[[], bytes], *, where: str) -> DcpMetadata:
    """The content of a .metadata file, after these checks: every chunk lies in its tensor and has an entry, every entry has a chunk, and
    all files are inside the checkpoint.

    content: reads the bytes. A large file is read a second time if it has to be; so its bytes take no memory while it is parsed.

    Raises: CheckpointError, naming the tensor and the offsets.
    """
    with gc_paused():
        with suppress(NotColumnsError, CheckpointError):
            return _metadata(*load_objects(content, _CHUNK, (_INDEX, _INFO), where=where), where)
        # What the columns cannot tell, and what is wrong: a value can be named in a message.
        return _metadata(load(content(), where=where), ObjectTable.empty(), where)


def _metadata(root: Any, table: ObjectTable, where: str) -> DcpMetadata:
    """The content of a .metadata file. table: the objects that are runs in the pickle (`load_objects`).

    Raises: CheckpointError; NotColumnsError if objects in the table have to be looked at one by one.
    """
    items, storage = _attribute(root, "state_dict_metadata", where), _attribute(root, "storage_data", where)
    for fqn, item in items.items():
        if type(fqn) is not str or not isinstance(item, Inert):
            _refuse(f"the metadata lists {shown(fqn)} as {shown(item)}", where)
        if not item.class_name.endswith((_TENSOR, _BYTES)):
            _refuse(f"it is stored as {item.class_name}, expected a tensor or bytes", f"{where}: {fqn}")
    reader = _Reader({fqn: item for fqn, item in items.items() if item.class_name.endswith(_TENSOR)}, table, where)
    tensors = reader.tensors(storage)
    objects = {fqn: reader.object(fqn) for fqn in items if fqn not in tensors}
    if left := reader.objects.keys() - objects:
        reader.refuse_entry(min(left), None)
    version, planner = root.get("version"), _planner(root.get("planner_data"), where)
    return DcpMetadata(tensors, objects, tuple(reader.paths), planner, version if isinstance(version, str) else None)


def merge(parts: Sequence[DcpMetadata]) -> DcpMetadata:
    """One metadata from those of all ranks (`__<rank>.metadata`, written with use_collectives=False).

    Each part has the global shape of every tensor, but only the chunks of its own rank. A chunk that is in several parts becomes several
    rows. If an object is in several parts, the first one is taken.

    Raises: CheckpointError if two parts describe a tensor differently.
    """
    paths: dict[str, int] = {}
    tensors: dict[str, list[TensorItem]] = {}
    objects: dict[str, BytesItem] = {}
    planner: dict[str, tuple[str | int, ...]] = {}
    for part in parts:
        numbers = np.array([paths.setdefault(path, len(paths)) for path in part.paths], np.int32)
        for fqn, item in part.tensors.items():
            tensors.setdefault(fqn, []).append(replace(item, chunks=replace(item.chunks, files=numbers[item.chunks.files])))
        objects = part.objects | objects
        planner = (part.planner or {}) | planner
    if both := tensors.keys() & objects.keys():
        _refuse("one rank's metadata lists it as a tensor, another's as an object", min(both))
    has_planner = any(part.planner is not None for part in parts)
    version = next((part.version for part in parts if part.version), None)
    merged = {fqn: _merged(items) for fqn, items in tensors.items()}
    return DcpMetadata(merged, objects, tuple(paths), planner if has_planner else None, version)


# ---- chunks and entries as columns ----
#
# Two tensors, "v" of [4] in one chunk and "w" of [4, 6] in two, have the numbers 0 and 1, and two axes at most. Whether their chunks and
# entries are values or lie in the table of `load_objects`, they become
#
#     chunks   tensors [1, 1, 0]   offsets [[2, 0], [0, 0], [0, 0]]   values [[2, 6], [2, 6], [4, 0]]                    the sizes
#     entries  tensors [0, 1, 1]   offsets [[0, 0], [0, 0], [2, 0]]   values [[0, 0, 1600], [0, 1600, 1624], [1, 0, 1624]]
#                                                                     file, byte offset, length
#
# The axis that "v" does not have is 0. Sorted by tensor and offsets, both have the tensors [0, 1, 1] and the offsets [[0, 0], [0, 0],
# [2, 0]]: so row i of the entries is where chunk i lies. Row 0 is that of "v", rows 1 and 2 are those of "w". If an entry were missing, its
# row would hold the next one, and the first difference shows which it is.

_Row = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A chunk or an entry that is a value: its tensor, its offsets, and its values as in `_Boxes`."""


@value(eq=False)
class _Boxes:
    """Chunks, or entries, of all tensors."""

    tensors: _Integers
    """[n]: the number of the tensor."""
    offsets: Numbers
    """[n, axes]: where each box starts; 0 along axes that the tensor does not have."""
    values: Numbers
    """[n, any]: of a chunk, its sizes; of an entry, its file, its byte offset and its length."""

    def taken(self, rows: _Integers) -> _Boxes:
        """These rows."""
        return _Boxes(self.tensors[rows], self.offsets[rows], self.values[rows])

    def sorted(self) -> _Boxes:
        """The boxes by tensor, then by offsets."""
        return self.taken(np.lexsort((*self.offsets.T[::-1], self.tensors)))

    def repeats(self) -> npt.NDArray[np.bool_]:
        """[n - 1]: whether each box but the first starts where the one before it does."""
        is_same: npt.NDArray[np.bool_] = (self.offsets[1:] == self.offsets[:-1]).all(axis=1)
        is_same &= self.tensors[1:] == self.tensors[:-1]
        return is_same


class _Reader:
    """The tensors and the entries of one .metadata file, whose chunks and entries are values or lie in a table."""

    def __init__(self, items: dict[str, Inert], table: ObjectTable, path: str) -> None:
        self._table, self._path = table, path
        self._items, self._names = items, list(items)
        self._shapes = [self._shape(item, number) for number, item in enumerate(items.values())]
        self._numbers = {fqn: number for number, fqn in enumerate(items)}
        self._ndims = np.array([len(shape) for shape in self._shapes], np.int32)
        self._axes = int(self._ndims.max(initial=0))
        self.paths: dict[str, int] = {}
        """The number of each file."""
        self.objects: dict[str, BytesItem] = {}
        """The entries of objects by name."""
        # By tensor, as far as they are values; by content, so that equal ones are one object.
        self._transforms: list[set[tuple[str, ...]]] = [set() for _ in items]
        self._same: dict[tuple[str, ...], tuple[str, ...]] = {(): ()}

    def tensors(self, storage: dict[Any, Any]) -> dict[str, TensorItem]:
        """The tensors by name. Empties `storage`, and releases the table."""
        chunks, entries = self._chunks(), self._entries(storage)
        self._table.clear()
        paired = self._paired(chunks, entries)
        del chunks, entries
        return {
            fqn: TensorItem(fqn, _dtype(item, self._where(number)), self._shapes[number], paired[number], self._transforms_of(number))
            for number, (fqn, item) in enumerate(self._items.items())
        }

    def object(self, fqn: str) -> BytesItem:
        """The entry of an object."""
        if fqn not in self.objects:
            _refuse("the object is in no file: the metadata lists it without one", f"{self._path}: {fqn}")
        return self.objects[fqn]

    def refuse_entry(self, fqn: str, offsets: tuple[int, ...] | None) -> NoReturn:
        """Raises CheckpointError for an entry whose chunk, or object, is not listed."""
        at, kind = ("", "object") if offsets is None else (f" at offsets {offsets}", "chunk")
        _refuse(
            f"the metadata names the file of {fqn}{at}, but lists no such {kind}",
            self._path,
            why="So this metadata was not written together with these files",
        )

    def _where(self, number: int) -> str:
        return f"{self._path}: {self._names[number]}"

    def _shape(self, item: Inert, number: int) -> tuple[int, ...]:
        shape = item.get("size")
        if not _are_counts(shape) or len(shape) > _MOST_AXES:
            _refuse(f"its size is {shown(shape)}", self._where(number))
        return shape

    def _transforms_of(self, number: int) -> tuple[str, ...]:
        transforms = self._transforms[number]
        if len(transforms) > 1:
            _refuse(f"its entries have different transforms: {sorted(transforms)}", self._where(number))
        return next(iter(transforms), ())

    def _chunks(self) -> _Boxes:
        """The chunks of all tensors, in any order."""
        runs: list[Run] = []
        of_runs: list[int] = []
        rows: list[_Row] = []
        for number, item in enumerate(self._items.values()):
            ndim, listed = len(self._shapes[number]), item.get("chunks")
            if not isinstance(listed, list):
                _refuse(f"its chunks are {shown(listed)}, not a list", self._where(number))
            for chunk in listed:
                if isinstance(chunk, Run):
                    runs.append(chunk)
                    of_runs.append(number)
                    continue
                offsets, sizes = (chunk.get("offsets"), chunk.get("sizes")) if isinstance(chunk, Inert) else (None, None)
                if not _are_counts(offsets) or not _are_counts(sizes):
                    _refuse(f"a chunk is {shown(chunk)} with offsets {shown(offsets)}, sizes {shown(sizes)}", self._where(number))
                if not len(offsets) == len(sizes) == ndim:
                    _refuse(f"a chunk has the offsets {offsets}, the sizes {sizes}, the tensor has {ndim} axes", self._where(number))
                rows.append((number, offsets, sizes))
        objects, tensors = _objects(runs, 1), np.repeat(np.array(of_runs, np.int32), [run.count for run in runs])
        return self._boxes(tensors, self._sizes(objects, "offsets", tensors), self._sizes(objects, "sizes", tensors), rows, self._axes)

    def _entries(self, storage: dict[Any, Any]) -> _Boxes:
        """The entries of all chunks, in any order. Those of objects are noted in `objects`."""
        runs: list[Run] = []
        rows: list[_Row] = []
        while storage:  # the Inerts are released one by one: a large checkpoint has a million of them
            index, info = storage.popitem()
            if isinstance(index, Run):
                runs.append(index)
            elif (row := self._entry(index, info)) is not None:
                rows.append(row)
        table, keys = self._table, _objects(runs, 2)
        values = keys + 1
        if len(keys) and (len(self._same) > 1 or table.has(values, "transform_descriptors")):
            raise NotColumnsError
        number_of_text = np.array([self._numbers.get(text, -1) for text in table.texts], np.int32)
        tensors = number_of_text[table.text_numbers(keys, "fqn")]
        if (tensors < 0).any():
            raise NotColumnsError
        texts, file_of_text = table.text_numbers(values, "relative_path"), np.full(len(table.texts), -1, np.int32)
        for text in distinct(texts).tolist():
            file_of_text[text] = self._file(table.texts[text], "storage_data")
        columns: list[Any] = [file_of_text[texts], table.numbers(values, "offset"), table.numbers(values, "length")]
        return self._boxes(tensors, self._sizes(keys, "offset", tensors), np.stack(columns, axis=1), rows, 3)

    def _entry(self, index: Any, info: Any) -> _Row | None:
        """The entry of a chunk; None if it is that of an object."""
        if not isinstance(index, Inert) or not isinstance(info, Inert):
            _refuse(f"the metadata's storage_data maps {shown(index)} to {shown(info)}", self._path)
        fqn, offsets = index.get("fqn"), index.get("offset")
        path, start, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        if type(fqn) is not str or not (offsets is None or _are_counts(offsets)):
            _refuse(f"the metadata names the file of {shown(fqn)} at offsets {shown(offsets)}", self._path)
        if type(path) is not str or not _are_counts((start, nbytes)):
            _refuse(
                f"the entry at offsets {offsets} should be a byte range of a file, "
                f"it is {shown(start)} + {shown(nbytes)} bytes of {shown(path)}",
                f"{self._path}: {fqn}",
            )
        names = info.get("transform_descriptors") or ()
        if names and not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
            _refuse(f"the entry at offsets {offsets} has the transforms {shown(names)}, which are not names", f"{self._path}: {fqn}")
        file, transforms = self._file(path, fqn), self._same.setdefault(tuple(names), tuple(names)) if names else ()
        if offsets is None:
            if fqn in self.objects:
                _refuse("two entries hold the object", f"{self._path}: {fqn}")
            self.objects[fqn] = BytesItem(fqn, path, start, nbytes, transforms)
            return None
        number = self._numbers.get(fqn, -1)
        if number < 0 or len(offsets) != len(self._shapes[number]):
            self.refuse_entry(fqn, offsets)
        self._transforms[number].add(transforms)
        return number, offsets, (file, start, nbytes)

    def _file(self, path: str, fqn: str) -> int:
        number = self.paths.get(path)
        return self.paths.setdefault(inside(path, where=f"{self._path}: {fqn}"), len(self.paths)) if number is None else number

    def _sizes(self, objects: _Integers, attribute: str, tensors: _Integers) -> Numbers:
        """[n, any]: an attribute that is a size of as many axes as the tensor has. tensors: [n], the tensor of each object."""
        axes, sizes = self._table.sizes(objects, attribute)
        if (axes != self._ndims[tensors]).any():
            raise NotColumnsError
        return sizes

    def _boxes(self, tensors: _Integers, offsets: _Integers, values: _Integers, rows: list[_Row], width: int) -> _Boxes:
        """The boxes of the table, given as columns, and those that are values. width: the number of their values."""
        return _Boxes(
            np.concatenate([tensors, np.array([row[0] for row in rows], np.int32)]),
            _filled(offsets, [row[1] for row in rows], self._axes),
            _filled(values, [row[2] for row in rows], width),
        )

    def _paired(self, chunks: _Boxes, entries: _Boxes) -> list[Chunks]:
        """The chunks of each tensor with their entries, sorted by offsets. Raises CheckpointError unless each chunk has one entry."""
        chunks, entries = self._without_empty(chunks.sorted()), entries.sorted()
        whole = _filled(np.zeros((0, 0), np.int64), self._shapes, self._axes)
        if (outside := chunks.offsets > whole[chunks.tensors] - chunks.values).any():
            number, offsets, sizes = self._box(chunks, int(outside.any(axis=1).argmax()))
            shape = self._shapes[number]
            _refuse(
                f"the chunk at offsets {offsets}, sizes {sizes}, is not inside the tensor, which has the shape {shape}", self._where(number)
            )
        self._check_same_places(chunks, entries)
        files = entries.values[:, 0].astype(np.int32)
        bounds = np.searchsorted(chunks.tensors, np.arange(len(self._shapes) + 1))
        paired = []
        for shape, start, stop in zip(self._shapes, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            rows, ndim = slice(start, stop), len(shape)
            box = chunks.offsets[rows, :ndim], chunks.values[rows, :ndim]
            paired.append(Chunks(*box, files[rows], entries.values[rows, 1], entries.values[rows, 2]))
        return paired

    def _without_empty(self, chunks: _Boxes) -> _Boxes:
        """One chunk for each place of these, which are sorted.

        Ranks that hold no element write empty chunks, all at the same offsets and with one entry for all of them (FSDP2, torch 2.13). If
        one of the chunks at these offsets is not empty, the entry belongs to it.
        """
        if not chunks.repeats().any():
            return chunks
        is_empty = ((chunks.values == 0) & (np.arange(self._axes) < self._ndims[chunks.tensors][:, None])).any(axis=1)
        order = np.lexsort((*chunks.values.T[::-1], is_empty, *chunks.offsets.T[::-1], chunks.tensors))
        chunks, is_empty = chunks.taken(order), is_empty[order]
        repeats = chunks.repeats()
        clash = repeats & ~is_empty[1:] & (chunks.values[1:] != chunks.values[:-1]).any(axis=1)
        if clash.any():
            (number, offsets, sizes), (_, _, others) = (self._box(chunks, int(clash.argmax()) + i) for i in (0, 1))
            _refuse(f"two chunks start at offsets {offsets}, with the sizes {sizes} and {others}", self._where(number))
        return chunks.taken(np.flatnonzero(np.append(True, ~repeats)))

    def _check_same_places(self, chunks: _Boxes, entries: _Boxes) -> None:
        """Raises CheckpointError unless sorted chunks and sorted entries start at the same places."""
        if np.array_equal(chunks.tensors, entries.tensors) and np.array_equal(chunks.offsets, entries.offsets):
            return
        if (repeats := entries.repeats()).any():
            number, offsets, _ = self._box(entries, int(repeats.argmax()))
            _refuse(f"two entries hold the offsets {offsets}", self._where(number))
        both = min(len(chunks.tensors), len(entries.tensors))
        differ = (chunks.tensors[:both] != entries.tensors[:both]) | (chunks.offsets[:both] != entries.offsets[:both]).any(axis=1)
        row = int(differ.argmax()) if differ.any() else both
        chunk, entry = (self._box(boxes, row) if row < len(boxes.tensors) else None for boxes in (chunks, entries))
        # The smaller one of the first two that differ has no partner.
        if chunk is not None and (entry is None or chunk[:2] < entry[:2]):
            number, offsets, sizes = chunk
            _refuse(
                f"the chunk at offsets {offsets}, sizes {sizes}, is in no file",
                self._where(number),
                why="The metadata lists it without a file, so a part of the tensor would be left unset",
                do="Get the .metadata again from where the checkpoint was written",
            )
        if entry is not None:
            self.refuse_entry(self._names[entry[0]], entry[1])

    def _box(self, boxes: _Boxes, row: int) -> _Row:
        """The tensor of a box, its offsets, and as many of its values."""
        number = int(boxes.tensors[row])
        ndim = len(self._shapes[number])
        return number, tuple(boxes.offsets[row, :ndim].tolist()), tuple(boxes.values[row, :ndim].tolist())


def _objects(runs: list[Run], step: int) -> _Integers:
    """The numbers of every `step`-th object of some runs."""
    numbers = [np.arange(run.first, run.first + run.count, step, dtype=np.int32) for run in runs]
    return np.concatenate(numbers) if numbers else np.zeros(0, np.int32)


def _filled(columns: _Integers, rows: list[tuple[int, ...]], width: int) -> Numbers:
    """[n, width]: the columns, and below them the rows; each with zeros at its end."""
    result = np.zeros((len(columns) + len(rows), width), np.int64)
    used = min(width, columns.shape[1])
    result[: len(columns), :used] = columns[:, :used]
    if rows and width:
        result[len(columns) :] = [row + (0,) * (width - len(row)) for row in rows]
    return result


def _sorted(chunks: Chunks) -> Chunks:
    """The chunks sorted by offsets, then sizes, then file."""
    axes = range(chunks.offsets.shape[1])
    keys = [chunks.offsets[:, axis] for axis in axes] + [chunks.sizes[:, axis] for axis in axes] + [chunks.files]
    order = np.lexsort(keys[::-1])
    return Chunks(chunks.offsets[order], chunks.sizes[order], chunks.files[order], chunks.entry_offsets[order], chunks.entry_nbytes[order])


def _dtype(item: Inert, where: str) -> DType:
    """The element type: the first value if the properties are a tuple, or the value called dtype."""
    properties = item.get("properties")
    state = properties.state if isinstance(properties, Inert) else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    name = dtype if isinstance(dtype, str) else getattr(dtype, "class_name", None)
    if not isinstance(name, str):
        _refuse(f"its element type is {shown(dtype)}, not a dtype of torch", where)
    return from_torch(name, where=where)


def _planner(data: Any, where: str) -> dict[str, tuple[str | int, ...]] | None:
    if not isinstance(data, dict):
        return None
    for fqn, keys in data.items():
        if type(fqn) is not str or not isinstance(keys, tuple | list) or not all(type(key) in (str, int) for key in keys):
            _refuse(f"the planner's path of {shown(fqn)} is {shown(keys)}, not a tuple of keys", where)
    return {fqn: tuple(keys) for fqn, keys in data.items()}


def _merged(items: list[TensorItem]) -> TensorItem:
    first = items[0]
    for item in items[1:]:
        if (item.dtype, item.shape, item.transforms) != (first.dtype, first.shape, first.transforms):
            _refuse(
                f"the metadata of one rank says {first.dtype} {first.shape} {first.transforms or ''}, "
                f"that of another rank {item.dtype} {item.shape} {item.transforms or ''}".rstrip(),
                first.fqn,
                why="So the files come from different saves",
            )
    if len(items) == 1:
        return first
    columns = (np.concatenate([getattr(item.chunks, field.name) for item in items]) for field in fields(Chunks))
    return replace(first, chunks=_sorted(Chunks(*columns)))


def _attribute(root: Any, name: str, where: str) -> dict[Any, Any]:
    value = root.get(name) if isinstance(root, Inert) else None
    if not isinstance(value, dict):
        _refuse(
            f"this is not the metadata of torch.distributed.checkpoint: it holds {shown(root)}, and its {name} is {shown(value)}", where
        )
    return value


def _are_counts(values: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether a value is a tuple of non-negative integers below 2**62. True and False are not integers."""
    return type(values) is tuple and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _refuse(what: str, where: str, *, why: str | None = None, do: str | None = "Get the .metadata again") -> NoReturn:
    raise CheckpointError(what, where=where, why=why, do=do)
