"""reshard apply: a checkpoint and its deltas, converted as one checkpoint."""

from __future__ import annotations

from typing import Any

import click

from reshard.storage.trees import chain_of

from .. import options
from ..replies import Reply
from .convert import convert, options_of_convert


@options.command(
    "apply",
    "reshard apply step-1000 delta-1100 out --to hf",
    "reshard apply step-1000 delta-1100 delta-1200 out --to vllm --tp 8",
    "reshard apply kept --step 4200 out --to hf",
)
@options.checkpoint("base")
@click.argument("deltas", nargs=-1, metavar="[DELTA...]")
@click.argument("target")
@options_of_convert
def command(base: str, deltas: tuple[str, ...], target: str, **given: Any) -> Reply:
    """Convert what a chain of deltas makes of the checkpoint BASE to another format, and write it to the directory TARGET, in one pass.

    The deltas follow each other: each one changes what the one before it makes. A delta that `reshard delta` wrote is applied to its own
    base alone; of a delta that a trainer wrote, the checksum of every changed tensor is compared. Nothing is left in TARGET if the result
    is not what the last delta says.

    Of a run that is kept as full checkpoints and deltas, --step chooses a step and its deltas.

    Other commands, `convert` included, take BASE+DELTA or BASE+DELTA+DELTA wherever they take a checkpoint.
    """
    chain = "+".join((base, *deltas))
    if not deltas and len(chain_of(chain)) == 1:
        raise click.UsageError("Missing argument 'DELTA...'.", click.get_current_context())
    return convert("apply", (chain,), target, **given)
