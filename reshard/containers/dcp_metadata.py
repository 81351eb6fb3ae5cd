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

from collections.abc import Callable, Iterable, Sequence
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

Numbers = npt.NDArray[np.int64]

_CHUNK, _INDEX, _INFO = "ChunkStorageMetadata", "MetadataIndex", "_StorageInfo"


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
    with suppress(NotColumnsError):
        root, objects = load_objects(content, _CHUNK, (_INDEX, _INFO), where=where)
        return _of_objects(root, objects, where)
    return _of_values(load(content(), where=where), where)


def _of_values(root: Any, where: str) -> DcpMetadata:
    """The content of a .metadata file whose objects are values."""
    items = _attribute(root, "state_dict_metadata", where)
    entries, paths = _entries(_attribute(root, "storage_data", where), where)
    tensors: dict[str, TensorItem] = {}
    objects: dict[str, BytesItem] = {}
    for fqn, item in items.items():
        if type(fqn) is not str or not isinstance(item, Inert):
            _refuse(f"the metadata lists {shown(fqn)} as {shown(item)}", where)
        if item.class_name.endswith(".TensorStorageMetadata"):
            tensors[fqn] = _tensor(fqn, item, entries, f"{where}: {fqn}")
        elif item.class_name.endswith(".BytesStorageMetadata"):
            objects[fqn] = _object(fqn, entries, paths, f"{where}: {fqn}")
        else:
            _refuse(f"it is stored as {item.class_name}, expected a tensor or bytes", f"{where}: {fqn}")
    for fqn, left in entries.items():
        for offsets in left:
            at = f" at offsets {offsets}" if offsets is not None else ""
            _refuse(
                f"the metadata names the file of {fqn}{at}, but lists no such {'chunk' if offsets is not None else 'object'}",
                where,
                why="So this metadata was not written together with these files",
            )
    version = root.get("version")
    planner = _planner(root.get("planner_data"), where)
    return DcpMetadata(tensors, objects, tuple(paths), planner, version if isinstance(version, str) else None)


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


# ---- objects as columns ----


@value(eq=False)
class _Boxes:
    """Chunks, or entries, of several tensors."""

    tensors: Numbers
    """[n]: the number of the tensor."""
    axes: Numbers
    """[n]: the number of axes of the offsets."""
    offsets: Numbers
    """[n, axes]: where each box starts."""
    values: Numbers
    """[n, any]: of a chunk, its sizes; of an entry, its file, its byte offset and its length."""


def _of_objects(root: Any, objects: ObjectTable, where: str) -> DcpMetadata:
    """The content of a .metadata file whose chunks and entries are columns.

    Raises: NotColumnsError if anything needs a closer look: then `_of_values` says what is wrong, or takes it as it is.
    """
    items, storage = _attribute(root, "state_dict_metadata", where), _attribute(root, "storage_data", where)
    if not all(type(fqn) is str and isinstance(item, Inert) for fqn, item in items.items()):
        raise NotColumnsError
    heads = {fqn: item for fqn, item in items.items() if item.class_name.endswith(".TensorStorageMetadata")}
    numbers = {fqn: number for number, fqn in enumerate(heads)}
    shapes = [item.get("size") for item in heads.values()]
    if not all(_are_counts(shape) for shape in shapes):
        raise NotColumnsError
    chunks = _chunk_boxes([item.get("chunks") for item in heads.values()], objects)
    paths: dict[str, int] = {}
    entries, of_values = _entry_boxes(storage, numbers, paths, objects)
    objects.clear()
    tensors = _paired(chunks, entries, shapes)
    del chunks, entries
    found: dict[str, TensorItem] = {}
    for (fqn, item), shape, of_tensor in zip(heads.items(), shapes, tensors, strict=True):
        found[fqn] = TensorItem(fqn, _dtype(item, f"{where}: {fqn}"), shape, of_tensor)
    entries_of_objects, listed = _entries(of_values, where)
    for path in listed:
        _file_number(paths, path)
    found_objects = {}
    for fqn, item in items.items():
        if fqn in heads:
            continue
        entry = entries_of_objects.get(fqn, {}).get(None)
        if not item.class_name.endswith(".BytesStorageMetadata") or entry is None:
            raise NotColumnsError
        found_objects[fqn] = BytesItem(fqn, listed[entry[0]], entry[1], entry[2], entry[3])
    if len(entries_of_objects) > len(found_objects) or any(len(of_fqn) > 1 for of_fqn in entries_of_objects.values()):
        raise NotColumnsError
    version, planner = root.get("version"), _planner(root.get("planner_data"), where)
    return DcpMetadata(found, found_objects, tuple(paths), planner, version if isinstance(version, str) else None)


