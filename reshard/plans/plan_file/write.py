"""Writing a plan file: the columns of a plan that can be run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import reshard
from reshard.errors import UnsupportedError
from reshard.geometry.dtypes import DType
from reshard.index.index import Tensor
from reshard.index.shards import primary_rows
from reshard.plans.plan import Plan
from reshard.plans.plan_file.columns import ColumnsWriter
from reshard.storage.files import Files
from reshard.storage.system_calls import system_errors

KIND, VERSION = "plan", 1


def write_plan(plan: Plan, path: str | os.PathLike[str], *, request: str) -> int:
    """Write a plan to a file, which appears under its name when it is complete; returns its length. request: as for `plan_content`."""
    content, partial = plan_content(plan, request=request), Path(f"{os.fspath(path)}.partial")
    with system_errors("written", Path(path)):
        partial.write_bytes(content)
        os.replace(partial, path)
    return len(content)


def plan_content(plan: Plan, *, request: str) -> bytes:
    """The content of a plan file. request: the digest of what determines the result besides the content of the source.

    Headers that say where a piece lies are read.
    """
    columns = ColumnsWriter(KIND, VERSION)
    if plan.content.merged:
        raise UnsupportedError(
            "a plan that merges an adapter is not written to a file",
            where=plan.content.merged.path,
            why="The file holds the places of the weights in one checkpoint, and the adapter lies in another",
            do="Leave out --plan-out; with --part each part makes the plan itself",
        )
    scaled = [(i, route.source.scaling) for i, route in enumerate(plan.routes) if route.source.scaling]
    sources = [route.source for route in plan.routes] + [scaling.scales for _, scaling in scaled if scaling]
    dtypes = _DTypes()
    source_paths = _tensors(columns, "source", sources, dtypes)
    target_paths = _tensors(columns, "target", [route.target for route in plan.routes], dtypes)
    columns.integers("scaling.routes", [i for i, _ in scaled])
    columns.value("scaling.blocks", [list(scaling.block_shape) for _, scaling in scaled if scaling])
    columns.value("dtypes", dtypes.names)
    _source(columns, plan, source_paths)
    _target(columns, plan, target_paths)
    columns.value("plan", _about(plan, request))
    return columns.content()


class _DTypes:
    """Numbers element types in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[DType, int] = {}

    def number(self, dtype: DType) -> int:
        return self._numbers.setdefault(dtype, len(self._numbers))

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(dtype.torch, dtype.function) for dtype in self._numbers]


def _tensors(columns: ColumnsWriter, side: str, tensors: Sequence[Tensor], dtypes: _DTypes) -> list[str]:
    """Add some tensors and their pieces; returns the paths that the pieces name. Pieces with one number of axes share a table."""
    columns.value(f"{side}.names", [tensor.name for tensor in tensors])
    columns.integers(f"{side}.dtypes", [dtypes.number(tensor.dtype) for tensor in tensors])
    columns.integers(f"{side}.axes", [len(tensor.shape) for tensor in tensors])
    columns.integers(f"{side}.shapes", [size for tensor in tensors for size in tensor.shape])
    columns.integers(f"{side}.pieces", [len(tensor.shards) for tensor in tensors])
    paths: dict[str, int] = {}
    for ndim in sorted({len(tensor.shape) for tensor in tensors}):
        rows: dict[str, list[Any]] = {name: [] for name in ("offsets", "sizes", "strides", "files", "starts", "dtypes", "primary")}
        for tensor in tensors:
            if len(tensor.shape) == ndim and len(tensor.shards):
                shards, located = tensor.shards, tensor.shards.located()
                used, which = np.unique(located.files, return_inverse=True)
                numbers = np.array([paths.setdefault(located.paths[file], len(paths)) for file in used.tolist()], np.int64)
                stored = located.dtype
                each = [stored] * len(shards) if isinstance(stored, DType) else stored.tolist()
                rows["offsets"].append(shards.offsets.reshape(-1))
                rows["sizes"].append(shards.sizes.reshape(-1))
                rows["strides"].append(located.strides.reshape(-1))
                rows["files"].append(numbers[which])
                rows["starts"].append(located.byte_offsets)
                rows["dtypes"].append(np.array([dtypes.number(dtype) for dtype in each], np.int64))
                rows["primary"].append(primary_rows(shards))
        for name, parts in rows.items():
            columns.integers(f"{side}.{ndim}.{name}", np.concatenate(parts) if parts else [])
    return list(paths)


def _source(columns: ColumnsWriter, plan: Plan, paths: Iterable[str]) -> None:
    files, sizes, named = plan.source_files, {file.path: file.nbytes for file in plan.source.files}, list(paths)
    for path in named:
        if "\0" in path:
            raise UnsupportedError(
                "the source has encoded pieces, which a plan file does not hold",
                where=path.partition("\0")[0],
                do="Give each part the options of the plan instead of --plan",
            )
        if path not in sizes:
            sizes[path] = _size(files, path)
    columns.value("source.files", [(path, nbytes, files.stamp(path)) for path, nbytes in sizes.items()])
    columns.value("source.paths", named)


def _size(files: Files, path: str) -> int:
    size = files.size(path)
    assert size is not None, "a planned source file exists"
    return size


def _target(columns: ColumnsWriter, plan: Plan, paths: list[str]) -> None:
    layout = plan.layout
    columns.value("target.paths", paths)
    columns.value("target.files", [(file.path, file.nbytes, dict(file.ranks)) for file in layout.files])
    columns.integers("target.stored", [len(file.tensors) for file in layout.files])
    columns.integers("target.stored.starts", [item.byte_offset for file in layout.files for item in file.tensors])
    columns.integers("target.stored.nbytes", [item.tensor.nbytes for file in layout.files for item in file.tensors])
    for i, file in enumerate(layout.files):
        literals = list(file.literals)
        columns.integers(f"framing.{i}.starts", [offset for offset, _ in literals])
        columns.integers(f"framing.{i}.nbytes", [len(data) for _, data in literals])
        columns.raw(f"framing.{i}", b"".join(bytes(data) for _, data in literals))
    columns.value("sidecars", [sidecar.path for sidecar in layout.sidecars])
    for i, sidecar in enumerate(layout.sidecars):
        columns.raw(f"sidecar.{i}", sidecar.content)
    constants = plan.target_index.constants
    columns.value("constants", [(constant.path, constant.expected.hex()) for constant in constants])
    columns.integers("constants.starts", [constant.byte_offset for constant in constants])
    columns.integers("constants.nbytes", [constant.nbytes for constant in constants])


def _about(plan: Plan, request: str) -> dict[str, Any]:
    """What the result and its records say about the plan."""
    layout = plan.layout
    return {
        "reshard": reshard.__version__,
        "identity": plan.identity(),
        "request": request,
        "source": {"format": plan.source.format, "step": plan.source.facts.step},
        "target": {
            "format": layout.format,
            **{axis: getattr(layout.parallel, axis) for axis in ("tp", "pp", "ep", "dp")},
            "engine_version": plan.target.engine_version,
        },
        "notes": list(layout.notes),
        "aliases": dict(layout.aliases),
        "drops": [(drop.name, drop.kind, drop.nbytes, drop.reason) for drop in plan.drops],
        "recorded": dict(plan.content.recorded()),
    }
