"""reshard diff: what changed between two checkpoints?"""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from reshard.geometry.documents import document

from ... import options
from ...progress import weight_bytes, working
from ...replies import Reply


@options.command(
    "diff",
    "reshard diff step-900 step-1000",
    "reshard diff runs/7 --step 900 --step 1000",
    "reshard diff step-900 step-1000 --threshold 0.01 --include '*experts*'",
    "reshard diff step-1000 out --headers",
)
@options.checkpoint("left")
@options.checkpoint("right", required=False)
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
@options.formats_of_two
@options.choice_of_two
@options.model
@options.effort
@options.page
@options.summary_or_full
def command(left: str, right: str | None, headers: bool, thresholds: tuple[str, ...], limit: int, full: bool, **given: Any) -> Reply:
    """Show in numbers what changed from LEFT to RIGHT, whatever their formats and layouts; or between two steps of the run LEFT.

    For every tensor: the share of the elements that differ, the relative L2 difference, the largest and the mean absolute difference, the
    cosine, and a histogram of ULPs (how many numbers of the element type lie between both values); summed by layer and by role. The exit
    code is 1 if there is a difference; with --threshold, if one is larger, or if names, shapes or element types differ.
    """
    import reshard
    from reshard.errors import RequestError
    from reshard.opening.keywords import ModelOptions
    from reshard.opening.open import open_both
    from reshard.pages.comparisons import diff_sections
    from reshard.requests.request import selection_of
    from reshard.verbs.look.diff import parse_thresholds
    from reshard.verbs.look.inspection import name_of_model

    if headers and thresholds:
        raise RequestError("--threshold compares values, and --headers reads none", do="Leave one of them out")
    limits = parse_thresholds(thresholds)
    left, right = options.Chosen.of(click.get_current_context()).both(left, right)
    a, b = open_both(left, right, formats=given.pop("formats"), **options.take(given, ModelOptions))
    with working("diff", 0 if headers else weight_bytes(b), given) as effort:
        result = reshard.diff(a, b, headers=headers, selection=selection_of(given), **effort)
    model = name_of_model(b.model_files.config or a.model_files.config or {})
    beyond = result.beyond(limits) if limits else None
    # With a threshold, smaller changes of values pass.
    counted = [difference for difference in result.differences if beyond is None or difference.kind != "values"]
    names, every = None if beyond is None else [change.name for change in beyond], {"changes": result.changes} if full else {}
    return Reply(
        partial(document, result, beyond_threshold=names, **every),
        diff_sections(result, f"{f'{model}: from' if model else 'From'} {left} to {right}", beyond, limit),
        code=1 if counted or beyond else 0,
        brief=True,
    )
