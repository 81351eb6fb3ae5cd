"""LearnedLayout: what every rank of an engine holds, as templates that a tracer of the engine's own loader has filled.

A template stands for the tensors of many layers; {0} and {1} in names are the numbers in the name of the tensor, {run} counts experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import product

from reshard.errors import RequestError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.mosaics import Mosaic, Tile
from reshard.geometry.parallel import Parallel
from reshard.geometry.sections import StoredTensor, constant
from reshard.geometry.value import value
from reshard.serving.learned.numbers import Number

Ranges = tuple[tuple[int, ...], ...]
"""For each number in a name, the values that it takes. The names are those of the product."""


@value
class TemplateAxis:
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


@value
class TemplateRun:
    """Experts that lie one after another in a tensor."""

    first: Number
    """The number of the first expert."""
    count: Number
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


@value
class TensorTemplate:
    """A tensor of a rank."""

    dtype: DType
    """Its element type."""
    shape: tuple[Number, ...]
    """Its shape."""
    parts: tuple[TemplatePart, ...]
    """The boxes of checkpoint tensors that it holds."""
    fill: float | None = None
    """The value of all other elements; None if there are none."""
    problem: str = ""
    """Why its elements are not known; empty if they are."""
    kernel: str = ""
    """Why its shape depends on a kernel that the platform chooses; empty if it does not: the tensor is the same on every platform."""


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
class LearnedStage:
    """The tensors of one pipeline stage."""

    pp: int
    """Pipeline-parallel size."""
    pp_rank: int
    """The stage."""
    has_ep: bool
    """Whether the ranks hold whole experts."""
    tensors: tuple[NamedTemplate, ...]
    """The tensors."""


@value
class LearnedSources:
    """Checkpoint tensors of the same kind in many layers."""

    name: str
    """Their name."""
    ranges: Ranges
    """The values of the numbers in the name."""
    dtype: DType
    """Their element type in the checkpoint that was traced."""
    shape: tuple[int, ...]
    """Their shape."""


@value
class LearnedSizes:
    """Parallel sizes that were traced together."""

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
    sources: tuple[LearnedSources, ...]
    """The tensors of the checkpoint that was traced."""
    stages: tuple[LearnedStage, ...]
    """The tensors of the ranks."""
    softened: tuple[str, ...] = ()
    """What the engine could not choose on that platform, and was passed over, since it does not matter for loading."""

    @cached_property
    def source_entries(self) -> Mapping[str, LearnedSources]:
        """Every checkpoint tensor by name, with its kind."""
        return {filled(each.name, numbers): each for each in self.sources for numbers in product(*each.ranges)}

    def stage(self, parallel: Parallel, pp_rank: int) -> LearnedStage:
        """The tensors of a stage. The sizes must have been traced."""
        key = parallel.pp, pp_rank, parallel.ep > 1
        return next(stage for stage in self.stages if (stage.pp, stage.pp_rank, stage.has_ep) == key)

    def rank_templates(self, parallel: Parallel, tp_rank: int, pp_rank: int) -> Iterator[tuple[str, tuple[int, ...], TensorTemplate]]:
        """The tensors of a rank: name, its numbers, template."""
        for each in self.stage(parallel, pp_rank).tensors:
            if each.is_on(parallel.tp, tp_rank):
                yield from ((name, numbers, each.template) for name, numbers in each.names())

    def rank_tensors(self, parallel: Parallel, tp_rank: int, pp_rank: int, dtypes: Mapping[str, DType]) -> tuple[StoredTensor, ...]:
        """The tensors of a rank. dtypes: name -> the element type to store, where it is not the traced one.

        Raises: NoRule if the rules have no numbers for the size, RequestError if a box lies outside of its tensors.
        """
        found = self.rank_templates(parallel, tp_rank, pp_rank)
        return tuple(self._stored(name, numbers, template, (parallel.tp, tp_rank), dtypes.get(name)) for name, numbers, template in found)

    def _stored(
        self, name: str, numbers: tuple[int, ...], template: TensorTemplate, rank: tuple[int, int], dtype: DType | None
    ) -> StoredTensor:
        dtype = dtype or template.dtype
        shape = tuple(number.at(*rank) for number in template.shape)
        fill = b"\0" if not template.fill else dtype.encoded(template.fill)
        if not template.parts:
            return constant(name, dtype, shape, fill)
        tiles = tuple(tile for part in template.parts for tile in _tiles(part, numbers, rank))
        for tile in tiles:
            self._check_inside(name, shape, tile)
        stored = Mosaic(shape, tiles).stored(name, dtype)
        return StoredTensor(stored.name, dtype, shape, stored.sections, fill)

    def _check_inside(self, name: str, shape: tuple[int, ...], tile: Tile) -> None:
        source = self.source_entries.get(tile.name)
        inside = source is not None and len(source.shape) == len(tile.box.sizes)
        if inside and source is not None:
            inside = all(stop <= size for stop, size in zip(tile.box.stops, source.shape, strict=True))
        if not inside or any(tile.span(axis)[1] > size for axis, size in enumerate(shape)):
            raise RequestError(
                f"the layout has a box of {tile.name} in it that lies outside of one of the two",
                where=name,
                why="The layout file has been changed since reshard wrote it, or is damaged",
                do="Learn it again with `reshard learn`",
            )


def filled(name: str, numbers: tuple[int, ...], run: int | None = None) -> str:
    """A name with the numbers in place of {0}, {1} and {run}."""
    for position, number in enumerate(numbers):
        name = name.replace(f"{{{position}}}", str(number))
    return name if run is None else name.replace("{run}", str(run))


def _tiles(part: TemplatePart, numbers: tuple[int, ...], rank: tuple[int, int]) -> Iterator[Tile]:
    """The boxes of a part on a rank, each as one box of a checkpoint tensor whose axes lie along axes of the tensor."""
    start, at = [number.at(*rank) for number in part.start], [number.at(*rank) for number in part.at]
    loops = [(each.size.at(*rank), each.axis, each.step.at(*rank), each.source_axis, each.source_step.at(*rank)) for each in part.axes]
    if any(size == 0 for size, *_ in loops):
        return
    sizes, axes = [1] * len(start), [None] * len(start)
    jumps: list[tuple[int, int, int, int, int]] = []
    for loop in sorted((loop for loop in loops if loop[0] > 1), key=lambda loop: -loop[0]):
        size, axis, step, source_axis, source_step = loop
        if step == source_step == 1 and axes[source_axis] is None and axis not in axes:
            sizes[source_axis], axes[source_axis] = size, axis  # type: ignore[call-overload]
        else:
            jumps.append(loop)
    experts, run_axis, run_step, first = range(1), 0, 0, None
    if part.run is not None:
        first, run_axis, run_step = part.run.first.at(*rank), part.run.axis, part.run.step.at(*rank)
        experts = range(part.run.count.at(*rank))
    for expert in experts:
        name = filled(part.source, numbers, None if first is None else first + expert)
        for indices in product(*(range(loop[0]) for loop in jumps)):
            here, there = list(at), list(start)
            if first is not None:
                here[run_axis] += expert * run_step
            for index, (_, axis, step, source_axis, source_step) in zip(indices, jumps, strict=True):
                here[axis] += index * step
                there[source_axis] += index * source_step
            yield Tile(name, Box(tuple(there), tuple(sizes)), tuple(here), tuple(axes))


def dtype_of(name: str) -> DType:
    """The element type that torch calls by that name."""
    return from_torch(name, where="the layout")


def elements(template: TensorTemplate, rank: tuple[int, int]) -> int:
    """The number of elements of a tensor on a rank."""
    return math.prod(number.at(*rank) for number in template.shape)
