"""Jobs on threads. Each worker has its own buffers, results come in the order of completion, and an interruption stops all threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import TypeVar

from reshard.errors import RequestError
from reshard.geometry.boxes import BLOCK_ELEMENTS

Job = TypeVar("Job")
Result = TypeVar("Result")

DEFAULT_MEMORY = 256 << 20
"""Bytes of buffers, if the caller sets no limit."""


def workers_within(memory: int | None, workers: int | None, itemsize: int, *, buffers: int) -> int:
    """The number of workers: `workers` (default: one per processor, at most 8), or fewer if their buffers do not fit into `memory` bytes.

    itemsize: the bytes of the widest element. buffers: the blocks of such elements that each worker needs.

    Raises: RequestError if the buffers of one worker do not fit.
    """
    per_worker = buffers * BLOCK_ELEMENTS * itemsize
    most = (DEFAULT_MEMORY if memory is None else memory) // per_worker
    if most < 1 and memory is not None:
        raise RequestError(
            f"`memory=` of {memory:,} bytes is too little: one worker needs {per_worker:,}",
            do=f"Use `memory=` {per_worker >> 20}MiB or more",
        )
    return max(1, min(workers or min(os.cpu_count() or 1, 8), max(most, 1)))


def run_jobs(jobs: Iterable[Job], make_worker: Callable[[], Callable[[Job], Result]], workers: int) -> Iterator[Result]:
    """The results of all jobs, in the order in which they are finished. The first error stops all workers and is raised here.

    Jobs are taken from the iterable one at a time, so it may be long. If the caller stops early, for example by an interruption, running
    jobs are finished, no other job is started, and all threads have ended before the exception continues.

    make_worker: called once in each thread; returns the function that performs a job.
    """
    source, lock, stop = iter(jobs), threading.Lock(), threading.Event()
    results: SimpleQueue[tuple[str, object]] = SimpleQueue()

    def work() -> None:
        try:
            perform = make_worker()
            while not stop.is_set():
                with lock:
                    job = next(source, _END)
                if job is _END:
                    break
                results.put(("done", perform(job)))  # type: ignore[arg-type]
        except BaseException as error:
            results.put(("error", error))
        else:
            results.put(("end", None))

    threads = [threading.Thread(target=work, name=f"reshard-{i}", daemon=True) for i in range(workers)]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            kind, value = results.get()
            if kind == "error":
                assert isinstance(value, BaseException)
                raise value
            if kind == "end":
                running -= 1
            else:
                yield value  # type: ignore[misc]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


_END = object()
