"""Whether a conversion may write a folder of a store, and the conversion or a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from reshard.adapter import registry
from reshard.adapter.model_files import CARRIED, CONFIG
from reshard.engine.events import event
from reshard.engine.journal import JournalHeader
from reshard.engine.record import Provenance
from reshard.engine.stores.conversion import StoreConversion
from reshard.engine.stores.part import StorePartConversion, check_no_task_is_missing
from reshard.engine.stores.store_target import StoreTarget
from reshard.errors import RequestError, TargetError, UnsupportedError
from reshard.geometry.quantities import plural
from reshard.plans.bands import PartNumber, imbalance, tasks_of_part
from reshard.plans.file_tasks import FileTask, file_tasks
from reshard.plans.manifest import MANIFEST, RECORDS
from reshard.plans.plan import Plan
from reshard.requests.request import Effort
from reshard.requests.unchanged import own_files
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.stores.remote_files import RemoteFiles
from reshard.storage.stores.urls import open_store

if TYPE_CHECKING:
    from reshard.verbs.convert import Existing

_IMBALANCE = 0.1
"""From here on, a part says that there are too few tasks."""


def conversion_into_store(plan: Plan, url: str, existing: Existing, effort: Effort, provenance: Provenance) -> StoreConversion:
    """A conversion into a folder of a store that has not begun.

    Raises: TargetError if something lies there that may not be replaced; UnsupportedError for a web server, which is only read.
    """
    _check_target(plan, url)
    store = open_store(url)
    target = StoreTarget(store)
    if existing == "update" and (begun := target.begun()) and begun.identity == plan.identity():
        existing = "resume"
    replaces = _replaceable(target, plan, existing)
    return StoreConversion(
        plan,
        store,
        resume=existing == "resume",
        replaces=replaces,
        workers=effort.workers,
        memory=effort.memory,
        provenance=provenance,
    )


def part_into_store(
    plan: Plan, url: str, part: PartNumber, existing: Existing, effort: Effort, provenance: Provenance
) -> StorePartConversion:
    """A part of a conversion into a folder of a store that has not begun. Raises: as `_shared` does."""
    tasks = file_tasks(plan)
    more = imbalance([task.weight for task in tasks], part.of)
    if more > _IMBALANCE:
        event(
            "imbalance",
            f"{plural(len(tasks), 'task')} for {part.of} parts: the part with the most work has {more:.0%} more than the mean; a smaller "
            "--max-shard-size makes more tasks, where the format has it",
            level=30,
            tasks=len(tasks),
            parts=part.of,
        )
    return _shared(StorePartConversion, plan, url, tasks_of_part(tasks, part), existing, effort, provenance)


def ray_into_store(plan: Plan, url: str, existing: Existing, effort: Effort, provenance: Provenance) -> StorePartConversion:
    """The same by the tasks of the Ray cluster that is connected."""
    from reshard.engine.stores.on_ray import RayStoreConversion
    from reshard.requests.order import PlanFile

    return _shared(partial(RayStoreConversion, shipped=PlanFile.of(plan)), plan, url, file_tasks(plan), existing, effort, provenance)


def _shared(
    kind: Callable[..., StorePartConversion],
    plan: Plan,
    url: str,
    tasks: Sequence[FileTask],
    existing: Existing,
    effort: Effort,
    provenance: Provenance,
) -> StorePartConversion:
    """Raises: RequestError for --overwrite and --if-changed; else as `conversion_into_store` does."""
    _check_target(plan, url)
    if existing not in ("refuse", "resume"):
        raise RequestError(
            f"--{'if-changed' if existing == 'update' else existing} does not go with --part and --ray for a target in a store",
            where=url,
            why="Stores have no locks, so one process could remove what another has just written",
            do="Choose an empty folder, or remove the old checkpoint first",
        )
    return kind(plan, open_store(url), tasks, workers=effort.workers, memory=effort.memory, provenance=provenance)


def finishing_in_store(plan: Plan, url: str, effort: Effort, provenance: Provenance) -> StoreConversion:
    """The conversion that completes a target whose files are all finished. Raises TargetError, naming what is missing, if some are not."""
    _check_target(plan, url)
    check_no_task_is_missing(plan, open_store(url))
    return conversion_into_store(plan, url, "resume", effort, provenance)


def _check_target(plan: Plan, url: str) -> None:
    check_store_target(url)
    _check_place(url.rstrip("/"), plan.source_files.root.rstrip("/"))


def check_store_target(url: str) -> None:
    """Raises UnsupportedError for the URL of a web server."""
    if url.partition("://")[0].lower() in ("http", "https"):
        raise UnsupportedError("http(s):// can be read, and not written", where=url, do="Give s3://, gs://, az:// or a local directory")


def _replaceable(target: StoreTarget, plan: Plan, existing: Existing) -> tuple[str, ...]:
    """The files that the conversion removes first. Raises TargetError if it may not write there."""
    entries, begun, url = sorted(target.entries), target.begun(), target.store.url
    if not entries:
        return ()
    if existing == "resume" and (begun or MANIFEST in entries):
        _check_same_plan(begun, plan, url)
        return ()
    if existing in ("refuse", "resume"):
        raise TargetError(
            f"a conversion to {begun.to} has begun here and has not ended"
            if begun
            else f"the target exists and holds {plural(len(entries), 'file')}",
            where=url,
            why="Another run may be writing here, or was interrupted; nothing was written" if begun else "Nothing was written",
            do="Finish it with --resume, or start anew with --overwrite" if begun else "Choose another folder, or say --overwrite",
            id="target-in-use" if begun else "target-exists",
        )
    globs = [glob for found in registry.formats().values() for glob in found.owns]
    weights = [path for path in entries if any(fnmatchcase(path, glob) for glob in globs)]
    if existing == "update":
        unfinished = target.unfinished_files()
        finished = [path for path in weights if path not in set(unfinished)]
        own = own_files(RemoteFiles(url), plan, entries, finished, is_interrupted=begun is not None)
        records = [path for path in entries if path.startswith(f"{WORK_FOLDER}/")]
        return tuple(path for path in dict.fromkeys((*own, *unfinished, *records)) if path in target.entries)
    if not weights and not begun:
        raise TargetError(
            f"--overwrite: {', '.join(entries[:3])} and what else lies there is no checkpoint",
            where=url,
            why="Only checkpoints are replaced",
            do="Choose another folder, or remove its content yourself",
        )
    others = [path for path in entries if any(fnmatchcase(path, glob) for glob in (*CARRIED, CONFIG, *RECORDS, f"{WORK_FOLDER}/*"))]
    return tuple(dict.fromkeys((*others, *weights)))


def _check_same_plan(begun: JournalHeader | None, plan: Plan, url: str) -> None:
    """Raises TargetError if the interrupted run followed another plan."""
    if begun and begun.identity != plan.identity():
        raise TargetError(
            "the interrupted conversion here had other options or another version of reshard, or its source has changed since",
            where=url,
            why="Resuming would mix two conversions",
            do="Repeat the options of that run, or start again with --overwrite",
        )


def _check_place(target: str, source: str) -> None:
    """Raises TargetError if source and target contain each other."""
    if target == source:
        raise TargetError("source and target are the same folder", where=target, do="Choose another target")
    for inner, outer in ((target, source), (source, target)):
        if inner.startswith(f"{outer}/"):
            raise TargetError(
                f"{inner} is inside of {outer}", where=target, why="One would be a part of the other", do="Choose another target"
            )
