"""The verbs `convert` and `convert_part`: run a plan, or a part of it, into a directory or a folder of a store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from reshard.adapter import registry
from reshard.adapter.model_files import CARRIED, CONFIG, DECLARATION
from reshard.engine.conversion import Conversion, check_nothing_is_missing, destination_at
from reshard.engine.destinations.destination import Destination
from reshard.engine.events import event
from reshard.engine.pool import NO_LIMITS, Effort
from reshard.engine.record import Provenance
from reshard.errors import RequestError, TargetError, TargetInUse, UnsupportedError, check_word
from reshard.geometry.documents import document
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.health.findings import Finding
from reshard.health.model_files import missing_in_target
from reshard.opening.keywords import ConvertOptions, PartOptions, PathLike, RecordOptions, WholeConversionOptions, checked_keywords, take
from reshard.plans.digests import Fingerprint
from reshard.plans.layout import LeftFile, left_by_kind
from reshard.plans.manifest import MANIFEST, RECORDS, usable_manifest, written_files
from reshard.plans.plan import Plan
from reshard.plans.summary import DropSummary, drops
from reshard.plans.tasks import PartNumber, imbalance, tasks_of_part
from reshard.requests.unchanged import files_of_target, own_files, reason_to_convert
from reshard.storage.claims import FileDigests, SourceChecks
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.system_calls import is_url, local_path, system_errors
from reshard.storage.trees import trees_of
from reshard.verbs.plan import Source, check_whole, effort_of, plan_to_run

if TYPE_CHECKING:
    from reshard.requests.pipelines import WholePipeline

Existing = Literal["refuse", "resume", "overwrite", "update"]
"""What happens to what lies in the target: nothing, it is finished, any checkpoint is replaced, or what reshard wrote is."""
Executor = Literal["threads", "ray"]
"""What runs a conversion: threads of this process, or the tasks of a Ray cluster."""


@value
class Sharing:
    """How the work of a conversion is shared. Without more, this process does all of it."""

    part: PartNumber | None = None
    """The part that this process does."""
    finish: bool = False
    """Whether this process completes what parts have done."""
    ray: bool = False
    """Whether the tasks of a Ray cluster do the work."""
    ray_address: str | None = None
    """The address of the cluster, if none is connected."""


_ALONE = Sharing()
_NO_PROVENANCE = Provenance()
_IMBALANCE = 0.1
"""From here on, a part says that there are too few tasks."""
_Make = Callable[..., Conversion]
_Made = TypeVar("_Made", "Result", "Result | None")


@value
class Result:
    """What a conversion has written, and what it has left out."""

    JSON = "path files dropped left notes findings fingerprint=fingerprint.root seconds unchanged source_checks source_digests overflow"

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
    left: tuple[LeftFile, ...] = ()
    """What lies beside the source's weights and was not carried."""
    unchanged: bool = False
    """Whether the target was the result of this conversion already, so that nothing was written (`if_changed`)."""
    source_checks: SourceChecks = SourceChecks()
    """What of the source was compared with the checksums that its files hold, by this process and by those of Ray."""
    source_digests: FileDigests = FileDigests()
    """How many files of the source were compared with recorded digests (`verify_source`)."""
    overflow: dict[str, int] = field(default_factory=dict)
    """How many finite values of each tensor became infinite in the cast, which `allow_overflow` allows."""

    def to_json(self) -> dict[str, Any]:
        """The result as plain values with stable keys."""
        files = [{"path": path, "bytes": nbytes} for path, nbytes in self.files.items()]
        return document(self, files=files, left=left_by_kind(self.left), seconds=round(self.seconds, 3))

    def __repr__(self) -> str:
        return f"Result({self.path!r}, {plural(len(self.files), 'file')}, {self.fingerprint.root})"

    def __str__(self) -> str:
        left_out = sum(group.tensors for group in self.dropped)
        return (
            f"{self.path}: {plural(len(self.files), 'file')}, {sum(self.files.values()):,} bytes in {self.seconds:.1f} s, "
            f"{plural(left_out, 'tensor')} left out, fingerprint {self.fingerprint.root}"
        )


