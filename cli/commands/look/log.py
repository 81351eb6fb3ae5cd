"""reshard log: the steps of a run, one line each."""

from __future__ import annotations

from typing import Any

import click

from reshard.geometry.documents import document

from ... import options
from ...progress import working
from ...replies import Reply


@options.command("log", "reshard log runs/7", "reshard log runs/7 --stats", "reshard log runs/7 --stats --html run.html")
@click.argument("run")
@click.option("--stats", is_flag=True, help="Read the weights of all steps: their norm, and how much each layer changed.")
@options.model
@options.page
@options.effort
def command(run: str, stats: bool, **given: Any) -> Reply:
    """Show the steps of RUN, one line each: size, age, whether it is complete, and the fingerprint that reshard recorded.

    With --stats, each complete step is read with the one before it. `change` is the L2 norm of the difference as a share of the norm; the
    line beside it shows the change of each layer, from the first to the last, as a share of the largest change in the run.
    """
    import reshard
    from reshard.opening.run_folders import run_at
    from reshard.pages.runs import log_sections

    folder = run_at(run) if stats else None
    total = 2 * sum(step.nbytes for step in folder.steps() if step.complete) if folder is not None else 0
    with working("log", total, given) as effort:
        history = reshard.log(run, stats=stats, **effort)
    ages = [None if step.of.age is None else round(step.of.age, 1) for step in history.steps]
    documents = [document(step, age_seconds=age) for step, age in zip(history.steps, ages, strict=True)]
    return Reply({"path": run, "steps": documents}, log_sections(history))
