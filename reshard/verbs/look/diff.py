"""The verb `diff`: what changed between two checkpoints, tensor by tensor, in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Unpack

from reshard.canonical.content import Selection
from reshard.engine.casts import cast
from reshard.engine.checks.reading import Reading
from reshard.engine.checks.recorded_digests import check_digests
from reshard.engine.compare import Comparison, Difference, Side, comparable
from reshard.engine.pool import Effort
from reshard.engine.walk import BlockPlace, Read, walk
from reshard.errors import RequestError, choices
from reshard.geometry.quantities import plural
from reshard.geometry.table import Table
from reshard.geometry.value import mutable, value
from reshard.index.name_parts import layer_of, part_of_layer
from reshard.measures.changes import Change, change_of, sum_of
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import EffortOptions, PathLike, checked_keywords
from reshard.verbs.resumed import compare_counts
from reshard.verbs.verify import about_types_of_engine, log_compared, not_compared, sides_of, types_of_engine


@value
class NotFinite:
    """NaN, or infinite elements, on one side of a comparison."""

    what: str
    """"nan" or "infinite"."""
    side: str
    """"left" or "right"."""
    elements: int
    """How many there are on this side."""
    tensors: int
    """The number of tensors that hold them."""
    first: str
    """The first of these in the order of the model."""

    def __str__(self) -> str:
        verb, what = "has" if self.tensors == 1 else "have", {"nan": "NaN", "infinite": "infinity"}[self.what]
        where = f"{plural(self.elements, 'element')}, such as in {self.first}"
        return f"{plural(self.tensors, 'tensor')} {verb} {what} on the {self.side}: {where}"


_COLUMNS = "name layer role elements changed share relative largest mean cosine nan_left nan_right infinite_left infinite_right"


@mutable
class Diff(Comparison):
    """What changed between two checkpoints."""

    JSON = "equal tensors bytes=nbytes not_finite differences beyond_threshold layers=by_layer roles=by_role total notes source_checks"

    changes: list[Change] = field(default_factory=list)
    """How each tensor changed, in the order of the model; empty if only headers were compared. Tensors without a change are listed, too."""

    def table(self) -> Table:
        """A row for each tensor, in the order of the model; if only headers were compared, a row for each difference."""
        if not self.changes:
            return Comparison.table(self)
        rows = ((*(getattr(change, name) for name in _COLUMNS.split()[:-4]), *change.nan, *change.infinite) for change in self.changes)
        return Table(tuple(_COLUMNS.split()), tuple(rows))

    def __repr__(self) -> str:
        return Comparison.__repr__(self)

    def by_layer(self) -> list[Change]:
        """The changes of each layer together, in order; what belongs to no layer is one entry at the end."""
        return _grouped(self.changes, lambda change: change.layer, lambda layer: "no layer" if layer is None else f"layer {layer}")

    def by_role(self) -> list[Change]:
        """The changes of each role together, the largest relative change first."""
        return sorted(_grouped(self.changes, lambda change: change.role, str), key=_size, reverse=True)

    def total(self) -> Change:
        """The changes of all tensors together."""
        return sum_of("all tensors", self.changes)

    def largest(self) -> list[Change]:
        """The tensors that changed, the largest relative change first."""
        return sorted((change for change in self.changes if change.changed), key=_size, reverse=True)

    def not_finite(self) -> list[NotFinite]:
        """NaN and infinite elements, by side, whether they changed or not. The numbers of a Change leave them out."""
        not_finite = []
        for what in ("nan", "infinite"):
            for i, side in enumerate(("left", "right")):
                counts = {change.name: getattr(change, what)[i] for change in self.changes if getattr(change, what)[i]}
                if counts:
                    not_finite.append(NotFinite(what, side, sum(counts.values()), len(counts), next(iter(counts))))
        return not_finite

    def beyond(self, thresholds: Mapping[str, float]) -> list[Change]:
        """The tensors whose change is larger than a threshold. thresholds: by measure, one of MEASURES."""
        return [change for change in self.changes if any(not MEASURES[name](change) <= most for name, most in thresholds.items())]


def _farthest(change: Change) -> float:
    """The largest distance in ULPs that the histogram tells of: the end of its last bin."""
    return 2.0 ** (len(change.ulps) - 2) if len(change.ulps) > 2 else float(max(len(change.ulps) - 1, 0))


def _size_of(name: str) -> Callable[[Change], float]:
    return lambda change: math.inf if change.nonfinite and change.changed else getattr(change, name)


MEASURES: dict[str, Callable[[Change], float]] = {
    **{name: _size_of(name) for name in ("relative", "largest", "mean")},
    "changed": lambda change: change.share,
    "ulps": _farthest,
}
"""What a threshold can be given for. A tensor with a change among NaN and infinite elements is beyond every threshold of a size."""


@checked_keywords
def diff(
    left: Checkpoint | PathLike,
    right: Checkpoint | PathLike,
    *,
    headers: bool = False,
    selection: Selection | None = None,
    **options: Unpack[EffortOptions],
) -> Diff:
    """What changed from one checkpoint to another, whatever their formats and layouts: names, shapes and element types, and for every
    tensor the share of the elements that differ, the largest and the mean absolute difference, the relative L2 difference, the cosine and a
    histogram of ULPs.

    Tensors of different floating-point types are compared as values. headers: compare names, shapes and element types alone; no weight is
    read.
    """
    effort = Effort.of(options)
    sides = sides_of(left, right, selection)
    result = Diff()
    result.notes.extend(check_digests(effort, *((side.files, side.index.tensors) for side in sides)).notes())
    held_as = {} if headers else {name: dtype for name, dtype in types_of_engine(*sides).items() if not dtype.floating}
    pairs = list(comparable(*sides, result, with_cast=not headers, held_as=held_as))
    result.notes.extend(about_types_of_engine(held_as))
    compare_counts(*sides, result)
    if not headers:
        _measure(result, pairs, sides, effort)
    for side in sides:
        result.notes.extend(not_compared(side))
    log_compared(result)
    return result


def _measure(result: Diff, pairs: Sequence[tuple], sides: tuple[Side, Side], effort: Effort) -> None:  # type: ignore[type-arg]
    """Read the pairs and fill in how they changed."""
    result.changes = [_unmeasured(a.name, sides) for a, _ in pairs]

    def measure(place: BlockPlace, read: Read) -> Change:
        dtypes, change = [tensor.dtype for tensor in pairs[place[0]]], Change()
        for _, (left, right) in read:
            if not dtypes[0].floating and dtypes[0] != dtypes[1]:  # an engine's integers are narrower
                common = min(dtypes, key=lambda dtype: dtype.itemsize)
                left, right = (cast(values, dtype, common) for values, dtype in zip((left, right), dtypes, strict=True))
                change.add(change_of(left, right, common, common))
                continue
            change.add(change_of(left, right, *dtypes))
        return change

    files, reading = (sides[0].files, sides[1].files), Reading(checks=effort.source_checksums)
    for (number, _, _), change in walk(pairs, files, lambda: measure, effort=effort, reading=reading):
        result.changes[number].add(change)
    result.end(reading, *sides)
    result.nbytes += sum(tensor.nbytes for _, tensor in pairs)
    result.differences += [Difference(measured.name, "values", _sentence(measured)) for measured in result.changes if measured.changed]


def _unmeasured(name: str, sides: tuple[Side, Side]) -> Change:
    """A tensor with its place in the model."""
    for model in (side.content.model for side in sides):
        if model is not None and (weight := model.weights.get(name)) is not None:
            return Change(name, weight.layer, weight.role)
    return Change(name, layer_of(name), part_of_layer(name))


def _sentence(change: Change) -> str:
    bad = f"; {change.nonfinite:,} NaN or infinite" if change.nonfinite else ""
    sizes = f"by at most {change.largest:.3g}; relative L2 {change.relative:.3g}"
    return f"{change.changed:,} of {change.elements:,} elements differ, {sizes}{bad}"


def _size(change: Change) -> tuple[float, float, float]:
    return MEASURES["relative"](change), change.largest, change.share


def _grouped(changes: Iterable[Change], key: Callable[[Change], object], name: Callable[[object], str]) -> list[Change]:
    groups: dict[object, list[Change]] = {}
    for change in changes:
        groups.setdefault(key(change), []).append(change)
    ordered = sorted(kind for kind in groups if isinstance(kind, int)) + [kind for kind in groups if not isinstance(kind, int)]
    return [sum_of(name(kind), groups[kind], layer=kind if isinstance(kind, int) else None, role=groups[kind][0].role) for kind in ordered]


def parse_thresholds(words: Iterable[str]) -> dict[str, float]:
    """The thresholds in words such as `0.01` (of the relative L2 difference) or `ulps=1`.

    Raises: RequestError for another measure, or what is not a number.
    """
    thresholds = {}
    for word in words:
        name, _, number = word.rpartition("=")
        if (name or "relative") not in MEASURES:
            raise RequestError(f"`threshold={word}`: there is no measure {name!r}", do=choices(name, MEASURES))
        try:
            thresholds[name or "relative"] = float(number)
        except ValueError:
            raise RequestError(f"`threshold={word}`: {number!r} is not a number", do="Use for example `threshold=0.01`") from None
    return thresholds
