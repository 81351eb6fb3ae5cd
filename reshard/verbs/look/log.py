"""The verb `log`: the steps of a run, one row each, and how their weights grew and changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import pairwise
from typing import Unpack, cast

from reshard.errors import RequestError, ReshardError, some
from reshard.geometry.quantities import plural
from reshard.geometry.table import Table
from reshard.geometry.value import Tabular, mutable, value
from reshard.opening.chains import delta_at, source_of
from reshard.opening.keywords import EffortOptions, ModelOptions, PathLike, checked_keywords, take
from reshard.opening.open import open
from reshard.opening.run_folders import Step, run_at
from reshard.plans.manifest import usable_manifest
from reshard.requests.lost_files import with_lost_files
from reshard.storage.tar import open_tree
from reshard.verbs.look.diff import diff

_COLUMNS = ("step", "part", "format", "bytes", "age", "complete", "fingerprint", "norm", "change")


@value
class LayerChange:
    """How the weights of one layer, or of what belongs to no layer, changed since the step before."""

    JSON = "name norm change"

    name: str
    """Such as "layer 3"."""
    norm: float
    """The L2 norm of its weights at this step."""
    change: float
    """The L2 norm of the difference, as a share of the norm at the step before."""


@mutable
class LoggedStep:
    """One checkpoint of a run, and what was measured of it."""

    JSON = (
        "step=of.number part=of.part path=of.path format=of.format bytes=of.nbytes age_seconds=of.age complete=of.complete "
        "reason=of.completeness.reason fingerprint norm change layers problem"
    )

    of: Step
    """Where it lies, and whether it is complete."""
    fingerprint: str | None = None
    """The fingerprint that reshard recorded when it wrote this step; None if another program wrote it."""
    norm: float | None = None
    """The L2 norm of all weights; None if it was not measured."""
    change: float | None = None
    """The L2 norm of the difference from the step before, as a share of that step's norm; None for the first step."""
    layers: list[LayerChange] = field(default_factory=list)
    """The same of each layer; empty for the first step."""
    problem: str | None = None
    """Why it was not measured, or not as a whole, although it is complete."""


@value
class RunLog(Tabular):
    """The steps of a run, in order."""

    JSON = "path steps"

    path: str
    """The folder of the run."""
    steps: tuple[LoggedStep, ...]
    """One row for each checkpoint: for each step, or for each part of a step."""

    def table(self) -> Table:
        """A row for each checkpoint."""
        rows = []
        for row in self.steps:
            step = row.of
            stored = (step.number, step.part, step.format, step.nbytes, step.age, step.complete)
            rows.append((*stored, row.fingerprint, row.norm, row.change))
        return Table(_COLUMNS, tuple(rows))

    def __repr__(self) -> str:
        return f"RunLog({self.path!r}, {plural(len(self.steps), 'checkpoint')})"


class RunLogOptions(EffortOptions, ModelOptions, total=False):
    """Keywords of `log`."""


@checked_keywords
def log(run: PathLike, *, stats: bool = False, **options: Unpack[RunLogOptions]) -> RunLog:
    """The checkpoints of a run, one row each: step, size, age, whether it is complete, and the fingerprint that reshard recorded.

    stats: also read the weights of all complete steps, each with the step before it: the L2 norm, and the relative change of each layer. A
    step that is kept as a delta is read as the checkpoint that it makes.

    Raises: RequestError if the path is not the folder of a run. CheckpointError if a file of a step was written while it was read.
    """
    folder = run_at(run)
    steps = with_lost_files(folder.steps()) if folder is not None else ()
    if not any(step.number is not None for step in steps):
        raise RequestError(
            "it is not the folder of a run",
            where=str(run),
            do="Give the folder that holds the folders of the steps; `reshard inspect` shows one",
        )
    rows = [LoggedStep(step, _fingerprint(step)) for step in steps if step.number is not None]
    for before, after in _pairs(rows) if stats else ():
        try:
            _measure(before, after, steps, options)
        except ReshardError as error:  # one step that cannot be compared hides no other
            after.problem = str(error)
    return RunLog(str(run), tuple(rows))


def _pairs(rows: Sequence[LoggedStep]) -> Iterator[tuple[LoggedStep, LoggedStep]]:
    """Complete checkpoints with the one of the same part at the step before."""
    parts = dict.fromkeys(row.of.part for row in rows)
    for part in parts:
        yield from pairwise([row for row in rows if row.of.part == part and row.of.complete])


def _fingerprint(step: Step) -> str | None:
    """What reshard recorded of a step: in the manifest of a checkpoint, or in a delta about its result."""
    if not step.complete:
        return None
    try:
        if (manifest := usable_manifest(open_tree(step.path))) is not None:
            return manifest.fingerprint
        facts = delta_at(step.path)
    except ReshardError:  # what is damaged is said when the step is opened
        return None
    return facts.result_fingerprint if facts is not None else None


def _measure(before: LoggedStep, after: LoggedStep, steps: Sequence[Step], options: RunLogOptions) -> None:
    """Fill in the norms and the change of two neighbours."""
    effort = {**options}
    about = take(effort, ModelOptions)
    change = diff(*(open(source_of(row.of, steps), **about) for row in (before, after)), **cast(EffortOptions, effort))
    if unlike := [difference for difference in change.differences if difference.kind != "values"]:
        names = some([difference.name for difference in unlike])
        after.problem = f"{plural(len(unlike), 'tensor')} of the two steps could not be compared, such as by name or shape: {names}"
    if not change.changes:
        return
    total = change.total()
    before.norm, after.norm, after.change = math.sqrt(total.left_squares), math.sqrt(total.right_squares), total.relative
    after.layers = [LayerChange(layer.name, math.sqrt(layer.right_squares), layer.relative) for layer in change.by_layer()]
