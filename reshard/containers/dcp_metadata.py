"""The .metadata of torch.distributed.checkpoint as columns of numbers.

A pickle of `Metadata`: state_dict_metadata {fqn: TensorStorageMetadata | BytesStorageMetadata}, storage_data {MetadataIndex:
_StorageInfo}, planner_data {fqn: path}. Attributes that some versions of torch lack (2.2 to 2.13) are never required.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.containers import inert_pickle
from reshard.dtypes import DType, from_torch
from reshard.errors import CheckpointError
from reshard.files import inside

Columns = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """One row per stored chunk, sorted by offsets. offsets, sizes: [n, ndim]; files: index into paths; entry_*: bytes."""

    offsets: Columns
    sizes: Columns
    files: Columns
    entry_offsets: Columns
    entry_nbytes: Columns


@dataclass(frozen=True, slots=True, eq=False)
class TensorItem:
    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: Chunks
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BytesItem:
    fqn: str
    path: str
    entry_offset: int
    entry_nbytes: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class DcpMetadata:
    tensors: Mapping[str, TensorItem]
    objects: Mapping[str, BytesItem]
    paths: tuple[str, ...]
    planner: Mapping[str, tuple[str | int, ...]] | None
    version: str | None


def parse(data: bytes, *, where: str) -> DcpMetadata:
    return merge_roots([(inert_pickle.load(data, where=where), where)])


def merge(parts: Sequence[tuple[bytes, str]]) -> DcpMetadata:
    """The union of the metadata that ranks wrote without collectives."""
    return merge_roots([(inert_pickle.load(data, where=where), where) for data, where in parts])


def merge_roots(roots: Sequence[tuple[Any, str]]) -> DcpMetadata:
    tensors: dict[str, Any] = {}
    chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    rows: dict[str, list[Any]] = {}
    objects: dict[str, BytesItem] = {}
    paths: dict[str, int] = {}
    planner: dict[str, Any] = {}
    transforms: dict[str, tuple[str, ...]] = {}
    version = None
    for root, where in roots:
        version = version or root.get("version")
        planner.update(root.get("planner_data") or {})
        for fqn, meta in root.get("state_dict_metadata").items():
            if meta.class_name.endswith(".TensorStorageMetadata"):
                tensors[fqn] = meta
                for chunk in meta.get("chunks"):
                    chunks.setdefault(fqn, {})[tuple(chunk.get("offsets"))] = tuple(chunk.get("sizes"))
        for index, info in root.get("storage_data").items():
            fqn, offset, path = index.get("fqn"), index.get("offset"), inside(info.get("relative_path"), where=where)
            entry = (paths.setdefault(path, len(paths)), info.get("offset"), info.get("length"))
            transforms[fqn] = tuple(info.get("transform_descriptors") or ())
            if fqn in tensors:
                if tuple(offset) not in chunks[fqn]:
                    raise CheckpointError(f"a stored chunk at {tuple(offset)} is not in the tensor's list of chunks", where=f"{fqn} in {where}")
                rows.setdefault(fqn, []).append((tuple(offset), *entry))
            else:
                objects[fqn] = BytesItem(fqn, path, entry[1], entry[2], transforms[fqn])
    items = {}
    for fqn, meta in tensors.items():
        shape, found = tuple(meta.get("size")), sorted(rows.get(fqn, []))
        missing = set(chunks.get(fqn, {})) - {row[0] for row in found}
        if missing:
            raise CheckpointError(f"the chunk at {sorted(missing)[0]} is listed but stored in no file", where=fqn)
        n, ndim = len(found), len(shape)
        state = meta.get("properties").state
        dtype = state[0] if isinstance(state, tuple) else state["dtype"]
        items[fqn] = TensorItem(
            fqn,
            from_torch(str(dtype), where=fqn),
            shape,
            Chunks(
                np.array([row[0] for row in found], np.int64).reshape(n, ndim),
                np.array([chunks[fqn][row[0]] for row in found], np.int64).reshape(n, ndim),
                np.array([row[1] for row in found], np.int64),
                np.array([row[2] for row in found], np.int64),
                np.array([row[3] for row in found], np.int64),
            ),
            transforms.get(fqn, ()),
        )
    return DcpMetadata(items, objects, tuple(paths), planner or None, version)
