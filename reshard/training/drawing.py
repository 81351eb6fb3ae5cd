"""How an estimate is drawn: a bar for the fullest rank of each strategy, and the bubble of a pipeline as a curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.geometry.quantities import nbytes_text
from reshard.picture.drawing import curves, stacked
from reshard.picture.page import Html, joined, table
from reshard.training.fitting import bubbles
from reshard.training.schedules import Schedule

if TYPE_CHECKING:
    from reshard.training.memory import Estimate

_NAMES = ("weights", "gradients", "optimizer", "activations", "transient")


def estimate_picture(found: Estimate) -> Html:
    """Stacked bars: weights, gradients, optimizer state, activations and what is needed for a moment."""
    rows = [
        (
            f"ZeRO-{each.zero}" if each.zero else "DDP",
            tuple(float(size or 0) for size in (rank.weights, rank.gradients, rank.optimizer, rank.activations, rank.transient)),
            nbytes_text(rank.total),
        )
        for each in found.strategies
        for rank in (each.fullest,)
    ]
    return stacked(rows, _NAMES, title="Bytes on the fullest rank")


def bubble_picture(schedules: Sequence[Schedule]) -> Html:
    """The share of the time that pipelines wait, against the number of microbatches: a curve and a table of each."""
    points = {f"PP {schedule.stages}": bubbles(schedule) for schedule in schedules}
    picture = curves(points, title="Pipeline bubble against microbatches", x_name="microbatches", y_name="bubble")
    rows = [(name, count, f"{100 * bubble:.3g} %") for name, line in points.items() for count, bubble in line]
    return joined((picture, table(("pipeline", "microbatches", "bubble"), rows)))
