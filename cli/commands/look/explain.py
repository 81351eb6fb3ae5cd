"""reshard explain: which mistake made this checkpoint wrong?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from reshard.geometry.documents import document
from reshard.pages.sections import Facts, Note, Section

from ... import options
from ...progress import weight_bytes, working
from ...replies import Reply

if TYPE_CHECKING:
    from reshard.verbs.look.explain import Explanation

# Names that are printed; --json prints all.
_MOST = 8


@options.command(
    "explain",
    "reshard explain converted step-1000",
    "reshard explain converted step-1000 --include '*layers.0.*' --json",
    "reshard explain merged base --adapter lora",
)
@options.checkpoint("bad")
@options.checkpoint("good")
@options.option("--adapter", section=options.SELECTION, metavar="DIR", help="BAD is GOOD with this LoRA adapter merged.")
@options.selection("Compare")
@options.formats_of_two
@options.choice
@options.model
@options.effort
def command(bad: str, good: str, adapter: str | None, **given: Any) -> Reply:
    """Name the mistake that turned the checkpoint GOOD into BAD, whatever their formats.

    Tried are tensors, rows and columns that were permuted, interleaved, exchanged or copied, transposed matrices, padding, a cast too many,
    norms off by one, and a rank from another save. A mistake is named only if it explains every bit of a tensor. The exit code is 1 if the
    checkpoints differ.

    With --adapter, the weights that the adapter changes are compared with its right merge into GOOD, within rounding, and with wrong ones:
    scale forgotten, rsLoRA ignored, gate and up exchanged, experts read in another order, applied twice or never.
    """
    import reshard
    from reshard.opening.keywords import ModelOptions
    from reshard.opening.open import open_both
    from reshard.requests.request import selection_of

    a, b = open_both(bad, good, formats=given.pop("formats"), **options.take(given, ModelOptions))
    with working("explain", weight_bytes(b), given) as effort:
        explanation = reshard.explain(a, b, adapter=adapter, selection=selection_of(given), **effort)
    return Reply(document(explanation), _sections(explanation), 0 if explanation.equal else 1)


def _sections(explanation: Explanation) -> Iterator[Section]:
    """The mistakes with the tensors that each explains, and the tensors that none explains."""
    from reshard.verbs.look.explain import summary_of

    yield summary_of(explanation)
    for mistake in explanation.mistakes:
        yield Note(f"  {mistake.text}", mistake.name.split(", "), limit=_MOST, hint="; --json lists all")
    rows = [("unexplained", explanation.unexplained), ("only in one", explanation.missing), ("by adapter", explanation.brought)]
    yield Facts(rows, width=11, limit=_MOST)