def _chunk_boxes(listed: list[Any], objects: ObjectTable) -> _Boxes:
    """The chunks of all tensors. listed: the list of each tensor's chunks: Inerts and runs."""
    runs, of_runs, rows = [], [], []
    for number, chunks in enumerate(listed):
        if not isinstance(chunks, list):
            raise NotColumnsError
        for chunk in chunks:
            if isinstance(chunk, Run):
                runs.append(np.arange(chunk.first, chunk.first + chunk.count, dtype=np.int32))
                of_runs.append(np.full(chunk.count, number, np.int32))
            elif isinstance(chunk, Inert) and _are_counts(offsets := chunk.get("offsets")) and _are_counts(sizes := chunk.get("sizes")):
                rows.append((number, offsets, sizes))
            else:
                raise NotColumnsError
    numbers, of_rows = _joined(runs), _joined(of_runs)
    axes, offsets_of_runs = objects.sizes(numbers, "offsets")
    axes_of_sizes, sizes_of_runs = objects.sizes(numbers, "sizes")
    if not np.array_equal(axes, axes_of_sizes) or any(len(offsets) != len(sizes) for _, offsets, sizes in rows):
        raise NotColumnsError
    inert = _boxes_of_rows(rows, offsets_of_runs.shape[1], offsets_of_runs.shape[1])
    return _Boxes(
        np.concatenate([of_rows, inert.tensors]),
        np.concatenate([axes, inert.axes]),
        np.concatenate([offsets_of_runs, inert.offsets]),
        np.concatenate([sizes_of_runs, inert.values]),
    )


def _entry_boxes(
    storage: dict[Any, Any], numbers: dict[str, int], paths: dict[str, int], objects: ObjectTable
) -> tuple[_Boxes, dict[Any, Any]]:
    """The entries of tensors, and the items of `storage` that are entries of other objects. Numbers the files in `paths`."""
    runs, rows, others = [], [], {}
    for index, info in storage.items():
        if isinstance(index, Run):
            runs.append(np.arange(index.first, index.first + index.count, 2, dtype=np.int32))
            continue
        if not isinstance(index, Inert) or not isinstance(info, Inert):
            raise NotColumnsError
        fqn, offsets = index.get("fqn"), index.get("offset")
        if offsets is None:
            others[index] = info
            continue
        path, start, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        is_plain = type(path) is str and _are_counts(offsets) and _are_counts((start, nbytes)) and not info.get("transform_descriptors")
        if not is_plain or type(fqn) is not str or fqn not in numbers:
            raise NotColumnsError
        rows.append((numbers[fqn], offsets, (_file_number(paths, path), start, nbytes)))
    keys = _joined(runs)
    values = keys + 1
    if objects.has(values, "transform_descriptors"):
        raise NotColumnsError
    tensors = np.full(len(objects.texts), -1, np.int32)
    known = [(i, numbers[text]) for i, text in enumerate(objects.texts) if text in numbers]
    if known:
        tensors[[i for i, _ in known]] = [number for _, number in known]
    of_runs = tensors[objects.text_numbers(keys, "fqn")]
    texts = objects.text_numbers(values, "relative_path")
    files = np.full(len(objects.texts), -1, np.int32)
    for text in distinct(texts).tolist():
        files[text] = _file_number(paths, objects.texts[text])
    if (of_runs < 0).any():
        raise NotColumnsError
    axes, offsets_of_runs = objects.sizes(keys, "offset")
    columns: list[Any] = [files[texts], objects.numbers(values, "offset"), objects.numbers(values, "length")]
    inert = _boxes_of_rows(rows, offsets_of_runs.shape[1], 3)
    return _Boxes(
        np.concatenate([of_runs, inert.tensors]),
        np.concatenate([axes, inert.axes]),
        np.concatenate([offsets_of_runs, inert.offsets]),
        np.concatenate([np.stack(columns, axis=1), inert.values]),
    ), others


def _file_number(paths: dict[str, int], path: str) -> int:
    number = paths.get(path)
    if number is not None:
        return number
    try:
        return paths.setdefault(inside(path, where=path), len(paths))
    except CheckpointError:
        raise NotColumnsError from None


