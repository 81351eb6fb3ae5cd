"""Distributed checkpoints of the old backend zarr: a folder per tensor, its boxes as raw files.

    <key>/.zarray        {"zarr_format": 2, "shape", "chunks", "dtype", "order": "C", "compressor": null, "filters": null, ...}
    <key>/i.j.k          the box of that number along each axis, row-major; all files of a tensor have the same length
    <key>/shard_*.pt     an object

Megatron-Core wrote it up to 2025, and read it up to 0.15. Measured on 0.12.3 (fixtures/megatron_versions); the layout is that of zarr's
format 2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.adapter.dcp_reader import DcpFolder
from reshard.containers import torch_zip
from reshard.containers.dcp_metadata import BytesItem, Chunks, DcpMetadata, TensorItem
from reshard.errors import CheckpointError
from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.extents import Extent
from reshard.index.index import StoredFile
from reshard.index.shards import PieceTable, Shards
from reshard.storage.files import Files, read_whole
from reshard.storage.json_input import parsed

_DTYPES = {"<f4": "float32", "<f2": "float16", "<f8": "float64", "<i8": "int64", "<i4": "int32", "|u1": "uint8", "bfloat16": "bfloat16"}
_HEADER, _LIMIT = ".zarray", 1 << 20


class ZarrFolder:
    """A folder of zarr arrays, with the methods of a `DcpFolder`.

    Raises: CheckpointError if an array is not raw and row-major, or if a file has another length than a box.
    """

    def __init__(self, files: Files, prefix: str) -> None:
        self._files, self.prefix = files, prefix
        self._arrays: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}
        tensors: dict[str, TensorItem] = {}
        objects: dict[str, BytesItem] = {}
        for folder in (path for path in files.list(prefix) if path.endswith("/")):
            key, listing = folder.removeprefix(prefix).rstrip("/"), files.list(folder)
            if folder + _HEADER in listing:
                tensors[key], paths, box_shape = _read_array(files, key, folder, listing)
                self._arrays[key] = paths, box_shape
            for path in (path for path in listing if path.endswith(".pt")):
                name = f"{key}/{path.removeprefix(folder).removesuffix('.pt')}"
                objects[name] = BytesItem(name, path.removeprefix(prefix), 0, files.size(path) or 0)
        self.metadata = DcpMetadata(tensors, objects, (), None, None)
        self.files = tuple(StoredFile(path, files.size(path) or 0) for paths, _ in self._arrays.values() for path in paths)

    def shards(self, item: TensorItem) -> Shards:
        """The stored boxes of a tensor."""
        paths, box_shape = self._arrays[item.fqn]
        chunks, strides, dtype = item.chunks, row_major(box_shape), item.dtype
        return Shards(
            PieceTable(
                paths, chunks.offsets, chunks.sizes, chunks.files, chunks.entry_offsets, lambda i: Extent(paths[i], 0, strides, dtype)
            )
        )

    def value(self, item: BytesItem) -> Any:
        """An object, as an inert unpickler reads it."""
        return torch_zip.read(self._files, self.prefix + item.path)


StoredFolder = DcpFolder | ZarrFolder
"""The folder of a distributed save, whatever its backend."""


def _read_array(files: Files, key: str, folder: str, listing: Sequence[str]) -> tuple[TensorItem, tuple[str, ...], tuple[int, ...]]:
    """(element type, shape and boxes; the file of each box; the shape of every file) of an array. Boxes at the end of an axis fill their
    file only in part."""
    where = folder + _HEADER
    shape, box_shape, dtype = _parse_header(read_whole(files, where, limit=_LIMIT), where)
    name = re.compile(r"\.".join(r"(\d{1,9})" for _ in shape) if shape else "0")
    numbered = [(path, match.groups()) for path in listing if (match := name.fullmatch(path.removeprefix(folder)))]
    paths, count = tuple(path for path, _ in numbered), len(numbered)
    nbytes = int(np.prod(box_shape, dtype=object)) * dtype.itemsize
    for path in paths:
        if files.size(path) != nbytes:
            raise CheckpointError(
                f"it has {files.size(path):,} bytes, a box has {nbytes:,}",
                where=path,
                why="The file was cut short, or belongs to another save",
                do="Copy it from where the checkpoint was written",
            )
    box_sizes = np.array(box_shape, np.int64)
    offsets = np.array([list(map(int, numbers)) for _, numbers in numbered], np.int64).reshape(count, len(shape)) * box_sizes
    sizes = np.minimum(offsets + box_sizes, np.array(shape, np.int64)) - offsets
    zeros = np.zeros(count, np.int64)
    chunks = Chunks(offsets, sizes, np.arange(count, dtype=np.int32), zeros, zeros + nbytes)
    return TensorItem(key, dtype, shape, chunks), paths, box_shape


def _parse_header(data: bytes, where: str) -> tuple[tuple[int, ...], tuple[int, ...], DType]:
    """Shape of the tensor, shape of a box, element type. Raises CheckpointError for anything but raw boxes in row-major order."""
    try:
        header = parsed(data)
        shape, box_shape, dtype = tuple(header["shape"]), tuple(header["chunks"]), header["dtype"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"it does not describe an array: {error!r}", where=where, do="Copy the file again") from None
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in shape + box_shape) or 0 in box_shape:
        raise CheckpointError(f"it claims the shape {shape} in boxes of {box_shape}", where=where)
    if len(shape) != len(box_shape):
        raise CheckpointError(f"the shape {shape} and the boxes {box_shape} have different numbers of axes", where=where)
    if header.get("zarr_format") != 2 or header.get("order") != "C" or header.get("compressor") or header.get("filters"):
        raise CheckpointError(
            f"its boxes are not raw: {', '.join(f'{key} {header.get(key)!r}' for key in ('order', 'compressor', 'filters'))}",
            where=where,
            why="Megatron-Core writes raw row-major boxes in zarr's format 2",
            do="Convert it to torch_dist with the Megatron-Core that wrote it",
        )
    if str(dtype) not in _DTYPES:
        raise CheckpointError(f"its element type is {dtype!r}, known are {', '.join(_DTYPES)}", where=where)
    return shape, box_shape, from_torch(_DTYPES[str(dtype)], where=where)
