"""reshard roundtrip: there and back loses nothing, proven from the plans or done for real."""

from __future__ import annotations

from typing import Any

import click

from reshard.geometry.quantities import plural

from .. import options
from ..json_output import show_json
from ..progress import bar
from ..tables import nbytes_text, show


@options.command("roundtrip", "reshard roundtrip step-1000 --to vllm --tp 8")
@options.checkpoint("source")
@options.target()
@options.selection("Convert")
@options.format_name
@options.model
@options.option("--materialize", section=options.OUTPUT, is_flag=True, help="Convert there and back for real, and compare every bit.")
@options.option("--work", section=options.OUTPUT, metavar="DIR", help="Directory for --materialize (default: a temporary one).")
@options.effort
@options.as_json
def command(source: str, to: str, materialize: bool, work: str | None, as_json: bool, show_progress: bool | None, **given: Any) -> None:
    """Prove that converting SOURCE and reading the result back loses nothing.

    The target's own reader gets the planned headers and says where it would find each weight: every byte must map to itself. No weight is
    read, except with --materialize. The exit code is 1 if something would be lost.
    """
    import reshard
    from reshard.errors import RequestError
    from reshard.opening.keywords import EffortOptions, OpenOptions
    from reshard.verbs.roundtrip import materialize as there_and_back

    if work is not None and not materialize:
        raise RequestError("--work without --materialize: nothing is written", do="Add --materialize, or leave it out")
    checkpoint = reshard.open(source, **options.take(given, OpenOptions))
    effort = options.take(given, EffortOptions)
    plan = reshard.plan(checkpoint, to=to, **given)
    proof = reshard.roundtrip(plan)
    losses = list(proof.losses)
    if materialize:
        with bar(4 * plan.totals().copied, "roundtrip", show_progress) as advance:
            losses += there_and_back(plan, checkpoint, work=work, **{**effort, "progress": advance})
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
        show(f"not lossless: {plural(len(losses), 'loss', 'losses')}")
        for loss in losses:
            show(f"  {loss}")
    else:
        how = "converted there and back, every bit compared" if materialize else "proven from the plans, no weight read"
        sizes = f"{plural(proof.tensors, 'tensor')}, {plural(proof.boxes, 'box', 'boxes')}, {nbytes_text(proof.nbytes)}"
        show(f"lossless: {sizes}; {how}")
    click.get_current_context().exit(1 if losses else 0)
