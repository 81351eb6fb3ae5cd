"""The verb `convert`: run a plan into a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from reshard.adapter import registry
from reshard.adapter.model_files import CARRIED, CONFIG
from reshard.engine.events import event
from reshard.engine.journal import read_journal
from reshard.engine.parts.shared import SharedConversion
from reshard.engine.record import Provenance
from reshard.engine.run import Conversion, recorded_fingerprint
from reshard.errors import RequestError, TargetError, TargetInUse, check_word
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.health.findings import Finding
from reshard.health.model_files import missing_in_target
from reshard.plans.digests import Fingerprint
from reshard.plans.manifest import MANIFEST, RECORDS
from reshard.plans.plan import Plan
from reshard.plans.summary import DropSummary, drops
from reshard.requests.request import Effort, EffortOptions, PathLike, checked_keywords
from reshard.storage.files import LocalFiles
from reshard.storage.local_path import is_url, local_path
from reshard.storage.lock import is_locked
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.system_calls import system_errors
from reshard.verbs.plan import check_whole

if TYPE_CHECKING:
    from reshard.engine.parts.part import PartConversion
    from reshard.engine.stores.conversion import StoreConversion
    from reshard.plans.bands import Band

Existing = Literal["refuse", "resume", "overwrite", "update"]
"""What happens to what lies in the target: nothing, it is finished, any checkpoint is replaced, or what reshard wrote is."""
Executor = Literal["threads", "ray"]
"""What runs a conversion: threads of this process, or the tasks of a Ray cluster."""
_NO_LIMITS = Effort()
_NO_PROVENANCE = Provenance()


@value
class Result:
    """What a conversion has written, and what it has left out."""

    path: str
    """The target directory."""
    files: dict[str, int]
    """The size of each weight file by its path in the target."""
    dropped: tuple[DropSummary, ...]
    """What was left out, by reason and kind."""
    notes: tuple[str, ...]
    """Remarks about what was written."""
    fingerprint: Fingerprint
    """The digests of the weights that were written."""
    seconds: float
    """How long the conversion took."""
    findings: tuple[Finding, ...] = ()
    """What its engines will miss, such as a tokenizer."""
    unchanged: bool = False
    """Whether the target was the result of this conversion already, so that nothing was written (`if_changed`)."""

    def to_json(self) -> dict[str, Any]:
        """The result as plain values with stable keys."""
        return {
            "path": self.path,
            "files": [{"path": path, "bytes": nbytes} for path, nbytes in self.files.items()],
            "dropped": [group.to_json() for group in self.dropped],
            "notes": list(self.notes),
            "findings": [finding.to_json() for finding in self.findings],
            "fingerprint": self.fingerprint.root,
            "seconds": round(self.seconds, 3),
            "unchanged": self.unchanged,
        }

    def __str__(self) -> str:
        left_out = sum(group.tensors for group in self.dropped)
        return (
            f"{self.path}: {plural(len(self.files), 'file')}, {sum(self.files.values()):,} bytes in {self.seconds:.1f} s, "
            f"{plural(left_out, 'tensor')} left out, fingerprint {self.fingerprint.root}"
        )


@checked_keywords
def convert(
    plan: Plan,
    target: PathLike,
    *,
    resume: bool = False,
    overwrite: bool = False,
    if_changed: bool = False,
    checksums: bool = False,
    executor: Executor = "threads",
    **options: Unpack[EffortOptions],
) -> Result:
    """Run a plan into the directory or URL `target`; returns what was written and what was left out.

    resume: finish an interrupted conversion. overwrite: replace the checkpoint in `target` once the new one is complete. if_changed: do
    nothing if `target` holds the result of this plan for the source as it is now; otherwise resume or replace what reshard wrote there.
    checksums: also write SHA256SUMS for `sha256sum -c`, which reads the result once more.
    executor: "ray" for the tasks of a Ray cluster: the one that is connected (`ray.init`), that of RAY_ADDRESS, or a new one on this
    machine; such a conversion always resumes.

    Raises: RequestError if the target exists and neither was said, or the disk has no room. CheckpointError if reshard wrote the source,
    and its weights are not those that it wrote.
    """
    effort, began = Effort(**options), time.monotonic()
    existing, provenance = existing_target(resume=resume, overwrite=overwrite, if_changed=if_changed), Provenance(checksums=checksums)
    if existing == "update" and (result := unchanged_result(plan, target, provenance)):
        return result
    check_word("executor", executor, ("threads", "ray"))
    make = ray_conversion if executor == "ray" else conversion
    running = make(plan, target, existing=existing, effort=effort, provenance=provenance)
    for done in running.run():
        effort.report(done.nbytes)
    return result_of(running, target, time.monotonic() - began)


def result_of(running: Conversion | StoreConversion | SharedConversion, target: PathLike, seconds: float) -> Result:
    """The result of a conversion that has run to its end. Raises TargetInUse if another process still writes the target."""
    whole = running.completed if isinstance(running, SharedConversion) else running
    if whole is None:
        raise TargetInUse(
            "all tasks are done, and another process still writes here, so the files have not got their final names",
            where=os.fspath(target),
            do="Wait until it has ended, then run the same command with --finish",
        )
    plan = whole.plan
    assert whole.fingerprint is not None
    files = {file.path: file.nbytes for file in plan.layout.files}
    notes = (*plan.layout.notes, *whole.notes)
    return Result(os.fspath(target), files, drops(plan), notes, whole.fingerprint, seconds, missing_in_target(plan))


def existing_target(*, resume: bool, overwrite: bool, if_changed: bool) -> Existing:
    """What the caller allows. Raises RequestError if the keywords contradict each other."""
    chosen: dict[Existing, bool] = {"resume": resume, "overwrite": overwrite, "update": if_changed}
    given = [name for name, is_given in chosen.items() if is_given]
    if len(given) > 1:
        flags = ["--if-changed" if name == "update" else f"--{name}" for name in given]
        raise RequestError(f"{flags[0]} and {flags[1]} contradict each other", do="Give one of them")
    return given[0] if given else "refuse"


def unchanged_result(plan: Plan, target: PathLike, provenance: Provenance) -> Result | None:
    """The result of an earlier conversion, if the target holds what this one would write; None if it must be written."""
    from reshard.requests.unchanged import files_of_target, reason_to_convert

    root, began = os.fspath(target if is_url(target) else target_folder(target)), time.monotonic()
    with nullcontext() if is_url(target) else system_errors("read", root):
        files = files_of_target(root)
        reason = reason_to_convert(plan, files, checksums=provenance.checksums)
        if reason is not None or files is None:
            event("changed", f"{root} is written: {reason}", target=root, reason=reason)
            return None
        fingerprint = recorded_fingerprint(files)
    event("unchanged", f"{root} is unchanged: nothing was written", target=root, fingerprint=fingerprint.root)
    sizes, seconds = {file.path: file.nbytes for file in plan.layout.files}, time.monotonic() - began
    return Result(os.fspath(target), sizes, drops(plan), plan.layout.notes, fingerprint, seconds, missing_in_target(plan), unchanged=True)


def target_folder(target: PathLike) -> Path:
    """The path of the target directory. Raises RequestError if its name cannot be that of a local directory."""
    root = local_path(target)
    if "\0" in str(root):
        raise RequestError(f"the name of the target, {str(root)!r}, contains NUL", do="Choose another name")
    return root


def conversion(
    plan: Plan,
    target: PathLike,
    *,
    existing: Existing = "refuse",
    effort: Effort = _NO_LIMITS,
    provenance: Provenance = _NO_PROVENANCE,
) -> Conversion | StoreConversion:
    """A conversion that has not begun, for callers that run it block by block. `convert` runs it to the end."""
    check_whole(plan)
    if is_url(target):
        from reshard.verbs.into_store import conversion_into_store

        return conversion_into_store(plan, os.fspath(target), existing, effort, provenance)
    return local_conversion(plan, target, existing=existing, effort=effort, provenance=provenance)


def local_conversion(
    plan: Plan,
    target: PathLike,
    *,
    existing: Existing = "refuse",
    effort: Effort = _NO_LIMITS,
    provenance: Provenance = _NO_PROVENANCE,
) -> Conversion:
    """The same for a local directory."""
    root = target_folder(target)
    if existing == "update":
        interrupted = read_journal(root)
        existing = "resume" if interrupted and interrupted.header.identity == plan.identity() else "update"

    def replaces() -> tuple[str, ...]:
        with system_errors("read", root):
            return _replaceable(root, plan, existing)

    # Asked now, before anything is created, and again when no other run can write there. Whoever writes there now is named by `run`.
    if not is_locked(root):
        replaces()
    resume = existing == "resume"
    return Conversion(plan, root, resume=resume, replaces=replaces, workers=effort.workers, memory=effort.memory, provenance=provenance)


def ray_conversion(
    plan: Plan,
    target: PathLike,
    *,
    existing: Existing = "refuse",
    effort: Effort = _NO_LIMITS,
    provenance: Provenance = _NO_PROVENANCE,
    address: str | None = None,
) -> SharedConversion:
    """A conversion by the tasks of a Ray cluster that has not begun. address: that of the cluster, if none is connected.

    Raises: UnsupportedError if Ray is not installed, SystemRefusal if no cluster answers.
    """
    from reshard.engine.parts.on_ray import RayConversion, connected

    connected(address)
    if is_url(target):
        from reshard.verbs.into_store import ray_into_store

        check_whole(plan)
        return ray_into_store(plan, os.fspath(target), existing, effort, provenance)
    from reshard.requests.order import PlanFile

    return shared_conversion(partial(RayConversion, shipped=PlanFile.of(plan)), plan, target, plan.bands(), existing, effort, provenance)


def shared_conversion(
    kind: Callable[..., PartConversion],
    plan: Plan,
    target: PathLike,
    bands: Sequence[Band],
    existing: Existing,
    effort: Effort,
    provenance: Provenance,
) -> PartConversion:
    """A conversion that has not begun, of these bands of a plan. Other processes may convert others, or the same."""
    check_whole(plan)
    root = target_folder(target)

    def replaces() -> tuple[str, ...]:
        with system_errors("read", root):
            return _replaceable(root, plan, "refuse" if existing == "resume" else existing)

    return kind(plan, root, bands, replaces=replaces, workers=effort.workers, memory=effort.memory, provenance=provenance)


def _replaceable(root: Path, plan: Plan, existing: Existing) -> tuple[str, ...]:
    """The files in the target directory that a conversion may replace. Raises RequestError if it may not write there."""
    _check_place(root, Path(plan.source_files.root))
    entries = sorted(entry.name for entry in root.iterdir() if entry.name != WORK_FOLDER) if root.exists() else []
    interrupted = read_journal(root)
    if not entries and not interrupted:
        return ()
    if existing == "resume" and (interrupted or MANIFEST in entries):
        return ()
    if existing in ("refuse", "resume"):
        found = f"an interrupted conversion to {interrupted.header.to}{interrupted.progress}" if interrupted else None
        raise TargetError(
            f"{found} lies here" if found else f"the target exists and holds {len(entries)} entries",
            where=str(root),
            why="Nothing was written",
            do="Finish it with --resume, or start anew with --overwrite" if found else "Choose another directory, or say --overwrite",
            id="target-in-use" if found else "target-exists",
        )
    globs = [glob for found in registry.formats().values() for glob in found.owns]
    # Search only those folders that the new checkpoint has, too.
    folders = {file.path.partition("/")[0] for file in plan.layout.files if "/" in file.path}
    inner = sorted(str(path.relative_to(root)) for folder in folders for path in (root / folder).rglob("*") if path.is_file())
    weights = [name for name in (*entries, *inner) if any(fnmatchcase(name, glob) for glob in globs)]
    if existing == "update":
        from reshard.requests.unchanged import own_files

        own = own_files(LocalFiles(root), plan, entries, weights, is_interrupted=interrupted is not None)
        return tuple(name for name in own if (root / name).is_file())
    if not weights and not interrupted:
        raise TargetError(
            f"--overwrite: {', '.join(entries[:3])} and what else lies there is no checkpoint",
            where=str(root),
            why="Only checkpoints are replaced",
            do="Choose another directory, or remove its content yourself",
        )
    carried = [name for name in entries if any(fnmatchcase(name, glob) for glob in (*CARRIED, CONFIG, *RECORDS))]
    return tuple(name for name in weights + carried if not (root / name).is_dir())


def _check_place(root: Path, source: Path) -> None:
    """Raises RequestError if the target cannot be a directory, TargetError if it and the source contain each other."""
    if root.exists() and not root.is_dir():
        raise TargetError("the target is a file; a directory is written", where=str(root))
    # realpath, because Path.resolve raises RuntimeError for links in a circle.
    target, folder = (Path(os.path.realpath(path)) for path in (root, source if source.is_dir() else source.parent))
    if target == folder:
        raise TargetError("source and target are the same directory", where=str(root), do="Choose another target")
    if source.is_dir() and folder in target.parents:
        raise TargetError(
            f"the target is inside of the source {source}",
            where=str(root),
            why="The next reader of the source would find two checkpoints in it",
            do="Choose a target outside of the source",
        )
    if target in folder.parents:
        raise TargetError(
            f"the source {source} is inside of the target",
            where=str(root),
            why="A target is replaced as a whole, and the source would be a part of it",
            do="Choose another target",
        )
