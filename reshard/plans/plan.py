"""Plan: per canonical tensor, which source pieces feed which target pieces. Data, made without reading a weight.

A plan prints, serialises to JSON, splits into tasks that share no target file, and is proven before it runs (proof.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reshard.canonical.content import Content, Drop
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.index.index import Index, Tensor
from reshard.index.join import meetings
from reshard.index.shards import primary_rows
from reshard.plans.layout import Layout
from reshard.plans.target import Target
from reshard.storage.files import Files


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One canonical tensor's way: the pieces it is read from and the pieces it is written to."""

    source: Tensor
    target: Tensor

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def is_cast(self) -> bool:
        return self.source.dtype != self.target.dtype

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element types that are read and written."""
        return (*self.source.dtypes, self.target.dtype)


@dataclass(frozen=True, slots=True)
class Copy:
    """The bytes of one box: from a file to a file. `replica` marks a source copy that is compared, not written."""

    name: str
    box: Box
    source: str
    target: str
    replica: bool


@dataclass(frozen=True, slots=True)
class Task:
    """Target files that no other task writes, and the tensors that fill them."""

    files: tuple[str, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a plan, in bytes unless the name says otherwise."""

    tensors: int
    files: int
    read: int
    compared: int
    written: int
    copied: int
    filled: int
    framing: int
    cast_tensors: int
    dropped_tensors: int
    dropped: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A conversion, ready to be shown, proven and run."""

    source: Index
    source_files: Files
    content: Content
    target: Target
    layout: Layout
    target_index: Index
    routes: tuple[Route, ...]

    @property
    def drops(self) -> tuple[Drop, ...]:
        """What of the source is left out, by choice or because the target has no place for it."""
        tensors = self.content.tensors
        here = (Drop(name, tensors[name].kind, tensors[name].nbytes, why) for name, why in self.layout.left_out.items() if name in tensors)
        return (*self.content.drops, *here)

    def copies(self) -> Iterator[Copy]:
        """Every box that goes from one file to one file."""
        for route in self.routes:
            primary = primary_rows(route.source.shards)
            for i, j, box in meetings(route.source.shards, route.target.shards):
                yield Copy(route.name, box, route.source.shards.path(i), route.target.shards.path(j), replica=not primary[i])

    def totals(self) -> Totals:
        read = compared = copied = 0
        for route in self.routes:
            volumes = route.source.shards.sizes.prod(axis=1)
            is_primary = primary_rows(route.source.shards)
            read += int(volumes[is_primary].sum()) * route.source.dtype.itemsize
            compared += int(volumes[~is_primary].sum()) * route.source.dtype.itemsize
            if route.source.scaling:
                read += route.source.scaling.scales.nbytes
            copied += int(route.target.shards.sizes.prod(axis=1).sum()) * route.target.dtype.itemsize
        written = sum(file.nbytes for file in self.layout.files)
        stored = sum(item.tensor.nbytes for file in self.layout.files for item in file.tensors)
        return Totals(
            tensors=len(self.routes),
            files=len(self.layout.files),
            read=read,
            compared=compared,
            written=written,
            copied=copied,
            filled=stored - copied,
            framing=written - stored,
            cast_tensors=sum(route.is_cast for route in self.routes),
            dropped_tensors=len(self.drops),
            dropped=sum(drop.nbytes for drop in self.drops),
        )

    def tasks(self) -> tuple[Task, ...]:
        """The plan in independent parts: target files are in one task if a tensor goes to both.

        So each source byte is read by one task, and a task can run on another machine.
        """
        parent = {file.path: file.path for file in self.layout.files}

        def root(path: str) -> str:
            while parent[path] != path:
                parent[path] = parent[parent[path]]
                path = parent[path]
            return path

        for route in self.routes:
            first, *others = dict.fromkeys(route.target.shards.paths)
            for other in others:
                parent[root(other)] = root(first)
        files: dict[str, list[str]] = {}
        tensors: dict[str, list[str]] = {}
        for file in self.layout.files:
            files.setdefault(root(file.path), []).append(file.path)
        for route in self.routes:
            tensors.setdefault(root(route.target.shards.paths[0]), []).append(route.name)
        return tuple(Task(tuple(paths), tuple(tensors.get(key, ()))) for key, paths in files.items())

    def to_json(self, *, copies: bool = False) -> dict[str, Any]:
        """The plan as plain values with stable keys; with `copies` also every box."""
        document: dict[str, Any] = {
            "source": {"format": self.source.format, "path": self.source_files.root},
            "target": {
                "format": self.layout.format,
                "tp": self.layout.parallel.tp,
                "pp": self.layout.parallel.pp,
                "ep": self.layout.parallel.ep,
                "dp": self.layout.parallel.dp,
                "dtype": str(self.target.dtype) if self.target.dtype else None,
                "engine_version": self.target.engine_version,
                "options": dict(self.target.options),
            },
            "totals": _fields(self.totals()),
            "files": [
                {
                    "path": file.path,
                    "bytes": file.nbytes,
                    "ranks": dict(file.ranks),
                    "tensors": [_stored_json(item) for item in file.tensors],
                }
                for file in self.layout.files
            ],
            "sidecars": [sidecar.path for sidecar in self.layout.sidecars],
            "tensors": [
                {
                    "name": route.name,
                    "shape": list(route.source.shape),
                    "from": str(route.source.dtype),
                    "to": str(route.target.dtype),
                    "scaled_by": route.source.scaling.scales.name if route.source.scaling else None,
                    "source_boxes": len(route.source.shards),
                    "target_boxes": len(route.target.shards),
                }
                for route in self.routes
            ],
            "dropped": [_fields(drop) for drop in self.drops],
            "tasks": [{"files": list(task.files), "tensors": list(task.tensors)} for task in self.tasks()],
            "notes": list(self.layout.notes),
        }
        if copies:
            document["copies"] = [
                {
                    "tensor": copy.name,
                    "offsets": list(copy.box.offsets),
                    "sizes": list(copy.box.sizes),
                    "source": copy.source,
                    "target": copy.target,
                    "replica": copy.replica,
                }
                for copy in self.copies()
            ]
        return document

    def identity(self) -> str:
        """A digest of all that the bytes of the result depend on: what is laid out where, and which source files, in which state.

        Resuming is only sound under the same identity.
        """
        digest = hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode())
        for file in self.source.files:
            digest.update(f"{file.path}\0{file.nbytes}\0{self.source_files.stamp(file.path)}\0".encode())
        return digest.hexdigest()


def make_plan(source: Index, source_files: Files, content: Content, target: Target, layout: Layout) -> Plan:
    """The plan that fills `layout` with `content`, its routes in the order in which the source's files lie."""
    target_index = layout.index(content.shapes)
    copies: dict[str, list[Tensor]] = {}
    for copy, kept in layout.aliases.items():
        copies.setdefault(kept, []).append(content.tensors[copy])
    routes = [Route(_with_copies(content.tensors[t.name], copies.get(t.name, [])), t) for t in target_index.tensors]
    routes.sort(key=lambda route: _place(route.source))
    return Plan(source, source_files, content, target, layout, target_index, tuple(routes))


