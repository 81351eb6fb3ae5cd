"""Tasks of a conversion on a Ray cluster: an executor for `Conversion`. The process that started them completes the destination.

The driver ships the plan once, and waits. A Ray task opens the source and the destination under the same paths or URLs on its node. Ray
runs the tasks of a lost node again elsewhere; tasks that were finished stay finished. Measured with Ray 2.60.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from reshard.engine.conversion import Conversion, Executor, destination_at
from reshard.engine.events import event
from reshard.engine.pool import Effort
from reshard.errors import ReshardError, SystemRefusal, UnsupportedError
from reshard.geometry.quantities import plural
from reshard.plans.plan import Plan
from reshard.plans.tasks import Task
from reshard.storage.claims import SourceChecks
from reshard.storage.stores.urls import current_options, storage_options

_RETRIES = 3


class ShippedPlan(Hashable, Protocol):
    """A plan that can be sent to another process: it is pickled, and hashed by its content."""

    def planned(self, sources: tuple[str, ...]) -> Plan:
        """The plan, for the sources under these paths."""


def ray_executor(shipped: ShippedPlan, sources: tuple[str, ...], target: str, effort: Effort) -> Executor:
    """An executor on the cluster that is connected.

    shipped: the plan for the tasks. effort: of each task. For each of its threads, Ray reserves a processor (default: 1).
    """
    limits = Effort(effort.workers or 1, effort.memory, source_checksums=effort.source_checksums)

    def run(tasks: Sequence[Task]) -> Iterator[tuple[Task, SourceChecks]]:
        ray, storage = connected(), dict(current_options())
        content = ray.put(shipped)
        remote = ray.remote(
            num_cpus=limits.workers, max_retries=_RETRIES, retry_exceptions=[SystemRefusal], scheduling_strategy="SPREAD", name="reshard"
        )(_convert_task)
        # The heaviest first, so that no large one is left at the end.
        order = sorted(tasks, key=lambda task: (-task.weight, task.number))
        running = {remote.remote(content, sources, target, task.number, limits, storage): task for task in order}
        nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        event("ray", f"runs {plural(len(running), 'task')} on {plural(len(nodes), 'node')} of Ray", tasks=len(running), nodes=len(nodes))
        try:
            while running:
                (done,), _ = ray.wait(list(running), num_returns=1)
                task = running.pop(done)
                yield task, _result(ray, done)
        finally:
            for under_way in running:
                ray.cancel(under_way, force=True)

    return run


def connected(address: str | None = None) -> Any:
    """The module ray, connected to a cluster: that of the address, of RAY_ADDRESS, or a new one on this machine.

    Raises: UnsupportedError if Ray is not installed, SystemRefusal if no cluster answers.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise UnsupportedError("`ray=True` needs Ray, which is not installed", do="Install it with `pip install 'reshard[ray]'`") from None
    # Where one task fails, so do others, whose errors nobody asks for. Ray would print them with their tracebacks.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if not ray.is_initialized():
        try:
            _check_answers(address)
            ray.init(address=address, configure_logging=False, log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise SystemRefusal(
                f"no Ray cluster answers: {str(error).splitlines()[0]}",
                where=address,
                do="Start one with `ray start --head`, and give its address with `ray_address=` or RAY_ADDRESS",
            ) from None
    return ray


def _check_answers(address: str | None) -> None:
    """Raises OSError if nothing listens at an address HOST:PORT, for which Ray itself would wait for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _result(ray: Any, done: Any) -> SourceChecks:
    """What a task has checked. Raises the error of a task that has failed."""
    try:
        return ray.get(done)  # type: ignore[no-any-return]
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ReshardError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise SystemRefusal(
            f"Ray lost a task {_RETRIES + 1} times: {type(error).__name__}",
            why="Its processes or nodes died, for example for want of memory; finished blocks are kept",
            do="Look at `ray logs`, then run the same command again",
        ) from None


# ---- inside a task ----


def _convert_task(
    shipped: ShippedPlan, sources: tuple[str, ...], target: str, number: int, effort: Effort, storage: Mapping[str, str]
) -> SourceChecks:
    """Convert one task. Runs in a worker process of Ray."""
    with storage_options(storage):
        plan, tasks = _tasks_on_node(shipped, sources, target)
        running = Conversion(plan, destination_at(target, effort), tasks=[tasks[number]], source_checksums=effort.source_checksums)
        for _ in running.copy():
            pass
        return running.source_checks


@lru_cache(maxsize=1)
def _tasks_on_node(shipped: ShippedPlan, sources: tuple[str, ...], target: str) -> tuple[Plan, tuple[Task, ...]]:
    """The plan that was shipped, and its tasks. A worker process runs many of them."""
    plan = shipped.planned(sources)
    return plan, destination_at(target).tasks(plan)
