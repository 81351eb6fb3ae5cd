"""Distributed checkpoints of the old backend zarr: a folder per tensor, its chunks raw files.

    <key>/.zarray        {"zarr_format": 2, "shape", "chunks", "dtype", "order": "C", "compressor": null, "filters": null, ...}
    <key>/i.j.k          the chunk of that number along each axis, row-major; one at the end is as long as any other
    <key>/shard_*.pt     an object

Read up to Megatron-Core 0.15, written up to 2025. Measured on 0.12.3 (fixtures/megatron_versions); the layout is that of zarr's format 2.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
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
from reshard.index.shards import Shards
from reshard.storage.files import Files, read_whole

_DTYPES = {"<f4": "float32", "<f2": "float16", "<f8": "float64", "<i8": "int64", "<i4": "int32", "|u1": "uint8", "bfloat16": "bfloat16"}
_HEADER, _LIMIT = ".zarray", 1 << 20


class ZarrFolder:
    """Such a folder with the surface of a `DcpFolder`."""

    def __init__(self, files: Files, prefix: str) -> None:
        self._tree, self.prefix = files, prefix
        self._paths: dict[str, tuple[str, ...]] = {}
        self._chunk_shapes: dict[str, tuple[int, ...]] = {}

    @cached_property
    def metadata(self) -> DcpMetadata:
        tensors: dict[str, TensorItem] = {}
        objects: dict[str, BytesItem] = {}
        for folder in self._tree.list(self.prefix):
            if not folder.endswith("/"):
                continue
            key, listing = folder.removeprefix(self.prefix).rstrip("/"), self._tree.list(folder)
            if folder + _HEADER in listing:
                tensors[key] = self._tensor(key, folder, listing)
            for path in listing:
                if path.endswith(".pt"):
                    name = f"{key}/{path.removeprefix(folder).removesuffix('.pt')}"
                    objects[name] = BytesItem(name, path.removeprefix(self.prefix), 0, self._tree.size(path) or 0)
        return DcpMetadata(tensors, objects, (), None, None)

    @property
    def files(self) -> tuple[StoredFile, ...]:
        paths = [path for key in self.metadata.tensors for path in self._paths[key]]
        return tuple(StoredFile(path, self._tree.size(path) or 0) for path in paths)

    def shards(self, item: TensorItem) -> Shards:
        paths, strides, dtype = self._paths[item.fqn], row_major(self._chunk_shapes[item.fqn]), item.dtype
        count = len(paths)
        return Shards(
            paths,
            item.chunks.offsets,
            item.chunks.sizes,
            np.arange(count),
            np.zeros(count, np.int64),
            lambda i: Extent(paths[i], 0, strides, dtype),
        )

    def value(self, item: BytesItem) -> Any:
        return torch_zip.read(self._tree, self.prefix + item.path)

    def _tensor(self, key: str, folder: str, listing: tuple[str, ...]) -> TensorItem:
        where = folder + _HEADER
        shape, chunk, dtype = _header(read_whole(self._tree, where, limit=_LIMIT), where)
        name = re.compile(r"\.".join(r"(\d{1,9})" for _ in shape) if shape else "0")
        found = [(path, match) for path in listing if (match := name.fullmatch(path.removeprefix(folder)))]
        nbytes = int(np.prod(chunk, dtype=np.int64)) * dtype.itemsize
        numbers = np.array([[int(group) for group in match.groups()] for _, match in found], np.int64).reshape(len(found), len(shape))
        offsets = numbers * np.array(chunk, np.int64)
        sizes = np.minimum(offsets + np.array(chunk, np.int64), np.array(shape, np.int64)) - offsets
        for path, _ in found:
            if self._tree.size(path) != nbytes:
                raise CheckpointError(
                    f"it has {self._tree.size(path):,} bytes, a chunk has {nbytes:,}",
                    where=path,
                    why="The file was cut short, or is of another save",
                    do="Copy it from where the checkpoint was written",
                )
        self._paths[key], self._chunk_shapes[key] = tuple(path for path, _ in found), chunk
        zeros = np.zeros(len(found), np.int64)
        return TensorItem(key, dtype, shape, Chunks(offsets, sizes, np.arange(len(found), dtype=np.int32), zeros, zeros + nbytes))


Stored = DcpFolder | ZarrFolder


def _header(data: bytes, where: str) -> tuple[tuple[int, ...], tuple[int, ...], DType]:
    """Shape of the tensor, shape of a chunk, element type. Raises CheckpointError for anything but raw chunks in row-major order."""
    try:
        said = json.loads(data)
        shape, chunk, kind = tuple(said["shape"]), tuple(said["chunks"]), said["dtype"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"it does not describe an array: {error!r}", where=where, do="Copy the file again") from None
    if not all(type(size) is int and size >= 0 for size in shape) or not all(type(size) is int and size > 0 for size in chunk):
        raise CheckpointError(f"it claims the shape {shape} in chunks of {chunk}", where=where)
    if len(shape) != len(chunk):
        raise CheckpointError(f"the shape {shape} and the chunks {chunk} have different numbers of axes", where=where)
    if said.get("zarr_format") != 2 or said.get("order") != "C" or said.get("compressor") or said.get("filters"):
        raise CheckpointError(
            f"its chunks are not plain: {', '.join(f'{key} {said.get(key)!r}' for key in ('order', 'compressor', 'filters'))}",
            where=where,
            why="Megatron-Core writes raw row-major chunks in zarr's format 2",
            do="Convert it to torch_dist with the Megatron-Core that wrote it",
        )
    if str(kind) not in _DTYPES:
        raise CheckpointError(f"its element type is {kind!r}, known are {', '.join(_DTYPES)}", where=where)
    return shape, chunk, from_torch(_DTYPES[str(kind)], where=where)
