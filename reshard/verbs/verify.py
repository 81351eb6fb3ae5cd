"""TODO."""

from __future__ import annotations

from reshard.canonical.content import Selection
from reshard.engine.compare import Comparison, Side, compare, fingerprint_blocks, fingerprint_of
from reshard.plans.digests import Fingerprint
from reshard.verbs.checkpoint import Checkpoint, PathLike, Progress, open, open_both


def verify(
    left: Checkpoint | PathLike,
    right: Checkpoint | PathLike,
    *,
    cast: bool = False,
    selection: Selection | None = None,
    workers: int | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Whether two checkpoints hold the same weights, whatever their layouts: names, shapes, element types, every bit.

    Where only one of them has a config, it speaks for both. cast: where element types differ, compare after casting the left's.
    """
    if isinstance(left, Checkpoint) or isinstance(right, Checkpoint):
        a, b = (side if isinstance(side, Checkpoint) else open(side) for side in (left, right))
    else:
        a, b = open_both(left, right)
    model = a.model or b.model
    a_side, b_side = (Side(side.files, side.index, side.content(selection, model=model)) for side in (a, b))
    result = Comparison()
    for nbytes in compare(a_side, b_side, result, with_cast=cast, workers=workers, memory=memory):
        if progress:
            progress(nbytes)
    return result


def fingerprint(
    source: Checkpoint | PathLike,
    *,
    selection: Selection | None = None,
    workers: int | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> Fingerprint:
    """The layout-independent digest of a checkpoint's weights; digests.py says what it hashes."""
    opened = source if isinstance(source, Checkpoint) else open(source)
    side = Side(opened.files, opened.index, opened.content(selection))
    digests: dict[str, dict[int, bytes]] = {}
    for name, number, nbytes, digest in fingerprint_blocks(side, workers=workers, memory=memory):
        digests.setdefault(name, {})[number] = digest
        if progress:
            progress(nbytes)
    return fingerprint_of(side, digests)
