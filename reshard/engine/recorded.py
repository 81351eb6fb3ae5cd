"""Digests of tensors from those of their blocks, and comparing what is read with the digests that reshard recorded when it wrote the
checkpoint (plans/manifest.py).

A conversion, a fingerprint and a comparison hash each block anyway, so the comparison costs no further pass. Only if a tensor differs are
parts of the files read again, to name the files that were changed or exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from reshard.engine.record import samples
from reshard.errors import CheckpointError, ReshardError
from reshard.geometry.quantities import grouped, plural
from reshard.index.index import Tensor
from reshard.plans.digests import CURRENT, DigestVersion, Fingerprint
from reshard.plans.manifest import MANIFEST, FileRecord, read_digests, read_manifest
from reshard.plans.plan import Plan
from reshard.storage.files import Files, read_range

BlockDigests = dict[str, dict[int, bytes]]
"""Tensor -> number of the block -> digest."""
Error = TypeVar("Error", bound=ReshardError)


def tensor_digest(name: str, tensor: Tensor, digests: Mapping[int, bytes], version: DigestVersion = CURRENT) -> bytes:
    """The digest of a tensor under a name. digests: those of its blocks, by their numbers."""
    return version.tensor(name, tensor.dtype, tensor.shape, (digest for _, digest in sorted(digests.items())))


def fingerprint_of(tensors: Mapping[str, Tensor], digests: BlockDigests, version: DigestVersion = CURRENT) -> Fingerprint:
    """The fingerprint of these tensors, from the digests of their blocks."""
    return version.checkpoint({name: tensor_digest(name, tensor, digests.get(name, {}), version) for name, tensor in tensors.items()})


def notes_on_source(plan: Plan, digests: BlockDigests) -> Iterator[str]:
    """Compare the tensors that a conversion has read with what reshard recorded when it wrote the source. Sentences on what cannot be.

    Raises: CheckpointError if a tensor differs.
    """
    recorded = plan.content.recorded()
    if not recorded and MANIFEST not in plan.source_files.list():
        return
    different: list[Tensor] = []
    compared = cast = merged = unknown = 0
    for route in plan.routes:
        tensor, expected = route.source, recorded.get(route.name)
        if expected is None:
            unknown += 1
        elif tensor.updates:  # The blocks were hashed after the update.
            merged += 1
        elif route.is_cast or tensor.encoding or tensor.derivation:  # The blocks were hashed after the cast.
            cast += 1
        else:
            compared += 1
            if CURRENT.text(tensor_digest(route.name, tensor, digests[route.name])) != expected:
                different.append(tensor)
    if different:
        raise mismatch(CheckpointError, plan.source_files, different, compared)
    reasons = "because of the cast", "because of the merge", f"as {MANIFEST} holds no digests under their names"
    for count, reason in zip((cast, merged, unknown), reasons, strict=True):
        if count:
            verb = "was" if count == 1 else "were"
            yield f"{plural(count, 'tensor')} of the source {verb} not compared with its {MANIFEST}, {reason}"


def mismatch(error: type[Error], files: Files, different: Sequence[Tensor], compared: int) -> Error:
    """The error for tensors that differ from what reshard wrote.

    error: its class. files: the checkpoint. different: the tensors. compared: how many were compared.
    """
    return error(
        f"it does not match {MANIFEST} ({len(different)} of {plural(compared, 'tensor')} do not)",
        where=different[0].name,
        why=f"Since reshard wrote {files.root}, {'; '.join(_changes(files, different))}",
        do=f"Copy the files again from where they were written, or remove {MANIFEST} if another program has written here since",
    )


def _changes(files: Files, different: Sequence[Tensor]) -> list[str]:
    """Sentences that name the files which hold something else than reshard wrote."""
    manifest = read_manifest(files)
    changes = changed_files(files, read_digests(files, manifest).files) if manifest else {}
    if changes:
        return _some([f"{path} {change}" for path, change in changes.items()])
    return [f"bytes have changed in {files_of(different[0])}"]


def files_of(tensor: Tensor) -> str:
    """The files that hold a tensor, for messages."""
    shards = tensor.shards
    return ", ".join(_some([shards.paths[i] for i in np.unique(shards.files).tolist()]))


def changed_files(files: Files, records: Mapping[str, FileRecord]) -> dict[str, str]:
    """The files whose length or samples are not those that were recorded, each with a phrase that says what it holds.

    A few changed bytes may lie between the samples. A file that was exchanged with another one, or comes from another conversion, is found.
    """
    written = grouped(records, lambda path: records[path].samples)
    found: dict[str, str] = {}
    for path, record in records.items():
        size = files.size(path)
        if size is None:
            found[path] = "is missing"
            continue
        stored = samples(path, size, partial(read_range, files))
        if size == record.nbytes and stored == record.samples:
            continue
        others = written.get(stored, [])
        if others:
            found[path] = f"holds what was written as {others[0]}"
        elif size != record.nbytes:
            found[path] = f"has {size:,} bytes, {record.nbytes:,} were written"
        else:
            found[path] = "holds something else"
    return found


def _some(sentences: list[str], most: int = 4) -> list[str]:
    return sentences if len(sentences) <= most else [*sentences[:most], f"and {len(sentences) - most} more"]
