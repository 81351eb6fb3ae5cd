"""The verb `verify`: do two checkpoints hold the same weights?"""

from __future__ import annotations

from typing import Unpack

from reshard.canonical.content import Selection, check_selected
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
    model = a.model or b.model
    left_side, right_side = (Side(each.files, each.index, each.content(selection, model=model)) for each in (a, b))
    check_selected(left_side.content, right_side.content)
    result = Comparison()
    for nbytes in compare(left_side, right_side, result, with_cast=cast, workers=effort.workers, memory=effort.memory):
        effort.report(nbytes)
    return result
