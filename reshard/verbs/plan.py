"""The verb `plan`: what a conversion would do, proven, before anything is written; and plans in files, for other machines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack, cast

from reshard.adapter import registry
from reshard.adapter.file_kinds import kinds
from reshard.errors import RequestError, some
from reshard.geometry.quantities import plural
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import EffortOptions, OpenOptions, PathLike, WholePlanOptions, checked_keywords, take
from reshard.opening.open import open_several
from reshard.plans.plan import Plan
from reshard.requests.order import PlanFile, planned
from reshard.requests.request import ConversionRequest
from reshard.storage.files import LocalFiles, read_whole
from reshard.storage.system_calls import existing_path, gc_paused, is_url

_MOST_BYTES = 1 << 30
Source = Checkpoint | PathLike
"""A checkpoint, opened or by its path."""


def effort_of(plan: Plan, given: Mapping[str, Any]) -> EffortOptions:
    """The keywords of an effort among those of a conversion. Raises RequestError with exit code 1 if `fail_if_skipped` is among them, and a
    tensor is skipped or a file beside the weights is left."""
    effort: Any = {**given}
    left = [file for file in plan.layout.left if not kinds()[file.kind].get("harmless")]
    if effort.pop("fail_if_skipped", False) and (plan.drops or left):
        names = [*(f"{drop.name} ({drop.kind})" for drop in plan.drops), *(f"{file.path} ({file.kind})" for file in left)]
        raise RequestError(
            f"{plural(len(plan.drops), 'tensor')} and {plural(len(left), 'file')} would not be carried: {some(names)}",
            where=plan.source_files.root,
            why="`fail_if_skipped=True` asks that nothing is left; nothing was written",
            do="Leave it out, or remove from the source what is not needed. `reshard plan` with --json --full names everything",
            id="skipped",
        )
    return cast(EffortOptions, effort)


@gc_paused()
@checked_keywords
def plan(source: Source | Sequence[Source], *, to: str, **options: Unpack[WholePlanOptions]) -> Plan:
    """The proven plan of a conversion to the format `to`. Nothing is written, no weight is read.

    An option of one format, such as Megatron's `vp`, is a further keyword; `reshard formats` lists them. Several sources become one
    checkpoint by `average`, `task_arithmetic` or `slerp`; with `last`, the source is the folder of a run.

    Raises: RequestError if the model or the parallel sizes do not allow it, or the sources are of different models; CheckpointError if a
    source does not hold the whole model.
    """
    return plan_of(source, to, dict(options))


def plan_of(source: Source | Sequence[Source], to: str, given: dict[str, Any]) -> Plan:
    """The plan of keywords, as `plan` makes it. given: the keywords of `plan` and of `open`."""
    about_source = take(given, OpenOptions)
    request = ConversionRequest.of(to, given)
    sources = _sources(source, given.pop("last", None), given.get("task_arithmetic"))
    checkpoint, *others = open_several(sources, about_source)
    return planned(checkpoint, request, {"to": request.to.name, **given}, others)


def plan_to_run(source: Plan | Source | Sequence[Source], to: str | None, given: dict[str, Any]) -> Plan:
    """The plan itself, or that of a source by the keywords of `plan_of`.

    Raises: RequestError if a plan comes with keywords that it holds already, or a source without a target format. What `plan` raises.
    """
    if not isinstance(source, Plan):
        if to is None:
            raise RequestError("no target format is given", do=f"Add `to=`: {', '.join(registry.writable())}")
        return plan_of(source, to, given)
    if name := "to" if to is not None else next(iter(given), None):
        raise RequestError(f"`{name}=` belongs to the plan, which is made already", do=f"Give it to `reshard.plan(..., {name}=...)`")
    return source


def _sources(source: Source | Sequence[Source], last: int | None, base: PathLike | None) -> list[Source]:
    """The sources, the base of a task arithmetic first. last: how many steps of a run are taken."""
    sources = [*source] if isinstance(source, Sequence) and not isinstance(source, str) else [source]
    if last is not None:
        sources = last_steps(sources, last)
    if not sources:
        raise RequestError("no source is given", do="Give a checkpoint, or several with `average=`")
    return sources if base is None else [base, *sources]


def last_steps(sources: Sequence[Source], number: int) -> list[Source]:
    """The checkpoints of the last steps of a run, the oldest first.

    Raises: RequestError unless the source is the folder of a run, and has so many complete steps of one checkpoint each.
    """
    from reshard.opening.chains import source_of
    from reshard.opening.run_folders import run_at

    for source in sources:
        if not isinstance(source, Checkpoint) and not is_url(source) and "+" not in os.fspath(source):
            existing_path(source)
    if len(sources) != 1 or isinstance(sources[0], Checkpoint) or (run := run_at(sources[0])) is None:
        raise RequestError(
            f"`last={number}` takes the folder of a run, and {'several sources are' if len(sources) > 1 else 'a checkpoint is'} given",
            where=None if len(sources) > 1 else str(sources[0]),
            do="Give the folder that holds the folders of the steps, or leave out `last=` and name the checkpoints",
        )
    steps = run.steps()
    complete = [step for step in steps if step.complete and step.number is not None]
    chosen = sorted({step.number for step in complete if step.number is not None})[-number:]
    fitting = [step for step in complete if step.number in chosen]
    if len(chosen) < number or number < 1:
        raise RequestError(
            f"`last={number}`: the run has {plural(len(chosen), 'complete step')}",
            where=os.fspath(sources[0]),
            do="Look at them with `reshard inspect`, and give a number from 1 to that",
        )
    if len(fitting) > len(chosen):
        names = ", ".join(step.part or step.name for step in fitting if step.number == chosen[-1])
        raise RequestError(
            f"`last={number}`: step {chosen[-1]} has several checkpoints: {names}",
            where=os.fspath(sources[0]),
            do="Name the checkpoints of one model in place of the run",
            id="ambiguous",
        )
    return [source_of(step, steps) for step in fitting]


def check_whole(plan: Plan) -> None:
    """Raises RequestError if the plan is of one rank alone, which is only looked at."""
    if plan.target.only_rank:
        raise RequestError(f"this is a plan of {dict(plan.target.only_rank)} alone", do="Plan without `only` what is to be written")


def save_plan(plan: Plan, path: PathLike) -> int:
    """Write a plan to the file `path`, so that other processes can run it; returns the file's length in bytes.

    Raises: UnsupportedError if an option names another checkpoint, SystemRefusal if the file cannot be written.
    """
    from reshard.storage.output_file import OutputFile

    check_whole(plan)
    return OutputFile.at(path).write(PlanFile.of(plan).content)


def load_plan(path: PathLike, source: PathLike | Sequence[PathLike]) -> Plan:
    """The plan in a file, for `convert` and `convert_part`: made and proven again from the source, which must be the planned one. source:
    if several were combined, all of them in their order, with the base of a task arithmetic first.

    Raises: RequestError if there is no plan file, CheckpointError if it is damaged, or the source has changed since it was planned. What
    `plan` raises.
    """
    files = LocalFiles(path)
    sources = [os.fspath(source)] if isinstance(source, str | os.PathLike) else [os.fspath(one_source) for one_source in source]
    if not files.is_file:
        raise RequestError(
            "a plan file is expected, this is a directory", where=files.root, do="Give the file that `plan_out=` has written"
        )
    return PlanFile(read_whole(files, files.list()[0], limit=_MOST_BYTES), os.fspath(path)).planned(sources)
