"""LearnedLayout: what every rank of an engine holds, as templates that a tracer of the engine's own loader has filled.

A template stands for the tensors of many layers; {0} and {1} in names are the numbers in the name of the tensor, {run} counts experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from itertools import product
from typing import NamedTuple

from reshard.errors import RequestError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import Parallel
from reshard.geometry.mosaics import Mosaic, Tile
from reshard.geometry.sections import StoredTensor, first_overlap
from reshard.geometry.value import value
from reshard.serving.learned.numbers import ONE_RANK, NoRule, Number, TpRank, values

MOST_TURNS = 1 << 20
"""No tensor is made of more boxes."""
Ranges = tuple[tuple[int, ...], ...]
"""For each number in a name, the values that it takes. The names are those of the product."""
StageKey = tuple[int, bool, int]
"""A pipeline-parallel size, whether the ranks hold whole experts, and a stage."""


class TemplateAxis(NamedTuple):
    """A loop along an axis of a tensor and an axis of a checkpoint tensor."""

    size: Number
    """Its length."""
    axis: int
    """The axis of the tensor."""
    step: Number
    """The distance of neighbours along that axis."""
    source_axis: int
    """The axis of the checkpoint tensor."""
    source_step: Number
    """The distance of neighbours along that axis."""


class TemplateRun(NamedTuple):
    """Experts that lie one after another in a tensor."""

    first: Number
    """The number of the first expert."""
    experts: Number
    """The number of experts."""
    axis: int
    """The axis of the tensor along which they lie."""
    step: Number
    """The distance of neighbours along that axis."""


@value
class TemplatePart:
    """A box of a checkpoint tensor in a tensor of a rank; with a run, such a box for each expert."""

    source: str
    """The name of the checkpoint tensor."""
    start: tuple[Number, ...]
    """Where the box starts in the checkpoint tensor."""
    at: tuple[Number, ...]
    """Where it starts in the tensor."""
    axes: tuple[TemplateAxis, ...]
    """Its loops. An axis without a loop has one element."""
    run: TemplateRun | None = None
    """The experts; None for one box."""

    def on(self, numbers: tuple[int, ...], rank: TpRank) -> Iterator[HeldBox]:
        """The boxes on a rank, one for each expert; none if a loop has no turns there. numbers: those in the name of the tensor."""
        start, at = values(self.start, rank), values(self.at, rank)
        loops = [(*values(axis, rank),) for axis in self.axes]
        if any(size == 0 for size, *_ in loops):
            return
        axes = tuple(loop for loop in loops if loop[0] > 1)
        if self.run is None:
            yield HeldBox(filled(self.source, numbers), start, at, axes)
            return
        first, count, along, step = values(self.run, rank)
        for expert in _turns(count):
            here = (*at[:along], at[along] + expert * step, *at[along + 1 :])
            yield HeldBox(filled(self.source, numbers, first + expert), start, here, axes)


class HeldBox(NamedTuple):
    """A box of a checkpoint tensor in a tensor of one rank."""

    source: str
    """The checkpoint tensor."""
    start: tuple[int, ...]
    """Where the box starts in the checkpoint tensor."""
    at: tuple[int, ...]
    """Where it starts in the tensor."""
    axes: tuple[tuple[int, ...], ...]
    """Its loops, as in TemplateAxis. An axis without a loop has one element."""


@value
class TensorTemplate:
    """A tensor of a rank."""

    dtype: DType
    """Its element type."""
    shape: tuple[Number, ...]
    """Its shape."""
    parts: tuple[TemplatePart, ...] = ()
    """The boxes of checkpoint tensors that it holds."""
    fill: float | None = None
    """The value of all other elements; None if there are none."""
    problem: str = ""
    """Why its elements are not known; empty if they are."""
    kernel: str = ""
    """Why its shape depends on a kernel that the platform chooses; empty if it does not: the tensor is the same on every platform."""

    @property
    def numbers(self) -> Iterator[Number]:
        """All numbers that can depend on the rank."""
        yield from self.shape
        for part in self.parts:
            yield from (*part.start, *part.at, *(number for axis in part.axes for number in axis), *(part.run or ()))


@value
class NamedTemplate:
    """The tensors that one template stands for."""

    name: str
    """Their name."""
    ranges: Ranges
    """The values of the numbers in the name."""
    template: TensorTemplate
    """The template."""
    ranks: Mapping[int, tuple[int, ...]] | None = None
    """Tensor-parallel size -> the ranks that hold them so; None: all ranks at all sizes."""

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each name with its numbers."""
        for numbers in product(*self.ranges):
            yield filled(self.name, numbers), numbers

    def is_on(self, tp: int, tp_rank: int) -> bool:
        """Whether a rank holds these tensors."""
        return self.ranks is None or tp_rank in self.ranks.get(tp, ())


