"""reshard convert: plan it, show it, run it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from shlex import join, quote
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from reshard.errors import RequestError
from reshard.geometry.quantities import nbytes_text, plural
from reshard.opening.keywords import RecordOptions
from reshard.pages.sections import Facts, Rows, Section

from .. import options
from ..invocation import current
from ..plans import plan_document, plan_reply
from ..progress import bar
from ..replies import Reply
from ..tables import fingerprint_text

if TYPE_CHECKING:
    from reshard.engine.conversion import Conversion
    from reshard.plans.plan import Plan
    from reshard.verbs.convert import PartResult, Result, Sharing

_LEAST_OF_A_RATE = 16 << 20
# Files that are printed; --json prints all.
_MOST = 20


options_of_convert = options.together(
    options.target(required=False),
    options.selection("Convert"),
    options.format_name,
    options.model,
    options.switch("--dry-run", options.OUTPUT, "Show the proven plan; write nothing."),
    options.switch("--resume", options.OUTPUT, "Resume an interrupted conversion."),
    options.switch("--overwrite", options.OUTPUT, "Replace the checkpoint in TARGET once the new one is complete."),
    options.switch("--if-changed", options.OUTPUT, "Do nothing if TARGET is up to date; otherwise replace what reshard wrote there."),
    options.keywords(RecordOptions, section=options.OUTPUT),
    options.whole_pipeline,
    options.fail_if_skipped,
    options.effort,
    options.parts,
    options.summary_or_full,
)
"""The options of a conversion, whatever its source is."""


@options.command(
    "convert",
    "reshard convert step-1000 out --to vllm --tp 8 --model llama-3-8b",
    "reshard convert step-1000 out --to hf --dtype bf16",
    "reshard convert step-1000 out --to megatron --tp 2 --pp 2 --optimizer --dry-run",
    "reshard convert runs/7 out --to hf --last 5 --average",
    "srun -n 8 reshard convert step-1000 out --to vllm --tp 8 --part auto",
)
@options.checkpoint("sources", nargs=-1, metavar="SOURCE...")
@click.argument("target")
@options.combining
@options_of_convert
def command(sources: tuple[str, ...], target: str, **given: Any) -> Reply:
    """Convert SOURCE to another format and write it to the directory TARGET. Several sources become one checkpoint by --average.

    TARGET is written atomically: its files appear under their names only when all are complete. SOURCE may be BASE+DELTA+DELTA: a
    checkpoint with what `reshard delta` has written of later ones.
    """
    if not sources:
        raise RequestError(f"TARGET is missing: {target} alone is given", do=f"Such as `reshard convert {quote(target)} out --to hf`")
    return convert("convert", sources, target, **given)


def convert(name: str, sources: tuple[str, ...], target: str, to: str | None, dry_run: bool, full: bool, **given: Any) -> Reply:
    """Convert sources to the target. name: the command, as it is recorded beside the result."""
    from reshard.engine.pool import Effort
    from reshard.engine.record import Provenance
    from reshard.opening.keywords import ConvertOptions
    from reshard.verbs.convert import (
        completed,
        conversion,
        existing_target,
        part_result,
        pipeline_around,
        result_of,
        target_place,
        unchanged_result,
    )
    from reshard.verbs.plan import effort_of

    metrics, arguments = current().metrics, current().arguments
    metrics.label(target=target, format=to)
    existing = existing_target(**{name: given.pop(name) for name in ("resume", "overwrite", "if_changed")})
    provenance = Provenance(tuple(arguments[arguments.index(name) :]), **options.take(given, RecordOptions))
    target_place(target)
    sharing, asked = _sharing(given), options.take(given, ConvertOptions)
    show_progress, is_whole = given.pop("show_progress"), given.pop("whole_pipeline")
    plan = _planned(sources, target, to, given)
    metrics.label(target=target, format=plan.layout.format)
    effort = Effort.of(effort_of(plan, asked))
    pipeline = pipeline_around(plan, target, existing, sharing) if is_whole else None
    if dry_run:
        return plan_reply(plan, full=full, target=target, copies=pipeline.copies() if pipeline else None)
    target = pipeline.component if pipeline else target
    began = time.monotonic()
    result = unchanged_result(plan, target, provenance) if existing == "update" else None
    metrics.record(tensors=len(plan.routes), dropped=len(plan.drops), unchanged=result is not None)
    if result is None:
        running = conversion(plan, target, existing=existing, effort=effort, provenance=provenance, sharing=sharing)
        with bar(running.total, f"convert {sharing.part}" if sharing.part else "convert", show_progress) as advance:
            for done in running.run():
                advance(done.nbytes)
        seconds = time.monotonic() - began
        if sharing.part:
            part = part_result(running, target, sharing.part, seconds)
            return _part(plan, replace(part, result=completed(pipeline, part.result)))
        result = result_of(running, target, seconds)
        totals = plan.totals()
        metrics.record(bytes_read=totals.read, bytes_written=totals.written)
    result = completed(pipeline, result)
    document = {**result.to_json(), "plan": plan_document(plan, full=True)} if full else result.to_json()
    if not result.unchanged:
        return Reply(document, _result(running, result), brief=True)
    sizes = f"{plural(len(result.files), 'file')}, {nbytes_text(sum(result.files.values()))}"
    return Reply(document, [f"{result.path}: unchanged, {sizes}, fingerprint {fingerprint_text(result.fingerprint.root)}"])


def _sharing(given: dict[str, Any]) -> Sharing:
    """How the work is shared, taken out of what the command was given."""
    part, parts = given.pop("part"), given.pop("parts")
    finish, ray, address = (given.pop(name) for name in ("finish", "ray", "ray_address"))
    chosen = {"--part": part is not None or parts is not None, "--finish": finish, "--ray": ray or address is not None}
    if len(flags := [flag for flag, is_given in chosen.items() if is_given]) > 1:
        raise click.UsageError(f"{flags[0]} and {flags[1]} contradict each other", click.get_current_context())
    number = None
    if chosen["--part"]:
        from reshard.requests.launcher import part_of

        number = part_of(part, parts, os.environ)
    from reshard.verbs.convert import Sharing

    return Sharing(number, finish, chosen["--ray"], address)


def _planned(sources: tuple[str, ...], target: str, to: str | None, given: dict[str, Any]) -> Plan:
    """The plan that the options ask for, or the one in a plan file."""
    import reshard
    from reshard.verbs.plan import plan_of

    context, path = click.get_current_context(), given.pop("plan_path")
    if path is None:
        if to is None:
            raise options.missing_target(f"reshard convert {join([*sources, target])}")
        return plan_of(sources, to, given)
    is_given = [name for name in ("to", *given) if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
    if is_given:
        flag = "--" + is_given[0].replace("_", "-")
        raise click.UsageError(f"{flag} and --plan contradict each other: the plan file says what is written", context)
    return reshard.load_plan(path, sources)


def _part(plan: Plan, part: PartResult) -> Reply:
    """What a part has done, and the result if it has completed the target."""
    earlier = f", {nbytes_text(part.resumed_bytes)} of them from an earlier run" if part.resumed_bytes else ""
    done = f"{plural(part.tasks, 'task')}, {nbytes_text(part.nbytes)} in {part.seconds:.1f} s{earlier}"
    line = f"{part.path}: part {part.part}, {done}; {'complete' if part.result else 'not complete yet'}"
    return Reply(part.to_json(), [line, *(_files(plan, part.result) if part.result else ())], brief=True)


def _result(running: Conversion, result: Result) -> Iterator[Section]:
    """Which files were written, how fast, and what was left out."""
    plan, resumed, seconds = running.plan, running.resumed_bytes, result.seconds
    totals = plan.totals()
    # The rate of a small conversion says how long Python took to start its threads.
    copied = totals.written - resumed
    rate = f" ({nbytes_text(int(copied / max(seconds, 1e-9)))}/s)" if copied >= _LEAST_OF_A_RATE else ""
    earlier = f", {nbytes_text(resumed)} of them from an earlier run" if resumed else ""
    fingerprint = f", fingerprint {fingerprint_text(result.fingerprint.root)}" if current().log.quiet else ""
    yield f"{result.path}: {plural(totals.files, 'file')}, {nbytes_text(totals.written)} in {seconds:.1f} s{rate}{earlier}{fingerprint}"
    yield from _files(plan, result)


def _files(plan: Plan, result: Result) -> Iterator[Section]:
    """The files, and what was left out."""
    from reshard.pages.checkpoints import dropped_facts
    from reshard.pages.plans import left_facts, missing_facts

    files = plan.layout.files
    listed = files if len(files) <= _MOST + 1 else files[:_MOST]  # A line saves none when it stands for one file.
    rest = files[len(listed) :]
    hint = f" files, {nbytes_text(sum(file.nbytes for file in rest))}; --json lists all"
    rows = [(file.path, nbytes_text(file.nbytes), len(file.tensors)) for file in listed]
    yield Rows(("file", "bytes", "tensors"), rows, hidden=len(rest), hint=hint)
    fingerprint = fingerprint_text(result.fingerprint.root)
    left_out = [*dropped_facts(plan.drops), *left_facts(result.left), *missing_facts(result.findings)]
    yield Facts([*left_out, ("note", result.notes), ("fingerprint", fingerprint)])
