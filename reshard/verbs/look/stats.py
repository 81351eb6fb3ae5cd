"""The verb `stats`: the distribution of the elements of every tensor, read once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Unpack

from reshard.canonical.content import Selection, check_read
from reshard.canonical.globs import as_globs, check_globs, matches
from reshard.engine.checks.reading import Reading
from reshard.engine.checks.recorded_digests import check_digests
from reshard.engine.pool import Effort
from reshard.engine.walk import BlockPlace, Read, walk
from reshard.geometry.boxes import blocks
from reshard.geometry.quantities import plural
from reshard.geometry.table import Table
from reshard.geometry.value import Tabular, value
from reshard.index.index import Tensor
from reshard.measures.distribution import ValueDistribution, measure_distribution
from reshard.opening.chains import delta_alone
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import EffortOptions, OpenOptions, PathLike, checked_keywords, take
from reshard.opening.open import open
from reshard.storage.claims import SourceChecks

BINS = 16
"""The intervals of a histogram."""
_OPTIMIZER = ("master", "moment1", "moment2", "step", "state")


class StatsOptions(OpenOptions, EffortOptions, total=False):
    """Keywords of `stats`."""


@value
class TensorStatistics:
    """The statistics of one tensor. Infinite elements and NaN are counted, and left out of the other numbers."""

    name: str
    """The canonical name."""
    kind: str
    """What it is for in the run, such as "weight"."""
    dtype: str
    """The element type."""
    shape: tuple[int, ...]
    """The global shape."""
    elements: int
    """The number of elements."""
    smallest: float | None
    """The smallest element; None if no element is a finite number."""
    largest: float | None
    """The largest element."""
    mean: float | None
    """The mean."""
    deviation: float | None
    """The standard deviation."""
    nan: int
    """The number of NaN."""
    inf: int
    """The number of infinite elements."""
    zeros: int
    """The number of elements that are zero."""
    rows: int
    """The number of rows along the last axis; 0 for vectors, and for rows too long to be read at once."""
    constant_rows: int
    """The number of rows that have one value."""
    histogram: tuple[int, ...]
    """The number of elements in each of 16 intervals of equal width from the smallest to the largest; empty for integers and constants."""


_COLUMNS = (
    "name", "kind", "dtype", "shape", "elements", "smallest", "largest", "mean", "deviation", "zeros", "nan", "inf", "constant_rows",
)  # fmt: skip


@value
class StatisticsReport(Tabular):
    """The statistics of the tensors of a checkpoint, in its order. It counts, indexes and iterates like a list of `TensorStatistics`."""

    tensors: tuple[TensorStatistics, ...]
    """One for each tensor."""
    source_checks: SourceChecks = SourceChecks()
    """What was compared with the checksums that the files hold."""

    def table(self) -> Table:
        """A row for each tensor."""
        return Table(_COLUMNS, tuple(tuple(getattr(tensor, name) for name in _COLUMNS) for tensor in self.tensors))

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[TensorStatistics]:
        return iter(self.tensors)

    def __getitem__(self, number: int) -> TensorStatistics:
        return self.tensors[number]

    def __repr__(self) -> str:
        strange = sum(1 for tensor in self.tensors if tensor.nan or tensor.inf)
        return f"StatisticsReport({plural(len(self), 'tensor')}, {strange} with NaN or infinite values)"


@checked_keywords
def stats(
    source: Checkpoint | PathLike, globs: str | Iterable[str] = (), *, optimizer: bool = False, **options: Unpack[StatsOptions]
) -> StatisticsReport:
    """The extremes, mean, standard deviation, zeros, NaN and histogram of every tensor whose name matches one of the globs, in the order of
    the checkpoint. Each tensor is read once, in blocks.

    optimizer: also the optimizer state. Quantized tensors are measured as they are stored, without their scales.

    Raises: RequestError if a glob matches no name, CheckpointError if a file cannot be read.
    """
    given: dict[str, Any] = dict(options)
    effort = Effort.of(take(given, EffortOptions))
    checkpoint = source if isinstance(source, Checkpoint) else open(source, **given)
    check_digests(effort, (checkpoint.files, checkpoint.index.tensors))
    tensors = wanted(checkpoint, as_globs(globs), optimizer=optimizer)
    if not tensors and checkpoint.index.facts.delta is not None:
        raise delta_alone(checkpoint.path, checkpoint.index.facts.delta)
    finished: dict[int, TensorStatistics] = {}
    parts = {number: ValueDistribution() for number in range(len(tensors))}
    left = {number: sum(1 for _ in blocks(tensor.shape)) for number, tensor in enumerate(tensors)}

    def measure(place: BlockPlace, read: Read) -> ValueDistribution:
        tensor = tensors[place[0]]
        return measure_distribution(((box, strip) for box, (strip,) in read), tensor.dtype, tensor.shape)

    files, reading = (checkpoint.files,), Reading(checks=effort.source_checksums)
    for (number, _, _), part in walk([(tensor,) for tensor in tensors], files, lambda: measure, effort=effort, reading=reading):
        parts[number].add(part)
        left[number] -= 1
        if not left[number]:  # only the tensors that are being read keep their counts
            finished[number] = _statistics(tensors[number], parts.pop(number))
    reading.check_unchanged(checkpoint.files, checkpoint.index)
    measured = tuple(finished.get(number) or _statistics(tensor, ValueDistribution()) for number, tensor in enumerate(tensors))
    return StatisticsReport(measured, reading.checks)


_MEASURED = ("smallest", "largest", "mean", "deviation")
_COUNTED = ("nan", "inf", "zeros", "rows", "constant_rows")


def _statistics(tensor: Tensor, known: ValueDistribution) -> TensorStatistics:
    counts: dict[str, Any] = {name: getattr(known, name) for name in _COUNTED}
    measured: dict[str, Any] = {name: getattr(known, name) if known.smallest <= known.largest else None for name in _MEASURED}
    histogram = tuple(known.histogram(tensor.dtype, BINS))
    return TensorStatistics(
        tensor.name, tensor.kind, tensor.dtype.name, tensor.shape, tensor.elements, histogram=histogram, **measured, **counts
    )


def wanted(checkpoint: Checkpoint, globs: tuple[str, ...], *, optimizer: bool) -> list[Tensor]:
    """The tensors that `stats` reads. Without optimizer state, a weight that is stored only as a master is read as it is."""
    index = checkpoint.named(Selection(keep_unknown=True))
    weights = index.by_kind("weight")
    chosen = [
        tensor
        for tensor in index.tensors
        if optimizer or tensor.kind not in _OPTIMIZER or (tensor.kind == "master" and tensor.name not in weights)
    ]
    check_globs("GLOB", globs, dict.fromkeys(tensor.name for tensor in chosen))
    read = [tensor for tensor in chosen if not globs or matches(tensor.name, globs)]
    check_read(read)
    return [tensor.without_replicas() for tensor in read]
