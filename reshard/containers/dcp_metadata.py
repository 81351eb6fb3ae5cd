"""The .metadata file of torch.distributed.checkpoint (DCP), as columns.

A checkpoint is a folder of `__<rank>_<i>.distcp` files, each many torch.save zips (entries) end to end, and one pickle that says
which entry holds what:

    Metadata
      state_dict_metadata: {fqn: TensorStorageMetadata{properties, size, chunks: [{offsets, sizes}]} | BytesStorageMetadata}
      storage_data:        {MetadataIndex{fqn, offset}: _StorageInfo{relative_path, offset, length[, transform_descriptors]}}
      planner_data:        {flat fqn: (key, key or list index, ...)}; absent or None in some writers

A chunk and its entry belong together by (fqn, offsets). `parse` checks that each has the other: this is how a missing box shows.
Whether the chunks of a tensor cover it is not asked here. Measured on torch 2.13, sources of 2.2..2.9: storage_meta, version,
planner_data and transform_descriptors may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeGuard

import numpy as np
import numpy.typing as npt

from reshard.containers.inert_pickle import Inert, load, shown
from reshard.errors import CheckpointError
from reshard.geometry.dtypes import DType, from_torch
from reshard.storage.files import inside

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunks:
    """The stored boxes of one tensor, sorted by offsets: row i is offsets[i], sizes[i] ([n, ndim]), and lies in file
    number files[i] at byte entry_offsets[i], entry_nbytes[i] long. Several rows with the same box are replicas."""

    offsets: Numbers
    sizes: Numbers
    files: npt.NDArray[np.int32]
    entry_offsets: Numbers
    entry_nbytes: Numbers

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor: its global shape, its chunks, and the transforms that every entry went through, in the order they were listed."""

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: Chunks
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BytesItem:
    """An object that is no tensor: the entry that holds its torch.save file."""

    fqn: str
    path: str
    entry_offset: int
    entry_nbytes: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a .metadata says. `paths` are the files that chunks number, relative to the folder; `planner` maps flat names to
    the path of keys they were flattened from, None if the writer did not say."""

    tensors: dict[str, TensorItem]
    objects: dict[str, BytesItem]
    paths: tuple[str, ...]
    planner: dict[str, tuple[str | int, ...]] | None
    version: str | None


def parse(data: bytes, *, where: str) -> DcpMetadata:
    """The content of a .metadata file, checked: every chunk lies in its tensor and has an entry, every entry has a chunk,
    and files stay inside the checkpoint.

    Raises: CheckpointError, naming the tensor and the offsets.
    """
    root = load(data, where=where)
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
            _refuse(f"it is stored as {item.class_name}, known are tensors and bytes", f"{where}: {fqn}")
    for fqn, left in entries.items():
        for offsets in left:
            at = f" at offsets {offsets}" if offsets is not None else ""
            _refuse(
                f"the metadata gives a place in the files to {fqn}{at}, but lists no such {'chunk' if offsets is not None else 'object'}",
                where,
                why="So the metadata is not the one that was written with these files",
            )
    version = root.get("version")
    planner = _planner(root.get("planner_data"), where)
    return DcpMetadata(tensors, objects, tuple(paths), planner, version if isinstance(version, str) else None)


def merge(parts: Sequence[DcpMetadata]) -> DcpMetadata:
    """One metadata from several, each of which lists the whole tensors but only its own rank's chunks
    (`__<rank>.metadata`, written with use_collectives=False).

    A chunk in several parts becomes as many rows. Of an object in several parts the first is taken.
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
    known = any(part.planner is not None for part in parts)
    version = next((part.version for part in parts if part.version), None)
    merged = {fqn: _merged(items) for fqn, items in tensors.items()}
    return DcpMetadata(merged, objects, tuple(paths), planner if known else None, version)


# What is left of storage_data: fqn -> offsets (None: an object) -> (file number, byte offset, length, transforms).
_Entry = tuple[int, int, int, tuple[str, ...]]
_Entries = dict[str, dict[tuple[int, ...] | None, _Entry]]


def _entries(storage_data: dict[Any, Any], where: str) -> tuple[_Entries, list[str]]:
    """The entries by fqn and offsets, and the files they number."""
    entries: _Entries = {}
    paths: dict[str, int] = {}
    transforms: dict[tuple[str, ...], tuple[str, ...]] = {(): ()}
    while storage_data:  # from here on the stand-ins are not needed: a large checkpoint has a million of them
        index, info = storage_data.popitem()
        if not isinstance(index, Inert) or not isinstance(info, Inert):
            _refuse(f"the metadata's storage_data maps {shown(index)} to {shown(info)}", where)
        fqn, offsets = index.get("fqn"), index.get("offset")
        path, start, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        if type(fqn) is not str or not (offsets is None or _are_counts(offsets)):
            _refuse(f"the metadata gives a place to {shown(fqn)} at offsets {shown(offsets)}", where)
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
            _refuse(f"the entry at offsets {offsets} went through {shown(names)}, which are no names", f"{where}: {fqn}")
        descriptors = tuple(names)
        of_tensor = entries.setdefault(fqn, {})
        if offsets in of_tensor:
            _refuse(f"two entries hold the offsets {offsets}", f"{where}: {fqn}")
        of_tensor[offsets] = (number, start, nbytes, transforms.setdefault(descriptors, descriptors))
    return entries, list(paths)


