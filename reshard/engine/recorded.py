"""Comparing what is read with the digests that reshard recorded when it wrote the checkpoint (plans/manifest.py).

A conversion, a fingerprint and a comparison hash each block anyway, so the comparison costs no further pass. Only if a tensor differs are
parts of the files read again, to name the files that were changed or exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from reshard.engine.record import samples
from reshard.errors import CheckpointError, ReshardError
from reshard.geometry.quantities import plural
from reshard.index.index import Tensor
from reshard.plans.digests import CURRENT
from reshard.plans.manifest import MANIFEST, FileRecord, read_digests, read_manifest
from reshard.plans.plan import Plan
from reshard.plans.tasks import Route
from reshard.storage.files import Files, read_range

Error = TypeVar("Error", bound=ReshardError)


class SourceCheck:
    """Compares the tensors that a conversion reads with the digests of the source, if reshard wrote it."""

    def __init__(self, plan: Plan) -> None:
        self._files, self._recorded = plan.source_files, plan.content.recorded()
        self._is_recorded = bool(self._recorded) or MANIFEST in plan.source_files.list()
        self._different: list[Tensor] = []
        self._compared = self._cast = self._merged = self._unknown = 0

    def add(self, route: Route, blocks: Sequence[bytes]) -> None:
        """Compare a tensor. blocks: the digests of what was written for it, block by block."""
        tensor, expected = route.source, self._recorded.get(route.name)
        if expected is None:
            self._unknown += 1
        elif tensor.updates:
            # The blocks were hashed after the update.
            self._merged += 1
        elif route.is_cast or tensor.encoding or tensor.derivation:
            # The blocks were hashed after the cast.
            self._cast += 1
        else:
            self._compared += 1
            if CURRENT.text(CURRENT.tensor(route.name, tensor.dtype, tensor.shape, blocks)) != expected:
                self._different.append(tensor)

    def notes(self) -> tuple[str, ...]:
        """Sentences about what was not compared. Raises CheckpointError if a tensor differs from what reshard wrote."""
        if self._different:
            raise mismatch(CheckpointError, self._files, self._different, self._compared)
        counts = (
            (self._cast, "because of the cast"),
            (self._merged, "because of the merge"),
            (self._unknown, f"as {MANIFEST} holds no digests under their names"),
        )
        return tuple(
            f"{plural(count, 'tensor')} of the source {'was' if count == 1 else 'were'} not compared with its {MANIFEST}, {reason}"
            for count, reason in counts
            if count and self._is_recorded
        )


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
    written: dict[str, list[str]] = {}
    for path, record in records.items():
        written.setdefault(record.samples, []).append(path)
    found: dict[str, str] = {}
    for path, record in records.items():
        size = files.size(path)
        if size is None:
            found[path] = "is missing"
            continue
        stored = samples(path, size, lambda path, start, nbytes: read_range(files, path, start, nbytes))
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
