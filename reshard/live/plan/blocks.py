"""Blocks: who computes the codes and scales of a weight that an engine holds quantized, so that few bytes travel.

A block of a weight has one scale, which follows from all its elements. The blocks that one source rank holds whole are computed there, and
codes and scales travel: half of the bytes. The others lie in the memory of several source ranks, as where FSDP cuts rows. Their values
travel into the memory of the target rank, beside its load form, and the target rank computes them.

    weight [out, in], blocks of 128 rows         source rank 0: rows 0..320      source rank 1: rows 320..640

      rows   0..256    source rank 0 computes  -> codes, scales
      rows 256..384    rows 256..320 and 320..384 travel as values, the target rank computes
      rows 384..640    source rank 1 computes  -> codes, scales
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.engine.origins.encoded import RECIPES
from reshard.engine.origins.on_tensors import TENSOR_RECIPES
from reshard.errors import UnsupportedError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import BF16
from reshard.geometry.quantities import grouped
from reshard.geometry.sections import Columns
from reshard.geometry.value import value
from reshard.index.origin import Encoded, Tensor
from reshard.live.plan.beside import BesideFiles, Computed, ComputedPart
from reshard.live.plan.joining import Forms, Meetings
from reshard.live.plan.schedule import BoxForm, Derived, HeldTensor
from reshard.plans.plan import Plan
from reshard.plans.tasks import Route

# Elements that a source computes at once; a box that it computes has no more.
_AT_ONCE = 1 << 21


@value(eq=False)
class QuantizedBoxes:
    """What a plan needs for the weights that the target holds quantized."""

    meetings: tuple[Meetings, ...]
    """The boxes that sources compute."""
    routes: tuple[Route, ...]
    """The values that travel, from the weights to the memory beside the load form."""
    computes: Mapping[int, tuple[Computed, ...]]
    """By file of the target: what its rank computes from these values."""


def is_quantized_here(route: Route) -> bool:
    """Whether the target of a route holds codes or scales that a transfer can compute."""
    encoded = route.source.origin
    if not isinstance(encoded, Encoded) or encoded.weight.is_computed or len(encoded.weight.shape) != 2:
        return False
    component = encoded.component
    is_grid = not component.is_single and not (
        component.unit_axes or component.transposed or (component.packing and component.packing.words)
    )
    return is_grid and RECIPES[encoded.recipe].shared is None and not encoded.recipe.startswith("exact-")


def quantized_boxes(plan: Plan, routes: Iterable[Route], forms: Forms, beside: BesideFiles) -> QuantizedBoxes:
    """The boxes for these routes, whose targets hold codes or scales. Values get places in `beside`.

    Raises: UnsupportedError if a rank of the target holds a part of a block.
    """
    made = _Boxes(plan, forms, beside)
    for of_weight in grouped(routes, lambda route: id(_encoded(route).weight)).values():
        made.add(of_weight)
    return made.found()


def _encoded(route: Route) -> Any:
    return route.source.origin


@value
class _Place:
    """Where the codes or the scales of a box of a weight lie in a file of the target."""

    route: Route
    byte_offset: int
    strides: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Elements of the weight for each of its own, along each axis."""
        encoded = _encoded(self.route)
        return tuple(size or whole for size, whole in zip(encoded.component.grid, encoded.weight.shape, strict=True))

    def at(self, box: Box, inner: Box) -> int:
        """The byte of the file at which a box inside of the place's box starts."""
        steps = zip(inner.offsets, box.offsets, self.grid, self.strides, strict=True)
        return self.byte_offset + sum((a - b) // size * stride for a, b, size, stride in steps) * self.route.target.dtype.itemsize


@value
class _Source:
    """Whole blocks of a weight that source ranks hold."""

    box: Box
    strides: tuple[int, ...]
    """The distance between neighbours along each axis, in elements."""
    holders: tuple[tuple[int, int], ...]
    """(source rank, the byte at which the box starts in its memory) of each copy."""


def _sources(weight: Tensor, block: tuple[int, int], ranks: Mapping[str, int]) -> list[_Source]:
    """The whole blocks in the pieces of a weight. ranks: the number of each rank, by its file."""
    located, shards = weight.shards.located(), weight.shards
    size, shape = np.array(block, np.int64), np.array(weight.shape, np.int64)
    stops = shards.offsets + shards.sizes
    first = -(-shards.offsets // size) * size
    last = np.where(stops == shape, shape, stops // size * size)
    before = ((first - shards.offsets) * located.strides).sum(axis=1) * weight.dtype.itemsize
    by_box: dict[tuple[Box, tuple[int, ...]], list[tuple[int, int]]] = {}
    for row in np.flatnonzero((last > first).all(axis=1)).tolist():
        box = Box(tuple(first[row].tolist()), tuple((last[row] - first[row]).tolist()))
        holder = ranks[located.paths[located.files[row]]], int(located.byte_offsets[row] + before[row])
        by_box.setdefault((box, tuple(located.strides[row].tolist())), []).append(holder)
    return [_Source(box, strides, tuple(holders)) for (box, strides), holders in by_box.items()]


class _Boxes:
    """Collects the boxes of all weights."""

    def __init__(self, plan: Plan, forms: Forms, beside: BesideFiles) -> None:
        self._forms, self._beside = forms, beside
        self._ranks = {file.path: i for i, file in enumerate(plan.source.files)}
        self._files = {file.path: i for i, file in enumerate(plan.layout.files)}
        self._tensors = [sorted((item.byte_offset, item.tensor.name) for item in file.tensors) for file in plan.layout.files]
        self._rows: dict[int, list[tuple[int, list[tuple[int, int]], int, int]]] = {}
        """By the number of copies: form, holders, file of the target, byte offset there."""
        self._routes: list[Route] = []
        self._computes: dict[int, list[Computed]] = {}

    def add(self, routes: Sequence[Route]) -> None:
        """The codes and scales of one weight."""
        encoded = _encoded(routes[0])
        weight, recipe = encoded.weight, encoded.recipe
        rows, columns = RECIPES[recipe].block
        block = rows, columns or weight.shape[1]
        is_sent = recipe in TENSOR_RECIPES and encoded.dtype == BF16
        sources = _sources(weight, block, self._ranks) if is_sent else []
        starts, stops = (np.array([getattr(held.box, name) for held in sources], np.int64).reshape(-1, 2) for name in ("offsets", "stops"))
        values: list[tuple[Box, int, int]] = []
        for (file, box), places in self._places(routes, block).items():
            is_open = np.ones([-(-size // step) for size, step in zip(box.sizes, block, strict=True)], np.bool_)
            for source in _meeting(sources, starts, stops, box):
                shared = source.box.intersect(box)
                if shared and is_open[blocks := _blocks(shared, box, block)].all():
                    is_open[blocks] = False
                    self._send(encoded, block, shared, source, file, (box, places))
            for part in _rectangles(is_open, box, block):
                values.append((part, file, self._receive(encoded, part, file, (box, places))))
        if values:
            dtype = encoded.dtype
            shards = self._beside.shards(dtype, [(box, file, address) for box, file, address in values])
            self._routes.append(Route(weight, Tensor(weight.name, dtype, weight.shape, weight.kind, shards)))

    def found(self) -> QuantizedBoxes:
        """The boxes of all weights that were added."""
        meetings = []
        for copies, rows in self._rows.items():
            forms, holders, files, offsets = zip(*rows, strict=True)
            pairs = np.array(holders, np.int64).reshape(1, len(rows), copies, 2)
            numbers = (np.array(column, np.int64) for column in (forms, [files], [offsets]))
            form, file, offset = numbers
            meetings.append(Meetings(form, pairs[..., 0], pairs[..., 1], file, offset))
        return QuantizedBoxes(tuple(meetings), tuple(self._routes), {file: tuple(computes) for file, computes in self._computes.items()})

    def _places(self, routes: Sequence[Route], block: tuple[int, int]) -> dict[tuple[int, Box], list[_Place]]:
        """(file of the target, box of the weight) -> where its codes and scales lie. Raises UnsupportedError for a part of a block."""
        by_box: dict[tuple[int, Box], list[_Place]] = {}
        shape = _encoded(routes[0]).weight.shape
        for route in routes:
            located, shards = route.target.shards.located(), route.target.shards
            for row in range(len(shards)):
                place = _Place(route, int(located.byte_offsets[row]), tuple(located.strides[row].tolist()))
                stored = shards.box(row)
                starts = tuple(start * size for start, size in zip(stored.offsets, place.grid, strict=True))
                stops = tuple(min(stop * size, end) for stop, size, end in zip(stored.stops, place.grid, shape, strict=True))
                ends = zip(starts, stops, block, shape, strict=True)
                if any(start % size or (stop % size and stop != end) for start, stop, size, end in ends):
                    raise UnsupportedError(
                        f"a rank of the target holds {stored} of it, which is not made of whole blocks",
                        where=route.name,
                        why=f"The elements of {block[0]} x {block[1]} share a scale",
                    )
                box = Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))
                by_box.setdefault((self._files[located.paths[located.files[row]]], box), []).append(place)
        return by_box

    def _send(
        self, encoded: Encoded, block: tuple[int, int], shared: Box, source: _Source, file: int, target: tuple[Box, Sequence[_Place]]
    ) -> None:
        """The boxes that sources compute, in parts that are computed at once."""
        weight, recipe = encoded.weight, encoded.recipe
        for box in _parts(shared, block):
            steps = zip(box.offsets, source.box.offsets, source.strides, strict=True)
            before = sum((a - b) * stride for a, b, stride in steps) * weight.dtype.itemsize
            holders = [(rank, address + before) for rank, address in source.holders]
            for place in target[1]:
                sizes = tuple(-(-size // step) for size, step in zip(box.sizes, place.grid, strict=True))
                derived = Derived(recipe, _encoded(place.route).component.is_scale, box.sizes, place.route.source.dtype)
                form = BoxForm(sizes, source.strides, place.strides, weight.dtype, place.route.target.dtype, derived)
                row = self._forms.number(form), holders, file, place.at(target[0], box)
                self._rows.setdefault(len(holders), []).append(row)

    def _receive(self, encoded: Encoded, box: Box, file: int, target: tuple[Box, Sequence[_Place]]) -> int:
        """A box that the target's rank computes; returns the byte offset of its values."""
        parts = []
        for place in target[1]:
            byte_offset = place.at(target[0], box)
            starts = self._tensors[file]
            start, name = starts[bisect_right(starts, (byte_offset, chr(0x10FFFF))) - 1]
            source, itemsize = place.route.source, place.route.target.dtype.itemsize
            is_scale = _encoded(place.route).component.is_scale
            at = (byte_offset - start) // itemsize
            parts.append(ComputedPart(name, at, place.strides, is_scale, source.dtype, place.route.target.dtype, place.grid[0]))
        ranges = ", ".join(f"{start}:{stop}" for start, stop in zip(box.offsets, box.stops, strict=True))
        held = HeldTensor(f"{encoded.weight.name}[{ranges}]", encoded.dtype, box.sizes, row_major(box.sizes))
        self._computes.setdefault(file, []).append(Computed(held, encoded.recipe, tuple(parts)))
        return self._beside.add(file, held)


def _meeting(sources: Sequence[_Source], starts: Columns, stops: Columns, box: Box) -> Iterator[_Source]:
    """The sources whose boxes share elements with a box. starts, stops: [n, 2], of their boxes."""
    rows = ((starts < np.array(box.stops)) & (stops > np.array(box.offsets))).all(axis=1)
    return (sources[row] for row in np.flatnonzero(rows).tolist())


def _blocks(part: Box, box: Box, block: tuple[int, int]) -> tuple[slice, ...]:
    """Which blocks of a box a part of it has."""
    ranges = zip(part.offsets, part.stops, box.offsets, block, strict=True)
    return tuple(slice((start - first) // size, -(-(stop - first) // size)) for start, stop, first, size in ranges)


def _rectangles(is_open: npt.NDArray[np.bool_], box: Box, block: tuple[int, int]) -> Iterator[Box]:
    """The open blocks of a box as boxes of the weight."""
    row = 0
    while row < len(is_open):
        columns, start = is_open[row], row
        while row < len(is_open) and (is_open[row] == columns).all():
            row += 1
        edges = np.flatnonzero(np.diff(np.concatenate([[False], columns, [False]]).astype(np.int8))).tolist()
        for left, right in zip(edges[::2], edges[1::2], strict=True):
            starts = tuple(first + at * size for first, at, size in zip(box.offsets, (start, left), block, strict=True))
            stops = (min(first + at * size, end) for first, at, size, end in zip(box.offsets, (row, right), block, box.stops, strict=True))
            yield Box(starts, tuple(stop - at for at, stop in zip(starts, stops, strict=True)))


def _parts(box: Box, block: tuple[int, int]) -> Iterator[Box]:
    """A box in parts of whole blocks with at most _AT_ONCE elements."""
    width = min(box.sizes[1], _AT_ONCE // block[0] // block[1] * block[1])
    height = max(1, _AT_ONCE // max(1, width) // block[0]) * block[0]
    for row, column in product(range(0, box.sizes[0], height), range(0, box.sizes[1], width)):
        rows = box.narrow(0, row, min(row + height, box.sizes[0]))
        yield rows.narrow(1, column, min(column + width, box.sizes[1]))
