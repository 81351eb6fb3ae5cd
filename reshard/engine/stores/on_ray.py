"""A conversion into a store on a Ray cluster: each file task is a Ray task, as each band is for a directory (parts/on_ray.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from reshard.engine.parts.on_ray import ShippedPlan, done_task, nbytes_of_task, on_cluster, plan_on_node
from reshard.engine.run import Done
from reshard.engine.stores.part import StorePartConversion, missing_tasks
from reshard.engine.stores.store_target import StoreTarget
from reshard.plans.file_tasks import FileTask, file_tasks
from reshard.storage.stores.urls import open_store, storage_options


class RayStoreConversion(StorePartConversion):
    """A conversion into a store whose file tasks are converted by the tasks of a Ray cluster. Takes the arguments of a StorePartConversion.

    shipped: the plan for the tasks. workers: threads of each task, for each of which Ray reserves a processor (default: 1).
    """

    def __init__(self, *given: Any, shipped: ShippedPlan, **options: Any) -> None:
        super().__init__(*given, **options)
        self._shipped = shipped

    @property
    def total(self) -> int:
        return sum(nbytes_of_task(self.plan, task) for task in self.tasks)

    def _copy(self, target: StoreTarget) -> Iterator[Done]:
        missing = missing_tasks(self.plan, target.finished(self.identity)).tasks
        todo = {task.number for task in missing}
        for task in self.tasks:
            if task.number not in todo:
                self.resumed_bytes += nbytes_of_task(self.plan, task)
                yield done_task(self.plan, task)
        for task in on_cluster(self.plan, self._shipped, missing, _convert_files, target.store.url, self.given_workers, self.given_memory):
            yield done_task(self.plan, task)


# ---- inside a task ----


def _convert_files(
    shipped: ShippedPlan, source: str, target: str, number: int, workers: int, memory: int | None, storage: Mapping[str, str]
) -> None:
    """Convert one file task. Runs in a worker process of Ray."""
    with storage_options(storage):
        task = _tasks(shipped, source)[number]
        for _ in StorePartConversion(plan_on_node(shipped, source), open_store(target), [task], workers=workers, memory=memory).copy():
            pass


@lru_cache(maxsize=1)
def _tasks(shipped: ShippedPlan, source: str) -> tuple[FileTask, ...]:
    return file_tasks(plan_on_node(shipped, source))
