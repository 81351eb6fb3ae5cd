"""How commands show the checkpoints of a run, and the events of a watch."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from reshard.geometry.documents import document
from reshard.pages.folders import run_sections
from reshard.pages.sections import Section
from reshard.secrets import masked_in

from .replies import Output, Reply
from .spelling import with_flags
from .tables import show, standard_output

if TYPE_CHECKING:
    from reshard.opening.pipelines import Pipeline
    from reshard.opening.run_folders import Step
    from reshard.verbs.steps.happened import WatchEvent


def run_reply(run: str, steps: Sequence[Step]) -> Reply:
    """The checkpoints of a folder."""
    from reshard.requests.lost_files import with_lost_files

    steps = with_lost_files(steps)
    ages = [None if step.age is None else round(step.age, 1) for step in steps]
    documents = [document(step, age_seconds=age) for step, age in zip(steps, ages, strict=True)]
    return Reply({"path": run, "steps": documents}, _sections(run, steps))


def pipeline_reply(pipeline: Pipeline) -> Reply:
    """The components of a diffusers pipeline."""
    from reshard.opening.run_folders import RunFolder
    from reshard.pages.folders import pipeline_sections

    listed = run_reply(pipeline.path, RunFolder(pipeline.path).checkpoints()).as_document()
    return Reply({**listed, "pipeline": document(pipeline)}, pipeline_sections(pipeline))


def _sections(run: str, steps: Sequence[Step]) -> Iterator[Section]:
    """The checkpoints, and a command that goes on from there: with a delta it inspects what the delta makes."""
    from reshard.adapter import registry

    yield from run_sections(run, steps)
    newest = max((step for step in steps if step.complete and step.number is not None), key=lambda step: step.order, default=None)
    shown = newest or next((step for step in steps if step.complete), None)
    if shown is not None:
        is_delta = shown.format is not None and shown.number is not None and registry.named(shown.format).changes_base
        place = f"{shlex.quote(run)} --step {shown.number}" if is_delta else shlex.quote(shown.path)
        yield from ("", f"  next  reshard inspect {place}")


def show_events(events: Iterable[WatchEvent]) -> None:
    """Show the events until there are no more; then end the command, with the exit code 1 if one of them is a failure."""
    failed, as_json = False, Output.current().as_json
    for happening in events:
        failed = failed or happening.event == "failed"
        if as_json:
            with standard_output():
                sys.stdout.write(with_flags(json.dumps(masked_in(happening.to_json()))) + "\n")
        else:
            show(f"step {happening.step}: {happening.event}: {happening.detail}")
        sys.stdout.flush()
    click.get_current_context().exit(1 if failed else 0)
