"""reshard apply: a checkpoint and its deltas, converted as one checkpoint."""

from __future__ import annotations

from typing import Any

import click

from .. import options
from .convert import convert, options_of_convert


@options.command(
    "apply",
    "reshard apply step-1000 delta-1100 out --to hf",
    "reshard apply step-1000 delta-1100 delta-1200 out --to vllm --tp 8",
)
@options.checkpoint("base")
@click.argument("deltas", nargs=-1, required=True, metavar="DELTA...")
@click.argument("target")
@options_of_convert
def command(base: str, deltas: tuple[str, ...], target: str, **given: Any) -> None:
    """Convert what a chain of deltas makes of the checkpoint BASE to another format, and write it to the directory TARGET, in one pass.

    The deltas follow each other: each one changes what the one before it makes. A delta that `reshard delta` wrote is applied to its own
    base alone; of a delta that a trainer wrote, the checksum of every changed tensor is compared. Nothing is left in TARGET if the result
    is not what the last delta says.

    Other commands, `convert` included, take BASE+DELTA or BASE+DELTA+DELTA wherever they take a checkpoint.
    """
    convert("apply", ("+".join((base, *deltas)),), target, **given)