@value
class LearnedSizes:
    """Parallel sizes that were traced together."""

    JSON = "tp pp ep=has_ep withheld"

    tp: tuple[int, ...]
    """Tensor-parallel sizes."""
    pp: int
    """Pipeline-parallel size."""
    has_ep: bool
    """Whether the ranks hold whole experts."""
    withheld: int | None = None
    """The traced size that the rules of the other sizes predicted exactly; other sizes then follow from the rules. None: only the traced
    sizes are known."""


@value(slots=False)
class LearnedLayout:
    """What every rank of an engine holds of one model."""

    JSON = "schema_version engine engine_version platform model_class dtype=dtype.name config counts sizes softened unread twice"

    engine: str
    """The engine's format, such as vllm."""
    engine_version: str
    """The version that was traced."""
    platform: str
    """The platform of the build that was traced, such as cpu."""
    model_class: str
    """The engine's class of the model."""
    dtype: DType
    """The element type in which the engine computes."""
    config: Mapping[str, str]
    """Key of the model's config -> a digest of its value."""
    counts: Mapping[str, int]
    """The numbers of heads and groups in the config, which decide how ranks share them."""
    sizes: tuple[LearnedSizes, ...]
    """The parallel sizes."""
    sources: tuple[NamedTemplate, ...]
    """The tensors of the checkpoint that was traced, whose templates have no parts."""
    stages: Mapping[StageKey, tuple[NamedTemplate, ...]]
    """The tensors of the ranks of each pipeline stage."""
    softened: tuple[str, ...] = ()
    """What the engine could not choose on that platform, and was passed over, since it does not matter for loading."""
    unread: tuple[str, ...] = ()
    """The tensors of the checkpoint that no rank read."""
    twice: tuple[str, ...] = ()
    """The tensors of the checkpoint of which one rank holds elements twice, such as in a second form."""
    has_digest: bool = field(default=True, compare=False)
    """Whether the file has a digest, which is right. Versions before 0.3 wrote none."""

    @cached_property
    def source_entries(self) -> Mapping[str, TensorTemplate]:
        """Every checkpoint tensor by name."""
        return {name: source.template for source in self.sources for name, _ in source.names()}

    @cached_property
    def source_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every checkpoint tensor."""
        return {name: values(template.shape, ONE_RANK) for name, template in self.source_entries.items()}

    def stage(self, parallel: Parallel, pp_rank: int) -> tuple[NamedTemplate, ...]:
        """The tensors of a stage. The sizes must have been traced."""
        return self.stages[parallel.pp, parallel.ep > 1, pp_rank]

    def rank_templates(self, parallel: Parallel, tp_rank: int, pp_rank: int) -> Iterator[tuple[str, tuple[int, ...], TensorTemplate]]:
        """The tensors of a rank: name, its numbers, template."""
        for tensor in self.stage(parallel, pp_rank):
            if tensor.is_on(parallel.tp, tp_rank):
                yield from ((name, numbers, tensor.template) for name, numbers in tensor.names())

    def rank_tensors(self, parallel: Parallel, tp_rank: int, pp_rank: int, dtypes: Mapping[str, DType]) -> tuple[StoredTensor, ...]:
        """The tensors of a rank. dtypes: name -> the element type to store, where it is not the traced one.

        Raises: NoRule if the rules have no numbers for the size, RequestError if a box lies outside of its tensors.
        """
        templates = self.rank_templates(parallel, tp_rank, pp_rank)
        made = {name: self._stored(name, numbers, form, (parallel.tp, tp_rank), dtypes.get(name)) for name, numbers, form in templates}
        if len(made) < sum(1 for _ in self.rank_templates(parallel, tp_rank, pp_rank)) or "__metadata__" in made:
            raise _changed("two tensors of one rank have one name", f"TP rank {tp_rank}")
        return tuple(made.values())

    def reads(self, parallel: Parallel) -> tuple[Mapping[str, int], set[str]]:
        """How many elements of each checkpoint tensor the ranks hold, and the tensors of which one rank holds elements twice."""
        boxes: dict[str, set[tuple[tuple[int, ...], ...]]] = {}
        twice: set[str] = set()
        for tp_rank, pp_rank in product(range(parallel.tp), range(parallel.pp)):
            of_rank: dict[str, list[tuple[tuple[int, ...], ...]]] = {}
            for _, numbers, template in self.rank_templates(parallel, tp_rank, pp_rank):
                for box in (box for part in template.parts for box in part.on(numbers, (parallel.tp, tp_rank))):
                    of_rank.setdefault(box.source, []).extend((tile.box.offsets, tile.box.sizes) for tile in tiles(box))
            for source, held in of_rank.items():
                boxes.setdefault(source, set()).update(held)
                if len({*held}) < len(held) or _volume(held) > math.prod(self.source_shapes.get(source, ())):
                    twice.add(source)
        return {source: _volume(held) for source, held in boxes.items()}, twice

    def _stored(self, name: str, numbers: tuple[int, ...], template: TensorTemplate, rank: TpRank, dtype: DType | None) -> StoredTensor:
        dtype = dtype or template.dtype
        shape = values(template.shape, rank)
        fill = b"\0" if not template.fill else dtype.encoded(template.fill)
        parts = tuple(tile for part in template.parts for box in part.on(numbers, rank) for tile in tiles(box))
        for tile in parts:
            self._check_inside(name, shape, tile)
        stored = StoredTensor(name, dtype, shape, Mosaic(shape, parts).sections(), fill)
        if (template.fill is None and stored.filled) or first_overlap(stored.sections.pattern, math.prod(shape)):
            raise _changed("parts of it lie on one another, or leave a hole that nothing fills", name)
        return stored

    def _check_inside(self, name: str, shape: tuple[int, ...], tile: Tile) -> None:
        source = self.source_shapes.get(tile.name, ())
        is_inside = len(source) == len(tile.box.sizes) and all(stop <= size for stop, size in zip(tile.box.stops, source, strict=True))
        if not is_inside or any(tile.span(axis)[1] > size for axis, size in enumerate(shape)):
            raise _changed(f"the layout has a box of {tile.name} in it that lies outside of one of the two", name)


def _changed(what: str, name: str) -> RequestError:
    why = "The layout file has been changed since reshard wrote it, or is damaged"
    return RequestError(what, where=name, why=why, do="Learn it again with `reshard learn`")


def _volume(boxes: Iterable[tuple[tuple[int, ...], ...]]) -> int:
    return sum(math.prod(sizes) for _, sizes in boxes)


def filled(name: str, numbers: tuple[int, ...], run: int | None = None) -> str:
    """A name with the numbers in place of {0}, {1} and {run}."""
    for position, number in enumerate(numbers):
        name = name.replace(f"{{{position}}}", str(number))
    return name if run is None else name.replace("{run}", str(run))


def _turns(count: int) -> range:
    """The turns of a loop. Raises NoRule if no model has so many."""
    if count > MOST_TURNS:
        raise NoRule(f"a tensor is made of {count:,} boxes, more than {MOST_TURNS:,}", do="Learn the layout again with `reshard learn`")
    return range(count)


def tiles(box: HeldBox) -> Iterator[Tile]:
    """A box as boxes whose axes lie along axes of the tensor: loops that jump are taken turn by turn."""
    sizes: list[int] = [1] * len(box.start)
    axes: list[int | None] = [None] * len(box.start)
    jumps: list[tuple[int, ...]] = []
    for loop in sorted(box.axes, key=lambda loop: -loop[0]):
        size, axis, step, source_axis, source_step = loop
        if step == source_step == 1 and axes[source_axis] is None and axis not in axes:
            sizes[source_axis], axes[source_axis] = size, axis
        else:
            jumps.append(loop)
    _turns(math.prod(loop[0] for loop in jumps))
    for indices in product(*(range(loop[0]) for loop in jumps)):
        here, there = list(box.at), list(box.start)
        for index, (_, axis, step, source_axis, source_step) in zip(indices, jumps, strict=True):
            here[axis] += index * step
            there[source_axis] += index * source_step
        yield Tile(box.source, Box(tuple(there), tuple(sizes)), tuple(here), tuple(axes))
