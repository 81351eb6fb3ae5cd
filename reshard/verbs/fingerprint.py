"""The verb `fingerprint`: a digest of the weights that no layout changes."""

from __future__ import annotations

from typing import Unpack

from reshard.canonical.content import Selection, check_selected
from reshard.engine.compare import Side, fingerprint_blocks, fingerprint_of
from reshard.plans.digests import Fingerprint
from reshard.verbs.checkpoint import Checkpoint, opened
from reshard.verbs.request import Effort, EffortOptions, PathLike


def fingerprint(source: Checkpoint | PathLike, *, selection: Selection | None = None, **options: Unpack[EffortOptions]) -> Fingerprint:
    """The layout-independent digest of a checkpoint's weights; plans/digests.py says what it hashes."""
    effort, checkpoint = Effort(**options), opened(source)
    side = Side(checkpoint.files, checkpoint.index, checkpoint.content(selection))
    check_selected(side.content)
    digests: dict[str, dict[int, bytes]] = {}
    for name, number, nbytes, digest in fingerprint_blocks(side, workers=effort.workers, memory=effort.memory):
        digests.setdefault(name, {})[number] = digest
        effort.report(nbytes)
    return fingerprint_of(side, digests)
