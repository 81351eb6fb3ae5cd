"""One part of a conversion into a store: its file tasks (plans/file_tasks.py), and what is still missing.

    join     the first part creates .reshard/begun.json; those of the same plan go on from what is there
    copy     the files of its tasks that are not finished; after each file its record
    complete if every file has its record: create the small files, the index, and last the manifest

Stores have no locks, and parts need none. A file that is written twice gets the same bytes, and becomes visible as a whole. Of two parts
that complete the target, one creates the manifest, and the other finds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from reshard.engine.events import event
from reshard.engine.parts.shared import SharedConversion
from reshard.engine.record import Provenance
from reshard.engine.run import Done, check_source_is_unchanged
from reshard.engine.stores.conversion import StoreConversion
from reshard.engine.stores.gather import Budget, Gather, gather_workers
from reshard.engine.stores.store_target import StoreTarget
from reshard.errors import CheckpointError, TargetError
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.plans.file_tasks import FileTask, file_tasks
from reshard.plans.plan import Plan
from reshard.storage.stores.store import LostObject, Store

_NO_PROVENANCE = Provenance()


class StorePartConversion(SharedConversion):
    """One process of a conversion into a store that several share. Iterate `run()` to its end. The counterpart of `PartConversion`.

    tasks: those that it converts, unless another process has. workers: threads. memory: the most bytes of buffers. provenance: what the
    caller wants to be recorded, if this process completes the target.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        tasks: Sequence[FileTask],
        *,
        workers: int | None = None,
        memory: int | None = None,
        provenance: Provenance = _NO_PROVENANCE,
    ) -> None:
        self.plan = plan
        self.tasks: tuple[FileTask, ...] = tuple(tasks)
        self.resumed_bytes = 0
        """The bytes of its tasks that were there already."""
        self.completed: StoreConversion | None = None
        """The conversion, if the target is complete when `run` has ended."""
        self.given_workers, self.given_memory = workers, memory
        """What the caller allows."""
        self.identity = plan.identity()
        """The identity of the plan."""
        self._store = store
        self._paths = {path for task in self.tasks for path in task.paths}
        self._routes = sorted({i for task in self.tasks for i in task.routes})
        self._workers = gather_workers(plan, workers)
        self._budget = Budget(memory, [file for file in plan.layout.files if file.path in self._paths])
        self._whole = StoreConversion(plan, store, workers=workers, memory=memory, provenance=provenance)

    @property
    def total(self) -> int:
        """The bytes that `run` reports in all."""
        return sum(self.plan.routes[i].target.nbytes for i in self._routes)

    def run(self) -> Iterator[Done]:
        """Convert the tasks, and yield each finished block; then complete the target if no file is missing.

        Raises: CheckpointError if the source is broken or has changed, TargetError if something else lies or is written in the target,
        SystemRefusal if the store does not answer. After any error, finished files stay, and the other parts go on.
        """
        target = StoreTarget(self._store)
        try:
            if not target.result_of(self.identity):
                self._join(target)
                yield from self._copy(target)
            self._complete()
        except (TargetError, LostObject) as refusal:
            # Another process may have completed the target meanwhile, and removed a record that was just written.
            if not self._whole.take_finished(StoreTarget(self._store)):
                raise
            event("left", f"another process has completed the target: {refusal.what}")
        self.completed = self._whole if self._whole.fingerprint else None

    def copy(self) -> Iterator[Done]:
        """Convert the tasks for a process that has begun the conversion and completes it. Raises: as `run` does."""
        target = StoreTarget(self._store)
        target.check_begun(self.identity)
        yield from self._copy(target)

    def _join(self, target: StoreTarget) -> None:
        """Begin the conversion, unless another part has. Raises TargetError if something else lies there."""
        begun, url = target.begun(), self._store.url
        if begun is None:
            if target.entries:
                raise TargetError(
                    f"the target exists and holds {plural(len(target.entries), 'file')}",
                    where=url,
                    why="Parts write into an empty folder of a store; nothing was written",
                    do="Choose another folder, or remove what lies there",
                    id="target-exists",
                )
            try:
                target.begin(self._whole.header(), self.plan.layout)
            except TargetError:
                begun = StoreTarget(self._store).begun()
                if begun is None:
                    raise
        if begun and begun.identity != self.identity:
            raise TargetError(
                f"another conversion to {begun.to} has begun here",
                where=url,
                why="It has other options or another version of reshard, or the source has changed since; nothing was written",
                do="Repeat the options of the other parts, or choose another folder",
                id="target-in-use",
            )

    def _copy(self, target: StoreTarget) -> Iterator[Done]:
        """Complete the files of the tasks that are not finished."""
        finished = target.finished(self.identity, self._paths)
        gather = Gather(self.plan, self.identity, target, budget=self._budget, workers=self._workers, finished=finished)
        yield from gather.run(self._paths, self._routes)
        self.resumed_bytes = gather.resumed_bytes
        check_source_is_unchanged(self.plan, gather.digests, self._workers)

    def _complete(self) -> None:
        """Complete the target, unless files are missing or another process has completed it."""
        target = StoreTarget(self._store)
        if self._whole.take_finished(target):
            return
        finished = target.finished(self.identity)
        if missing_tasks(self.plan, finished).tasks:
            return
        try:
            self._whole.complete(target, finished)
        except CheckpointError:
            now = StoreTarget(self._store).entries
            if all(now.get(path) == file.entry for path, file in finished.items()):
                raise
            # A part that runs twice has written a file again. It completes the target when it has ended.
            self._whole.fingerprint = None


@value
class MissingTasks:
    """The tasks of a conversion into a store that are not finished."""

    tasks: tuple[FileTask, ...]
    """The tasks."""
    of: int
    """How many tasks the plan has."""

    def sentence(self, plan: Plan) -> str:
        """What is missing, in words."""
        sizes = {file.path: file.nbytes for file in plan.layout.files}
        paths = [path for task in self.tasks for path in task.paths]
        names = paths[0] + (f" to {paths[-1]}" if len(paths) > 1 else "")
        nbytes = sum(sizes[path] for path in paths)
        return f"{len(self.tasks)} of {plural(self.of, 'task')} are missing ({plural(len(paths), 'file')}, {nbytes:,} bytes): {names}"


def missing_tasks(plan: Plan, finished: Collection[str]) -> MissingTasks:
    """The tasks that have files which are not finished. finished: the paths of the finished files."""
    tasks = file_tasks(plan)
    return MissingTasks(tuple(task for task in tasks if any(path not in finished for path in task.paths)), len(tasks))


def check_no_task_is_missing(plan: Plan, store: Store) -> None:
    """Raises TargetError, naming what is missing, unless all files of the plan are finished or the target is complete."""
    identity, target = plan.identity(), StoreTarget(store)
    if target.result_of(identity):
        return
    begun = target.begun()
    if begun is None or begun.identity != identity:
        raise TargetError(
            "no conversion with these options has begun here" if begun is None else "another conversion has begun here",
            where=store.url,
            do="Repeat the options of the parts, and run them first",
            id="target-in-use",
        )
    missing = missing_tasks(plan, target.finished(identity))
    if missing.tasks:
        raise TargetError(
            missing.sentence(plan),
            where=store.url,
            why="Their parts are still running or were interrupted",
            do="Run the missing parts again, or run --resume, which converts what is missing with one process",
            id="target-in-use",
        )
