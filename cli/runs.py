"""How commands show the checkpoints of a run (as a table and as JSON), the events of a watch, and a model without weights."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from reshard.errors import MOST_NAMES
from reshard.geometry.documents import document
from reshard.geometry.quantities import plural
from reshard.secrets import masked_in

from .spelling import with_flags
from .tables import count_text, nbytes_text, show, show_table, standard_output

if TYPE_CHECKING:
    from reshard.opening.run_folders import Step
    from reshard.verbs.steps.happened import WatchEvent


def run_document(run: str, steps: Sequence[Step]) -> dict[str, Any]:
    """The checkpoints of a folder with stable keys."""
    return {"path": run, "steps": [run_step(step) for step in steps]}


def show_run(run: str, steps: Sequence[Step]) -> None:
    """The checkpoints of a folder, one row each, and a command that goes on from there: with a delta it inspects what the delta makes."""
    from reshard.adapter import registry

    show_list(run, steps)
    newest = max((step for step in steps if step.complete and step.number is not None), key=lambda step: step.order, default=None)
    shown = newest or next((step for step in steps if step.complete), None)
    if shown is not None:
        show()
        is_delta = shown.format is not None and shown.number is not None and registry.named(shown.format).changes_base
        place = f"{shlex.quote(run)} --step {shown.number}" if is_delta else shlex.quote(shown.path)
        show(f"  next  reshard inspect {place}")


def show_list(run: str, steps: Sequence[Step], *, on_stderr: bool = False) -> None:
    """A table of the checkpoints of a folder. Below it stands why some are incomplete: there, a narrow terminal has room for it."""
    done, numbers = sum(step.complete for step in steps), {step.number for step in steps if step.number is not None}
    of_steps = f" of {plural(len(numbers), 'step')}" if numbers else ""
    show(f"{run}: {plural(len(steps), 'checkpoint')}{of_steps}, {done:,} complete", on_stderr=on_stderr)
    show(on_stderr=on_stderr)
    rows = [
        (
            *(("-" if step.number is None else str(step.number),) if numbers else ()),
            _folder(run, step),
            step.format or "-",
            nbytes_text(step.nbytes),
            "-" if step.age is None else age_text(step.age),
            "complete" if step.complete else "incomplete",
            step.completeness.reason if step.complete else "",
        )
        for step in steps
    ]
    headings = (*(("step",) if numbers else ()), "folder", "format", "bytes", "age", "", "because")
    last = len(headings) - 1
    show_table(rows, headings, optional=(last, last - 2, last - 3), on_stderr=on_stderr)
    incomplete = [step for step in steps if not step.complete]
    if incomplete:
        show(on_stderr=on_stderr)
    for step in incomplete[:MOST_NAMES]:
        show(f"  note  {_folder(run, step)}: {step.completeness.reason}", on_stderr=on_stderr)
    if len(incomplete) > MOST_NAMES:
        show(f"  note  {len(incomplete) - MOST_NAMES:,} more are incomplete", on_stderr=on_stderr)


def _folder(run: str, step: Step) -> str:
    return step.path[len(run) :].strip("/")


def run_step(step: Step) -> dict[str, Any]:
    """A checkpoint of a run with stable keys."""
    return document(step, age_seconds=None if step.age is None else round(step.age, 1))


def age_text(seconds: float) -> str:
    """A time as people say it: 40 s, 12 min, 3 h, 5 days."""
    for most, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def show_bare_model(path: str) -> None:
    """What the model of a config is, which engines serve it, and the command that plans with it.

    Raises: RequestError if its architecture is not declared.
    """
    from reshard.models.model import Model
    from reshard.models.quantization import without_quantization
    from reshard.opening.models import model_at
    from reshard.plans import summary
    from reshard.requests.outlook import engine_sizes
    from reshard.training.parameter_counts import parameters

    model = model_at(path)
    plain = Model(model.architecture, without_quantization(model.config))
    d, experts, count = model.dimensions, summary.experts(plain), parameters(plain)
    about_experts = ""
    if experts is not None:
        top = "" if experts.per_token is None else f", top {experts.per_token}"
        active = ""
        if experts.idle_parameters is not None:
            # As those of the model, without the layers for multi-token prediction.
            ahead = sum(weight.elements for weight in plain.weights.values() if weight.optional and weight.role.startswith("expert."))
            idle = experts.idle_parameters - ahead // experts.number * (experts.number - (experts.per_token or 0))
            active = f"{count_text(count - idle)} active; "
        about_experts = f" ({active}{plural(experts.number, 'expert')}{top})"
    show(
        f"{path}: {model.architecture.model_type}, {count_text(count)} parameters{about_experts}; a model without weights, its config alone"
    )
    heads = f"{plural(d['heads'], 'head')} ({d['kv_heads']} KV)"
    tied = ", tied head" if model.is_tied else ""
    show(f"  model     {plural(d['layers'], 'layer')}, hidden {d['hidden']}, {heads}, vocabulary {d['vocab']}{tied}")
    if sizes := engine_sizes(model):
        show("  serves    " + "; ".join(f"{name} at TP {', '.join(map(str, legal))}" for name, legal in sizes.items()))
        show(f"  next      reshard degrees {shlex.quote(path)} --to {'vllm' if 'vllm' in sizes else min(sizes)}")


def show_events(events: Iterable[WatchEvent], *, as_json: bool) -> None:
    """Show the events until there are no more; then end the command, with the exit code 1 if one of them is a failure."""
    failed = False
    for each in events:
        failed = failed or each.event == "failed"
        if as_json:
            with standard_output():
                sys.stdout.write(with_flags(json.dumps(masked_in(each.to_json()))) + "\n")
        else:
            show(f"step {each.step}: {each.event}: {each.detail}")
        sys.stdout.flush()
    click.get_current_context().exit(1 if failed else 0)