@value
class PartResult:
    """What one part of a conversion has done, and the result if the target is complete."""

    JSON = "path part tasks bytes=nbytes resumed_bytes seconds complete result source_checks"

    path: str
    """The target directory."""
    part: PartNumber
    """The part."""
    tasks: int
    """The number of its tasks."""
    nbytes: int
    """The bytes of the target that its tasks make, without replicas."""
    resumed_bytes: int
    """The bytes of those that were there already."""
    seconds: float
    """How long it took."""
    result: Result | None
    """The result of the conversion, if the target is complete; None if tasks of other parts are missing or another process completes it."""
    source_checks: SourceChecks = SourceChecks()
    """What of the source this part compared with the checksums that its files hold."""

    @property
    def complete(self) -> bool:
        """Whether the target is complete."""
        return self.result is not None

    def to_json(self) -> dict[str, Any]:
        """The result as plain values with stable keys."""
        return document(self, part=str(self.part), seconds=round(self.seconds, 3), result=self.result.to_json() if self.result else None)

    def __str__(self) -> str:
        state = f"complete, fingerprint {self.result.fingerprint.root}" if self.result else "not complete yet"
        done = f"part {self.part}, {plural(self.tasks, 'task')}, {self.nbytes:,} bytes in {self.seconds:.1f} s"
        return "; ".join((f"{self.path}: {done}", state, *self.source_checks.notes()))


@checked_keywords
def convert(
    source: Plan | Source | Sequence[Source],
    target: PathLike,
    *,
    to: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    if_changed: bool = False,
    executor: Executor = "threads",
    **options: Unpack[WholeConversionOptions],
) -> Result:
    """Convert a checkpoint, or run a plan, into the directory or URL `target`; returns what was written and what was left out.

    source: a checkpoint or its path, with the format `to` and the keywords of `plan` and `open`, as on the command line; or a plan, which
    has them.
    resume: finish an interrupted conversion. overwrite: replace the checkpoint in `target` once the new one is complete. if_changed: do
    nothing if `target` holds the result of this plan for the source as it is now; otherwise resume or replace what reshard wrote there.
    checksums: also write SHA256SUMS for `sha256sum -c`, which reads the result once more. card: also say in README.md what the files were
    made from, what was proven, and how to check it. whole_pipeline: `target` becomes the diffusers pipeline that contains the folder of
    `model`, with the component in that folder's place and its other files byte for byte.
    executor: "ray" for the tasks of a Ray cluster: the one that is connected (`ray.init`), that of RAY_ADDRESS, or a new one on this
    machine; such a conversion always resumes.

    Raises: RequestError if the target exists and neither was said, or the disk has no room. CheckpointError if reshard wrote the source,
    and its weights are not those that it wrote. ValuesOverflow if a cast makes finite values infinite, and the plan does not allow it.
    """
    began, given = time.monotonic(), {**options}
    about_work, provenance = take(given, ConvertOptions), Provenance(**take(given, RecordOptions))
    is_whole = given.pop("whole_pipeline", False)
    plan = plan_to_run(source, to, given)
    effort = Effort.of(effort_of(plan, about_work))
    existing = existing_target(resume=resume, overwrite=overwrite, if_changed=if_changed)
    check_word("executor", executor, ("threads", "ray"))
    sharing = Sharing(ray=executor == "ray")
    pipeline = pipeline_around(plan, target, existing, sharing) if is_whole else None
    target = pipeline.component if pipeline else target
    result = unchanged_result(plan, target, provenance) if existing == "update" else None
    if result is None:
        running = conversion(plan, target, existing=existing, effort=effort, provenance=provenance, sharing=sharing)
        for done in running.run():
            effort.report(done.nbytes)
        result = result_of(running, target, time.monotonic() - began)
    return completed(pipeline, result)


