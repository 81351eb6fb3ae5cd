"""Merging: weights with a LoRA adapter. The values of the base and the two factors travel beside the load form of a target rank, which
merges them as `convert --merge-adapter` does: base + scale * (rows x columns), in float32, rounded once.

    q_proj [out, in] on a target rank: rows 0..64      beside its load form: base [64, in], rows [64, r], columns [r, in]

The factors are small. So an adapter costs a target rank the memory of the weights that it changes, once more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from reshard.geometry.boxes import Box, row_major
from reshard.geometry.value import value
from reshard.index.origin import Merged, Tensor
from reshard.live.plan.beside import BesideFiles, Factors, MergedBox
from reshard.live.plan.schedule import HeldTensor
from reshard.plans.plan import Plan
from reshard.plans.tasks import Route


@value(eq=False)
class MergedBoxes:
    """What a plan needs for the weights that a target merges."""

    routes: tuple[Route, ...]
    """The base's values and the factors that travel, into the memory beside the load form."""
    merges: Mapping[int, tuple[MergedBox, ...]]
    """By file of the target: what its rank merges from them."""


def is_merged_here(route: Route) -> bool:
    """Whether a target can merge the products of a weight: matrices of a LoRA adapter, each of the whole weight and without a magnitude."""
    source, merged = route.source, route.source.origin
    if not isinstance(merged, Merged) or len(source.shape) != 2 or any(tensor.is_computed for tensor in merged.inputs):
        return False
    if len({tensor.name for tensor in merged.inputs}) < len(merged.inputs):
        return False  # of several adapters, whose factors have the same names
    return all(product.rows and product.magnitude is None and product.box == Box.whole(source.shape) for product in merged.products)


def merged_boxes(plan: Plan, routes: Iterable[Route], beside: BesideFiles) -> MergedBoxes:
    """The boxes for these routes, whose weights have products. Base and factors get places in `beside`."""
    files = {file.path: i for i, file in enumerate(plan.layout.files)}
    starts = [sorted((item.byte_offset, item.tensor.name) for item in file.tensors) for file in plan.layout.files]
    made: list[Route] = []
    merges: dict[int, list[MergedBox]] = {}
    for route in routes:
        travelling = _Travelling(beside)
        located, shards = route.target.shards.located(), route.target.shards
        for row in range(len(shards)):
            box, file = shards.box(row), files[located.paths[located.files[row]]]
            byte_offset = int(located.byte_offsets[row])
            start, name = starts[file][bisect_right(starts[file], (byte_offset, chr(0x10FFFF))) - 1]
            where = f"{name} from byte {byte_offset - start}:"
            merged: Any = route.source.origin
            factors = tuple(_factors(product, box, file, where, travelling) for product in merged.products)
            base = travelling.add(merged.base, box, file, where)
            at, strides = (byte_offset - start) // route.target.dtype.itemsize, tuple(located.strides[row].tolist())
            merges.setdefault(file, []).append(MergedBox(base, factors, name, at, strides, route.target.dtype))
        made += travelling.routes()
    return MergedBoxes(tuple(made), {file: tuple(boxes) for file, boxes in merges.items()})


class _Travelling:
    """The boxes of stored tensors that travel beside load forms."""

    def __init__(self, beside: BesideFiles) -> None:
        self._beside = beside
        self._boxes: dict[str, tuple[Tensor, list[tuple[Box, int, int]]]] = {}

    def add(self, tensor: Tensor, box: Box, file: int, where: str) -> HeldTensor:
        """A box gets a place beside a file. where: what the box is for, which makes its name its own."""
        held = HeldTensor(f"{where} {tensor.name}", tensor.dtype, box.sizes, row_major(box.sizes))
        self._boxes.setdefault(tensor.name, (tensor, []))[1].append((box, file, self._beside.add(file, held)))
        return held

    def routes(self) -> list[Route]:
        """The routes of all boxes that were added."""
        return [Route(tensor, replace(tensor, shards=self._beside.shards(tensor.dtype, boxes))) for tensor, boxes in self._boxes.values()]


def _factors(product: Any, box: Box, file: int, where: str, travelling: _Travelling) -> Factors:
    """The factors of a product for a box of the weight."""
    (first, left), (height, width), rank = box.offsets, box.sizes, product.columns.shape[0]
    rows = travelling.add(product.rows, Box((first, 0), (height, rank)), file, where)
    return Factors(rows, travelling.add(product.columns, Box((0, left), (rank, width)), file, where), product.scale)