def _boxes_of_rows(rows: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]], axes: int, width: int) -> _Boxes:
    """(tensor, offsets, values) as columns: the offsets of `axes` axes, `width` values."""
    if any(len(offsets) > axes for _, offsets, _ in rows):
        raise NotColumnsError
    table = [(number, len(offsets), *_filled(offsets, axes), *_filled(values, width)) for number, offsets, values in rows]
    columns = np.array(table, np.int64).reshape(len(rows), 2 + axes + width)
    return _Boxes(columns[:, 0].astype(np.int32), columns[:, 1].astype(np.int32), columns[:, 2 : 2 + axes], columns[:, 2 + axes :])


def _filled(values: tuple[int, ...], length: int) -> tuple[int, ...]:
    return values + (0,) * (length - len(values))


def _joined(columns: list[Any]) -> Numbers:
    return np.concatenate(columns) if columns else np.zeros(0, np.int32)


def _paired(chunks: _Boxes, entries: _Boxes, shapes: list[tuple[int, ...]]) -> list[Chunks]:
    """The chunks of each tensor with their entries. Raises NotColumnsError unless they belong together one by one."""
    if len(chunks.tensors) != len(entries.tensors):
        raise NotColumnsError
    chunk_order, entry_order = (np.lexsort((*boxes.offsets.T[::-1], boxes.tensors)) for boxes in (chunks, entries))
    tensors = chunks.tensors[chunk_order]
    offsets, sizes = chunks.offsets[chunk_order], chunks.values[chunk_order]
    is_same = (
        np.array_equal(tensors, entries.tensors[entry_order])
        and np.array_equal(offsets, entries.offsets[entry_order])
        and np.array_equal(chunks.axes[chunk_order], entries.axes[entry_order])
    )
    if not is_same:
        raise NotColumnsError
    repeats = (tensors[1:] == tensors[:-1]) & (offsets[1:] == offsets[:-1]).all(axis=1)
    axes = offsets.shape[1]
    whole = np.array([_filled(shape, axes) if len(shape) <= axes else (-1,) * axes for shape in shapes], np.int64).reshape(
        len(shapes), axes
    )
    dimensions = np.array([len(shape) for shape in shapes], np.int64)
    if repeats.any() or (chunks.axes[chunk_order] != dimensions[tensors]).any() or (offsets > whole[tensors] - sizes).any():
        raise NotColumnsError
    of_entries = entries.values[entry_order]
    files = of_entries[:, 0].astype(np.int32)
    bounds = np.searchsorted(tensors, np.arange(len(shapes) + 1))
    found = []
    for shape, start, stop in zip(shapes, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows, ndim = slice(start, stop), len(shape)
        found.append(Chunks(offsets[rows, :ndim], sizes[rows, :ndim], files[rows], of_entries[rows, 1], of_entries[rows, 2]))
    return found


# ---- objects as values ----

# The content of storage_data: fqn -> offsets (None: an object) -> (file number, byte offset, length, transforms).
_Entry = tuple[int, int, int, tuple[str, ...]]
_Entries = dict[str, dict[tuple[int, ...] | None, _Entry]]


def _entries(storage_data: dict[Any, Any], where: str) -> tuple[_Entries, list[str]]:
    """The entries by fqn and offsets, and the files by number. Empties `storage_data`."""
    entries: _Entries = {}
    paths: dict[str, int] = {}
    transforms: dict[tuple[str, ...], tuple[str, ...]] = {(): ()}
    while storage_data:  # the Inerts are released one by one: a large checkpoint has a million of them
        index, info = storage_data.popitem()
        if not isinstance(index, Inert) or not isinstance(info, Inert):
            _refuse(f"the metadata's storage_data maps {shown(index)} to {shown(info)}", where)
        fqn, offsets = index.get("fqn"), index.get("offset")
        path, start, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        if type(fqn) is not str or not (offsets is None or _are_counts(offsets)):
            _refuse(f"the metadata names the file of {shown(fqn)} at offsets {shown(offsets)}", where)
        if type(path) is not str or not _are_counts((start, nbytes)):
            _refuse(
                f"the entry at offsets {offsets} should be a byte range of a file, "
                f"it is {shown(start)} + {shown(nbytes)} bytes of {shown(path)}",
                f"{where}: {fqn}",
            )
        number = paths.get(path)
        if number is None:
            number = paths[inside(path, where=f"{where}: {fqn}")] = len(paths)
        names = info.get("transform_descriptors") or ()
        if names and not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
            _refuse(f"the entry at offsets {offsets} has the transforms {shown(names)}, which are not names", f"{where}: {fqn}")
        descriptors = tuple(names)
        by_offsets = entries.setdefault(fqn, {})
        if offsets in by_offsets:
            _refuse(f"two entries hold the offsets {offsets}", f"{where}: {fqn}")
        by_offsets[offsets] = (number, start, nbytes, transforms.setdefault(descriptors, descriptors))
    return entries, list(paths)


def _tensor(fqn: str, item: Inert, entries: _Entries, where: str) -> TensorItem:
    """One tensor with its chunks. The entries of the chunks are removed from `entries`."""
    shape = item.get("size")
    if not _are_counts(shape):
        _refuse(f"its size is {shown(shape)}", where)
    listed = item.get("chunks")
    if not isinstance(listed, list):
        _refuse(f"its chunks are {shown(listed)}, not a list", where)
    boxes = _boxes(listed, where)
    by_offsets = entries.get(fqn, {})
    rows = []
    for offsets in boxes:
        if (entry := by_offsets.pop(offsets, None)) is None:
            _refuse(
                f"the chunk at offsets {offsets}, sizes {boxes[offsets]}, is in no file",
                where,
                why="The metadata lists it without a file, so a part of the tensor would be left unset",
                do="Get the .metadata again from where the checkpoint was written",
            )
        rows.append(entry)
    transforms = {entry[3] for entry in rows}
    if len(transforms) > 1:
        _refuse(f"its entries have different transforms: {sorted(transforms)}", where)
    chunks = _columns(boxes, rows, shape, where)
    return TensorItem(fqn, _dtype(item, where), shape, chunks, transforms.pop() if transforms else ())


def _boxes(listed: list[Any], where: str) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The sizes of every chunk by its offsets.

    Ranks that hold no element write empty chunks, all at the same offsets and with one entry for all of them (FSDP2, torch 2.13). If one of
    the chunks at these offsets is not empty, the entry belongs to it.
    """
    boxes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for chunk in listed:
        offsets, sizes = (chunk.get("offsets"), chunk.get("sizes")) if isinstance(chunk, Inert) else (None, None)
        if not _are_counts(offsets) or not _are_counts(sizes):
            _refuse(f"a chunk is {shown(chunk)} with offsets {shown(offsets)}, sizes {shown(sizes)}", where)
        earlier = boxes.setdefault(offsets, sizes)
        if earlier != sizes and 0 not in sizes:
            if 0 not in earlier:
                _refuse(f"two chunks start at offsets {offsets}, with the sizes {earlier} and {sizes}", where)
            boxes[offsets] = sizes
    return boxes


def _columns(boxes: dict[tuple[int, ...], tuple[int, ...]], rows: list[_Entry], shape: tuple[int, ...], where: str) -> Chunks:
    """The chunks of one tensor. rows: the entry of each box, in the order of `boxes`."""
    offsets, sizes = _table(boxes, len(shape), "offsets", where), _table(boxes.values(), len(shape), "sizes", where)
    outside = (offsets > np.array(shape, np.int64) - sizes).any(axis=1)
    if outside.any():
        row = int(outside.argmax())
        _refuse(
            f"the chunk at offsets {tuple(offsets[row].tolist())}, sizes {tuple(sizes[row].tolist())}, "
            f"is not inside the tensor, which has the shape {shape}",
            where,
        )
    files, starts, lengths, _ = zip(*rows, strict=True) if rows else ((), (), (), ())
    return _sorted(Chunks(offsets, sizes, np.array(files, np.int32), np.array(starts, np.int64), np.array(lengths, np.int64)))


def _table(rows: Iterable[tuple[int, ...]], ndim: int, what: str, where: str) -> Numbers:
    """Rows of `ndim` numbers each as an array [n, ndim]."""
    rows = list(rows)
    for row in rows:
        if len(row) != ndim:
            _refuse(f"a chunk has the {what} {row}, the tensor has {ndim} axes", where)
    return np.array(rows, np.int64).reshape(len(rows), ndim)


def _sorted(chunks: Chunks) -> Chunks:
    """The chunks sorted by offsets, then sizes, then file."""
    axes = range(chunks.offsets.shape[1])
    keys = [chunks.offsets[:, axis] for axis in axes] + [chunks.sizes[:, axis] for axis in axes] + [chunks.files]
    order = np.lexsort(keys[::-1])
    return Chunks(chunks.offsets[order], chunks.sizes[order], chunks.files[order], chunks.entry_offsets[order], chunks.entry_nbytes[order])


def _object(fqn: str, entries: _Entries, paths: list[str], where: str) -> BytesItem:
    entry = entries.get(fqn, {}).pop(None, None)
    if entry is None:
        _refuse("the object is in no file: the metadata lists it without one", where)
    number, start, nbytes, transforms = entry
    return BytesItem(fqn, paths[number], start, nbytes, transforms)


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