@checked_keywords
def convert_part(
    plan: Plan,
    target: PathLike,
    part: PartNumber | str,
    *,
    overwrite: bool = False,
    if_changed: bool = False,
    **options: Unpack[PartOptions],
) -> PartResult:
    """Convert one part of a plan, such as "3/8"; the process that finds all parts done completes the target.

    All parts need the same plan, and a store or a file system that they share. A part may be killed, run again or run twice, and the next
    run may have another number of parts: what is finished is not converted again.

    Raises: as `convert` does.
    """
    given, began = {**options}, time.monotonic()
    provenance, is_whole = Provenance(**take(given, RecordOptions)), given.pop("whole_pipeline", False)
    effort = Effort.of(effort_of(plan, given))
    existing = existing_target(resume=False, overwrite=overwrite, if_changed=if_changed)
    number = PartNumber.parse(part) if isinstance(part, str) else part
    pipeline = pipeline_around(plan, target, existing, Sharing(number)) if is_whole else None
    target = pipeline.component if pipeline else target
    running = conversion(plan, target, existing=existing, effort=effort, provenance=provenance, sharing=Sharing(number))
    for done in running.run():
        effort.report(done.nbytes)
    part_of_target = part_result(running, target, number, time.monotonic() - began)
    return replace(part_of_target, result=completed(pipeline, part_of_target.result))


def pipeline_around(plan: Plan, target: PathLike, existing: Existing, sharing: Sharing) -> WholePipeline:
    """The pipeline that a conversion writes around its component (`whole_pipeline`). Raises: as `WholePipeline` does."""
    from reshard.requests.pipelines import WholePipeline

    pipeline = WholePipeline.around(plan, target)
    pipeline.check_place(is_new=existing == "refuse" and sharing == _ALONE, replaces=existing == "overwrite")
    return pipeline


def completed(pipeline: WholePipeline | None, result: _Made) -> _Made:
    """The result with the other files of the pipeline, which are copied now; nothing is copied while parts are missing."""
    if pipeline is None or result is None:
        return result
    files = {pipeline.folder + path: nbytes for path, nbytes in result.files.items()}
    return replace(result, path=pipeline.target, files=files, notes=(*result.notes, pipeline.complete()))


def result_of(running: Conversion, target: PathLike, seconds: float) -> Result:
    """The result of a conversion that has run to its end. Raises TargetInUse if another process still writes the target."""
    if running.fingerprint is None:
        raise TargetInUse(
            "all tasks are done, and another process still writes here, so the files have not got their final names",
            where=os.fspath(target),
            do="Wait until it has ended, then run the same command with `finish=True`",
        )
    checks, digests = running.source_checks, running.source_digests
    result = _result(running.plan, target, seconds, running.fingerprint, (*running.notes, *checks.notes(), *digests.notes()))
    return replace(result, source_checks=checks, source_digests=digests, overflow=running.overflow)


def part_result(running: Conversion, target: PathLike, part: PartNumber, seconds: float) -> PartResult:
    """The result of a part that has run to its end."""
    result = result_of(running, target, seconds) if running.fingerprint else None
    done = len(running.tasks), running.total, running.resumed_bytes, seconds
    return PartResult(os.fspath(target), part, *done, result, running.source_checks)


def _result(plan: Plan, target: PathLike, seconds: float, fingerprint: Fingerprint, notes: tuple[str, ...] = ()) -> Result:
    files = {file.path: file.nbytes for file in plan.layout.files}
    notes = (*plan.layout.notes, *notes)
    findings, left = missing_in_target(plan), plan.layout.left
    return Result(os.fspath(target), files, drops(plan), notes, fingerprint, seconds, findings, left)


def existing_target(*, resume: bool, overwrite: bool, if_changed: bool) -> Existing:
    """What the caller allows. Raises RequestError if the keywords contradict each other."""
    chosen: dict[Existing, bool] = {"resume": resume, "overwrite": overwrite, "update": if_changed}
    given = [name for name, is_given in chosen.items() if is_given]
    if len(given) > 1:
        flags = ["`if_changed=True`" if name == "update" else f"`{name}=True`" for name in given]
        raise RequestError(f"{flags[0]} and {flags[1]} contradict each other", do="Give one of them")
    return given[0] if given else "refuse"


def unchanged_result(plan: Plan, target: PathLike, provenance: Provenance) -> Result | None:
    """The result of an earlier conversion, if the target holds what this one would write; None if it must be written."""
    root, began = target_place(target), time.monotonic()
    with nullcontext() if is_url(root) else system_errors("read", root):
        files = files_of_target(root)
        reason = reason_to_convert(plan, files, provenance)
        manifest = usable_manifest(files) if files is not None and reason is None else None
    if manifest is None:
        event("changed", f"{root} is written: {reason}", target=root, reason=reason)
        return None
    fingerprint = Fingerprint(manifest.fingerprint, {})
    event("unchanged", f"{root} is unchanged: nothing was written", target=root, fingerprint=fingerprint.root)
    result = _result(plan, target, time.monotonic() - began, fingerprint)
    return replace(result, overflow=manifest.overflow, unchanged=True)


