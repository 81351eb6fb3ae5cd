"""reshard roundtrip: there and back loses nothing, proven from the plans or done for real."""

from __future__ import annotations

from typing import Any

import click

from . import options
from .progress import bar
from .tables import nbytes_text, show, show_json


@click.command("roundtrip")
@click.argument("source")
@options.target
@options.selection
@options.format_name
@options.model
@click.option("--materialize", is_flag=True, help="Really convert there and back, and compare every bit.")
@click.option("--work", metavar="DIR", help="Where --materialize puts its files (default: a temporary directory).")
@options.effort
@options.as_json
def command(
    source: str,
    format_name: str | None,
    model: str | None,
    vocab_size: int | None,
    architecture: str | None,
    materialize: bool,
    work: str | None,
    workers: int | None,
    memory: int | None,
    shown: bool | None,
    as_json: bool,
    max_shard_size: int | None,
    **asked: Any,
) -> None:
    """Prove that converting SOURCE and reading the result back loses nothing.

    The plan is composed with what the target's own reader makes of the planned headers: every byte must map to itself. No weight is read,
    unless --materialize. Exit code 1 if something would be lost.
    """
    import reshard
    from reshard.verbs import roundtrip as verb

    opened = reshard.open(source, format=format_name, model=model, vocab_size=vocab_size, architecture=architecture)
    plan = reshard.plan(opened, to=asked.pop("to"), max_shard_bytes=max_shard_size, **asked)
    proof = reshard.roundtrip(plan)
    losses = list(proof.losses)
    if materialize:
        with bar(4 * plan.totals().copied, "roundtrip", shown) as advance:
            losses += verb.materialize(plan, opened, work=work, workers=workers, memory=memory, progress=advance)
    if as_json:
        show_json(
            {
                "lossless": not losses,
                "materialized": materialize,
                "tensors": proof.tensors,
                "boxes": proof.boxes,
                "bytes": proof.nbytes,
                "losses": losses,
            }
        )
    elif losses:
        show(f"not lossless: {len(losses)} findings")
        for loss in losses:
            show(f"  {loss}")
    else:
        how = "converted there and back, every bit compared" if materialize else "proven from the plans, no weight read"
        show(f"lossless: {proof.tensors} tensors, {proof.boxes} boxes, {nbytes_text(proof.nbytes)}; {how}")
    click.get_current_context().exit(1 if losses else 0)
