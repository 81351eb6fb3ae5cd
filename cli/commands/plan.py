"""reshard plan: the plan of one conversion, proven, without writing anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..plans import plan_reply
from ..replies import Reply

if TYPE_CHECKING:
    from reshard.storage.output_file import OutputFile


@options.command("plan", "reshard plan step-1000 --to vllm --tp 8", "reshard plan step-1000 --to hf --json > plan.json")
@options.checkpoint("sources", nargs=-1, required=True, metavar="SOURCE...")
@options.target(required=False)
@options.combining
@options.selection("Convert")
@options.format_name
@options.model
@options.output_file("--plan-out", "Also write the plan to FILE, which `reshard convert` runs with --plan.", section=options.OUTPUT)
@options.page
@options.summary_or_full
def command(sources: tuple[str, ...], to: str | None, plan_out: OutputFile | None, full: bool, **given: Any) -> Reply:
    """Show the proven plan of converting SOURCE: which rank and file gets what, and what is cast, filled or skipped.

    No weight is read and nothing is written. `reshard degrees` compares several parallel sizes.
    """
    import reshard
    from reshard.engine.events import event
    from reshard.errors import RequestError
    from reshard.storage.system_calls import gc_paused
    from reshard.verbs.plan import plan_of

    if to is None:
        raise RequestError(
            "--to FORMAT is missing",
            why="A plan is of one conversion",
            do=f"Did you mean `reshard degrees {sources[0]}`, which lists the parallel sizes that a model can be served at?",
        )
    click.get_current_context().with_resource(gc_paused())
    plan = plan_of(sources, to, given)
    if plan_out is not None:
        nbytes = reshard.save_plan(plan, plan_out)
        event("plan-file", f"wrote {plan_out}, {nbytes:,} bytes", path=str(plan_out), bytes=nbytes)
    return plan_reply(plan, full=full)