def target_place(target: PathLike) -> str:
    """The path or URL of a target.

    Raises: RequestError if its name cannot be that of a local directory; UnsupportedError for a web server, which is only read.
    """
    if is_url(target):
        url = os.fspath(target)
        if url.partition("://")[0].lower() in ("http", "https"):
            raise UnsupportedError("http(s):// can be read, and not written", where=url, do="Give s3://, gs://, az:// or a local directory")
        return url
    root = str(local_path(target))
    if "\0" in root:
        raise RequestError(f"the name of the target, {root!r}, contains NUL", do="Choose another name")
    return root


# ---- conversions that have not begun ----


def conversion(
    plan: Plan,
    target: PathLike,
    *,
    existing: Existing = "refuse",
    effort: Effort = NO_LIMITS,
    provenance: Provenance = _NO_PROVENANCE,
    sharing: Sharing = _ALONE,
) -> Conversion:
    """A conversion that has not begun, for callers that run it block by block. `convert` runs it to the end.

    Raises: TargetError if something lies there that may not be replaced, or parts are missing that are to be finished; UnsupportedError for
    a web server, which is only read, and if Ray is not installed; SystemRefusal if no cluster answers; CheckpointError for a file of the
    source that does not have its recorded digest (`verify_source`).
    """
    make = partial(Conversion, plan, provenance=provenance, source_checksums=effort.source_checksums)
    running = (_shared_conversion if sharing.part or sharing.ray else _conversion)(plan, target, existing, effort, make, sharing)
    if not effort.verify_source:
        return running
    from reshard.engine.checks.recorded_digests import check_digests

    sources = (plan.routes[i].source for i in {i for task in running.tasks for i in task.routes})
    running.source_digests = check_digests(effort, (plan.source_files, sources))
    return running


def _conversion(plan: Plan, target: PathLike, existing: Existing, effort: Effort, make: _Make, sharing: Sharing) -> Conversion:
    """A conversion by this process alone."""
    destination = _destination(plan, target, "resume" if sharing.finish else existing, effort)
    if sharing.finish:
        check_nothing_is_missing(plan, destination)
        return make(destination, resume=True)
    begun = destination.begun() if existing == "update" else None
    resume = existing == "resume" or (begun is not None and begun.header.identity == plan.identity())
    # Asked now, before anything is created, and again when no other run can write there. Whoever writes there now is named by `run`.
    if not destination.is_running:
        may_replace(destination, plan, "resume" if resume else existing)
    return make(destination, resume=resume)


def _shared_conversion(plan: Plan, target: PathLike, existing: Existing, effort: Effort, make: _Make, sharing: Sharing) -> Conversion:
    """A part of a conversion, or one by a Ray cluster. It goes on from what is there, and replaces nothing in a store."""
    if is_url(target) and existing not in ("refuse", "resume"):
        raise RequestError(
            f"`{'if_changed' if existing == 'update' else existing}=True` does not go with `part=` and `ray=True` for a target in a store",
            where=os.fspath(target),
            why="Stores have no locks, so one process could remove what another has just written",
            do="Choose an empty folder, or remove the old checkpoint first",
        )
    destination = _destination(plan, target, "refuse" if existing == "resume" else existing, effort)
    tasks = destination.tasks(plan)
    if sharing.part is None:
        from reshard.engine.on_ray import connected, ray_executor
        from reshard.requests.order import PlanFile

        connected(sharing.ray_address)
        assert plan.order is not None, "a plan that can be run was asked for"
        executor = ray_executor(PlanFile.of(plan), (plan.order.source, *plan.order.others), destination.place, effort)
        return make(destination, tasks=tasks, executor=executor)
    more = imbalance([task.weight for task in tasks], sharing.part.of)
    if more > _IMBALANCE and is_url(target):
        event(
            "imbalance",
            f"{plural(len(tasks), 'task')} for {sharing.part.of} parts: the part with the most work has {more:.0%} more than the mean; a "
            "smaller `max_shard_size=` makes more tasks, where the format has it",
            level=30,
            tasks=len(tasks),
            parts=sharing.part.of,
        )
    return make(destination, tasks=tasks_of_part(tasks, sharing.part))


