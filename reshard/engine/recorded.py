"""Digests of tensors from those of their blocks, and comparing what is read with the digests that reshard recorded when it wrote the
checkpoint (plans/manifest.py).

A conversion, a fingerprint and a comparison hash each block anyway, so the comparison costs no further pass. Only if a tensor differs are
parts of the files read again, to name the files that were changed or exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from reshard.engine.record import samples
from reshard.errors import CheckpointError, ReshardError, some
from reshard.geometry.boxes import blocks
from reshard.geometry.quantities import grouped, plural
from reshard.index.origin import Mixed, Patched, Tensor
from reshard.plans.digests import CURRENT, DigestVersion, Fingerprint
from reshard.plans.manifest import MANIFEST, FileRecord, read_digests, read_manifest
from reshard.plans.plan import Plan
from reshard.plans.tasks import Route
from reshard.storage.files import Files, read_range

if TYPE_CHECKING:
    from reshard.index.provenance import AppliedDelta

BlockDigests = dict[str, dict[int, bytes]]
"""Tensor -> number of the block -> digest."""
# The most files that an error names.
_MOST_FILES = 4
Error = TypeVar("Error", bound=ReshardError)


def tensor_digest(name: str, tensor: Tensor, digests: Mapping[int, bytes], version: DigestVersion = CURRENT) -> bytes:
    """The digest of a tensor under a name. digests: those of its blocks, by their numbers."""
    return version.tensor(name, tensor.dtype, tensor.shape, (digest for _, digest in sorted(digests.items())))


def fingerprint_of(tensors: Mapping[str, Tensor], digests: BlockDigests, version: DigestVersion = CURRENT) -> Fingerprint:
    """The fingerprint of these tensors, from the digests of their blocks."""
    return version.checkpoint({name: tensor_digest(name, tensor, digests.get(name, {}), version) for name, tensor in tensors.items()})


def recorded_fingerprint(plan: Plan) -> str | None:
    """The fingerprint of what a plan writes, by the digests that reshard recorded when it wrote the source; None if these do not tell it,
    because of a cast, for example. The source may have changed since."""
    recorded = plan.content.recorded()
    is_told = not plan.layout.aliases and not plan.content.combined
    for route in plan.routes if is_told else ():
        source = route.source
        if route.name not in recorded or route.is_cast or source.is_computed:
            is_told = False
    digests = {route.name: bytes.fromhex(recorded[route.name].removeprefix(CURRENT.prefix)) for route in plan.routes} if is_told else {}
    return CURRENT.checkpoint(digests).root if is_told else None


def notes_on_source(plan: Plan, digests: BlockDigests) -> Iterator[str]:
    """Compare the tensors that a conversion has read with what reshard recorded when it wrote the source. Sentences on what cannot be.

    Raises: CheckpointError if a tensor differs.
    """
    if plan.content.combined:
        return  # `InputDigests` compares each checkpoint
    recorded, deltas = plan.content.recorded(), plan.content.deltas
    if not recorded and (deltas or MANIFEST not in plan.source_files.list()):
        return
    different: list[Tensor] = []
    compared = cast = merged = unknown = 0
    for route in plan.routes:
        tensor, expected = route.source, recorded.get(route.name)
        if expected is None:
            unknown += 1
        elif tensor.origin.changed_by:  # The blocks were hashed after the update.
            merged += 1
        elif route.is_cast or tensor.is_computed:  # The blocks were hashed after the cast.
            cast += 1
        else:
            compared += 1
            if CURRENT.text(tensor_digest(route.name, tensor, digests[route.name])) != expected:
                different.append(tensor)
    if different:
        raise mismatch(CheckpointError, plan.source_files, different, compared, deltas)
    if deltas:  # What was cast or merged was compared with its checksum when it was read.
        return
    reasons = "because of the cast", "because of the merge", f"as {MANIFEST} holds no digests under their names"
    for count, reason in zip((cast, merged, unknown), reasons, strict=True):
        if count:
            verb = "was" if count == 1 else "were"
            yield f"{plural(count, 'tensor')} of the source {verb} not compared with its {MANIFEST}, {reason}"


class InputDigests:
    """The digests of the blocks of every checkpoint that a plan combines, as they were read. Does nothing for a plan of one checkpoint."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        sources = plan.content.combined.sources if plan.content.combined else ()
        self._found: tuple[BlockDigests, ...] = tuple({} for _ in sources)

    def add(self, name: str, number: int, digests: Sequence[bytes]) -> None:
        """Add the digests of a block of a tensor, of each checkpoint."""
        for of_input, digest in zip(self._found, digests, strict=False):
            of_input.setdefault(name, {})[number] = digest

    def notes(self) -> Iterator[str]:
        """Compare the tensors with what reshard recorded when it wrote the checkpoints. A sentence on each checkpoint with tensors that
        could not be compared.

        Raises: CheckpointError if a tensor differs.
        """
        combined = self._plan.content.combined
        for i, source in enumerate(combined.sources if combined else ()):
            recorded, digests = source.recorded(), self._tensors(i)
            different = [tensor for name, (tensor, digest) in digests.items() if recorded.get(name, digest) != digest]
            if different:
                compared = len(digests.keys() & recorded.keys())
                raise mismatch(CheckpointError, source.files, different, compared, source.deltas)
            if recorded and (unknown := len(recorded.keys() & self._names - digests.keys())):
                yield f"{plural(unknown, 'tensor')} of {source.path} {'was' if unknown == 1 else 'were'} not compared with its {MANIFEST}"

    def fingerprints(self) -> tuple[str | None, ...]:
        """The fingerprint of each checkpoint; None if not all of its tensors were read as they are stored, such as by other processes."""
        return tuple(self._fingerprint(i) for i in range(len(self._found)))

    def _fingerprint(self, i: int) -> str | None:
        digests = self._tensors(i)
        if digests.keys() != self._names:
            return None
        return CURRENT.checkpoint({name: bytes.fromhex(text.removeprefix(CURRENT.prefix)) for name, (_, text) in digests.items()}).root

    @property
    def _names(self) -> set[str]:
        return {*self._plan.content.tensors}

    def _tensors(self, i: int) -> dict[str, tuple[Tensor, str]]:
        """By name the tensors of a checkpoint that were read whole and as they are stored, each with its digest."""
        tensors: dict[str, tuple[Tensor, str]] = {}
        for name, whole in self._plan.content.tensors.items():
            tensor, digests = _input(whole, i), self._found[i].get(name, {})
            if tensor is not None and not tensor.is_computed and len(digests) == sum(1 for _ in blocks(tensor.shape)):
                tensors[name] = tensor, CURRENT.text(tensor_digest(name, tensor, digests))
        return tensors


