"""The verb `fingerprint`: a digest of the weights that no layout changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from reshard.canonical.content import Selection, check_selected
from reshard.engine.checks.reading import Reading
from reshard.engine.checks.recorded_digests import check_digests
from reshard.engine.compare import Side, check_recorded
from reshard.engine.pool import Effort
from reshard.engine.recorded import fingerprint_of
from reshard.engine.walk import block_digests
from reshard.errors import RequestError
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import EffortOptions, PathLike, checked_keywords
from reshard.opening.open import opened
from reshard.plans.digests import CURRENT, VERSIONS, Fingerprint


@checked_keywords
def fingerprint(
    source: Checkpoint | PathLike,
    *,
    selection: Selection | None = None,
    digest_version: int | None = None,
    **options: Unpack[EffortOptions],
) -> Fingerprint:
    """The layout-independent digest of a checkpoint's weights; plans/digests.py says what it hashes.

    digest_version: 2 for BLAKE3 (the default), 1 for the SHA-256 of reshard 0.1.

    Raises: DifferenceFound if reshard wrote the checkpoint, and the weights are not those that it wrote (`reshard.json`). CheckpointError
    if a file was written meanwhile, or its bytes do not have the checksum that was saved with them.
    """
    if digest_version is not None and digest_version not in VERSIONS:
        raise RequestError(f"`digest_version={digest_version}`: unknown version", do=f"Use one of {', '.join(map(str, VERSIONS))}")
    version = CURRENT if digest_version is None else VERSIONS[digest_version]
    effort, checkpoint = Effort.of(options), opened(source)
    check_digests(effort, (checkpoint.files, checkpoint.index.tensors))
    side = Side(checkpoint.files, checkpoint.index, checkpoint.content(selection))
    check_selected(side.content)
    tensors = side.content.tensors
    reading = Reading(checks=effort.source_checksums)
    digests = block_digests(side.files, tensors, effort, version=version, reading=reading)
    if version is CURRENT:
        check_recorded(side, digests)
    reading.check_unchanged(side.files, side.index, lambda: block_digests(side.files, tensors, version=version) == digests)
    return replace(fingerprint_of(tensors, digests, version), source_checks=reading.checks)
