"""Jobs on threads: each worker owns its buffers, results come back as they are done, and an interruption stops all cleanly."""

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


def workers_within(memory: int | None, workers: int | None, itemsize: int, *, buffers: int) -> int:
    """How many workers run: as many as asked for (or processors, at most 8), as far as their buffers fit into `memory` bytes.

    Each needs `buffers` blocks of the widest element. Raises RequestError if not even one fits.
    """
    each = buffers * BLOCK_ELEMENTS * itemsize
    room = (memory or DEFAULT_MEMORY) // each
    if room < 1 and memory is not None:
        raise RequestError(f"--memory {memory:,} bytes is too little: one worker needs {each:,}")
    return max(1, min(workers or min(os.cpu_count() or 1, 8), max(room, 1)))


def run_jobs(jobs: Iterable[Job], make_worker: Callable[[], Callable[[Job], Result]], workers: int) -> Iterator[Result]:
    """The results of all jobs, in the order in which they finish. The first error stops the others and is raised here.

    Jobs are taken from the iterable one at a time, so it may be long. If the consumer stops early (an interruption), running jobs
    are finished, no new ones are begun, and all threads have ended before the exception goes on.
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
