"""reshard convert: plan it, show it, run it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.quantities import plural

from .. import options
from ..json_output import show_json
from ..plans import plan_document, show_drops, show_plan
from ..progress import bar
from ..tables import nbytes_text, show, table

if TYPE_CHECKING:
    from reshard.engine.run import Conversion


@click.command(
    "convert",
    cls=options.Command,
    examples=[
        "reshard convert step-1000 out --to vllm --tp 8 --model llama-3-8b",
        "reshard convert step-1000 out --to hf --dtype bf16",
        "reshard convert step-1000 out --to megatron --tp 2 --pp 2 --optimizer --dry-run",
    ],
)
@click.argument("source")
@click.argument("target")
@options.target()
@options.selection("Convert")
@options.format_name
@options.model
@options.option("--dry-run", section=options.OUTPUT, is_flag=True, help="Show the proven plan; write nothing.")
@options.option("--resume", section=options.OUTPUT, is_flag=True, help="Resume an interrupted conversion.")
@options.option("--overwrite", section=options.OUTPUT, is_flag=True, help="Replace the checkpoint in TARGET once the new one is complete.")
@options.option(
    "--checksums", section=options.OUTPUT, is_flag=True, help="Also write SHA256SUMS for `sha256sum -c`; reads the result once more."
)
@options.effort
@options.summary_or_full
def command(source: str, target: str, to: str, dry_run: bool, as_json: bool, full: bool, show_progress: bool | None, **given: Any) -> None:
    """Convert SOURCE to another format and write it to the directory TARGET.

    TARGET is written atomically: its files appear under their names only when all are complete.
    """
    import reshard
    from reshard.engine.record import Provenance
    from reshard.errors import RequestError
    from reshard.verbs.convert import conversion, result_of
    from reshard.verbs.request import Effort, EffortOptions, OpenOptions

    resume, overwrite, checksums = (given.pop(name) for name in ("resume", "overwrite", "checksums"))
    if resume and overwrite:
        raise RequestError("--resume and --overwrite contradict each other", do="Give one of them")
    checkpoint = reshard.open(source, **options.take(given, OpenOptions))
    effort = Effort(**options.take(given, EffortOptions))
    plan = reshard.plan(checkpoint, to=to, **given)
    if dry_run:
        show_json(plan_document(plan, full=full)) if as_json else show_plan(plan)
        return
    began = time.monotonic()
    arguments = click.get_current_context().find_root().obj
    provenance = Provenance(tuple(arguments[arguments.index("convert") :]), checksums)
    running = conversion(plan, target, resume=resume, overwrite=overwrite, effort=effort, provenance=provenance)
    with bar(running.total, "convert", show_progress) as advance:
        for done in running.run():
            advance(done.nbytes)
    seconds = time.monotonic() - began
    if as_json:
        result = result_of(running, target, seconds).to_json()
        show_json({**result, "plan": plan_document(plan, full=True)} if full else result)
        return
    _show_result(running, target, seconds)


def _show_result(running: Conversion, target: str, seconds: float) -> None:
    """Which files were written, how fast, and what was left out."""
    plan, resumed = running.plan, running.resumed_bytes
    totals = plan.totals()
    rate = nbytes_text(int((totals.written - resumed) / max(seconds, 1e-9)))
    show(
        f"{target}: {plural(totals.files, 'file')}, {nbytes_text(totals.written)} in {seconds:.1f} s ({rate}/s)"
        + (f", {nbytes_text(resumed)} of them from an earlier run" if resumed else "")
    )
    show(table([(file.path, nbytes_text(file.nbytes), len(file.tensors)) for file in plan.layout.files], ("file", "bytes", "tensors")))
    show_drops(plan)
    for note in (*plan.layout.notes, *running.notes):
        show(f"  note      {note}")
    assert running.fingerprint is not None
    show(f"  fingerprint {running.fingerprint.root}")
