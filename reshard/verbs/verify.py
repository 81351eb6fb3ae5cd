"""The verb `verify`: do two checkpoints hold the same weights?"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from reshard.canonical.content import Selection
from reshard.engine.compare import Comparison, Side, compare
from reshard.verbs.checkpoint import Checkpoint, open_both, opened
from reshard.verbs.request import Effort, EffortOptions, PathLike


def verify(
    left: Checkpoint | PathLike,
    right: Checkpoint | PathLike,
    *,
    cast: bool = False,
    selection: Selection | None = None,
    **options: Unpack[EffortOptions],
) -> Comparison:
    """Whether two checkpoints hold the same weights, whatever their layouts: names, shapes, element types, every bit.

    Where only one of them has a config, it speaks for both. cast: where element types differ, compare after casting the left's.
    """
    effort = Effort(**options)
    if isinstance(left, Checkpoint) or isinstance(right, Checkpoint):
        a, b = opened(left), opened(right)
    else:
        a, b = open_both(left, right)
    selections = _selections((a, b), selection)
    # Each by its own config: under another model's config its weights would be unknown, and not compared.
    contents = (each.content(chosen, model=each.model or a.model or b.model) for each, chosen in zip((a, b), selections, strict=True))
    left_side, right_side = (Side(each.files, each.index, content) for each, content in zip((a, b), contents, strict=True))
    result = Comparison()
    for nbytes in compare(left_side, right_side, result, with_cast=cast, workers=effort.workers, memory=effort.memory):
        effort.report(nbytes)
    return result


def _selections(checkpoints: tuple[Checkpoint, Checkpoint], selection: Selection | None) -> tuple[Selection | None, ...]:
    """The selection for each side. A root counts for the checkpoint that has it: the other may be the model that was converted from it."""
    if selection is None or selection.root is None:
        return selection, selection
    has_root = [any(found.root == selection.root for found in each.models) for each in checkpoints]
    if not any(has_root):
        return selection, selection
    return tuple(selection if has else replace(selection, root=None) for has in has_root)
