"""Plan: for each canonical tensor, the source pieces that feed the target pieces. A plan is made without reading a weight.

A plan can be printed, written as JSON, and split into tasks that share no source byte (tasks.py). It is proven before it runs (proof.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from reshard.canonical.content import Content, Drop
from reshard.errors import UnsupportedError
from reshard.geometry import documents
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import can_cast
from reshard.geometry.quantities import grouped, plural
from reshard.geometry.value import Drawn, value
from reshard.index.index import Index, Tensor
from reshard.index.shards import meetings, primary_rows
from reshard.plans.digests import CURRENT
from reshard.plans.layout import Layout, PlacedTensor, Target, left_by_kind
from reshard.plans.layout_index import index_of_layout
from reshard.plans.tasks import Route, Task, by_routes
from reshard.secrets import public
from reshard.storage.files import Files
from reshard.storage.trees import numbered


@value
class Copy:
    """A box of a canonical tensor that goes from one source file to one target file."""

    JSON = "tensor=name offsets=box.offsets sizes=box.sizes source target replica"

    name: str
    """The canonical tensor."""
    box: Box
    """The box, in the coordinates of the canonical tensor."""
    source: str
    """The source file."""
    target: str
    """The target file."""
    replica: bool
    """Whether the source bytes are a replica, which is compared but not written."""


@value
class Totals:
    """Sums over a plan."""

    tensors: int
    """The number of canonical tensors that are written."""
    files: int
    """The number of target files that hold tensors."""
    read: int
    """Bytes of primary source pieces and of scales."""
    compared: int
    """Bytes of replicas, which are read and compared."""
    written: int
    """Bytes of the target files."""
    copied: int
    """Bytes of the target that come from the source."""
    filled: int
    """Bytes of the target that hold padding or constants."""
    framing: int
    """Bytes of the target around its tensors, such as headers."""
    cast_tensors: int
    """The number of tensors whose element type changes."""
    dropped_tensors: int
    """The number of source tensors that are left out."""
    dropped: int
    """Bytes of the source tensors that are left out."""


@value(eq=False)
class Order:
    """What a caller asked for. Together with the source it determines the plan, so that a plan file holds this and no place of a byte."""

    source: str
    """Where the source lay, as the caller gave it."""
    others: tuple[str, ...]
    """Where the sources lay that it is combined with."""
    opened: Mapping[str, Any]
    """The keywords of `open`."""
    asked: Mapping[str, Any]
    """The keywords of `plan`, with `to`."""
    attached: Callable[[], Mapping[str, bytes]]
    """Reads the small files that the keywords name, as `keyword/name`: the model's config and tokenizer, a declared architecture."""
    held: object = None
    """What has to live as long as the plan: the folder into which a plan file was unpacked."""


