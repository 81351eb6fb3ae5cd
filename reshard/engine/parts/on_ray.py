"""A conversion on a Ray cluster: each task of the plan is a Ray task, and the process that started them completes the target.

The driver holds a share of the target's lock, ships the plan once, and waits. A task opens the source and the target under the same paths
or URLs on its node. Ray runs the tasks of a lost node again elsewhere; tasks that were finished stay finished. Measured with Ray 2.60.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from reshard.engine.events import event
from reshard.engine.journal import BlockKey
from reshard.engine.parts.part import PartConversion, missing_bands
from reshard.engine.run import Done
from reshard.errors import ReshardError, SystemRefusal, UnsupportedError
from reshard.geometry.quantities import plural
from reshard.plans.bands import AnyTask, Task
from reshard.plans.plan import Plan
from reshard.storage.staging import Staging
from reshard.storage.stores.urls import current_options, storage_options

_RETRIES = 3


class ShippedPlan(Hashable, Protocol):
    """A plan that can be sent to another process: it is pickled, and hashed by its content."""

    def planned(self, source: str) -> Plan:
        """The plan, for a source under that path."""


class RayConversion(PartConversion):
    """A conversion whose bands are converted by the tasks of a Ray cluster. Takes the arguments of a PartConversion.

    shipped: the plan for the tasks. workers: threads of each task, for each of which Ray reserves a processor (default: 1).
    """

    def __init__(self, *given: Any, shipped: ShippedPlan, **options: Any) -> None:
        super().__init__(*given, **options)
        self._shipped = shipped

    def _copy(self, staging: Staging, finished: Mapping[BlockKey, bytes]) -> Iterator[Done]:
        missing = missing_bands(self.plan, finished).bands
        todo = {band.number for band in missing}
        for band in self.tasks:
            if band.number not in todo:
                self.resumed_bytes += nbytes_of_task(self.plan, band)
                yield done_task(self.plan, band)
        for band in on_cluster(self.plan, self._shipped, missing, _convert_band, str(self.root), self.given_workers, self.memory):
            yield done_task(self.plan, band)


def on_cluster(
    plan: Plan,
    shipped: ShippedPlan,
    tasks: Sequence[AnyTask],
    convert: Callable[..., None],
    target: str,
    workers: int | None,
    memory: int | None,
) -> Iterator[AnyTask]:
    """Run these tasks of a plan on the cluster that is connected, and yield each that is done.

    convert: what runs on a node, a function of (the shipped plan, source, target, number of the task, workers, memory, storage
    options). Raises: what it raises, and SystemRefusal if a task was lost again and again.
    """
    ray = connected()
    content = ray.put(shipped)
    threads = workers or 1
    remote = ray.remote(
        num_cpus=threads, max_retries=_RETRIES, retry_exceptions=[SystemRefusal], scheduling_strategy="SPREAD", name="reshard"
    )(convert)
    # The heaviest first, so that no large one is left at the end.
    order = sorted(tasks, key=lambda task: (-task.weight, task.number))
    places, storage = (str(plan.source_files.root), target), dict(current_options())
    running = {remote.remote(content, *places, task.number, threads, memory, storage): task for task in order}
    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    event("ray", f"runs {plural(len(running), 'task')} on {plural(len(nodes), 'node')} of Ray", tasks=len(running), nodes=len(nodes))
    try:
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            task = running.pop(done)
            _result(ray, done)
            yield task
    finally:
        for each in running:
            ray.cancel(each, force=True)


def nbytes_of_task(plan: Plan, task: Task) -> int:
    """The bytes of its tensors in the target, without replicas."""
    return sum(plan.routes[i].target.nbytes for i in task.routes)


def done_task(plan: Plan, task: Task) -> Done:
    """A task that is finished, named after its first tensor."""
    return Done(plan.routes[task.routes[0]].name if task.routes else "", nbytes_of_task(plan, task))


def connected(address: str | None = None) -> Any:
    """The module ray, connected to a cluster: that of the address, of RAY_ADDRESS, or a new one on this machine.

    Raises: UnsupportedError if Ray is not installed, SystemRefusal if no cluster answers.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise UnsupportedError("--ray needs Ray, which is not installed", do="Install it with `pip install 'reshard[ray]'`") from None
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
                do="Start one with `ray start --head`, and give its address with --ray-address or RAY_ADDRESS",
            ) from None
    return ray


def _check_answers(address: str | None) -> None:
    """Raises OSError if nothing listens at an address HOST:PORT, for which Ray itself would wait for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _result(ray: Any, done: Any) -> None:
    """Raises the error of a task that has failed."""
    try:
        ray.get(done)
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


def _convert_band(
    shipped: ShippedPlan, source: str, target: str, number: int, workers: int, memory: int | None, storage: Mapping[str, str]
) -> None:
    """Convert one band. Runs in a worker process of Ray."""
    with storage_options(storage):
        plan = plan_on_node(shipped, source)
        for _ in PartConversion(plan, target, [plan.bands()[number]], workers=workers, memory=memory).copy():
            pass


@lru_cache(maxsize=1)
def plan_on_node(shipped: ShippedPlan, source: str) -> Plan:
    """The plan that was shipped. A worker process runs many tasks of it."""
    return shipped.planned(source)
