"""reshard convert: plan it, show it, run it."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from . import options
from .progress import bar
from .tables import nbytes_text, show, show_json, table

if TYPE_CHECKING:
    from reshard.canonical.content import Drop
    from reshard.plans.plan import Plan


@click.command("convert")
@click.argument("source")
@click.argument("target")
@options.target
@options.selection
@options.format_name
@options.model
@click.option("--dry-run", is_flag=True, help="Show the proven plan; write nothing.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted conversion.")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint in TARGET, once the new one is whole.")
@options.effort
@options.as_json
def command(
    source: str,
    target: str,
    to: str,
    format_name: str | None,
    model: str | None,
    vocab_size: int | None,
    architecture: str | None,
    dry_run: bool,
    resume: bool,
    overwrite: bool,
    workers: int | None,
    memory: int | None,
    shown: bool | None,
    as_json: bool,
    max_shard_size: int | None,
    **asked: Any,
) -> None:
    """Make of SOURCE a checkpoint of another format, in the directory TARGET.

    Nothing appears under its final name before all of it is whole.
    """
    import reshard
    from reshard.errors import RequestError
    from reshard.verbs.convert import conversion

    if resume and overwrite:
        raise RequestError("--resume and --overwrite contradict each other", do="Say one of them")
    opened = reshard.open(source, format=format_name, model=model, vocab_size=vocab_size, architecture=architecture)
    plan = reshard.plan(opened, to=to, max_shard_bytes=max_shard_size, **asked)
    if dry_run:
        show_json(plan_document(plan)) if as_json else show_plan(plan)
        return
    began = time.monotonic()
    running = conversion(plan, target, resume=resume, overwrite=overwrite, workers=workers, memory=memory)
    with bar(running.total, "convert", shown) as advance:
        for done in running.run():
            advance(done.nbytes)
    seconds = time.monotonic() - began
    assert running.fingerprint is not None
    if as_json:
        show_json({**plan_document(plan), "path": target, "fingerprint": running.fingerprint.root, "seconds": round(seconds, 3)})
        return
    _show_result(plan, target, running.fingerprint.root, seconds, running.resumed_bytes)


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan with stable keys, what each rank holds included."""
    from dataclasses import asdict

    from reshard.plans import summary

    return {**plan.to_json(), "ranks": [asdict(rank) for rank in summary.ranks(plan)]}


def show_plan(plan: Plan) -> None:
    """What would be written, for whom, and what is cast, filled or dropped on the way."""
    from reshard.plans import summary

    totals = plan.totals()
    show(f"{plan.source.format} -> {plan.layout.format} for {plan.layout.parallel}: {totals.tensors} tensors into {totals.files} files")
    show()
    rows = [
        (
            " ".join(f"{name} {number}" for name, number in rank.ranks.items()) or "-",
            rank.files[0] + (f" (+{len(rank.files) - 1})" if len(rank.files) > 1 else ""),
            nbytes_text(rank.nbytes),
            rank.tensors,
            _range(rank.layers),
            _range(rank.query_heads),
            _range(rank.kv_heads),
            _range(rank.vocabulary),
            rank.padding_rows,
        )
        for rank in summary.ranks(plan)
    ]
    show(table(rows, ("rank", "file", "bytes", "tensors", "layers", "query heads", "KV heads", "vocabulary", "padding rows")))
    show()
    show(
        f"  read      {nbytes_text(totals.read)}"
        + (f", and {nbytes_text(totals.compared)} of copies to compare" if totals.compared else "")
    )
    show(
        f"  write     {nbytes_text(totals.written)}: {nbytes_text(totals.copied)} copied, {nbytes_text(totals.filled)} filled, "
        f"{nbytes_text(totals.framing)} of framing"
    )
    for source, target, count in summary.casts(plan):
        show(f"  cast      {count} tensors from {source} to {target}")
    _show_drops(plan)
    if plan.layout.sidecars:
        show(f"  along     {', '.join(sidecar.path for sidecar in plan.layout.sidecars)}")
    for note in plan.layout.notes:
        show(f"  note      {note}")
    show("  proven    every target byte has exactly one origin; every source tensor is used or named as dropped")


def _show_drops(plan: Plan) -> None:
    by_reason: dict[str, list[Drop]] = {}
    for drop in plan.drops:
        by_reason.setdefault(drop.reason, []).append(drop)
    for reason, drops in by_reason.items():
        roles = Counter(drop.kind for drop in drops)
        counts = ", ".join(f"{count} {role}" for role, count in roles.items())
        show(f"  drop      {counts}, {nbytes_text(sum(drop.nbytes for drop in drops))}: {reason}; such as {drops[0].name}")


def _show_result(plan: Plan, target: str, fingerprint: str, seconds: float, resumed: int) -> None:
    totals = plan.totals()
    rate = nbytes_text(int((totals.written - resumed) / max(seconds, 1e-9)))
    show(
        f"{target}: {totals.files} files, {nbytes_text(totals.written)} in {seconds:.1f} s ({rate}/s)"
        + (f", {nbytes_text(resumed)} of them from before" if resumed else "")
    )
    show(table([(file.path, nbytes_text(file.nbytes), len(file.tensors)) for file in plan.layout.files], ("file", "bytes", "tensors")))
    _show_drops(plan)
    for note in plan.layout.notes:
        show(f"  note      {note}")
    show(f"  fingerprint {fingerprint}")


def _range(pair: tuple[int, int] | None) -> str:
    if pair is None:
        return "-"
    return str(pair[0]) if pair[1] - pair[0] == 1 else f"{pair[0]}..{pair[1] - 1}"
