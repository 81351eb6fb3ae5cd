"""reshard fingerprint: a digest that no layout changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ... import options
from ...json_output import show_json
from ...progress import working
from ...tables import show

if TYPE_CHECKING:
    from reshard.canonical.content import Content


@options.command("fingerprint", "reshard fingerprint step-1000 --model llama-3-8b")
@options.checkpoint("checkpoint")
@options.selection("Digest")
@options.format_name
@options.model
@options.effort
@click.option("--digest-version", type=click.IntRange(1, 2), help="2: BLAKE3 (default). 1: SHA-256, as reshard 0.1 printed it.")
@options.summary_or_full
def command(checkpoint: str, digest_version: int | None, as_json: bool, full: bool, **given: Any) -> None:
    """Digest the weights of CHECKPOINT. The same weights have the same digest in any format, at any parallel sizes.

    The digest covers names, shapes, element types and every bit of the model's weights, and no optimizer state. A tied head counts once;
    to know that it is tied takes the config (--model). What engines do not keep beside packed weights is named in a note.

    If reshard wrote CHECKPOINT, its weights are compared with reshard.json. The exit code is 1 if they differ.
    """
    import reshard
    from reshard.requests.keywords import OpenOptions
    from reshard.requests.request import selection_of

    opened = reshard.open(checkpoint, **options.take(given, OpenOptions))
    selection = selection_of(given)
    content = opened.content(selection)
    with working("fingerprint", sum(tensor.nbytes for tensor in content.tensors.values()), given) as effort:
        found = reshard.fingerprint(opened, selection=selection, digest_version=digest_version, **effort)
    notes = list(_notes(content))
    if as_json:
        show_json({"fingerprint": found.root, "notes": notes, **({"tensors": dict(found.tensors)} if full else {})})
        return
    show(f"{found.root}  {checkpoint}")
    for note in notes:
        show(f"  note      {note}")


def _notes(content: Content) -> Iterator[str]:
    """Why a checkpoint of the same weights may have another fingerprint."""
    if implied := content.implied:
        yield (
            f"without {implied[0]}"
            + (f" and {len(implied) - 1} more" if len(implied) > 1 else "")
            + ", which follow from the shapes of the weights and are not stored here; where they are stored, the fingerprint differs"
        )
