"""The log of a run, described once: its steps, the gaps between them, and how the weights grew and changed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from reshard.geometry.quantities import plural
from reshard.pages.sections import Facts, Head, Rows, Section
from reshard.pages.texts import age_text, nbytes_text, sparkline

if TYPE_CHECKING:
    from reshard.verbs.look.log import LoggedStep, RunLog

_DIGITS = 12
_FINEST = 1000
"""Heights that a change is counted in before it is drawn."""


def log_sections(log: RunLog) -> Iterator[Section]:
    """One row for each step, and one sentence about the whole."""
    rows, complete = log.steps, [row for row in log.steps if row.of.complete]
    has_parts, is_measured = any(row.of.part for row in rows), any(row.norm is not None for row in rows)
    title = f"{log.path}: {plural(len(rows), 'checkpoint')}, {len(complete)} complete"
    tiles = [("checkpoints", len(rows)), ("bytes", nbytes_text(sum(row.of.nbytes for row in rows)))]
    yield Head(log.path, "run", f"{len(complete)} complete", "good" if complete else "open", tiles)
    yield from (title, "")
    highest = max((layer.change for row in rows for layer in row.layers), default=0.0)
    headings = ["step", *(["part"] if has_parts else []), "bytes", "age", "", "fingerprint"]
    headings += ["norm", "change", "by layer"] if is_measured else []
    cells = [_cells(row, highest, has_parts=has_parts, is_measured=is_measured) for row in rows]
    yield Rows(headings, cells, "Steps", fits=True)
    yield ""
    yield Facts([("change", _most_changed(log)), ("gap", _gaps(log)), ("note", [*_problems(log)])], width=6)


def _cells(row: LoggedStep, highest: float, *, has_parts: bool, is_measured: bool) -> list[object]:
    digits = row.fingerprint.rpartition(":")[2][:_DIGITS] if row.fingerprint else "-"
    cells: list[object] = [str(row.of.number), *([row.of.part] if has_parts else []), nbytes_text(row.of.nbytes)]
    cells += ["-" if row.of.age is None else age_text(row.of.age), "complete" if row.of.complete else "incomplete", digits]
    if is_measured:
        line = sparkline([round(_FINEST * layer.change / highest) for layer in row.layers]) if highest else ""
        cells += ["-" if row.norm is None else f"{row.norm:.4g}", "-" if row.change is None else f"{row.change:.3g}", line]
    return cells


def _most_changed(log: RunLog) -> str | None:
    """Where the weights changed most: one sentence, computed from the steps."""
    changed = [(row, layer) for row in log.steps for layer in row.layers if layer.change]
    if not changed:
        return "no weight changed between the steps" if any(row.layers for row in log.steps) else None
    row, layer = max(changed, key=lambda pair: pair[1].change)
    name = "what belongs to no layer" if layer.name == "no layer" else layer.name
    return f"{name} changed most: by {100 * layer.change:.3g} % of its norm up to step {row.of.number}"


def _gaps(log: RunLog) -> str | None:
    """Steps that are missing in the rhythm of the run."""
    numbers = sorted({row.of.number for row in log.steps if row.of.number is not None})
    distances = [after - before for before, after in pairwise(numbers)]
    usual = max(set(distances), key=lambda distance: (distances.count(distance), -distance), default=0)
    wide = [(before, after) for before, after in pairwise(numbers) if after - before > usual]
    if not wide or len(wide) * 2 > len(distances):
        return None
    shown = ", ".join(f"{before} to {after}" for before, after in wide[:5])
    return f"steps are {usual} apart, and more between {shown}" + (f" and {len(wide) - 5} more" if len(wide) > 5 else "")


def _problems(log: RunLog) -> Iterator[str]:
    for row in log.steps:
        if row.problem is not None:
            yield f"step {row.of.number} and the one before: {row.problem}"
        elif not row.of.complete:
            yield f"step {row.of.number}: {row.of.completeness.reason}"
