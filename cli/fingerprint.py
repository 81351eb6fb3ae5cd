"""reshard fingerprint: a digest that no layout changes."""

from __future__ import annotations

from typing import Any

import click

from . import options
from .progress import bar
from .tables import show, show_json


@click.command("fingerprint")
@click.argument("checkpoint")
@options.selection
@options.format_name
@options.model
@options.effort
@options.as_json
def command(
    checkpoint: str,
    format_name: str | None,
    model: str | None,
    vocab_size: int | None,
    architecture: str | None,
    workers: int | None,
    memory: int | None,
    shown: bool | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Digest the weights of CHECKPOINT: equal for the same weights in any format, at any parallel sizes.

    It covers names, shapes, element types and every bit of the model's weights; no optimizer state. A tied head counts once, which takes
    the config to know (--model).
    """
    import reshard

    opened = reshard.open(checkpoint, format=format_name, model=model, vocab_size=vocab_size, architecture=architecture)
    selection = options.selection_of(**asked)
    with bar(sum(t.nbytes for t in opened.content(selection).tensors.values()), "fingerprint", shown) as advance:
        found = reshard.fingerprint(opened, selection=selection, workers=workers, memory=memory, progress=advance)
    if as_json:
        show_json({"fingerprint": found.root, "tensors": dict(found.tensors)})
    else:
        show(f"{found.root}  {checkpoint}")