@value(eq=False)
class Plan(Drawn):
    """A conversion that can be printed, proven and run."""

    source: Index
    """The index of the source."""
    source_files: Files
    """The files of the source."""
    content: Content
    """The tensors of the source that are converted, and those that are left out."""
    target: Target
    """The request that the layout fulfils."""
    layout: Layout
    """The files of the target."""
    target_index: Index
    """The index of the target once it is written."""
    routes: tuple[Route, ...]
    """One route per canonical tensor, in the order in which the source's files hold them."""
    order: Order | None = None
    """What the caller asked for; None if the plan is only looked at."""

    def __repr__(self) -> str:
        formats, files = f"{self.source.format} -> {self.layout.format}", plural(len(self.layout.files), "file")
        return f"Plan({formats}, {self.layout.parallel}, {plural(len(self.routes), 'tensor')}, {files})"

    @property
    def drops(self) -> tuple[Drop, ...]:
        """The source tensors that are left out, because the selection or the target leaves them out."""
        tensors, left_out = self.content.tensors, self.layout.left_out
        of_target = (Drop(name, tensors[name].kind, tensors[name].nbytes, why) for name, why in left_out.items() if name in tensors)
        return (*self.content.drops, *of_target)

    def copies(self) -> Iterator[Copy]:
        """Every box whose bytes go from one source file to one target file."""
        for route in self.routes:
            primary = primary_rows(route.source.shards)
            for i, j, box in meetings(route.source.shards, route.target.shards):
                yield Copy(route.name, box, route.source.shards.path(i), route.target.shards.path(j), replica=not primary[i])

    def totals(self) -> Totals:
        """The sums over the plan."""
        read = compared = copied = 0
        for route in self.routes:
            source, target = route.source, route.target
            for tensor in source.leaves:
                shards, itemsize = tensor.shards, tensor.dtype.itemsize
                replicas = int(shards.sizes[~primary_rows(shards)].prod(axis=1).sum()) if len(shards) > 1 else 0
                read += (shards.elements - replicas) * itemsize
                compared += replicas * itemsize
            copied += target.shards.elements * target.dtype.itemsize
        written = sum(file.nbytes for file in self.layout.files)
        stored = sum(file.stored_nbytes for file in self.layout.files)
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
        """The plan in tasks, each of which can run on another machine: no source byte is read for two of them (tasks.py)."""
        return by_routes(self.routes)

    def to_json(self, *, tensors: bool = True, copies: bool = False) -> dict[str, Any]:
        """The plan as plain values with stable keys. tensors: include each tensor. copies: include every box that is copied."""
        document: dict[str, Any] = {
            "source": {"format": self.source.format, "path": self.source_files.root},
            "adapter": self.content.merged.to_json() if self.content.merged else None,
            "combined": self.content.combined.to_json() if self.content.combined else None,
            "deltas": [delta.to_json() for delta in self.content.deltas],
            "target": {
                "format": self.layout.format,
                **asdict(self.layout.parallel),
                "dtype": str(self.target.dtype) if self.target.dtype else None,
                "engine_version": self.target.engine_version,
                "options": dict(self.target.options),
            },
            "totals": asdict(self.totals()),
            "files": [
                {
                    "path": file.path,
                    "bytes": file.nbytes,
                    "ranks": dict(file.ranks),
                    **({"tensors": [_stored_json(item) for item in file.tensors]} if tensors else {}),
                }
                for file in self.layout.files
            ],
            "sidecars": [sidecar.path for sidecar in self.layout.sidecars],
            "left": left_by_kind(self.layout.left),
            "notes": list(self.layout.notes),
        }
        if tensors:
            document["tensors"] = [
                {
                    "name": route.name,
                    "shape": list(route.source.shape),
                    "from": str(route.source.dtype),
                    "to": str(route.target.dtype),
                    "scaled_by": ", ".join(route.scaled_by) or None,
                    "updated_by": list(route.source.origin.changed_by),
                    "source_boxes": len(route.source.shards),
                    "target_boxes": len(route.target.shards),
                }
                for route in self.routes
            ]
            document["dropped"] = [asdict(drop) for drop in self.drops]
            document["left_files"] = [asdict(file) for file in self.layout.left]
            document["tasks"] = [
                {
                    "files": list(dict.fromkeys(path for i in task.routes for path in self.routes[i].target.shards.holders)),
                    "tensors": [self.routes[i].name for i in task.routes],
                }
                for task in self.tasks()
            ]
        if copies:
            document["copies"] = list(map(documents.document, self.copies()))
        return document

    def identity(self) -> str:
        """A digest of everything that determines the bytes of the result: the plan, and the names, lengths and stamps of the source files.

        A conversion may only be resumed by a plan with the same identity.
        """
        # The journal and the manifest hold digests of this version.
        about = {**self.to_json(tensors=False), "dropped": [asdict(drop) for drop in self.drops]}
        del about["notes"], about["left"]
        if self.order:
            about["source"]["path"] = self.order.source
        for key in ("adapter", "combined"):
            if about[key] is None:
                del about[key]
        if self.content.combined:
            about["combined"]["sources"] = [{**source, "path": None} for source in about["combined"]["sources"]]
        if not about["deltas"]:
            del about["deltas"]
        digest = hashlib.sha256(f"digests {CURRENT.number}\0{public(json.dumps(about, sort_keys=True))}".encode())
        for route in self.routes:
            source, target = route.source, route.target
            scales = ", ".join((*route.scaled_by, *filter(None, [route.quantized_by])))
            text = f"{route.name}\0{source.dtype}\0{target.dtype}\0{source.shape}\0{scales}\0{len(source.shards)}\0{len(target.shards)}\0"
            digest.update(text.encode("utf-8", "surrogatepass"))
            digest.update(source.origin.identity.encode("utf-8", "surrogatepass"))
        # Windows on a table are rows of it, and the routes together have all rows.
        for table in {id(route.target.shards.table): route.target.shards.table for route in self.routes}.values():
            for column in (table.offsets, table.sizes, table.files, table.positions):
                digest.update(np.ascontiguousarray(column).tobytes())
        for file in self.source.files:
            path = numbered(self.source_files, file.path) if self.content.combined else file.path
            digest.update(f"{path}\0{file.nbytes}\0{self.source_files.stamp(file.path)}\0".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def make_plan(source: Index, source_files: Files, content: Content, target: Target, layout: Layout) -> Plan:
    """The plan that fills `layout` with `content`. Its routes are in the order in which the source's files hold the tensors.

    Raises: CheckpointError if an alias differs in dtype or shape from the tensor that is stored in its place. UnsupportedError if the
    source holds a function of a weight in place of the weight, and the target does not.
    """
    target_index = index_of_layout(layout, content.shapes)
    aliases = grouped(layout.aliases, layout.aliases.__getitem__)
    routes = [Route(content.tensors[t.name], t) for t in target_index.tensors]
    if aliases:
        replicas = {stored: [content.tensors[alias] for alias in names] for stored, names in aliases.items()}
        routes = [replace(route, source=route.source.with_aliases(replicas.get(route.name, ()))) for route in routes]
    for route in routes:
        if route.source.dtype.function:
            _check_function(route)
    order = _order_in_files([route.source for route in routes])
    return Plan(source, source_files, content, target, layout, target_index, tuple(routes[i] for i in order))


def _check_function(route: Route) -> None:
    """Raises UnsupportedError unless the target holds the values of the same function of the weight as the source."""
    function = route.source.dtype.function
    if not can_cast(route.source.dtype, route.target.dtype):
        raise UnsupportedError(
            f"the source holds {function} of this weight, rounded to {route.source.dtype.name}",
            where=route.name,
            why="Several weights can have the same value, so the weight does not follow from it bit by bit",
            do="Convert the checkpoint that the source was made from, or leave the weight out with `exclude=`",
        )


def _order_in_files(tensors: Sequence[Tensor]) -> list[int]:
    """The numbers of the tensors in the order in which files hold their first pieces: by path, then by position. Tensors without pieces
    come first."""

    def place(i: int) -> tuple[str, int]:
        shards = tensors[i].shards
        if not len(shards):
            return "", 0
        row = shards.start + (int(np.argmin(shards.files)) if len(shards) > 1 else 0)
        return shards.table.paths[shards.table.files[row]], int(shards.table.positions[row])

    return sorted(range(len(tensors)), key=place)


def _stored_json(item: PlacedTensor) -> dict[str, Any]:
    stored = item.tensor
    return {
        "name": stored.name,
        "dtype": str(stored.dtype),
        "shape": list(stored.shape),
        "byte_offset": item.byte_offset,
        "holds": [
            {"tensor": section.name, "offsets": list(section.box.offsets), "sizes": list(section.box.sizes)} for section in stored.sections
        ],
        "filled_elements": stored.filled,
    }