def _destination(plan: Plan, target: PathLike, existing: Existing, effort: Effort) -> Destination:
    """The target of a plan. Raises TargetError if source and target contain each other."""
    check_whole(plan)
    place = target_place(target)
    for tree in trees_of(plan.source_files):
        _check_apart(place, str(tree.root))
    destination = destination_at(place, effort, replaces=lambda: may_replace(destination, plan, existing))
    return destination


# ---- what may be replaced ----


def may_replace(destination: Destination, plan: Plan, existing: Existing) -> tuple[str, ...]:
    """The files in a target that a conversion may replace. Raises TargetError if it may not write there."""
    entries, begun, place = destination.entries(), destination.begun(), destination.place
    kind = "folder" if is_url(place) else "directory"
    if not entries and not begun:
        return ()
    if existing == "resume" and (begun or MANIFEST in entries):
        return ()
    if existing in ("refuse", "resume"):
        raise TargetError(
            begun.sentence if begun else f"the target exists and holds {plural(len(entries), 'entry', 'entries')}",
            where=place,
            why="Another run may be writing here, or was interrupted; nothing was written" if begun else "Nothing was written",
            do="Finish it with `resume=True`, or start anew with `overwrite=True`"
            if begun
            else f"Choose another {kind}, or say `overwrite=True`",
            id="target-in-use" if begun else "target-exists",
        )
    # Only those folders are searched that the new checkpoint has, too.
    entries = destination.entries({file.path.partition("/")[0] for file in plan.layout.files if "/" in file.path})
    weights = _matching(entries, *(glob for format in registry.formats().values() for glob in format.owns))
    records = _matching(entries, f"{WORK_FOLDER}/*")
    if existing == "update":
        unfinished = destination.unfinished_files()
        finished = [path for path in weights if path not in set(unfinished)]
        own = own_files(destination.files, plan, entries, finished, is_interrupted=begun is not None)
        return destination.existing(dict.fromkeys((*own, *unfinished, *records)))
    if not weights and not begun:
        raise TargetError(
            f"`overwrite=True`: {', '.join(entries[:3])} and what else lies there is no checkpoint",
            where=place,
            why="Only checkpoints are replaced",
            do=f"Choose another {kind}, or remove its content yourself",
        )
    carried = _matching(entries, *CARRIED, CONFIG, DECLARATION, *RECORDS)
    # An old declaration beside the new config.json would say how the new weights are split.
    beside = (sidecar.path.rpartition("/") for sidecar in plan.layout.sidecars)
    declarations = [f"{folder}{slash}{DECLARATION}" for folder, slash, name in beside if name == CONFIG]
    manifest = usable_manifest(destination.files)
    listed = written_files(destination.files, manifest) if manifest else ()
    return destination.existing(dict.fromkeys((*carried, *listed, *declarations, *records, *weights)))


def _matching(entries: Sequence[str], *globs: str) -> list[str]:
    return [entry for entry in entries if any(fnmatchcase(entry, glob) for glob in globs)]


def _check_apart(target: str, source: str) -> None:
    """Raises TargetError if source and target contain each other."""
    # A single file is the source, and not its directory. realpath, because Path.resolve raises RuntimeError for links in a circle.
    is_file = not is_url(source) and not os.path.isdir(source)
    inner, outer = (path.rstrip("/") if is_url(path) else os.path.realpath(path) for path in (target, source))
    if inner == (os.path.dirname(outer) if is_file else outer):
        raise TargetError("source and target are the same directory", where=target, do="Choose another target")
    if not is_file and inner.startswith(f"{outer}/"):
        raise TargetError(
            f"the target is inside of the source {source}",
            where=target,
            why="The next reader of the source would find two checkpoints in it",
            do="Choose a target outside of the source",
        )
    if outer.startswith(f"{inner}/"):
        raise TargetError(
            f"the source {source} is inside of the target",
            where=target,
            why="A target is replaced as a whole, and the source would be a part of it",
            do="Choose another target",
        )