def _input(tensor: Tensor, number: int) -> Tensor | None:
    """The input of that number of a combined tensor; None if its components are computed, or one input is taken as it is."""
    mixed = tensor.origin
    if not isinstance(mixed, Mixed) or (mixed.rule == "slerp" and mixed.weights[1] in (0, 1)):
        return None
    return mixed.inputs[number]


def with_late_comparison(plan: Plan) -> Plan:
    """The plan for a run that calls `notes_on_source` at its end: where this compares what deltas make of a tensor with its digest, the
    tensor is not read once more to compare its checksum first."""
    recorded = plan.content.recorded() if plan.content.deltas else {}
    if not recorded:
        return plan

    def route_of(route: Route) -> Route:
        patched = route.source.origin
        if not isinstance(patched, Patched) or route.is_cast or route.name not in recorded:
            return route
        return replace(route, source=replace(route.source, origin=patched.compared_later()))

    return replace(plan, routes=tuple(map(route_of, plan.routes)))


def mismatch(error: type[Error], files: Files, different: Sequence[Tensor], compared: int, deltas: Sequence[AppliedDelta] = ()) -> Error:
    """The error for tensors that differ from what reshard wrote.

    error: its class. files: the checkpoint. different: the tensors. compared: how many were compared. deltas: those that change them.
    """
    if deltas:
        return error(
            f"it is not what the delta {deltas[-1].path} makes ({len(different)} of {plural(compared, 'tensor')} are not)",
            where=different[0].name,
            why=f"The base {files.root} is not the one that the delta was made of, or has changed since, or it is the result already",
            do="Give the base that `reshard inspect DELTA` names, then its deltas in the order of their versions",
        )
    return error(
        f"it does not match {MANIFEST} ({len(different)} of {plural(compared, 'tensor')} do not)",
        where=different[0].name,
        why=f"Since reshard wrote {files.root}, {_changes(files, different)}",
        do=f"Copy the files again from where they were written, or remove {MANIFEST} if another program has written here since",
    )


def _changes(files: Files, different: Sequence[Tensor]) -> str:
    """The files that hold something else than reshard wrote, in words."""
    manifest = read_manifest(files)
    changes = changed_files(files, read_digests(files, manifest).files) if manifest else {}
    if changes:
        return some([f"{path} {change}" for path, change in changes.items()], most=_MOST_FILES)
    return f"bytes have changed in {files_of(different[0])}"


def files_of(tensor: Tensor) -> str:
    """The files that hold a tensor, for messages."""
    shards = tensor.shards
    return some([shards.paths[i] for i in np.unique(shards.files).tolist()], most=_MOST_FILES)


def changed_files(files: Files, records: Mapping[str, FileRecord]) -> dict[str, str]:
    """The files whose length or samples are not those that were recorded, each with a phrase that says what it holds.

    A few changed bytes may lie between the samples. A file that was exchanged with another one, or comes from another conversion, is found.
    """
    written = grouped(records, lambda path: records[path].samples)
    changed: dict[str, str] = {}
    for path, record in records.items():
        size = files.size(path)
        if size is None:
            changed[path] = "is missing"
            continue
        stored = samples(path, size, partial(read_range, files))
        if size == record.nbytes and stored == record.samples:
            continue
        others = written.get(stored, [])
        if others:
            changed[path] = f"holds what was written as {others[0]}"
        elif size != record.nbytes:
            changed[path] = f"has {size:,} bytes, {record.nbytes:,} were written"
        else:
            changed[path] = "holds something else"
    return changed
