"""reshard explain: which mistake made this checkpoint wrong?"""

from __future__ import annotations

from typing import Any

import click

from reshard.geometry.documents import document

from ... import options
from ...json_output import show_json
from ...progress import weight_bytes, working
from ...tables import show

# Names that are printed; --json prints all.
_MOST = 8


@options.command("explain", "reshard explain converted step-1000", "reshard explain converted step-1000 --include '*layers.0.*' --json")
@options.checkpoint("bad")
@options.checkpoint("good")
@options.selection("Compare")
@options.choice
@options.model
@options.effort
@options.as_json
def command(bad: str, good: str, as_json: bool, **given: Any) -> None:
    """Name the mistake that turned the checkpoint GOOD into BAD, whatever their formats.

    Tried are tensors, rows and columns that were permuted, interleaved, exchanged or copied, transposed matrices, padding, a cast too many,
    norms off by one, and a rank from another save. A mistake is named only if it explains every bit of a tensor. The exit code is 1 if the
    checkpoints differ.
    """
    import reshard
    from reshard.opening.keywords import ModelOptions
    from reshard.opening.open import open_both
    from reshard.requests.request import selection_of
    from reshard.verbs.look.explain import summary_of

    a, b = open_both(bad, good, **options.take(given, ModelOptions))
    with working("explain", weight_bytes(b), given) as effort:
        found = reshard.explain(a, b, selection=selection_of(given), **effort)
    if as_json:
        show_json(document(found))
    else:
        show(summary_of(found))
        for mistake in found.mistakes:
            show(f"  {mistake.text}")
            names = mistake.name.split(", ")
            for name in names[:_MOST]:
                show(f"    {name}")
            if len(names) > _MOST:
                show(f"    and {len(names) - _MOST:,} more; --json lists all")
        for title, names in (("unexplained", found.unexplained), ("only in one", found.missing)):
            for name in names[:_MOST]:
                show(f"  {title}  {name}")
            if len(names) > _MOST:
                show(f"  {title}  and {len(names) - _MOST:,} more")
    click.get_current_context().exit(0 if found.equal else 1)