def _tensor(fqn: str, item: Inert, entries: _Entries, where: str) -> TensorItem:
    """One tensor with its chunks' entries, which are taken out of `entries`."""
    shape = item.get("size")
    if not _are_counts(shape):
        _refuse(f"its size is {shown(shape)}", where)
    listed = item.get("chunks")
    if not isinstance(listed, list):
        _refuse(f"its chunks are {shown(listed)}, not a list", where)
    boxes = _boxes(listed, where)
    of_tensor = entries.get(fqn, {})
    rows = []
    for offsets in boxes:
        if (entry := of_tensor.pop(offsets, None)) is None:
            _refuse(
                f"the chunk at offsets {offsets}, sizes {boxes[offsets]}, is in no file",
                where,
                why="The metadata lists it without a place, so a part of the tensor would be left unset",
                do="Get the .metadata again from where the checkpoint was written",
            )
        rows.append(entry)
    transforms = {entry[3] for entry in rows}
    if len(transforms) > 1:
        _refuse(f"its entries went through different transforms: {sorted(transforms)}", where)
    chunks = _columns(boxes, rows, shape, where)
    return TensorItem(fqn, _dtype(item, where), shape, chunks, transforms.pop() if transforms else ())


def _boxes(listed: list[Any], where: str) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The sizes of every chunk by its offsets.

    Ranks that hold nothing write empty chunks, all at the same offsets and with one entry among them (FSDP2, torch 2.13);
    where one of them is not empty, the entry is its.
    """
    boxes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for chunk in listed:
        offsets, sizes = (chunk.get("offsets"), chunk.get("sizes")) if isinstance(chunk, Inert) else (None, None)
        if not _are_counts(offsets) or not _are_counts(sizes):
            _refuse(f"a chunk is {shown(chunk)} with offsets {shown(offsets)}, sizes {shown(sizes)}", where)
        known = boxes.setdefault(offsets, sizes)
        if known != sizes and 0 not in sizes:
            if 0 not in known:
                _refuse(f"two chunks start at offsets {offsets}, with the sizes {known} and {sizes}", where)
            boxes[offsets] = sizes
    return boxes


def _columns(boxes: dict[tuple[int, ...], tuple[int, ...]], rows: list[_Entry], shape: tuple[int, ...], where: str) -> Chunks:
    offsets, sizes = _table(boxes, len(shape), "offsets", where), _table(boxes.values(), len(shape), "sizes", where)
    outside = (offsets > np.array(shape, np.int64) - sizes).any(axis=1)
    if outside.any():
        row = int(outside.argmax())
        _refuse(
            f"the chunk at offsets {tuple(offsets[row].tolist())}, sizes {tuple(sizes[row].tolist())}, "
            f"is not inside of the tensor, which has the shape {shape}",
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
    """By offsets, then sizes, then file."""
    axes = range(chunks.offsets.shape[1])
    keys = [chunks.offsets[:, axis] for axis in axes] + [chunks.sizes[:, axis] for axis in axes] + [chunks.files]
    order = np.lexsort(keys[::-1])
    return Chunks(chunks.offsets[order], chunks.sizes[order], chunks.files[order], chunks.entry_offsets[order], chunks.entry_nbytes[order])


def _object(fqn: str, entries: _Entries, paths: list[str], where: str) -> BytesItem:
    entry = entries.get(fqn, {}).pop(None, None)
    if entry is None:
        _refuse("the object is in no file: the metadata lists it without a place", where)
    number, start, nbytes, transforms = entry
    return BytesItem(fqn, paths[number], start, nbytes, transforms)


def _dtype(item: Inert, where: str) -> DType:
    """The element type: the first of five properties, or the one called dtype."""
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
                f"one rank's metadata says {first.dtype} {first.shape} {first.transforms or ''}, "
                f"another's {item.dtype} {item.shape} {item.transforms or ''}".rstrip(),
                first.fqn,
                why="So the files come from different saves",
            )
    if len(items) == 1:
        return first
    columns = (np.concatenate([getattr(item.chunks, name) for item in items]) for name in Chunks.__slots__)
    return replace(first, chunks=_sorted(Chunks(*columns)))


def _attribute(root: Any, name: str, where: str) -> dict[Any, Any]:
    found = root.get(name) if isinstance(root, Inert) else None
    if not isinstance(found, dict):
        _refuse(f"this is no metadata of torch.distributed.checkpoint: it holds {shown(root)}, and its {name} is {shown(found)}", where)
    return found


def _are_counts(values: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether it is a tuple of integers from 0 on that fit 62 bits; true and false are none."""
    return type(values) is tuple and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _refuse(what: str, where: str, *, why: str | None = None, do: str | None = "Get the .metadata again") -> NoReturn:
    raise CheckpointError(what, where=where, why=why, do=do)
