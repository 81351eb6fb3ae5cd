"""Recording a conversion: the files reshard.json, reshard.digests and SHA256SUMS of a plan that has been run (plans/manifest.py)."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, field
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

import reshard
from reshard.canonical.content import Drop
from reshard.engine.pool import run_jobs
from reshard.errors import CheckpointError
from reshard.geometry.quantities import grouped
from reshard.geometry.value import value
from reshard.plans.digests import CURRENT, Fingerprint, content_digest
from reshard.plans.layout import Sidecar, TargetFile
from reshard.plans.manifest import (
    CHECKSUMS,
    DIGESTS,
    MANIFEST,
    README,
    SCHEMA_VERSION,
    Digests,
    FileRecord,
    Ranges,
    digests_bytes,
    fixed_bytes,
    fixed_ranges,
    manifest_bytes,
    parts,
    read_digests,
    sample_ranges,
    usable_manifest,
)
from reshard.plans.plan import Plan
from reshard.secrets import public
from reshard.storage.files import Files, leads_elsewhere, read_whole
from reshard.storage.trees import root_of

if TYPE_CHECKING:
    from reshard.index.provenance import Combined, CombinedSource, MergedAdapter

Read = Callable[[str, int, int], bytes]
"""Reads (path, byte offset, bytes) of a file of the result."""
# reshard.json names at most this many reasons for drops, and tensors for each. Paths and the command line are cut at the length of the
# longest path.
_MOST_OF_README = 64 << 20
_MOST_REASONS, _MOST_EXAMPLES, _LONGEST_REASON, _LONGEST_TEXT = 32, 5, 200, 4096


@value
class Provenance:
    """What the caller of a conversion wants to be recorded."""

    arguments: tuple[str, ...] = ()
    """The arguments of the `reshard` command; empty if Python code started the conversion."""
    checksums: bool = False
    """Whether SHA256SUMS is written."""
    card: bool = False
    """Whether README.md gets a card (plans/card.py)."""
    edited: bytes | None = None
    """README.md of the target, if somebody has changed it since reshard wrote it, or has written it."""
    overflow: Mapping[str, int] = field(default_factory=dict)
    """How many finite values of each tensor became infinite in the cast: what the conversion itself adds."""


def records(
    plan: Plan,
    files: Iterable[TargetFile],
    identity: str,
    fingerprint: Fingerprint,
    read: Read,
    provenance: Provenance,
    workers: int,
    of_inputs: Sequence[str | None] = (),
) -> Iterator[Sidecar]:
    """The files that record a conversion. reshard.json comes last and completes the result. README.md with a card is one of them.

    files: those of the plan, with their checksums. identity: of the plan. read: reads the written files, of which a few parts are sampled,
    and all if checksums are wanted. of_inputs: the fingerprints of the checkpoints that were combined, as far as they are known.
    """
    layout, record = plan.layout, _document(plan, identity, provenance, of_inputs)
    small_files = list(layout.sidecars)
    if provenance.card:
        from reshard.plans.card import card, kept_readme, with_card

        text = card(plan, record, fingerprint.root, checksums=provenance.checksums)
        readme = Sidecar(README, with_card(kept_readme(small_files, provenance.edited), text))
        small_files = [*(sidecar for sidecar in small_files if sidecar.path != README), readme]
        yield readme
    if provenance.checksums:
        small_files.append(Sidecar(CHECKSUMS, _checksums(layout.files, small_files, read, workers)))
        yield small_files[-1]
    planned = _fixed_bytes(plan, layout.files)
    fixed = planned | _fixed_bytes(plan, (file for file in files if file.checksums))
    digests = Digests(
        files={file.path: FileRecord(file.nbytes, *fixed[file.path], samples(file.path, file.nbytes, read)) for file in layout.files},
        small_files={sidecar.path: content_digest(sidecar.content) for sidecar in small_files},
        tensors=dict(fingerprint.tensors),
        aliases={alias: name for alias, name in layout.aliases.items() if alias in fingerprint.tensors},
    )
    content = digests_bytes(digests)
    yield Sidecar(DIGESTS, content)
    document = {
        **record,
        "request": _request_digest(plan, planned),
        "fingerprint": fingerprint.root,
        "digests": content_digest(content),
    }
    yield Sidecar(MANIFEST, manifest_bytes(document, {file.path: file.nbytes for file in layout.files}))


def planned_record(plan: Plan) -> Sidecar:
    """reshard.json of a plan that nobody has run: without a command, a time, and what only all weights tell."""
    document = {
        **_document(plan, plan.identity(), Provenance(), ()),
        "time": None,
        "request": request_digest(plan),
        "fingerprint": None,
        "digests": None,
    }
    return Sidecar(MANIFEST, manifest_bytes(document, {file.path: file.nbytes for file in plan.layout.files}))


def edited_readme(files: Files) -> bytes | None:
    """README.md of a target that somebody has changed since reshard wrote it, or has written; None if it is reshard's, or there is none.

    A link that leads elsewhere is not followed.
    """
    if not files.size(README) or (files.store is None and leads_elsewhere(files.root, README)):
        return None
    content, manifest = read_whole(files, README, limit=_MOST_OF_README), usable_manifest(files)
    with suppress(CheckpointError):
        if manifest and manifest.digests and read_digests(files, manifest).small_files.get(README) == content_digest(content):
            return None
    return content


def lacking(provenance: Provenance, files: Files) -> tuple[str, str] | None:
    """The option whose result is missing in a finished conversion, and that result; None if nothing is missing."""
    if provenance.checksums and files.size(CHECKSUMS) is None:
        return "checksums", CHECKSUMS
    if provenance.card:
        from reshard.plans.card import has_card

        if not files.size(README) or not has_card(read_whole(files, README, limit=_MOST_OF_README)):
            return "card", f"a card in {README}"
    return None


def samples(path: str, nbytes: int, read: Read) -> str:
    """The digest of the sampled parts of a file of that length."""
    return digest_of(path, sample_ranges(nbytes), read)


def digest_of(path: str, ranges: Ranges, read: Read) -> str:
    """The digest of the bytes of a file in these ranges."""
    running = CURRENT.new()
    for start, stop in parts(ranges):
        running.update(read(path, start, stop - start))
    return CURRENT.text(running.digest())


def source_state(plan: Plan) -> str:
    """A digest of where the source lies, and of the names, lengths and modification times of its files."""
    state: list[object] = [public(root_of(plan.source_files)), plan.source.facts.step]
    state += [(file.path, file.nbytes, plan.source_files.stamp(file.path)) for file in plan.source.files]
    return content_digest(json.dumps(state).encode())


def request_digest(plan: Plan) -> str:
    """A digest of what determines the result besides the content of the source files: the options, the model, and all bytes of the result
    that the plan knows, such as headers and small files."""
    return _request_digest(plan, _fixed_bytes(plan, plan.layout.files))


def _merged_adapters(last: MergedAdapter | None) -> dict[str, object]:
    """What determines the result of the adapters that are merged besides the content of their files."""
    if last is None:
        return {}
    several = [(dict(adapter.settings), adapter.weight) for adapter in last.all]
    combination = {"combination": last.combination} if last.combination else {}
    return {"adapter": dict(last.settings), **({"adapters": several} if last.before or last.weight != 1 else {}), **combination}


_FixedBytes = dict[str, tuple[Ranges, str]]
"""The ranges of the fixed bytes of each file, and their digest."""


def _request_digest(plan: Plan, fixed: _FixedBytes) -> str:
    document, model, target = plan.to_json(tensors=False), plan.content.model, plan.target
    combined, selection = plan.content.combined, asdict(plan.content.selection)
    del selection["packed_states"]  # it follows from the target
    request = {
        "target": document["target"],
        "totals": document["totals"],
        **_merged_adapters(plan.content.merged),
        **({"combined": [(source.format, source.weight) for source in combined.sources] + [combined.rule]} if combined else {}),
        **({"allow_overflow": True} if target.allow_overflow else {}),
        "keep_dtype": [*target.keep_dtype, *sorted(target.dtype_kept_for)],
        "selection": selection,
        "config": dict(model.config) if model else None,
        "architecture": model and (model.architecture.declaration or model.architecture.model_type),
        "files": fixed,
        "small_files": {sidecar.path: content_digest(sidecar.content) for sidecar in plan.layout.sidecars},
    }
    return content_digest(json.dumps(request, sort_keys=True, default=str).encode())


def _fixed_bytes(plan: Plan, files: Iterable[TargetFile]) -> _FixedBytes:
    constants, by_file = grouped(plan.target_index.constants, attrgetter("path")), {}
    for file in files:
        of_file = constants.get(file.path, ())
        running = CURRENT.new()
        for _, part in fixed_bytes(file, of_file):
            running.update(part)
        by_file[file.path] = fixed_ranges(file, of_file), CURRENT.text(running.digest())
    return by_file


def _checksums(files: Sequence[TargetFile], sidecars: Sequence[Sidecar], read: Read, workers: int) -> bytes:
    """The content of SHA256SUMS, in the form that `sha256sum -c` reads. The files are read once more, by several threads."""

    def perform(file: TargetFile) -> tuple[str, str]:
        running = hashlib.sha256()
        for start, stop in parts(((0, file.nbytes),)):
            running.update(read(file.path, start, stop - start))
        return file.path, running.hexdigest()

    sums = dict(run_jobs(files, lambda: perform, workers))
    sums |= {sidecar.path: hashlib.sha256(sidecar.content).hexdigest() for sidecar in sidecars}
    return "".join(_checksum_line(path, sums[path]) for path in sorted(sums)).encode()


def _checksum_line(path: str, digest: str) -> str:
    """A line of SHA256SUMS. As GNU does it, a line starts with a backslash if the name has characters that are escaped."""
    escaped = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == path else chr(92)}{digest}  {escaped}\n"


def _document(plan: Plan, identity: str, provenance: Provenance, of_inputs: Sequence[str | None]) -> dict[str, Any]:
    """What reshard.json says about the conversion, without digests and files."""
    layout, source_manifest, deltas = plan.layout, usable_manifest(plan.source_files), plan.content.deltas
    command = shlex.join(("reshard", *provenance.arguments)) if provenance.arguments else None
    return {
        "schema_version": SCHEMA_VERSION,
        "format": layout.format,
        **asdict(layout.parallel),
        "engine_version": plan.target.engine_version,
        "source": {
            "path": root_of(plan.source_files)[:_LONGEST_TEXT],
            "format": plan.source.format,
            "step": plan.source.facts.step,
            "fingerprint": deltas[-1].fingerprint if deltas else source_manifest.fingerprint if source_manifest else None,
            "state": source_state(plan),
        },
        "adapter": plan.content.merged.to_json() if plan.content.merged else None,
        "combined": _combined(plan, plan.content.combined, of_inputs) if plan.content.combined else None,
        "deltas": [delta.to_json() for delta in deltas],
        "command": command if command is None or len(command) <= _LONGEST_TEXT else command[:_LONGEST_TEXT] + " ...",
        "versions": {"reshard": reshard.__version__, "python": platform.python_version(), "numpy": np.__version__},
        "time": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "plan": identity,
        "file_count": len(layout.files),
        "bytes": sum(file.nbytes for file in layout.files),
        "tensors": len(plan.routes),
        "dropped": _drops_by_reason(plan.drops),
        **({"overflow": dict(provenance.overflow)} if provenance.overflow else {}),
    }


def _combined(plan: Plan, combined: Combined, of_inputs: Sequence[str | None]) -> dict[str, Any]:
    """What reshard.json says about the checkpoints that were combined. of_inputs: their fingerprints, as far as they were computed."""
    longest = max(200, _LONGEST_TEXT // len(combined.sources))
    sources = [
        {**source.to_json(), "path": source.path[:longest], "fingerprint": computed or _recorded_fingerprint(source)}
        for source, computed in zip(combined.sources, of_inputs or (None,) * len(combined.sources), strict=True)
    ]
    return {**combined.to_json(), "sources": sources}


def _recorded_fingerprint(source: CombinedSource) -> str | None:
    """The fingerprint that was recorded when reshard wrote the checkpoint, or the last delta that changes it."""
    if source.deltas:
        return source.deltas[-1].fingerprint
    manifest = usable_manifest(source.files)
    return manifest.fingerprint if manifest else None


def _drops_by_reason(drops: Sequence[Drop]) -> list[dict[str, Any]]:
    """The drops by kind and reason, with the first names of each."""
    groups = grouped(drops, lambda drop: (drop.kind, drop.reason))
    return [
        {
            "kind": kind,
            "reason": reason[:_LONGEST_REASON],
            "tensors": len(group),
            "bytes": sum(drop.nbytes for drop in group),
            "examples": [drop.name[:_LONGEST_REASON] for drop in group[:_MOST_EXAMPLES]],
        }
        for (kind, reason), group in list(groups.items())[:_MOST_REASONS]
    ]
