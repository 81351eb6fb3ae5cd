"""reshard fingerprint: a digest that no layout changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.documents import to_json
from reshard.pages.sections import Facts, Section

from ... import options
from ...progress import working
from ...replies import Reply
from ...tables import fingerprint_text

if TYPE_CHECKING:
    from reshard.canonical.content import Content


@options.command("fingerprint", "reshard fingerprint step-1000 --model llama-3-8b", "reshard fingerprint step-1000 served/step-1000")
@options.checkpoint("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...")
@options.selection("Digest")
@options.format_name
@options.model
@options.effort
@click.option("--digest-version", type=click.IntRange(1, 2), help="2: BLAKE3 (default). 1: SHA-256, as reshard 0.1 printed it.")
@options.summary_or_full
def command(checkpoints: tuple[str, ...], digest_version: int | None, full: bool, **given: Any) -> Reply:
    """Digest the weights of each CHECKPOINT. The same weights have the same digest in any format, at any parallel sizes.

    The digest covers names, shapes, element types and every bit of the model's weights, and no optimizer state. A tied head counts once;
    to know that it is tied takes the config (--model). What engines do not keep beside packed weights is named in a note. 12 digits are
    shown, all of them with --verbose, --quiet or --json.

    If reshard wrote CHECKPOINT, its weights are compared with reshard.json. The exit code is 1 if they differ.
    """
    digested = [_digested(path, digest_version, dict(given), full=full) for path in checkpoints]
    documents = [{"path": path, **entry} for path, entry in zip(checkpoints, digested, strict=True)]
    return Reply(digested[0] if len(digested) == 1 else {"checkpoints": documents}, _sections(documents))


def _sections(documents: Iterable[dict[str, Any]]) -> Iterator[Section]:
    for entry in documents:
        yield from (f"{fingerprint_text(entry['fingerprint'])}  {entry['path']}", Facts([("note", entry["notes"])]))


def _digested(path: str, digest_version: int | None, given: dict[str, Any], *, full: bool) -> dict[str, Any]:
    """The fingerprint of a checkpoint, with stable keys."""
    import reshard
    from reshard.opening.keywords import OpenOptions
    from reshard.requests.request import selection_of

    opened = reshard.open(path, **options.take(given, OpenOptions))
    selection = selection_of(given)
    content = opened.content(selection)
    with working("fingerprint", sum(tensor.nbytes for tensor in content.tensors.values()), given) as effort:
        fingerprint = reshard.fingerprint(opened, selection=selection, digest_version=digest_version, **effort)
    about = {"fingerprint": fingerprint.root, "notes": [*_notes(content), *fingerprint.source_checks.notes()]}
    return {**about, "source_checks": to_json(fingerprint.source_checks), **({"tensors": dict(fingerprint.tensors)} if full else {})}


def _notes(content: Content) -> Iterator[str]:
    """Why a checkpoint of the same weights may have another fingerprint."""
    from reshard.errors import some

    if implied := content.implied:
        yield (
            f"without {some(implied, most=1)}, which follow from the shapes of the weights and are not stored here; "
            "where they are stored, the fingerprint differs"
        )
