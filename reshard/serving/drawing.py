"""How the sizes of a serving engine are drawn: a bar for the fullest GPU at each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.geometry.quantities import nbytes_text
from reshard.picture.drawing import stacked
from reshard.picture.page import Html, element, joined

if TYPE_CHECKING:
    from reshard.serving.capacity import DegreeReport, DegreeRow


def smallest_that_fits(report: DegreeReport) -> DegreeRow | None:
    """The sizes with the fewest GPUs at which room for a KV cache is left; None if there are none, or the GPU's memory is not given."""
    fitting = [row for row in report.rows if row.capacity is not None and row.capacity.nbytes > 0]
    return min(fitting, key=lambda row: (row.parallel.tp * row.parallel.pp, row.parallel.pp), default=None)


def degrees_picture(report: DegreeReport) -> Html:
    """Stacked bars: the weights that a GPU holds alone, those that others hold as well, and what is left for the KV cache."""
    best, rows = smallest_that_fits(report), []
    for row in report.rows:
        if (stage := row.fullest) is None:
            continue
        room = max(row.capacity.nbytes, 0) if row.capacity else 0
        after = f", {nbytes_text(room)} for the KV cache" if room else ", does not fit" if row.capacity else ""
        text = ("fewest GPUs: " if row is best else "") + nbytes_text(stage.weights) + after
        rows.append((f"TP {row.parallel.tp} PP {row.parallel.pp}", (stage.weights - stage.replicated, stage.replicated, room), text))
    limit = report.memory.usable if report.memory else None
    names = ("weights", "replicated weights", "room for the KV cache")
    note = element("p", f"The line is the memory that the engine may use: {nbytes_text(limit)}.", class_="dim") if limit else ""
    return joined((stacked(rows, names, title="Bytes on the fullest GPU", limit=limit), note))