def _with_copies(tensor: Tensor, copies: list[Tensor]) -> Tensor:
    """A tensor that stands for others, too: they are compared with it whenever it is read."""
    for copy in copies:
        if (copy.dtype, copy.shape) != (tensor.dtype, tensor.shape):
            raise CheckpointError(
                f"it is {copy.dtype} {list(copy.shape)}, {tensor.name} is {tensor.dtype} {list(tensor.shape)}",
                where=copy.name,
                why="The target keeps them once",
            )
    if not copies:
        return tensor
    distinct = {id(copy.shards): copy.shards for copy in copies if copy.shards is not tensor.shards}
    return replace(tensor, shards=tensor.shards.with_copies(list(distinct.values())))


def _place(tensor: Tensor) -> tuple[str, int]:
    shards = tensor.shards
    if not len(shards):
        return "", 0
    first = int(np.argmin(shards.files))
    return shards.path(first), int(shards.positions[first])


def _stored_json(item: Any) -> dict[str, Any]:
    stored = item.tensor
    return {
        "name": stored.name,
        "dtype": str(stored.dtype),
        "shape": list(stored.shape),
        "byte_offset": item.byte_offset,
        "holds": [{"tensor": s.name, "offsets": list(s.box.offsets), "sizes": list(s.box.sizes)} for s in stored.sections],
        "filled_elements": stored.filled,
    }


def _fields(value: Any) -> Mapping[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
