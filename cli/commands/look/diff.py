"""reshard diff: what changed between two checkpoints?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.documents import document
from reshard.geometry.quantities import plural

from ... import options
from ...invocation import current
from ...json_output import show_json
from ...progress import weight_bytes, working
from ...tables import nbytes_text, show, show_table

if TYPE_CHECKING:
    from reshard.measures.changes import Change
    from reshard.verbs.look.diff import Diff


@options.command(
    "diff",
    "reshard diff step-900 step-1000",
    "reshard diff step-900 step-1000 --threshold 0.01 --include '*experts*'",
    "reshard diff step-1000 out --headers",
)
@options.checkpoint("left")
@options.checkpoint("right")
@click.option("--headers", is_flag=True, help="Compare names, shapes and element types only. No weight is read.")
@click.option(
    "--threshold",
    "thresholds",
    multiple=True,
    metavar="[MEASURE=]N",
    help="Allow changes up to N: of `relative` L2 (default), `largest`, `mean`, `changed`, `ulps`.",
)
@click.option("--limit", default=20, show_default=True, type=click.IntRange(0), metavar="N", help="Show N tensors; 0 for all.")
@options.selection("Compare")
@options.choice
@options.model
@options.effort
@options.page
@options.summary_or_full
def command(left: str, right: str, headers: bool, thresholds: tuple[str, ...], limit: int, as_json: bool, full: bool, **given: Any) -> None:
    """Show in numbers what changed from LEFT to RIGHT, whatever their formats and layouts.

    For every tensor: the share of the elements that differ, the relative L2 difference, the largest and the mean absolute difference, the
    cosine, and a histogram of ULPs (how many numbers of the element type lie between both values); summed by layer and by role. The exit
    code is 1 if there is a difference; with --threshold, if one is larger, or if names, shapes or element types differ.
    """
    import reshard
    from reshard.errors import RequestError
    from reshard.opening.keywords import ModelOptions
    from reshard.opening.open import open_both
    from reshard.requests.request import selection_of
    from reshard.verbs.look.diff import parse_thresholds

    if headers and thresholds:
        raise RequestError("--threshold compares values, and --headers reads none", do="Leave one of them out")
    limits, page = parse_thresholds(thresholds), options.page_of(given)
    a, b = open_both(left, right, **options.take(given, ModelOptions))
    with working("diff", 0 if headers else weight_bytes(b), given) as effort:
        result = reshard.diff(a, b, headers=headers, selection=selection_of(given), **effort)
    beyond = result.beyond(limits) if limits else None
    page.write(lambda pages: pages.comparison_page(result, f"From {left} to {right}"))
    if as_json:
        every = {"changes": result.changes} if full else {}
        show_json(document(result, beyond_threshold=beyond and [change.name for change in beyond], **every))
    else:
        _show(result, beyond, limit)
    # With a threshold, smaller changes of values pass.
    counted = [each for each in result.differences if beyond is None or each.kind != "values"]
    click.get_current_context().exit(1 if counted or beyond else 0)


def _show(result: Diff, beyond: list[Change] | None, limit: int) -> None:
    """The result in one line, then the changes by layer, role and tensor, and what cannot be compared."""
    changed = result.largest()
    others = [each for each in result.differences if each.kind != "values"]
    compared = f"{plural(result.tensors, 'tensor')}, {nbytes_text(result.nbytes)} compared" if result.changes else "headers"
    outcome = f"{len(changed):,} of {plural(len(result.changes), 'tensor')} changed" if result.changes else "no weight was read"
    for found in result.not_finite():
        show(str(found))
    more = f"; {plural(len(others), 'difference')} in names, shapes or element types" if others else ""
    show(("equal: " if result.equal else "different: ") + f"{compared}; {outcome}{more}")
    if beyond is not None:
        show(f"beyond the threshold: {plural(len(beyond), 'tensor')}" + (f", such as {beyond[0].name}" if beyond else ""))
    if current().log.quiet:
        return
    if changed:
        for title, rows in (("layer", result.by_layer()), ("role", result.by_role())):
            _show_changes(title, [row for row in rows if row.changed], len(rows), limit)
        _show_changes("tensor", changed, len(result.changes), limit)
        _show_ulps(result)
    if others:
        show()
        show_table([(d.name, d.kind, d.detail) for d in others], ("tensor", "what", "how"))
    for note in result.notes:
        show(f"  note      {note}")


def _show_changes(title: str, changes: Sequence[Change], number: int, limit: int) -> None:
    """A table of changes. number: how many entries were compared."""
    from reshard.measures.changes import columns_of

    shown = changes[: limit or None]
    headings, rows = columns_of(title, shown)
    show()
    show_table(rows, headings, optional=(5, 4, 1))
    if len(changes) > len(shown):
        show(f"  and {len(changes) - len(shown):,} more; --limit 0 shows all")
    if number > len(changes):
        show(f"  and {number - len(changes):,} without a change")


def _show_ulps(result: Diff) -> None:
    """The histogram of ULPs of all tensors together."""
    from reshard.measures.changes import sum_of, ulp_range

    counts = sum_of("", result.changes).ulps
    if not counts:
        return
    total = sum(counts)
    rows = []
    for number, count in enumerate(counts):
        first, last = ulp_range(number)
        if count:
            rows.append((str(first) if first == last else f"{first:,} to {last:,}", count, f"{100 * count / total:.3g} %"))
    show()
    show_table(rows, ("ULPs", "elements", "share"))
