"""reshard fingerprint: a digest that no layout changes."""

from __future__ import annotations

from typing import Any

import click

from .. import options
from ..json_output import show_json
from ..progress import bar
from ..tables import show


@click.command("fingerprint", cls=options.Command, examples=["reshard fingerprint step-1000 --model llama-3-8b"])
@click.argument("checkpoint")
@options.selection("Digest")
@options.format_name
@options.model
@options.effort
@click.option("--digest-version", type=click.IntRange(1, 2), help="2: BLAKE3 (default). 1: SHA-256, as reshard 0.1 printed it.")
@options.summary_or_full
def command(checkpoint: str, digest_version: int | None, as_json: bool, full: bool, show_progress: bool | None, **given: Any) -> None:
    """Digest the weights of CHECKPOINT. The same weights have the same digest in any format, at any parallel sizes.

    The digest covers names, shapes, element types and every bit of the model's weights, and no optimizer state. A tied head counts once;
    to know that it is tied takes the config (--model).

    If reshard wrote CHECKPOINT, its weights are compared with reshard.json. The exit code is 1 if they differ.
    """
    import reshard
    from reshard.verbs.request import EffortOptions, OpenOptions, selection_of

    opened = reshard.open(checkpoint, **options.take(given, OpenOptions))
    effort = options.take(given, EffortOptions)
    selection = selection_of(given)
    with bar(sum(t.nbytes for t in opened.content(selection).tensors.values()), "fingerprint", show_progress) as advance:
        found = reshard.fingerprint(opened, selection=selection, digest_version=digest_version, **{**effort, "progress": advance})
    if as_json:
        show_json({"fingerprint": found.root, **({"tensors": dict(found.tensors)} if full else {})})
    else:
        show(f"{found.root}  {checkpoint}")
